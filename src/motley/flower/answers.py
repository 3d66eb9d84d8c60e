"""Receives answers in threads, so that an incomplete answer delays no other.

A node announces an answer before it sends it, and from then on Flower's pull waits for all of it:
for minutes if the node dies in between, and longer if the node is malicious.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from threading import Thread

from flwr.app import Message
from flwr.serverapp import Grid

#: Seconds that one pull may delay the others.
HOLD_S = 1.0

Pull = Future[list[Message]]


class Answers:
    """Receives the answers to messages as they arrive."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        #: Message -> the pull of its answer that took too long, which goes on in a thread.
        self._begun: dict[str, Pull] = {}

    def pull(self, numbers: Iterable[str]) -> Iterator[Message]:
        """Return the answers to some messages that have arrived, at most one per message.

        They are pulled one by one, so that an answer that cannot be read affects no other.
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
        """Ignore the answer to a message from now on; return whether it had been announced."""
        return self._begun.pop(sent, None) is not None


class PullThread:
    """Pulls one answer after another until it is dismissed. The process can end without it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._tasks: SimpleQueue[tuple[str, Pull] | None] = SimpleQueue()
        Thread(target=self._work, name="pull", daemon=True).start()

    def pull(self, sent: str) -> Pull:
        """Start to pull an answer, and wait for it for a moment."""
        pull: Pull = Future()
        self._tasks.put((sent, pull))
        wait([pull], HOLD_S)
        return pull

    def dismiss(self) -> None:
        """End the thread after its present task."""
        self._tasks.put(None)

    def _work(self) -> None:
        while task := self._tasks.get():
            sent, pull = task
            try:
                pull.set_result(list(self.grid.pull_messages([sent])))
            except BaseException as error:  # Flower stops runs with SystemExit
                pull.set_exception(error)


def read(sent: str, pull: Pull) -> list[Message]:
    """Return the answer that a finished pull has received, if there is one."""
    try:
        replies = pull.result()
    except Exception as error:
        print(f"an answer could not be read: {error!r}", flush=True)
        return []
    return [reply for reply in replies if reply.metadata.reply_to_message_id == sent][:1]
