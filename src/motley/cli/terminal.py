"""The console that every command prints to: names from files are shown as they are.

Names of classes, sizes, columns and folders come from files that others may have written. Rich
would take "[red]" in them for a style, "[/]" for a mistake and ":x:" for a picture, and a terminal
obeys escape sequences, which can rewrite the lines above or change the window's title.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

#: Tables of numbers are laid out for at least this many columns.
NARROWEST = 80

#: No line of a list is longer than this.
MAX_LINE = 2000

#: Control characters other than tab and line feed, marks that turn the direction of writing, and
#: halves of characters, which no terminal can show: undecodable bytes of file names become such.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Return a text in which control characters are spelled out, as \x1b."""
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


class Console(rich.console.Console):
    """A console that takes no text for markup, and writes no control characters from texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text to print. This is where strings and cells of tables pass."""
        return super().render_str(visible(text), **options)

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """Yield the pieces of anything printable. Texts that have a style pass only here."""
        for segment in super().render(*arguments, **options):
            if segment.control is None and _UNSAFE.search(segment.text):
                segment = Segment(visible(segment.text), segment.style)
            yield segment

    def print_numbers(self, table: Table) -> None:
        """Print a table of numbers, which rich would shorten if the terminal is too narrow.

        In a narrow terminal the table's lines go on in the next line of the screen instead.
        """
        self.print(_Wide(table, NARROWEST), crop=False)

    def print_list(self, table: Table) -> None:
        """Print a table for people, and for programs at the other end of a pipe.

        In a pipe every row is one line, however long its cells are.
        """
        if self.is_terminal:
            self.print_numbers(table)
            return
        with self.capture() as capture:
            self.print(_Wide(table, MAX_LINE), crop=False)
        for line in capture.get().splitlines():
            self.print(line.rstrip(), soft_wrap=True, highlight=False)


class _Wide:
    """A table that is laid out as if the terminal had at least this many columns."""

    def __init__(self, table: Table, width: int) -> None:
        self.table = table
        self.width = width

    def __rich_console__(
        self, console: rich.console.Console, options: rich.console.ConsoleOptions
    ) -> rich.console.RenderResult:
        width = max(options.max_width, self.width)
        yield from console.render(self.table, options.update_width(width))
