"""Checks the server state after a round, so that a poisoned one is never kept.

Every update may be finite and the result still useless: weighted sums overflow, a server optimizer
divides, and 1e30 is finite. So the result of the pipeline is checked too:

- No number in the global state, its moving average, the method's state or the stages' states is
  infinite, NaN or beyond `LARGEST`.
- The step of the global state's parameters, of the average's and of the method's state is at most
  `factor` times the median of its last steps. Until there are `ENOUGH` of them, the step of
  parameters is compared with the norm of the parameters themselves.

If the check fails, `rounds.finish_round` undoes the round and looks for the updates that are
responsible. The norms of past steps are kept in the server state, so a resumed run has them.

The numbers are computed on the server's device and read later, with the verdict on the updates: a
GPU does not wait for the host.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from motley.core.async_copy import AsyncCopy
from motley.core.part import State
from motley.core.robust import total_norm
from motley.core.tensors import max_norm
from motley.server.bounds import STAGE as BOUNDS
from motley.server.state import STAGE_PREFIX, ServerState

#: Under this name the norms of the last steps are kept in `ServerState.stage_states`.
STAGE = "step-history"
#: No weight, statistic or moment is larger: squares of larger numbers overflow in single precision
#: when a few thousand of them are added.
LARGEST = 1e15
#: Steps that are kept, and the number from which on they are used.
HISTORY, ENOUGH = 20, 5
#: Section -> its name in messages.
WORDS = {
    "state": "the global state",
    "ema": "its moving average",
    "method_state": "the method's state",
}


class StateCheck:
    """Compares a server state with the one before the round.

    parameters: global names of parameters; steps of the state and its average are about these.
    factor: a step is at most this many times the median of the last ones; 0: any step.
    """

    def __init__(
        self,
        before: ServerState,
        after: ServerState,
        parameters: Collection[str],
        factor: float,
    ) -> None:
        self._factor = factor
        history = before.stage_states.get(STAGE, {})
        steps = _steps(before, after, parameters)
        #: The state after the round, with the norms of its steps.
        self.server = after
        if steps:
            kept = dict(history)
            for section, (step, _, _) in steps.items():
                values = step.reshape(1)
                if section in kept:
                    values = torch.cat([kept[section], values])[-HISTORY:]
                kept[section] = values
            self.server = after.with_stage_state(STAGE, kept)
        numbers: list[Tensor] = []
        self._sections = _sections(after)
        for tensors in self._sections.values():
            numbers.append(max_norm(tensors.values()).double().reshape(1))
        self._past: dict[str, int] = {}
        self._roots: dict[str, float] = {}
        for section, (step, norm, root) in steps.items():
            past = history.get(section, step.new_zeros(0))
            self._past[section] = len(past)
            self._roots[section] = root
            numbers.append(torch.cat([step.reshape(1), norm.reshape(1), past]))
        self._numbers = AsyncCopy(torch.cat(numbers) if numbers else torch.zeros(0))

    @cached_property
    def problem(self) -> str | None:
        """The problem with the state, or None. The first access waits for the device."""
        numbers = iter(self._numbers.read())
        for section in self._sections:
            largest = next(numbers)
            if not largest <= LARGEST:
                return f"{_word(section)} would hold {_described(largest)}"
        for section, count in self._past.items():
            step, norm = next(numbers), next(numbers)
            past = [next(numbers) for _ in range(count)]
            problem = self._step_problem(section, step, norm, past)
            if problem:
                return problem
        return None

    def _step_problem(
        self, section: str, step: float, norm: float, past: list[float]
    ) -> str | None:
        if not self._factor:
            return None
        # Rounds that changed nothing say nothing about the usual step.
        past = [number for number in past if number > 0]
        if len(past) >= ENOUGH:
            typical = median(past)
            against = f"the median of the last {len(past)} steps is {typical:.3g}"
        elif section != "method_state":
            typical = max(norm, self._roots[section])
            against = f"the norm of its parameters is {norm:.3g}"
        else:
            return None
        if step <= self._factor * typical:
            return None
        return (
            f"{_word(section)} would take a step of norm {step:.3g}, and {against} "
            f"(server.max_step_factor = {self._factor:g})"
        )


def _word(section: str) -> str:
    return WORDS.get(section, f"the state of the stage {section.removeprefix(STAGE_PREFIX)!r}")


def _described(largest: float) -> str:
    if math.isfinite(largest):
        return f"a number of {largest:.3g}"
    return "a number that is not finite"


def _sections(server: ServerState) -> dict[str, State]:
    """Return all tensors of a server state, except the state of the checks themselves."""
    sections = server.sections
    for name in (STAGE, BOUNDS):
        sections.pop(STAGE_PREFIX + name, None)
    return sections


def _steps(
    before: ServerState, after: ServerState, parameters: Collection[str]
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return the norm of every section's step, its norm before, and the root of its dimension."""
    pairs: list[tuple[str, Mapping[str, Tensor], Mapping[str, Tensor], Collection[str] | None]] = [
        ("state", before.state, after.state, parameters),
        ("ema", before.ema or {}, after.ema or {}, parameters),
        ("method_state", before.method_state, after.method_state, None),
    ]
    steps = {}
    for section, old, new, among in pairs:
        # Sorted: a state that was read from a checkpoint has another order, and sums in another
        # order differ in their last bits.
        names = sorted(name for name in new if _is_comparable(name, old, new, among))
        if not names:
            continue
        olds = [old[name] for name in names]
        # On a GPU these are a few grouped kernels over the whole state.
        changes = torch._foreach_sub([new[name] for name in names], olds)
        root = math.sqrt(sum(tensor.numel() for tensor in olds))
        steps[section] = (total_norm(changes), total_norm(olds), root)
    return steps


def _is_comparable(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], among: Collection[str] | None
) -> bool:
    if name not in old or (among is not None and name not in among):
        return False
    same = old[name].shape == new[name].shape and old[name].dtype == new[name].dtype
    return same and new[name].is_floating_point() and new[name].numel() > 0
