"""Users' own code by dotted path: "package.module:Name".

This module imports the object that a path names, and explains the problem if that fails. It never
changes `sys.path`: the command line does (`motley.cli.code`), and a program that uses Motley as a
library has set its own.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from motley.core.errors import MotleyError

_NAME = r"[^\W\d]\w*"
_PATH = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME}(?:\.{_NAME})*)")
#: The modules that dotted paths have named in this process.
_imported: set[str] = set()


def is_dotted(name: str) -> bool:
    """Tell whether a name is a path into somebody's module. No built-in name has a colon."""
    return ":" in name


def is_dotted_path(text: str) -> bool:
    """Tell whether a text has the form package.module:Name. No other text can be imported."""
    return _PATH.fullmatch(text) is not None


def module_of(path: str) -> str:
    """Return the module that a dotted path names, without importing it."""
    return _parts(path)[0]


def imported_modules() -> frozenset[str]:
    """Return the modules that dotted paths have named, for messages about failures."""
    return frozenset(_imported)


def import_dotted(path: str) -> Any:
    """Import the object that a dotted path names.

    Raises MotleyError with the reason; it does not repeat the path.
    """
    module_name, names = _parts(path)
    item: Any = _import(module_name)
    _imported.add(module_name)
    module = item
    for name in names.split("."):
        if not hasattr(item, name):
            raise MotleyError(_no_attribute(module, item, name))
        item = getattr(item, name)
    return item


def path_of(item: object) -> str | None:
    """Return the dotted path under which other processes can import an object; None: there is none.

    Lambdas, functions inside functions, and everything defined in a notebook or in the script that
    is running have no path.
    """
    module_name = getattr(item, "__module__", None)
    names = getattr(item, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(names, str):
        return None
    path = f"{module_name}:{names}"
    if module_name == "__main__" or _PATH.fullmatch(path) is None:
        return None
    target: Any = sys.modules.get(module_name)
    for name in names.split("."):
        target = getattr(target, name, None)
    return path if target is item else None


def subclass_of(base: type, described: str) -> Callable[[Any], Any]:
    """Return a check that an imported object is a subclass; `described` is its public name."""

    def accept(item: Any) -> Any:
        if isinstance(item, type) and issubclass(item, base):
            abstract: frozenset[str] = getattr(item, "__abstractmethods__", frozenset())
            if abstract:
                missing = ", ".join(sorted(abstract))
                raise MotleyError(f"is {describe(item)}, which lacks {missing}.")
            return item
        raise MotleyError(f"is {describe(item)}; a subclass of {described} is expected.")

    return accept


def describe(item: object) -> str:
    """Return a description of an object for messages: "the class Net", "a function", "a dict"."""
    if isinstance(item, type):
        return f"the class {item.__name__}"
    if isinstance(item, ModuleType):
        return f"the module {item.__name__}"
    type_name = type(item).__name__
    return f"an {type_name}" if type_name[0] in "aeiouAEIOU" else f"a {type_name}"


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments that can be passed to a function by keyword."""
    return tuple(parameter.name for parameter in _parameters(function))


def required_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's arguments that have no default."""
    required = []
    for parameter in _parameters(function):
        if parameter.default is Parameter.empty:
            required.append(parameter.name)
    return tuple(required)


def check_arguments(function: Callable[..., Any], arguments: Sequence[str], name: str) -> None:
    """Refuse a user's function that cannot be called with these arguments, in this order."""
    try:
        own = signature(function)
    except (TypeError, ValueError):  # some callables of C code have no signature
        return
    try:
        own.bind(*arguments)
    except TypeError:
        called = f"{name.rpartition('.')[2]}({', '.join(arguments)})"
        raise MotleyError(
            f"{name}{own} is called as {called} and cannot take these arguments."
        ) from None


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Tell whether a function has a parameter **kwargs."""
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in _signature(function))


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    by_keyword = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return [parameter for parameter in _signature(function) if parameter.kind in by_keyword]


def _signature(function: Callable[..., Any]) -> list[Parameter]:
    try:
        return list(signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables of C code have no signature
        return []


def _parts(path: str) -> tuple[str, str]:
    match = _PATH.fullmatch(path)
    if match is None:
        raise MotleyError("should be written package.module:Name.")
    return match[1], match[2]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise MotleyError(_no_module(missing)) from None
        raise MotleyError(_failed(name, error)) from error
    except Exception as error:
        raise MotleyError(_failed(name, error)) from error


def _no_module(missing: str) -> str:
    package, _, _ = missing.rpartition(".")
    if package:
        parent = sys.modules[package]
        return f"there is no module {missing!r} in {_file_of(parent)}."
    folders = ", ".join(_own_folders())
    where = f"Looked in {folders} and among" if folders else "Looked among"
    return f"there is no module {missing!r}. {where} the installed packages."


def _own_folders() -> list[str]:
    """Return the entries of sys.path that hold no installed packages."""
    installed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    folders: dict[str, None] = {}  # used as an ordered set
    for entry in sys.path:
        folder = Path(entry).resolve()
        if folder.is_dir() and not installed & {folder, *folder.parents}:
            folders[str(folder)] = None
    return list(folders)


def _failed(name: str, error: Exception) -> str:
    """Return the error in a user's module, and its place."""
    where = ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
        text = error.msg
    else:
        text = str(error)
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            where = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"importing the module {name!r} failed: {type(error).__name__}: {text}{where}."


def _no_attribute(module: ModuleType, owner: object, name: str) -> str:
    names = [key for key in vars(owner) if not key.startswith("_")]
    # A module's own definitions come before the names that it imports.
    defined_here = [
        key for key in names if getattr(getattr(owner, key), "__module__", "") == module.__name__
    ]
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {matches[0]!r}?" if matches else ""
    which = "" if owner is module else f" in {getattr(owner, '__qualname__', owner)!r}"
    return (
        f"there is no {name!r}{which} in {_file_of(module)}.{hint} "
        f"Defined there: {', '.join(sorted(defined_here)) or 'nothing'}."
    )


def _file_of(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) else f"the module {module.__name__!r}"
