"""The stage that adds the aggregated delta to the global state."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from motley.core.merge import Aggregate, apply
from motley.core.update import ClientUpdate
from motley.server.pipeline import StageResult
from motley.server.state import ServerState


@dataclass(frozen=True)
class Apply:
    """Add `lr` times the aggregated delta to the global state.

    `lr` scales parameters only. Buffers get their whole delta, and coordinates without an owner
    keep their bits.
    """

    parameters: Collection[str]
    lr: float = 1.0
    name: str = "apply"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Return the new global state."""
        state = apply(server.state, aggregate, self.parameters, self.lr)
        return StageResult(replace(server, state=state), aggregate, applied=True)
