"""plugins.json: the users' own modules that a run was started with.

A run records the dotted paths in its configuration. This file adds where they were imported from,
so that the command line can import them again from another working folder, and a hash of each
module's file, so that resuming and studies can tell that the code has changed. Nodes never see this
file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from motley.config import Config, ModelSettings, TaskSettings
from motley.core.dotted import module_of
from motley.core.errors import MotleyError
from motley.core.registry import Entry
from motley.models import MODELS
from motley.settings import RegistryChoice, Settings, table_of

FILE = "plugins.json"


@dataclass(frozen=True)
class Plugin:
    """Something in a configuration that is not Motley's own."""

    #: The key that names it, such as method.name.
    setting: str
    #: The name in the configuration: a dotted path, or the name of an entry point.
    name: str
    path: str
    #: The file of the module. Empty if it has none.
    file: str = ""
    sha256: str = ""
    #: The folder that has to be on sys.path; empty for installed packages.
    folder: str = ""
    #: The same folder, relative to the run's, in case both are moved together.
    folder_from_run: str = ""


def plugins_of(config: Config, run: Path | None = None) -> list[Plugin]:
    """Return everything in a configuration that is not Motley's own, with where it comes from."""
    plugins = []
    for setting, entry in _entries(config, ""):
        if entry.path:
            plugins.append(_described(setting, entry, run))
        elif entry.name.startswith("<"):
            plugins.append(Plugin(setting, entry.name, ""))
    return plugins


def require_importable(config: Config) -> None:
    """Raise if a configuration names an object that only exists in this process."""
    in_memory = [plugin for plugin in plugins_of(config) if not plugin.path]
    if in_memory:
        names = ", ".join(f"{plugin.setting} = {plugin.name}" for plugin in in_memory)
        raise MotleyError(
            f"{names}: cannot be imported by other processes, so a run folder could not be "
            "resumed. Define it at the top level of a module, and not in a notebook, in the script "
            "that is running, or inside a function."
        )


def write_plugins(run: Path, config: Config) -> None:
    """Record the users' modules of a new run, if there are any."""
    plugins = plugins_of(config, run)
    if plugins:
        text = json.dumps([asdict(plugin) for plugin in plugins], indent=2)
        (run / FILE).write_text(text, encoding="utf-8")


def read_plugins(run: Path) -> list[Plugin]:
    """Return the plug-ins of a run; none if the file is missing or damaged."""
    try:
        values: Any = json.loads((run / FILE).read_text(encoding="utf-8"))
        plugins = [Plugin(**value) for value in values]
    except (OSError, ValueError, TypeError, RecursionError):
        return []
    for plugin in plugins:
        if not all(isinstance(value, str) for value in asdict(plugin).values()):
            return []
    return plugins


def recorded_folders(path: Path) -> list[Path]:
    """Return the folders that the modules of a run, or of a study's runs, were imported from."""
    files = [path / FILE]
    if (path / "study.json").exists():
        files += sorted((path.parent / "runs").glob(f"*/{FILE}"))
    folders: dict[Path, None] = {}  # used as an ordered set
    for file in files:
        for plugin in read_plugins(file.parent):
            if not plugin.folder:
                continue
            for folder in (Path(plugin.folder), file.parent / plugin.folder_from_run):
                if folder.is_dir():
                    folders[folder.resolve()] = None
                    break
    return list(folders)


def changed_plugins(run: Path, config: Config) -> list[str]:
    """Return one sentence per module that is not the one that the run began with."""
    before = {plugin.path: plugin for plugin in read_plugins(run)}
    sentences: dict[str, None] = {}  # used as an ordered set
    for plugin in plugins_of(config):
        old = before.get(plugin.path)
        if old is None or not plugin.sha256 or plugin.sha256 == old.sha256:
            continue
        where = plugin.file if plugin.file == old.file else f"{plugin.file} (it was {old.file})"
        sentences[f"{where} has changed since the run began."] = None
    return list(sentences)


def code_digest(config: Config) -> str:
    """Return a digest of the files of the user's own modules; empty if a configuration names none.

    Installed packages do not count, torch's own optimizers among them: like Motley itself, they are
    software whose versions a run records.
    """
    hashes = {plugin.sha256 for plugin in plugins_of(config) if plugin.folder and plugin.sha256}
    if not hashes:
        return ""
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:10]


def _entries(settings: Settings, prefix: str) -> Iterator[tuple[str, Entry[Any]]]:
    """Yield the registry entries that a configuration names, with the keys."""
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        table = table_of(field)
        if isinstance(value, tuple) and value and isinstance(value[0], Settings):
            for number, item in enumerate(value):
                yield from _choice(_choice_in(field.annotation), item, f"{prefix}{key}.{number}.")
        if table is None or not isinstance(value, Settings):
            continue
        yield from _choice(table.choice, value, f"{prefix}{key}.")
        yield from _entries(value, f"{prefix}{key}.")
    if isinstance(settings, ModelSettings):
        for size in settings.sizes:
            yield f"{prefix}sizes", MODELS.entry(settings.factories.get(size, size))
    if isinstance(settings, TaskSettings):
        for setting, registry, name in settings.references():
            yield setting, registry.entry(name)


def _choice(choice: Any, settings: Settings, prefix: str) -> Iterator[tuple[str, Entry[Any]]]:
    if isinstance(choice, RegistryChoice):
        name = getattr(settings, choice.key)
        yield f"{prefix}{choice.key}", choice.registry.entry(name)


def _choice_in(annotation: Any) -> RegistryChoice | None:
    """Return the choice in the type of a list's items."""
    for inner in getattr(annotation, "__args__", ()):
        for item in getattr(inner, "__metadata__", ()):
            if isinstance(item, RegistryChoice):
                return item
    return None


def _described(setting: str, entry: Entry[Any], run: Path | None) -> Plugin:
    module_name = module_of(entry.path)
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if not isinstance(file, str):
        return Plugin(setting, entry.name, entry.path)
    source = Path(file).resolve()
    digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else ""
    folder = source.parent
    levels = module_name.count(".") + (source.stem == "__init__")
    for _ in range(levels):
        folder = folder.parent
    installed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    if installed & {folder, *folder.parents}:
        return Plugin(setting, entry.name, entry.path, str(source), digest)
    from_run = os.path.relpath(folder, run.resolve()) if run is not None else ""
    return Plugin(setting, entry.name, entry.path, str(source), digest, str(folder), from_run)
