"""Registries of everything a configuration refers to by name: methods, models, data sets, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

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


class Registry(Generic[T]):
    """A collection that decorators fill, with lookup by name. `kind` is used in messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}
        self._aliases: dict[str, str] = {}

    def register(
        self, name: str, summary: str, *, paper: str = "", aliases: tuple[str, ...] = ()
    ) -> Callable[[T], T]:
        """Return a decorator that registers an item as `name` and under each alias."""

        def add(item: T) -> T:
            for key in (name, *aliases):
                if key in self:
                    raise ValueError(f"{self.kind} {key!r} is registered twice")
            self._entries[name] = Entry(name, item, summary, paper, aliases)
            self._aliases.update({alias: name for alias in aliases})
            return item

        return add

    def entry(self, name: str, setting: str = "") -> Entry[T]:
        """Return the entry with this name or alias.

        The error about an unknown name lists the known ones, and names the `setting` it came from.
        """
        canonical = self._aliases.get(name, name)
        if canonical not in self._entries:
            prefix = f"{setting}: " if setting else ""
            raise MotleyError(prefix + unknown(self.kind, name, self._entries))
        return self._entries[canonical]

    def __getitem__(self, name: str) -> T:
        return self.entry(name).item

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())
