"""Ending a round before its updates have been checked, so that a GPU is never idle between rounds.

While a GPU is still training, the host already holds the updates as tensors that are not computed
yet. Whether they are finite is known only once they are. Waiting for that would leave the GPU idle
while the host then queues the aggregation and the evaluation. So the end of the round is queued
behind the training as if all updates were valid, and queued again without the invalid ones if some
turn out to be, or if the state that they give is not usable. Server states are never changed in
place, so the first end can simply be dropped.

Nodes elsewhere have sent their updates completely when they arrive, and they are not asked for a
collection twice: for them, and on a CPU, this is `rounds.finish_round`.
"""

from __future__ import annotations

from motley.server import rounds
from motley.server.aggregation import merge_updates
from motley.server.context import RoundContext
from motley.server.rounds import Attempt, Ending, Undone, end_round, enough_updates
from motley.server.state import ServerState


def finish_round(context: RoundContext, server: ServerState, attempt: Attempt) -> Ending | Undone:
    """Do as `rounds.finish_round` does, with the end queued before the updates are checked."""
    if not context.engine.trusted or attempt.check.ready:
        return rounds.finish_round(context, server, attempt)
    merged = merge_updates(context, server, attempt.updates, attempt.check.metrics)
    ending = end_round(context, merged, attempt.clients)
    # Reading the verdict waits for the training; the work above is queued behind it.
    accepted = attempt.check.verdict.accepted
    if not enough_updates(context, attempt):
        return Undone(attempt.rejected)
    # The check of the merged state is queued before the evaluation, with which the GPU goes on.
    if len(accepted) == len(attempt.updates) and merged.problem is None:
        return ending
    return rounds.finish_round(context, server, attempt)
