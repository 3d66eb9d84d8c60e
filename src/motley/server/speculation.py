"""Queuing work before a round's updates have been checked, so that a GPU is never idle.

While a GPU is still training, the host already holds the updates as tensors without values. Whether
they are finite is known only after the training. If the host waited for that, the GPU would be idle
while the host then queues the aggregation and the evaluation. So the host queues the end of the
round behind the training as if all updates were valid (`finish_round`). If some are not, or if the
new state is not usable, it queues the end again without them. Server states are never changed in
place, so the first end can simply be dropped.

`NextRound` goes one step further: it also queues the training of the next round before the check
of this one is read. Otherwise the GPU would wait until the host has sampled and loaded clients.

Nodes elsewhere have sent their updates completely when they arrive, and they are not asked for
anything twice: for them, and on a CPU, all this is `rounds.finish_round`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from motley.engine.base import Done
from motley.server import rounds
from motley.server.aggregation import Merged, merge_updates
from motley.server.context import RoundContext
from motley.server.rounds import Attempt, Ending, Undone, end_round, enough_updates
from motley.server.state import ServerState


def finish_round(
    context: RoundContext,
    server: ServerState,
    attempt: Attempt,
    next_round: NextRound | None = None,
) -> Ending | Undone:
    """Do as `rounds.finish_round` does, with the end queued before the updates are checked.

    If `next_round` is given, the next round's training is queued too.
    """
    if not context.engine.trusted or attempt.check.ready:
        return rounds.finish_round(context, server, attempt)
    ends = _merge_and_end(context, server, attempt)
    if ends is None:
        return rounds.finish_round(context, server, attempt)
    merged, ending = ends
    if next_round is not None:
        next_round.begin(context, ending.server)
    # Reading the verdict waits for the training; the work above is queued behind it.
    accepted = attempt.check.verdict.accepted
    # Reading `problem` does not wait for the evaluation: the state's check was queued before it.
    all_accepted = len(accepted) == len(attempt.updates)
    if enough_updates(context, attempt) and all_accepted and merged.problem is None:
        return ending
    if next_round is not None:
        next_round.drop()
    return rounds.finish_round(context, server, attempt)


def _merge_and_end(
    context: RoundContext, server: ServerState, attempt: Attempt
) -> tuple[Merged, Ending] | None:
    """Queue the end of a round as if all updates were valid; None if that raises an error.

    Stages and methods may raise errors about numbers that the check rejects, such as a NaN. The
    plain end of the round raises any other error again.
    """
    try:
        merged = merge_updates(context, server, attempt.updates, attempt.check.metrics)
        return merged, end_round(context, merged, attempt.clients)
    except Exception:
        return None


@dataclass(frozen=True)
class _Begun:
    """A round whose training is queued.

    context: the context that it was queued with.
    server: the server state that it started from.
    finished: the clients that trained, in the order in which they were queued.
    """

    context: RoundContext
    server: ServerState
    attempt: Attempt
    finished: list[int]

    def fits(self, context: RoundContext, server: ServerState) -> bool:
        """Tell whether the training would be the same with this context and server state.

        A caller may continue from another state, and may replace parts of a federation between
        rounds.
        """
        return (
            server is self.server
            and context.engine is self.context.engine
            and context.sample is self.context.sample
            and context.algorithm is self.context.algorithm
            and context.split is self.context.split
            and context.size_of is self.context.size_of
        )


class NextRound:
    """Trains the clients of the next round before the current round has been checked.

    If the current round ends in another way than expected, this training is dropped. Which clients
    train, and all of their random numbers, depend on the round's number only, so the training that
    takes its place overwrites the client states that it has stored.
    """

    def __init__(self) -> None:
        self._begun: _Begun | None = None
        #: Why the last training could not be queued; None if it could.
        self._problem: str | None = None
        self._is_off = False

    def begin(self, context: RoundContext, server: ServerState) -> None:
        """Queue the training of the round after `server`, which may turn out to be unusable.

        Not with differential privacy, where each request to a client is accounted for.
        """
        self.drop()
        if context.accountant is not None or self._is_off:
            return
        finished: list[int] = []
        try:
            attempt = rounds.train_clients(context, server, 0, finished.append)
        except Exception as error:
            # The current round must be kept. If the error is the next round's own, training its
            # clients in turn raises it again.
            self._problem = str(error)
            return
        self._begun = _Begun(context, server, attempt, finished)

    def drop(self) -> None:
        """Forget the training that was queued, so that its memory is freed."""
        self._begun = None
        # A state that is not usable may be the reason.
        self._problem = None

    def train_clients(
        self, context: RoundContext, server: ServerState, attempt_number: int, done: Done
    ) -> Attempt:
        """Do as `rounds.train_clients` does, with the training that was queued if it fits."""
        begun, problem = self._begun, self._problem
        self.drop()
        if begun is not None and attempt_number == 0 and begun.fits(context, server):
            for client in begun.finished:
                done(client)
            return begun.attempt
        # It may be large, and it is not used.
        del begun
        attempt = rounds.train_clients(context, server, attempt_number, done)
        if problem is not None:
            # A GPU may have memory for one round's updates only. Trying it in every round would
            # take longer than not to overlap.
            self._is_off = True
            warnings.warn(
                "engine.overlap_rounds: rounds do not overlap from now on. The next round could "
                f"not be queued early: {problem}",
                stacklevel=2,
            )
        return attempt
