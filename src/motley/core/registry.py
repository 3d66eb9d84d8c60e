"""Names for things a configuration can choose: methods, models, data sets, partitions, splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from motley.core.errors import MotleyError, unknown

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing, with the line that `motley list` prints for it."""

    name: str
    item: T
    summary: str
    paper: str = ""
    aliases: tuple[str, ...] = ()


class Registry(Generic[T]):
    """A named collection that is filled by decorators and asked by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}
        self._aliases: dict[str, str] = {}

    def register(self, name: str, summary: str, *, paper: str = "", aliases: tuple[str, ...] = ()) -> Callable[[T], T]:
        """Return a decorator that files its target under `name` (and under each alias)."""

        def file(item: T) -> T:
            for key in (name, *aliases):
                if key in self:
                    raise ValueError(f"{self.kind} {key!r} is registered twice")
            self._entries[name] = Entry(name, item, summary, paper, aliases)
            self._aliases.update({alias: name for alias in aliases})
            return item

        return file

    def entry(self, name: str, setting: str = "") -> Entry[T]:
        """Return the entry of a name or an alias; a wrong one gets an error that names the setting and lists the right
        ones.
        """
        own = self._aliases.get(name, name)
        if own not in self._entries:
            raise MotleyError((f"{setting}: " if setting else "") + unknown(self.kind, name, self._entries))
        return self._entries[own]

    def __getitem__(self, name: str) -> T:
        return self.entry(name).item

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())
