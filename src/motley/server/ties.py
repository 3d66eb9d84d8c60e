"""The stage that keeps tensors equal that a model has under two names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.server.pipeline import StageResult
from motley.server.state import ServerState


@dataclass(frozen=True)
class Tie:
    """Copy each tensor to its second name (`Split.tied`).

    Server step sizes, optimizers and corrections of methods see a parameter under its first name
    only. A model has one tensor for both names, and would load the second one last.
    """

    tied: Mapping[str, str]
    name: str = "tie"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Return a server state in which both names have the value of the first one."""
        state = dict(server.state)
        for second, first in self.tied.items():
            state[second] = state[first].clone()
        return StageResult(replace(server, state=state), aggregate)
