"""pfl-research (the package `pfl`) against Motley. Run it from the repository:

    python -m benchmarks.peers.pfl_research [--json FILE]

pfl runs its FederatedAveraging on its simulated backend, once in one process and once in one
process per core, which torchrun starts and which divide the clients of a round among themselves.
Its sampler is told which clients to sample.

What pfl does differently: it sends and averages differences of parameters, without buffers, and
applies them with an optimizer at the server; it aggregates metrics per client and logs them in
every round; with several processes, they reduce updates and metrics over gloo and share the
evaluation. It does not shuffle, so the data set is shuffled here when it is made, once per client
and round. Its evaluation of clients before and after training is switched off after the first
round, which is not timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.compare import CORES, Contender, main
from benchmarks.peers.federation import (
    EVALUATION_BATCH,
    Outcome,
    Workload,
    clients_of_round,
    counted_steps,
    data,
    examples_of,
    initial_model,
)


def pfl(workload: Workload, rounds: int) -> Outcome:
    """Run the federation on pfl, in this process or in all of those that torchrun started."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, StringMetricName, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Classifier(nn.Module):
        """The workload's model, with the two functions that pfl calls."""

        def __init__(self) -> None:
            super().__init__()
            self.network = initial_model(workload)

        def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
            """Return the loss of a training batch."""
            self.train()
            return F.cross_entropy(self.network(inputs), targets)

        @torch.no_grad()
        def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Weighted]:
            """Return the number of correct predictions in a test batch."""
            self.eval()
            correct = int((self.network(inputs).argmax(1) == targets).sum())
            return {"accuracy": Weighted(correct, len(targets))}

    class Clock(TrainingProcessCallback):
        """Notes the end of each round, after the evaluation."""

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            """Note a round's accuracy. pfl does not evaluate after the first round."""
            scores = aggregate_metrics.to_simple_dict()
            outcome.round_over(float(scores.get("Central val | accuracy", 0.0)))
            return False, Metrics()

    def sampled_clients() -> Iterator[int]:
        for round_number in range(1, rounds + 1):
            yield from clients_of_round(workload, round_number)

    def client_dataset(client: int) -> Dataset:
        inputs, targets = examples_of(workload, client)
        order = torch.randperm(len(targets))
        return Dataset([inputs[order], targets[order]], user_id=str(client))

    outcome = Outcome()
    schedule = sampled_clients()
    federated = FederatedDataset(client_dataset, lambda: next(schedule))
    examples = data(workload)
    evaluation = CentralEvaluationCallback(
        Dataset([examples.test_inputs, examples.test_targets]),
        NNEvalHyperParams(local_batch_size=EVALUATION_BATCH),
        format_fn=lambda name: StringMetricName(f"Central val | {name}"),
    )
    classifier = Classifier()
    model = PyTorchModel(
        classifier,
        local_optimizer_create=lambda parameters, lr: torch.optim.SGD(
            parameters, lr=lr, fused=True
        ),
        central_optimizer=torch.optim.SGD(classifier.parameters(), lr=1.0),
    )
    with counted_steps(outcome):
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=rounds,
                evaluation_frequency=rounds,
                train_cohort_size=workload.clients_per_round,
                val_cohort_size=0,
            ),
            SimulatedBackend(training_data=federated, val_data=federated),
            model,
            NNTrainHyperParams(
                local_num_epochs=workload.epochs,
                local_learning_rate=workload.lr,
                local_batch_size=workload.batch_size,
            ),
            NNEvalHyperParams(local_batch_size=EVALUATION_BATCH),
            callbacks=[evaluation, Clock()],
        )
    steps = torch.tensor(outcome.steps - rounds)  # without those of the server's optimizer
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(steps)
    outcome.steps = int(steps)
    return outcome


PEERS = [Contender("pfl-research", pfl, "1 process")]
if CORES > 1:
    PEERS.append(Contender("pfl-research", pfl, f"{CORES} processes", processes=CORES))

if __name__ == "__main__":
    main(__doc__, __spec__.name, PEERS, ["pfl"])
