"""Limits the answers of nodes while they arrive, before the SuperLink stores them.

A node announces an answer with the ids of its pieces, and sends the pieces one by one. The size
of an answer is not announced, so the pieces are added up. The piece that exceeds the limit is
refused, and so are all later pieces of the answer. The run's request for the answer is refused too,
because it would wait for the rest until its own limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

#: The ids and the texts of an answer, which `engine.flower.max_reply_mib` does not count.
OVERHEAD_BYTES = 2**20
#: Answers that are remembered at the same time; the oldest are forgotten.
MAX_REPLIES = 10_000


@dataclass
class Reply:
    """An answer that a node has announced."""

    #: The id of the message itself, which names the pieces.
    root: str
    #: The largest size in MiB.
    limit_mib: float
    #: The bytes of its pieces so far. A piece that is sent twice counts once.
    size: int = 0
    pieces: set[str] = field(default_factory=set)


class Replies:
    """The answers that are arriving, and the refused ones."""

    def __init__(self, limit_mib: Callable[[], float]) -> None:
        """`limit_mib` returns the largest size of an answer in MiB."""
        self.limit_mib = limit_mib
        #: Flower's number of an upload -> the answer.
        self._replies: OrderedDict[str, Reply] = OrderedDict()
        #: The id of a message -> why it was refused.
        self.refused: OrderedDict[str, str] = OrderedDict()

    def announce(self, upload: str, root: str) -> None:
        """Expect the pieces of an answer."""
        self._replies[upload] = Reply(root, self.limit_mib())
        while len(self._replies) > MAX_REPLIES:
            self._replies.popitem(last=False)

    def add(self, upload: str, piece: str, size: int) -> str:
        """Count a piece; return why it is refused, or an empty text."""
        reply = self._replies.get(upload)
        if reply is None:
            return "no answer was announced for this piece"
        if reply.root in self.refused:
            return self.refused[reply.root]
        if piece not in reply.pieces:
            reply.pieces.add(piece)
            reply.size += size
        limit = reply.limit_mib
        if reply.size > limit * 2**20 + OVERHEAD_BYTES:
            self.refused[reply.root] = (
                f"it has more than {limit:g} MiB; engine.flower.max_reply_mib = {limit:g}."
            )
            while len(self.refused) > MAX_REPLIES:
                self.refused.popitem(last=False)
            return self.refused[reply.root]
        return ""
