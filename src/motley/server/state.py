"""The server state: everything that the server keeps from one round to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from motley.core.client_numbers import ClientNumbers
from motley.core.part import State
from motley.privacy import PrivacyLedger

#: Prefix of the sections that hold the states of the pipeline's stages.
STAGE_PREFIX = "stage-"


@dataclass(frozen=True)
class ServerState:
    """Everything that changes from round to round. A round takes one and returns another.

    round_number: the last completed round; 0 before the first one.
    state: the global state that clients train from.
    ema: the moving average of `state` over rounds, or None if none is kept.
    method_state: the method's own server state, such as SCAFFOLD's control variate.
    client_state_rounds: for each client, the round of its last accepted update. Its client state of
        that round is the one that it continues from.
    stage_states: the states of the pipeline's stages, by the stage's name, such as a server
        optimizer's moments.
    ledger: the record of the rounds so far from which epsilon is computed.
    """

    round_number: int
    state: State
    ema: State | None = None
    method_state: State = field(default_factory=dict)
    client_state_rounds: Mapping[int, int] = field(default_factory=ClientNumbers)
    stage_states: Mapping[str, State] = field(default_factory=dict)
    ledger: PrivacyLedger = field(default_factory=PrivacyLedger)

    @property
    def model(self) -> State:
        """The state that is evaluated and handed out: the moving average if one is kept."""
        return self.state if self.ema is None else self.ema

    @property
    def sections(self) -> dict[str, State]:
        """All tensors by section: "state", "ema", "method_state", and "stage-NAME" for every stage
        of the pipeline that keeps tensors. Empty sections are left out.
        """
        sections = {
            "state": self.state,
            "ema": self.ema or {},
            "method_state": self.method_state,
        }
        for name, state in self.stage_states.items():
            sections[STAGE_PREFIX + name] = state
        return {name: tensors for name, tensors in sections.items() if tensors}

    def with_model(self, model: State) -> ServerState:
        """Return a server state with another evaluated state."""
        if self.ema is None:
            return replace(self, state=model)
        return replace(self, ema=model)

    def with_stage_state(self, name: str, state: State) -> ServerState:
        """Return a server state in which a stage keeps another state."""
        return replace(self, stage_states={**self.stage_states, name: state})

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> ServerState:
        """Return a server state with `change` applied to every tensor."""

        def changed(state: State) -> State:
            return {name: change(tensor) for name, tensor in state.items()}

        return replace(
            self,
            state=changed(self.state),
            ema=None if self.ema is None else changed(self.ema),
            method_state=changed(self.method_state),
            stage_states={name: changed(state) for name, state in self.stage_states.items()},
        )
