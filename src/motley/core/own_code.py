"""Where in users' own code, or in a plug-in, an exception was raised.

A method, model or stage of a user's own that raises is no bug in Motley: the message should name
the line in the user's file, and a study should go on with its other runs. The same is true of an
installed package that a configuration names, by an entry point or by a dotted path.
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
#: A configuration may name torch's optimizers, but whatever Motley computes passes torch.
_NO_PLUGIN = ("torch", "motley")


class RemoteError(Exception):
    """The traceback of an exception in another process, as its cause."""

    def __init__(self, text: str, place: str | None) -> None:
        """Keep the traceback, and `place_in_own_code` of the exception, found in that process."""
        super().__init__(text)
        self.place = place


def failure_in_own_code(error: BaseException) -> str | None:
    """Return what an exception says and where in a user's own code or in a plug-in it was raised.

    None: it was not raised there. Other installed packages are not meant, because nothing tells
    them from the libraries that Motley uses.
    """
    place = place_in_own_code(error)
    if place is None:
        return None
    text = str(error).strip().rstrip(".")
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{message}. This was raised in {place}."


def place_in_own_code(error: BaseException) -> str | None:
    """Return the innermost line of a user's or a plug-in's file that an exception passed.

    Only lines that Motley has called are meant. The text begins with whose file it is.
    """
    if isinstance(error.__cause__, RemoteError):
        return error.__cause__.place
    place = None
    plugins = _plugin_packages()
    called_by_motley = False  # the script that starts Motley is not meant
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(_MOTLEY):
            called_by_motley = True
            continue
        if not called_by_motley:
            continue
        where = f"{file}, line {line}, in {code.co_name}"
        plugin = _package_among(plugins, frame.f_globals.get("__name__"))
        if not _is_installed(file):
            place = f"your own code: {where}"
        elif plugin and file.is_absolute():  # not <string>, for example
            place = f"the plug-in {plugin!r}: {where}"
    return place


def own_files() -> list[str]:
    """Return the files of users' own modules and plug-ins that configurations have named so far."""
    files = []
    plugins = _plugin_packages()
    for name in imported_modules():
        file = getattr(sys.modules.get(name), "__file__", None)
        if not isinstance(file, str):
            continue
        if not _is_installed(Path(file)) or _package_among(plugins, name):
            files.append(file)
    return sorted(files)


def _plugin_packages() -> set[str]:
    """Return the installed packages that configurations have named so far."""
    packages = set()
    for module in imported_modules():
        package = _package_of(module)
        file = getattr(sys.modules.get(package), "__file__", None)
        if package in _NO_PLUGIN or not isinstance(file, str):
            continue
        if any(folder in Path(file).parts for folder in _INSTALLED):
            packages.add(package)
    return packages


def _package_of(module: str) -> str:
    """Return the outermost package of a module that is no namespace, which others may share."""
    names = module.split(".")
    for number in range(1, len(names)):
        package = ".".join(names[:number])
        if getattr(sys.modules.get(package), "__file__", None) is not None:
            return package
    return module


def _package_among(packages: set[str], module: object) -> str | None:
    """Return the one of some packages that a module belongs to."""
    for package in packages:
        if module == package or str(module).startswith(f"{package}."):
            return package
    return None


def _is_installed(file: Path) -> bool:
    # Code without a file has a name such as <string> or <frozen importlib._bootstrap>.
    if str(file).startswith("<") or file.is_relative_to(_STANDARD_LIBRARY):
        return True
    return any(folder in file.parts for folder in _INSTALLED)
