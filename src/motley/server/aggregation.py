"""Merges a round's updates into a new server state, and finds those that make it unusable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from motley.core.client_numbers import client_numbers
from motley.core.part import by_type
from motley.core.robust import total_norm
from motley.core.update import ClientUpdate
from motley.server.context import RoundContext
from motley.server.metrics import Metrics
from motley.server.pipeline import run_stages
from motley.server.state import ServerState
from motley.server.state_check import StateCheck
from motley.server.timing import Timer


@dataclass(frozen=True)
class Merged:
    """The server state after the pipeline, which a GPU may still be computing.

    check: says whether the state is usable; None if there was nothing to merge.
    """

    server: ServerState
    metrics: Metrics
    check: StateCheck | None
    seconds: Mapping[str, float]

    @property
    def problem(self) -> str | None:
        """The problem with the state, or None. Waits for the device."""
        return None if self.check is None else self.check.problem


def merge_updates(
    context: RoundContext,
    server: ServerState,
    updates: Sequence[ClientUpdate],
    metrics: Metrics | None = None,
) -> Merged:
    """Run the stages of the aggregation, and start to check the state after them.

    `metrics` are numbers of the round that are known before.
    """
    timer = Timer()
    after = replace(server, round_number=server.round_number + 1)
    check = None
    all_metrics: Metrics = {}
    with timer.phase("merge"):
        if updates:
            after, stage_metrics = run_stages(context.pipeline, after, updates)
            all_metrics = {**(metrics or {}), **stage_metrics}
            accepted = {update.client: after.round_number for update in updates}
            rounds = client_numbers(after.client_state_rounds).updated(accepted)
            after = replace(after, client_state_rounds=rounds)
            check = StateCheck(server, after, context.split.parameters, context.max_step_factor)
            after = check.server
            if context.bounds is not None:
                after = context.bounds.remember(after, updates)
    return Merged(after, all_metrics, check, timer.seconds)


def find_responsible(
    context: RoundContext,
    server: ServerState,
    updates: Sequence[ClientUpdate],
    problem: str,
    max_excluded: int,
) -> dict[int, str] | None:
    """Find updates without which the state is usable; return their clients, each with a reason.

    Updates are left out one by one, the largest first (root mean square of all that was sent),
    until the state passes its check. Then each one is put back if the state still passes with it,
    so that no client is blamed only because its update is large. None if that takes more than
    `max_excluded` updates, or all of them: then nobody in particular is responsible.

    This waits for the device and may run the pipeline many times. It is for the rare round that has
    failed already.
    """
    kept = sorted(updates, key=_magnitude)
    excluded: list[ClientUpdate] = []
    while True:
        excluded.append(kept.pop())
        if not kept or len(excluded) > max_excluded:
            return None
        if merge_updates(context, server, _by_client(kept)).problem is None:
            break
    for update in sorted(excluded[:-1], key=_magnitude):
        if merge_updates(context, server, _by_client([*kept, update])).problem is None:
            kept.append(update)
            excluded.remove(update)
    reason = f"the round was undone and ended without it: with its update, {problem}."
    return {update.client: reason for update in excluded}


def _by_client(updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    return sorted(updates, key=lambda update: update.client)


def _magnitude(update: ClientUpdate) -> float:
    """Return the root mean square of everything that a client sent."""
    tensors, _ = by_type([*update.delta.values(), *update.payload.values()])
    count = sum(tensor.numel() for tensor in tensors)
    return float(total_norm(tensors)) / count**0.5 if count else 0.0
