"""InclusiveFL: sizes share all layers but each one's last block, which learns from the next larger
size.

Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022.
The parts are those of `split.name = "inclusive"`: a size keeps its last block and its head to
itself. Momentum distillation mixes the delta d of a size's last block, before anything is averaged
between sizes, with the mean delta of the next larger size's blocks from there to that size's last
one:

    d <- (1 - beta) d + beta mean(d of these blocks)

This is the paper's formula; in the released code the mix is never applied. The paper is about
transformers. In ResNets the last block is that of stage 4, and of the larger size's blocks in that
stage, only tensors of the same shape as the last block's take part. InCo comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field

from motley.core.merge import Aggregate, merge
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings, Requirements, ServerAlgorithm
from motley.splits.inclusive import Inclusive


class InclusiveFLSettings(MethodSettings):
    """InclusiveFL's own setting."""

    name: str = "inclusivefl"
    beta: float = Field(default=0.2, ge=0, le=1)
    """Weight of the next larger size's delta in the delta of a size's last block (momentum
    distillation).
    """


class InclusiveFLServer(ServerAlgorithm):
    """FedAvg, and momentum distillation between sizes."""

    settings: InclusiveFLSettings

    def aggregate(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        merged = merge(state, updates)
        split = self.info.split
        if not isinstance(split, Inclusive) or not self.settings.beta:
            return merged
        delta = dict(merged.delta)
        for size, larger in zip(split.by_depth, split.by_depth[1:], strict=False):
            means = _mean_of_size(state, [update for update in updates if update.size == larger])
            for name, sources in split.taught_by(size, larger).items():
                if name in merged.delta and all(source in means for source in sources):
                    teacher = torch.stack([means[source] for source in sources]).mean(0)
                    # d <- (1 - beta) d + beta mean(d of these blocks)
                    delta[name] = torch.lerp(merged.delta[name], teacher, self.settings.beta)
        return merged.with_delta(delta)


@METHODS.register(
    "inclusivefl",
    "a size's own last block learns from the next larger size",
    paper="Liu et al., KDD 2022",
)
class InclusiveFL(Method):
    """FedAvg, with another server half."""

    Settings = InclusiveFLSettings
    Server = InclusiveFLServer
    requirements = Requirements(own_aggregation=True)


def _mean_of_size(state: State, updates: Sequence[ClientUpdate]) -> State:
    """Return the mean delta of the clients of one size, under that size's own names."""
    under_own_names = []
    for update in updates:
        part = {local: replace(piece, name=local) for local, piece in update.part.items()}
        under_own_names.append(replace(update, part=part))
    return merge(state, under_own_names).delta
