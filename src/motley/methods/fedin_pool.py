"""FedIN's pool of client features at the server: inputs and outputs of clients' intermediate
layers.

It is the method's own state at the server. The names of an entry's tensors hold the round and the
client they came from, so the host can choose among entries without reading values from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from motley.core.part import State
from motley.core.update import ClientUpdate

#: Names of features in a broadcast and in a payload: inputs and outputs of the intermediate layers.
IN, OUT = "features/in", "features/out"
#: The shapes of s_in and s_out of one example.
Shapes = tuple[torch.Size, torch.Size]


class Entry(NamedTuple):
    """The client whose features these are, and their round."""

    round_number: int
    client: int

    def name(self, end: str) -> str:
        """Return the name of one of the entry's two tensors in the pool."""
        return f"{self.round_number}/{self.client}/{end}"


def entries(pool: State) -> list[Entry]:
    """Return the entries of a pool, oldest first."""
    return sorted(Entry(*map(int, name.split("/")[:2])) for name in pool if name.endswith(IN))


def collect(pool: State, updates: Sequence[ClientUpdate], capacity: int, stale: bool) -> State:
    """Return the pool after a round: the newest features of each client, of at most `capacity`
    clients.

    Without `stale`, features of earlier rounds are dropped.
    """
    old_entries = entries(pool)
    number = 1 + max((entry.round_number for entry in old_entries), default=0)
    features: dict[Entry, State] = {}
    for update in updates:
        if IN in update.payload and OUT in update.payload:
            features[Entry(number, update.client)] = update.payload
    if not features:
        return pool
    newcomers = {entry.client for entry in features}
    for entry in old_entries:
        if stale and entry.client not in newcomers:
            features[entry] = {end: pool[entry.name(end)] for end in (IN, OUT)}
    after: State = {}
    for entry in sorted(features)[-capacity:]:
        for end in (IN, OUT):
            after[entry.name(end)] = features[entry][end]
    return after


def draw(pool: State, client: int, shapes: Shapes, count: int, rng: np.random.Generator) -> State:
    """Draw the features of `count` other clients of these shapes; empty if the pool has none.

    If the pool has fewer, some are drawn twice, because a step is captured for one shape of the
    broadcast.
    """
    others = []
    for entry in entries(pool):
        if entry.client != client and _shapes(pool, entry) == shapes:
            others.append(entry)
    if not others or not count:
        return {}
    drawn = rng.choice(len(others), count, replace=len(others) < count)
    features = {}
    for end in (IN, OUT):
        features[end] = torch.cat([pool[others[number].name(end)] for number in drawn])
    return features


def _shapes(pool: State, entry: Entry) -> Shapes:
    return pool[entry.name(IN)].shape[1:], pool[entry.name(OUT)].shape[1:]
