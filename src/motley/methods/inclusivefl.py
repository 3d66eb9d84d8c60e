"""InclusiveFL: sizes share all layers but each one's last, which learns from the deeper layers of the next size.

Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022. The parts are those
of `split.name = "inclusive"`: a size keeps its last block and its head to itself. Momentum distillation mixes the
change of a size's last block, before anything is averaged between sizes, with the mean change of the next larger size's
blocks from there to its own last one:

    d <- (1 - beta) d + beta mean(d of these blocks)

This is the paper's formula; in the released code the mix is never applied. The paper is about transformers. In ResNets
the last block is that of stage 4, and of the larger size's blocks there, those tensors take part that have the shape
of the last block's own. InCo comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field

from motley.core.merge import Aggregate, merge
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings
from motley.splits.inclusive import Inclusive


class InclusiveFLSettings(MethodSettings):
    """InclusiveFL's own setting."""

    name: str = "inclusivefl"
    beta: float = Field(default=0.2, ge=0, le=1)
    """Weight of the next larger size's delta in the delta of a size's last block (momentum distillation)."""


@METHODS.register(
    "inclusivefl", "a size's own last block learns from the next larger size", paper="Liu et al., KDD 2022"
)
class InclusiveFL(Method):
    """FedAvg, and a mix at the server."""

    Settings = InclusiveFLSettings
    settings: InclusiveFLSettings

    def aggregate(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        merged, split = merge(state, updates), self.info.split
        if not isinstance(split, Inclusive) or not self.settings.beta:
            return merged
        change = dict(merged.delta)
        for size, larger in zip(split.by_depth, split.by_depth[1:], strict=False):
            means = self._mean_of(state, [update for update in updates if update.size == larger])
            for name, sources in split.taught_by(size, larger).items():
                if name in merged.delta and all(source in means for source in sources):
                    taught = torch.stack([means[source] for source in sources]).mean(0)
                    change[name] = torch.lerp(merged.delta[name], taught, self.settings.beta)
        return merged.with_delta(change)

    def _mean_of(self, state: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the mean change of one size's clients alone, under its own names."""
        own = [
            replace(update, part={local: replace(p, name=local) for local, p in update.part.items()})
            for update in updates
        ]
        return merge(state, own).delta
