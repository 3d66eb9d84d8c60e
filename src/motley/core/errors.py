"""What goes wrong in a user's hands: one exception type, and messages that name what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MotleyError(Exception):
    """A problem the user can solve. The command line prints it without a traceback."""


def unknown(kind: str, given: str, allowed: Iterable[str], also: Iterable[str] = ()) -> str:
    """Say that `given` is no known `kind`, which names are, and which one was probably meant, perhaps one of `also`."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given, [*names, *also], n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {given!r}.{hint} Allowed: {', '.join(names) or 'none'}."
