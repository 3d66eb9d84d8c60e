"""Messages with tensors between processes of one machine, through memory that they share.

The sender copies tensors into an arena and sends their offsets; the receiver maps the arena and
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
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from motley.core.part import State

#: Tensors by group and name.
Groups: TypeAlias = Mapping[str, State]
#: Tensors begin at multiples of this many bytes, as torch's own allocator places them.
ALIGNMENT = 64
#: A new arena is larger than its first content by this factor: the next content may be, too.
ROOM = 1.25


class Place(NamedTuple):
    """The location of a tensor in an arena.

    A tuple, because a round sends hundreds of them, and tuples are pickled and hashed fast.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


Layout: TypeAlias = Mapping[str, Mapping[str, Place]]


class Packing:
    """Places in an arena for tensors. The same tensor in several messages has one place.

    All tensors must live until they are packed: their identities and addresses tell which are the
    same.
    """

    def __init__(self) -> None:
        self.size = 0
        self._by_identity: dict[int, Place] = {}
        self._by_address: dict[object, Place] = {}

    def add(self, groups: Groups) -> tuple[Layout, list[tuple[Tensor, Place]]]:
        """Return the places of a message's tensors, and those tensors that have no place yet."""
        layout: dict[str, dict[str, Place]] = {}
        new = []
        for group, tensors in groups.items():
            layout[group] = {}
            for name, tensor in tensors.items():
                # Most clients of a size are sent the same objects, and this is the fastest test.
                place = self._by_identity.get(id(tensor))
                if place is None:
                    place = self._by_address.get(_address(tensor))
                if place is None or not tensor.numel():
                    place = self._add_tensor(tensor)
                    new.append((tensor, place))
                layout[group][name] = place
        return layout, new

    def _add_tensor(self, tensor: Tensor) -> Place:
        place = Place(self.size, tensor.dtype, tuple(tensor.shape))
        self._by_identity[id(tensor)] = self._by_address[_address(tensor)] = place
        self.size += _aligned(tensor.numel() * tensor.element_size())
        return place


def _address(tensor: Tensor) -> object:
    """Return what two tensors have in common if they are views of the same numbers."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _aligned(num_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Memory:
    """An arena's memory in one process. The mapping ends with the last tensor that is in it."""

    def __init__(self, handle: int, size: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)
        #: The whole memory as numbers of a type, because making such a view is slow.
        self._as_type: dict[torch.dtype, Tensor] = {}

    def at(self, place: Place) -> Tensor:
        """Return the tensor at a place."""
        numel = math.prod(place.shape)
        if numel == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        if place.dtype not in self._as_type:
            self._as_type[place.dtype] = self._bytes.view(place.dtype)
        numbers = self._as_type[place.dtype]
        return numbers.narrow(0, place.offset // place.dtype.itemsize, numel).view(place.shape)


class Arena:
    """Memory that this process writes and others read. It is released with its last reference."""

    _numbers = count()

    def __init__(self, size: int) -> None:
        self.size = max(_aligned(size), ALIGNMENT)
        #: No other arena of this process has this number.
        self.number = next(Arena._numbers)
        #: The process that made it. A fork of that process inherits it, and must not write to it.
        self.owner = os.getpid()
        self.handle = os.memfd_create("motley")
        self._close_handle = weakref.finalize(self, os.close, self.handle)
        os.ftruncate(self.handle, self.size)
        self._memory: Memory | None = Memory(self.handle, self.size)

    def write(self, tensors: Iterable[tuple[Tensor, Place]]) -> None:
        """Copy tensors to their places."""
        assert self._memory is not None
        for tensor, place in tensors:
            if tensor.numel():
                self._memory.at(place).copy_(tensor.detach())

    def close(self) -> None:
        """Release the memory. It is freed when no other process has it mapped either."""
        self._close_handle()
        self._memory = None


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
        self._mapped: dict[int, Memory] = {}

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
                self._mapped[number] = Memory(handle, size)
            finally:
                os.close(handle)
        memory = self._mapped[number]
        return content, _tensors(memory, layouts)

    def close(self) -> None:
        """Close the connection, and unmap the other side's arenas."""
        self.connection.close()
        self._mapped = {}


def pack(messages: Sequence[Groups]) -> tuple[int, list[tuple[Layout, list[tuple[Tensor, Place]]]]]:
    """Return the size of an arena for messages, and each one's layout and tensors to be written."""
    packing = Packing()
    packed = [packing.add(groups) for groups in messages]
    return packing.size, packed


def _tensors(memory: Memory, layouts: Sequence[Layout]) -> list[dict[str, State]]:
    """Return the tensors of some layouts. Those that several layouts have are one object."""
    tensor_at: dict[Place, Tensor] = {}
    messages = []
    for layout in layouts:
        groups: dict[str, State] = {}
        for group, places in layout.items():
            groups[group] = {}
            for name, place in places.items():
                if place not in tensor_at:
                    tensor_at[place] = memory.at(place)
                groups[group][name] = tensor_at[place]
        messages.append(groups)
    return messages
