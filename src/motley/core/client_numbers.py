"""One whole number per client, for federations of a million clients.

The server remembers numbers about clients, such as the round of each client's last update. A dict
of a million clients takes 100 MB and seconds as JSON, and every round would copy it. Two arrays
take 8 MB and can be written to a file directly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import TypeVar

import numpy as np

Default = TypeVar("Default")

#: Ids and numbers are stored in 32 bits.
LIMIT = 2**31


class ClientNumbers(Mapping[int, int]):
    """A mapping from client ids to numbers that never changes. Clients are in ascending order.

    It equals a dict with the same items. `updated` and `counted` return another mapping. Ids and
    numbers are below `LIMIT`.
    """

    def __init__(self, numbers: Mapping[int, int] | None = None) -> None:
        ordered = sorted((numbers or {}).items())
        #: Client ids in ascending order.
        self.clients = np.array([client for client, _ in ordered], dtype=np.int32)
        #: The number of each of these clients.
        self.numbers = np.array([number for _, number in ordered], dtype=np.int32)

    @classmethod
    def from_arrays(cls, clients: np.ndarray, numbers: np.ndarray) -> ClientNumbers:
        """Return a mapping of the two attributes' arrays, which must not be changed afterwards.

        Raises ValueError if no mapping has such arrays: they may come from a damaged file.
        """
        for array in (clients, numbers):
            if array.dtype != np.int32 or array.shape != clients.shape or array.ndim != 1:
                raise ValueError("clients and numbers should be int32 vectors of one length")
        if (np.diff(clients) <= 0).any():
            raise ValueError("clients should be in ascending order")
        mapping = cls()
        mapping.clients, mapping.numbers = clients, numbers
        return mapping

    def __len__(self) -> int:
        return len(self.clients)

    def __iter__(self) -> Iterator[int]:
        return iter(self.clients.tolist())

    def __contains__(self, client: object) -> bool:
        return self.get(client) is not None  # type: ignore[arg-type]

    def __getitem__(self, client: int) -> int:
        number = self.get(client)
        if number is None:
            raise KeyError(client)
        return number

    def get(self, client: int, default: Default | None = None) -> int | Default | None:  # type: ignore[override]
        """Return a client's number, or the default if it has none."""
        if not isinstance(client, int | np.integer) or not 0 <= client < LIMIT:
            return default
        # The id must have the array's type: for another one, NumPy would convert the whole array.
        position = int(self.clients.searchsorted(np.int32(client)))
        if position == len(self.clients) or self.clients[position] != client:
            return default
        return int(self.numbers[position])

    def items(self) -> ItemsView[int, int]:
        """Return pairs of client and number, without looking up each client."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClientNumbers):
            same_clients = np.array_equal(self.clients, other.clients)
            return same_clients and np.array_equal(self.numbers, other.numbers)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClientNumbers({dict(self.items())})"

    def largest(self) -> int:
        """Return the largest number; 0 if there are no clients."""
        return int(self.numbers.max(initial=0))

    def updated(self, changes: Mapping[int, int]) -> ClientNumbers:
        """Return a mapping with other numbers for some clients, which may be new."""
        change = ClientNumbers(changes)
        positions = self.clients.searchsorted(change.clients)
        is_known = np.zeros(len(change), dtype=bool)
        inside = positions < len(self)
        is_known[inside] = self.clients[positions[inside]] == change.clients[inside]
        numbers = self.numbers.copy()
        numbers[positions[is_known]] = change.numbers[is_known]
        new = ~is_known
        return ClientNumbers.from_arrays(
            np.insert(self.clients, positions[new], change.clients[new]),
            np.insert(numbers, positions[new], change.numbers[new]),
        )

    def changed_since(self, before: ClientNumbers) -> ClientNumbers:
        """Return the clients whose numbers are new, or other ones than before."""
        positions = before.clients.searchsorted(self.clients)
        inside = positions < len(before)
        is_same = np.zeros(len(self), dtype=bool)
        is_same[inside] = (before.clients[positions[inside]] == self.clients[inside]) & (
            before.numbers[positions[inside]] == self.numbers[inside]
        )
        return ClientNumbers.from_arrays(self.clients[~is_same], self.numbers[~is_same])

    def counted(self, clients: Iterable[int]) -> ClientNumbers:
        """Return a mapping in which each of these clients has one more for every time it occurs."""
        counts = {}
        for client, times in Counter(clients).items():
            counts[client] = times + (self.get(client) or 0)
        return self.updated(counts)


class _Items(ItemsView[int, int]):
    _mapping: ClientNumbers

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._mapping.clients.tolist(), self._mapping.numbers.tolist(), strict=True)


def client_numbers(mapping: Mapping[int, int]) -> ClientNumbers:
    """Return a mapping as `ClientNumbers`; if it is one, without a copy."""
    return mapping if isinstance(mapping, ClientNumbers) else ClientNumbers(mapping)
