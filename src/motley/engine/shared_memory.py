"""Messages with tensors between processes of one machine, through memory that they share.

The sender copies tensors into an arena and sends where they are; the receiver maps the arena and
reads them there. An arena is anonymous memory (memfd): unlike files in /dev/shm, which containers
limit to a few megabytes, it is limited by the machine's memory only, and it is gone with the last
process that uses it, however that process ends.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, TypeAlias

import torch
from torch import Tensor

from motley.core.part import State

#: Tensors by group and name.
Groups: TypeAlias = Mapping[str, State]
#: Tensors begin at multiples of this many bytes, as torch's own allocator places them.
ALIGNMENT = 64
#: A new arena is larger than its first content by this factor: the next content may be, too.
ROOM = 1.25


@dataclass(frozen=True)
class Place:
    """Where a tensor is in an arena."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


Layout: TypeAlias = Mapping[str, Mapping[str, Place]]


class Packing:
    """Places in an arena for tensors. The same tensor in several messages has one place."""

    def __init__(self) -> None:
        self.size = 0
        self._places: dict[object, Place] = {}

    def add(self, groups: Groups) -> tuple[Layout, list[tuple[Tensor, Place]]]:
        """Return the places of a message's tensors, and those tensors that have no place yet."""
        layout: dict[str, dict[str, Place]] = {}
        new = []
        for group, tensors in groups.items():
            layout[group] = {}
            for name, tensor in tensors.items():
                # All tensors are alive while they are packed, so equal addresses mean equal values.
                key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                place = self._places.get(key)
                if place is None or not tensor.numel():
                    place = Place(self.size, tensor.dtype, tuple(tensor.shape))
                    self._places[key] = place
                    num_bytes = tensor.numel() * tensor.element_size()
                    self.size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
                    new.append((tensor, place))
                layout[group][name] = place
        return layout, new


class Arena:
    """Memory that this process writes and others read. It is released with its last reference."""

    _numbers = count()

    def __init__(self, size: int) -> None:
        self.size = max(size, ALIGNMENT)
        #: No other arena of this process has this number.
        self.number = next(Arena._numbers)
        #: The process that made it. A fork of that process inherits it, and must not write to it.
        self.owner = os.getpid()
        self.handle = os.memfd_create("motley")
        self._close_handle = weakref.finalize(self, os.close, self.handle)
        os.ftruncate(self.handle, self.size)
        self._memory = _mapped(self.handle, self.size)

    def write(self, tensors: Iterable[tuple[Tensor, Place]]) -> None:
        """Copy tensors to their places."""
        for tensor, place in tensors:
            if tensor.numel():
                _at(self._memory, place).copy_(tensor.detach())

    def close(self) -> None:
        """Release the memory. It is freed when no other process has it mapped either."""
        self._close_handle()
        self._memory = torch.empty(0, dtype=torch.uint8)


class Arenas:
    """The arenas of a sender. One that is free is used again, because new memory is slow."""

    def __init__(self) -> None:
        self._free: list[Arena] = []
        self._all: weakref.WeakSet[Arena] = weakref.WeakSet()

    @property
    def numbers(self) -> set[int]:
        """The numbers of all arenas that somebody still uses, or that are free."""
        return {arena.number for arena in self._all}

    def take(self, size: int) -> Arena:
        """Return an arena with at least `size` bytes: the smallest free one, or a new one."""
        large_enough = []
        for arena in self._free:
            if arena.size >= size and arena.owner == os.getpid():
                large_enough.append(arena)
        if large_enough:
            arena = min(large_enough, key=lambda arena: arena.size)
            self._free.remove(arena)
            return arena
        self.drop_free()
        arena = Arena(int(size * ROOM))
        self._all.add(arena)
        return arena

    def give_back(self, arena: Arena) -> None:
        """Let an arena be used again: nobody reads its content any more."""
        self._free.append(arena)

    def drop_free(self) -> None:
        """Release the arenas that are free."""
        self._free = []

    def close(self) -> None:
        """Release all arenas, also those in use. For a fork, which has inherited them."""
        self._free = []
        for arena in self._all:
            arena.close()


class Channel:
    """A connection between two processes, over which arenas travel as well."""

    def __init__(self, connection: Connection) -> None:
        """The connection is one of `multiprocessing.Pipe()`, which is a Unix socket on Linux."""
        self.connection = connection
        #: The numbers of arenas that the other side has mapped.
        self._sent: set[int] = set()
        #: The arenas of the other side by their numbers.
        self._mapped: dict[int, Tensor] = {}

    def send(
        self, content: Any, layouts: Sequence[Layout], arena: Arena, numbers: Collection[int]
    ) -> None:
        """Send a picklable object, and the tensors of some layouts, which are in an arena.

        `numbers` are those of all arenas that this side still has; the other side unmaps all
        others.
        """
        is_new = arena.number not in self._sent
        dropped = self._sent - set(numbers)
        size = arena.size if is_new else 0
        self.connection.send((content, layouts, arena.number, size, dropped))
        if is_new:
            send_handle(self.connection, arena.handle, None)  # the process id is for Windows
        self._sent = (self._sent - dropped) | {arena.number}

    def receive(self) -> tuple[Any, list[dict[str, State]]]:
        """Receive an object, and tensors that are valid until the sender uses the arena again."""
        content, layouts, number, size, dropped = self.connection.recv()
        for other in dropped:
            self._mapped.pop(other, None)
        if size:
            handle = recv_handle(self.connection)
            try:
                self._mapped[number] = _mapped(handle, size)
            finally:
                os.close(handle)
        memory = self._mapped[number]
        return content, [_tensors(memory, layout) for layout in layouts]

    def close(self) -> None:
        """Close the connection, and unmap the other side's arenas."""
        self.connection.close()
        self._mapped = {}


def pack(messages: Sequence[Groups]) -> tuple[int, list[tuple[Layout, list[tuple[Tensor, Place]]]]]:
    """Return the size of an arena for messages, and each one's layout and tensors to be written."""
    packing = Packing()
    packed = [packing.add(groups) for groups in messages]
    return packing.size, packed


def _mapped(handle: int, size: int) -> Tensor:
    """Return an arena's memory as bytes. The mapping ends with the last tensor that uses it."""
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def _tensors(memory: Tensor, layout: Layout) -> dict[str, State]:
    """Return the tensors of a layout."""
    groups: dict[str, State] = {}
    for group, places in layout.items():
        groups[group] = {name: _at(memory, place) for name, place in places.items()}
    return groups


def _at(memory: Tensor, place: Place) -> Tensor:
    """Return the tensor at a place."""
    num_bytes = math.prod(place.shape) * place.dtype.itemsize
    if num_bytes == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    taken = memory[place.offset : place.offset + num_bytes]
    return taken.view(place.dtype).view(place.shape)
