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
from rich.text import Text

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
