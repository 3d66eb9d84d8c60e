"""Answers are pulled in threads, so that one that does not come whole holds up no other.

A node announces an answer before it sends it, and from then on Flower's pull waits for all of it: for minutes if the
node dies in between, and longer if it means harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread

from flwr.app import Message
from flwr.serverapp import Grid

HOLD_S = 1.0
"""Seconds that one pull may hold up the others."""

Pull = Future[list[Message]]


class Answers:
    """The answers to messages, as they come."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._begun: dict[str, Pull] = {}
        """Message -> the pull of its answer that took too long, in a thread that was left to it."""

    def pull(self, numbers: Iterable[str]) -> Iterator[Message]:
        """Return the answers that have come, each to one of the given messages and at most one to each.

        They are asked for one by one, so that one that cannot be read costs no other.
        """
        thread = PullThread(self.grid)
        try:
            for sent in numbers:
                if sent not in self._begun:
                    self._begun[sent] = thread.pull(sent)
                    if not self._begun[sent].done():
                        thread.dismiss()
                        thread = PullThread(self.grid)
                if self._begun[sent].done():
                    yield from read(sent, self._begun.pop(sent))
        finally:
            thread.dismiss()

    def give_up(self, sent: str) -> bool:
        """Ignore the answer to a message from now on; return whether it was announced."""
        return self._begun.pop(sent, None) is not None


class PullThread:
    """Pulls one answer after another until it is dismissed. The process does not wait for it at its end."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._tasks: SimpleQueue[tuple[str, Pull] | None] = SimpleQueue()
        Thread(target=self._work, name="pull", daemon=True).start()

    def pull(self, sent: str) -> Pull:
        """Return the pull of an answer, which is done unless it takes too long."""
        pull: Pull = Future()
        self._tasks.put((sent, pull))
        wait([pull], HOLD_S)
        return pull

    def dismiss(self) -> None:
        """End the thread after what it does now."""
        self._tasks.put(None)

    def _work(self) -> None:
        while task := self._tasks.get():
            sent, pull = task
            try:
                pull.set_result(list(self.grid.pull_messages([sent])))
            except BaseException as error:  # Flower stops a run with one that is no Exception
                pull.set_exception(error)


def read(sent: str, pull: Pull) -> list[Message]:
    """Return what a pull that is done has brought for a message: one answer at most."""
    try:
        replies = pull.result()
    except Exception as error:
        print(f"an answer could not be read: {error!r}", flush=True)
        return []
    return [reply for reply in replies if reply.metadata.reply_to_message_id == sent][:1]
