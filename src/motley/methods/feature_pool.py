"""The server's pool of client features: what entered and left the intermediate layers of each client's last batch.

It is part of the method's server state. An entry's name holds the round and the client it came from, so that choosing
among entries never asks the device for a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from motley.core.part import State
from motley.core.update import ClientUpdate

IN, OUT = "features/in", "features/out"
"""What a message and a reply call them."""
Shapes = tuple[torch.Size, torch.Size]
"""Of s_in and s_out of one example."""


class Entry(NamedTuple):
    """Whose features, and from which round."""

    round_number: int
    client: int

    def name(self, end: str) -> str:
        """Return the name of one of the entry's two tensors in the server's state."""
        return f"{self.round_number}/{self.client}/{end}"


def entries(server: State) -> list[Entry]:
    """Return what the pool holds, oldest first."""
    return sorted(Entry(*map(int, name.split("/")[:2])) for name in server if name.endswith(IN))


def collect(server: State, updates: Sequence[ClientUpdate], most: int, stale: bool) -> State:
    """Return the pool after a round: the newest features of each client, of at most `most` clients."""
    held = entries(server)
    number = 1 + max((entry.round_number for entry in held), default=0)
    given = {Entry(number, u.client): u.payload for u in updates if IN in u.payload and OUT in u.payload}
    if not given:
        return server
    newcomers = {entry.client for entry in given}
    old = {e: {end: server[e.name(end)] for end in (IN, OUT)} for e in held if stale and e.client not in newcomers}
    pool = {**old, **given}
    return {entry.name(end): pool[entry][end] for entry in sorted(pool)[-most:] for end in (IN, OUT)}


def draw(server: State, client: int, shapes: Shapes, count: int, numbers: np.random.Generator) -> State:
    """Return the features of `count` clients other than this one, of these shapes; nothing where there are none.

    Where the pool has fewer, some come twice: a message of one shape needs one captured step.
    """
    others = [entry for entry in entries(server) if entry.client != client and _shapes(server, entry) == shapes]
    if not others or not count:
        return {}
    chosen = [others[at] for at in numbers.choice(len(others), count, replace=len(others) < count)]
    return {end: torch.cat([server[entry.name(end)] for entry in chosen]) for end in (IN, OUT)}


def _shapes(server: State, entry: Entry) -> Shapes:
    return server[entry.name(IN)].shape[1:], server[entry.name(OUT)].shape[1:]
