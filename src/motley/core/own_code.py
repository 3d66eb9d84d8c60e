"""Where in users' own code an exception was raised.

A method, model or stage of a user's own that raises is no bug in Motley: the message should name
the line in the user's file, and a study should go on with its other runs.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path

from motley.core.dotted import imported_modules

_MOTLEY = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
#: Folders of installed packages, wherever they are.
_INSTALLED = ("site-packages", "dist-packages")


class RemoteError(Exception):
    """The traceback of an exception in another process, as its cause."""

    def __init__(self, text: str, place: str | None) -> None:
        """Keep the traceback, and `place_in_own_code` of the exception, found in that process."""
        super().__init__(text)
        self.place = place


def failure_in_own_code(error: BaseException) -> str | None:
    """Return what an exception says and where in a user's own code it was raised.

    None: it was not raised there. Code in an installed package is not recognized as a user's own,
    because nothing tells it from the libraries that Motley uses.
    """
    place = place_in_own_code(error)
    if place is None:
        return None
    text = str(error).strip().rstrip(".")
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{message}. This was raised in your own code: {place}."


def place_in_own_code(error: BaseException) -> str | None:
    """Return the innermost line of a user's file that an exception passed, called by Motley."""
    if isinstance(error.__cause__, RemoteError):
        return error.__cause__.place
    place = None
    called_by_motley = False  # the script that starts Motley is not meant
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(_MOTLEY):
            called_by_motley = True
        elif called_by_motley and not _is_installed(file):
            place = f"{file}, line {line}, in {code.co_name}"
    return place


def own_files() -> list[str]:
    """Return the files of the user's own modules that a configuration has named so far."""
    files = []
    for name in imported_modules():
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and not _is_installed(Path(file)):
            files.append(file)
    return sorted(files)


def _is_installed(file: Path) -> bool:
    # Code without a file has a name such as <string> or <frozen importlib._bootstrap>.
    if str(file).startswith("<") or file.is_relative_to(_STANDARD_LIBRARY):
        return True
    return any(folder in file.parts for folder in _INSTALLED)
