"""FedDF: after averaging, the server distills the ensemble of client models on public images.

Lin, Kong, Stich, Jaggi, Ensemble Distillation for Robust Model Fusion in Federated Learning,
NeurIPS 2020 (Algorithms 1 and 3). Clients train as in FedAvg. The server averages them per
architecture (here: over the split), and each average is the starting point of a student that learns
from the mean logits of all clients of the round, whatever their architectures:

    minimize  KL(softmax(1/|S| sum_k z_k(x)) || softmax(z(x)))   over public images x

with Adam and a learning rate that falls along a cosine. The students are the sizes of the round's
clients; a size that no client of the round trained stays as it is. Sizes that share parts are
trained together, see `distillation.py`, also for BatchNorm's statistics.

The paper takes up to 10,000 steps per round and stops early by the accuracy on labelled validation
images. Public images have no labels here, so there is no early stopping, and the default is 100
steps. With `method.steps = 0` this is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings, Requirements, ServerAlgorithm
from motley.methods.distillation import (
    Adam,
    ServerModels,
    SizeTrainer,
    Statistics,
    client_logits,
    cosine,
    draw_batches,
    kl_divergence,
)
from motley.methods.info import FederationInfo
from motley.settings import Limit


class FedDFSettings(MethodSettings):
    """FedDF's own settings: the distillation at the server."""

    name: str = "feddf"
    steps: int = Field(default=100, ge=0)
    """Server steps per round. The paper has up to 10,000, with early stopping. 0: FedAvg."""
    batch_size: int = Field(default=128, ge=1)
    """Public images per step."""
    lr: float = Field(default=0.001, gt=0)
    """Adam's learning rate in the first step; it falls to 0 along a half cosine."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the ensemble's and the students' probabilities."""
    max_grad_norm: Limit = 5.0
    """Bound on the norm of a size's gradient."""
    statistics: Statistics = "frozen"
    """BatchNorm in the students. frozen: the averaged running statistics, which do not change.
    adapt: they normalize with public batches and their running statistics follow the public images,
    as in the paper's code.
    """


class FedDFServer(ServerAlgorithm):
    """FedAvg, and distillation of the ensemble after the average was applied."""

    settings: FedDFSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        if self.settings.statistics == "adapt" and info.split.parts_change:
            raise MotleyError(
                "method.statistics = 'adapt': the channels of a size change from round to round, "
                "and running statistics of copied channels cannot follow. Use 'frozen'."
            )
        self._models = ServerModels(info.split)
        self._trainer = SizeTrainer(
            self._models,
            info.split.parameters,
            self._loss,
            max_norm=self.settings.max_grad_norm,
            statistics=self.settings.statistics,
        )

    def _loss(self, logits: Tensor, targets: State) -> Tensor:
        """Return the mean divergence from the ensemble."""
        return kl_divergence(targets["ensemble"], logits, self.settings.temperature).mean()

    def post_process(
        self, own: State, state: State, updates: Sequence[ClientUpdate]
    ) -> tuple[State, dict[str, Tensor | float]]:
        settings, public, split = self.settings, self.info.public, self.info.split
        if settings.steps == 0:
            return state, {}
        assert public is not None
        round_number = updates[0].round_number
        device = next(iter(state.values())).device
        batches = draw_batches(
            len(public), settings.steps, settings.batch_size, self.info.seed, round_number, device
        )
        ensemble = client_logits(self._models, updates, public, batches.distinct).mean(0)
        sizes_of_round = {update.size for update in updates}
        students = [size for size in split.sizes if size in sizes_of_round]
        state, loss = self._trainer.train(
            state,
            {size: split.evaluated(size, round_number) for size in students},
            public,
            batches,
            {"ensemble": ensemble},
            Adam(),
            [cosine(settings.lr, step, settings.steps) for step in range(settings.steps)],
        )
        return state, {"distillation_loss": loss}


@METHODS.register(
    "feddf",
    "the server distills the clients' mean logits on public images",
    paper="Lin et al., NeurIPS 2020",
)
class FedDF(Method):
    """FedAvg with ensemble distillation at the server."""

    Settings = FedDFSettings
    Server = FedDFServer
    requirements = Requirements(
        own_aggregation=True, classes=True, mixed_classes=True, public_data=True
    )
