"""Registries of everything a configuration refers to by name: methods, models, data sets, ...

A name stands for one of three things: an entry that Motley registered, an entry point that an
installed package declares in the registry's group (`motley.methods`, ...), or a dotted path,
"package.module:Name", to an object of the user's own. `Registry.entry` finds all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from motley.core.dotted import import_dotted, is_dotted
from motley.core.errors import MotleyError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered item and its description for `motley list`."""

    name: str
    item: T
    summary: str
    paper: str = ""
    aliases: tuple[str, ...] = ()
    #: The dotted path of an item that is not Motley's own; empty for the others.
    path: str = ""


class Registry(Generic[T]):
    """A collection that decorators fill, with lookup by name.

    Iteration yields the registered entries only, so that the documentation does not depend on the
    packages that are installed. `plugins` yields the others.
    """

    def __init__(
        self, kind: str, *, group: str = "", accept: Callable[[Any], T] | None = None
    ) -> None:
        """Create an empty registry.

        Args:
            kind: The kind of the entries, for messages.
            group: The group of entry points that belong here.
            accept: See `accept_with`.
        """
        self.kind, self.group = kind, group
        self._accept = accept
        self._entries: dict[str, Entry[T]] = {}
        self._aliases: dict[str, str] = {}
        #: Path -> the imported object, and the entry that was made of it.
        self._imported: dict[str, tuple[object, Entry[T]]] = {}
        self._in_memory: WeakValueDictionary[str, Entry[T]] = WeakValueDictionary()

    def register(
        self, name: str, summary: str, *, paper: str = "", aliases: tuple[str, ...] = ()
    ) -> Callable[[T], T]:
        """Return a decorator that registers an item as `name` and under each alias."""

        def add(item: T) -> T:
            for key in (name, *aliases):
                if key in self._entries or key in self._aliases:
                    raise ValueError(f"{self.kind} {key!r} is registered twice")
            self._entries[name] = Entry(name, item, summary, paper, aliases)
            self._aliases.update({alias: name for alias in aliases})
            return item

        return add

    def accept_with(self, accept: Callable[[Any], T]) -> None:
        """Set the function that turns an imported object into an item.

        It raises a MotleyError that says what is expected if the object is something else.
        """
        self._accept = accept

    def keep(self, item: Any, label: str) -> Entry[T]:
        """Give a name to an object that cannot be imported, such as a notebook's class.

        The name is "<label>", and it is known as long as somebody holds the entry. A second object
        of this label is called "<label>#2".
        """
        name, number = f"<{label}>", 1
        while name in self._in_memory:
            number += 1
            name = f"<{label}>#{number}"
        entry = Entry(name, self._accepted(item), summary_of(item))
        self._in_memory[name] = entry
        return entry

    def entry(self, name: Any, setting: str = "") -> Entry[T]:
        """Return the entry with this name, alias or dotted path. A value that is no text has none.

        Errors name the `setting` that the name comes from. The error about an unknown name lists
        the known ones.
        """
        if not isinstance(name, str):
            raise MotleyError(self._unknown(name, setting))
        canonical = self._aliases.get(name, name)
        if canonical in self._entries:
            return self._entries[canonical]
        in_memory = self._in_memory.get(name)
        if in_memory is not None:
            return in_memory
        prefix = f"{setting} = {name!r}" if setting else f"{self.kind} {name!r}"
        if is_dotted(name):
            return self._load(name, name, prefix)
        points = self._entry_points()
        if name in points:
            path = f"{points[name].module}:{points[name].attr}"
            return self._load(name, path, f"{prefix} ({path})")
        raise MotleyError(self._unknown(name, setting))

    def _unknown(self, name: Any, setting: str) -> str:
        prefix = f"{setting}: " if setting else ""
        return prefix + unknown(self.kind, name, self.names())

    def names(self) -> list[str]:
        """Return all names that can be written, without loading anything."""
        return list({**self._entries, **self._entry_points()})

    def plugins(self) -> Iterator[Entry[T] | str]:
        """Load the entry points of installed packages, by name.

        For one that cannot be loaded, yield a line about it instead.
        """
        for name, point in sorted(self._entry_points().items()):
            if name in self._entries or name in self._aliases:
                yield f"{name} ({point.value}): the name is taken by Motley's own {self.kind}."
                continue
            try:
                yield self.entry(name)
            except MotleyError as error:
                yield str(error)

    def _entry_points(self) -> dict[str, EntryPoint]:
        return _points_of(self.group) if self.group else {}

    def _load(self, name: str, path: str, prefix: str) -> Entry[T]:
        try:
            imported = import_dotted(path)
            known = self._imported.get(name)
            # A module that was reloaded has new objects.
            if known is None or known[0] is not imported:
                entry = Entry(name, self._accepted(imported), summary_of(imported), "", path=path)
                known = self._imported[name] = (imported, entry)
            return known[1]
        except MotleyError as error:
            raise MotleyError(f"{prefix}: {error}") from error.__cause__

    def _accepted(self, imported: Any) -> T:
        item: T = imported if self._accept is None else self._accept(imported)
        return item

    def __getitem__(self, name: str) -> T:
        return self.entry(name).item

    def __contains__(self, name: object) -> bool:
        """Tell whether a name can be resolved. To say why it cannot, call `entry`."""
        try:
            self.entry(name)
        except MotleyError:
            return False
        return True

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())


@cache
def _points_of(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group; reading the installed packages takes milliseconds."""
    return {point.name: point for point in entry_points(group=group)}


def summary_of(item: object) -> str:
    """Return the first sentence of an object's own documentation."""
    text = " ".join((getattr(item, "__doc__", None) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]
