"""The exception for problems that a user can solve, and messages that name the alternatives."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MotleyError(Exception):
    """A problem the user can solve. The command line prints it without a traceback."""


def unknown(kind: str, given: object, allowed: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return a message that `given` is not a known `kind`, with a suggestion and the allowed names.

    `also` are names that may be suggested but are not listed.
    """
    names = sorted(allowed)
    matches = difflib.get_close_matches(str(given), [*names, *also], n=1, cutoff=0.5)
    hint = f" Did you mean {matches[0]!r}?" if matches else ""
    return f"unknown {kind} {given!r}.{hint} Allowed: {', '.join(names) or 'none'}."
