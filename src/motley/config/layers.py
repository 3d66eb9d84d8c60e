"""From a preset, a file and overrides to one configuration.

There is one rule. Layers are merged table by table, and a higher layer wins. If it changes the
`name` or `variant` of a table, the other keys of that table in lower layers are dropped, because
they belonged to the old choice; only keys that hold for every choice stay (`Settings.lasting`,
declared by the table's class). Likewise `model.sizes` drops the tables of model families that are
no longer used.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from motley.config.paper_names import spelled_out
from motley.config.renames import reject_old_names, with_new_names
from motley.config.schema import FAMILIES, Config, ModelSettings, families_of
from motley.core.errors import MotleyError, unknown
from motley.files import given_path
from motley.settings import NamesFile, Settings, Table, TableOf, flat, table_of, validate

DEFAULT_PRESET = "quickstart"
#: Lists and tables in one another. The settings need five.
MAX_DEPTH = 30
#: A configuration with every setting has less than 20,000 bytes.
MAX_TOML_BYTES = 50_000_000


@dataclass(frozen=True)
class Layer:
    """Some settings, and where they come from in the words of `motley config`."""

    values: Table
    origin: str


@dataclass(frozen=True)
class Resolved:
    """A configuration, and the origin of every key that some layer gave."""

    config: Config
    #: Dotted key -> where its value comes from. Keys with their default values are not in it.
    origins: Mapping[str, str]


def load_config(
    file: str | Path | None = None, *, preset: str = "", overrides: Iterable[str] = ()
) -> Config:
    """Read a run's configuration: a preset, then a TOML file on top, then `a.b=c` overrides.

    Without a file and a preset, the preset is quickstart, so settings that are not overridden have
    the quickstart's values (an EMA, for example), not the defaults. A file without a preset starts
    from the defaults.

    Relative paths in the file start from the file's folder, those in overrides from the working
    folder. The result has absolute paths only, so that a run can be resumed from any folder.
    """
    file = None if file is None else given_path(file, "load_config: file")
    if isinstance(overrides, str):
        overrides = [overrides]
    return load_with_origins(file, preset=preset, overrides=overrides).config


def load_with_origins(
    file: Path | None = None, *, preset: str = "", overrides: Iterable[str] = ()
) -> Resolved:
    """Return a run's configuration as `load_config` does, and where each value comes from."""
    given: Table = {}
    if file:
        values = read_toml(file)
        if isinstance(values.get("methods"), list):
            raise MotleyError(
                f"{file}: is a study, not the configuration of one run: motley study {file}"
            )
        given = absolute_paths(values, file.parent)
    chosen = parse_overrides(overrides)
    sources = {"--set": chosen.get("preset"), "--preset": preset, str(file): given.get("preset")}
    if file is None:
        sources["default"] = DEFAULT_PRESET
    # The first of the sources that names a preset.
    origin, preset_name = "default", ""
    for source, named in sources.items():
        if named:
            origin, preset_name = source, str(named)
            break
    resolved = resolve_with_origins(preset_name, [Layer(given, str(file)), Layer(chosen, "--set")])
    return Resolved(resolved.config, {**resolved.origins, "preset": origin})


def resolve(preset: str, layers: Iterable[Table]) -> Config:
    """Return the configuration of a preset with layers of settings on it, the last one on top."""
    return resolve_with_origins(preset, [Layer(layer, "") for layer in layers]).config


def resolve_with_origins(preset: str, layers: Iterable[Layer]) -> Resolved:
    """Like `resolve`, and return where each value comes from too."""
    if preset:
        layers = [Layer(_preset_values(preset), f"preset {preset}"), *layers]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        reject_old_names(layer.values)
        plain = spelled_out(layer.values, values)
        values = merge(TableOf(Config), values, plain)
        origins |= _origins(layer, plain)
    values["preset"] = preset
    config = validate(Config, absolute_paths(values, Path()))
    kept = flat(values)
    return Resolved(config, {key: origin for key, origin in origins.items() if key in kept})


def with_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """Return a configuration with `a.b=c` overrides on top of it."""
    chosen = parse_overrides(overrides)
    if not chosen:
        return config
    reject_old_names(chosen)
    values = config.model_dump(mode="json", exclude_none=True)
    merged = merge(TableOf(Config), values, spelled_out(chosen, values))
    return validate(Config, absolute_paths(merged, Path()))


def _origins(layer: Layer, plain: Table) -> dict[str, str]:
    """Return the origin of every key of a layer.

    In `plain`, the layer's settings, a paper's name of a method is replaced by its settings.
    """
    written, replaced = flat(layer.values), flat(plain)
    origins = dict.fromkeys(replaced, layer.origin)
    name = written.get("method.name")
    if name != replaced.get("method.name"):
        for key in replaced:
            if key not in written or key == "method.name":
                origins[key] = f"{layer.origin}, {name}"
    return origins


def merge(table: TableOf | None, below: Table, above: Table) -> dict[str, Any]:
    """Return `below` with `above` on top, table by table, by the rule at the top of this module."""
    cls: type[Settings] | None = None
    if table is not None and table.choice is not None:
        below = table.choice.kept_below(below, above)
        cls = table.choice.class_of({**below, **above}) or table.cls
    elif table is not None:
        cls = table.cls
        below = cls.kept_below(below, above)
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = merge(table_of(cls.model_fields.get(key)) if cls else None, old, value)
        result[key] = value
    return result


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return `a.b=c` overrides as one layer. If a key is set twice, the later value counts."""
    chosen: dict[str, Any] = {}
    for override in overrides:
        chosen = merge(None, chosen, _parse_override(override))
    return chosen


def _parse_override(text: str) -> dict[str, Any]:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not equals or not all(name.split(".")):
        raise MotleyError(
            f"--set {text!r}: write it as table.key=value, for example training.rounds=20."
        )
    steps = name.split(".")
    if len(steps) > MAX_DEPTH:
        raise MotleyError(
            f"--set {text[:60]!r}...: has {len(steps)} keys in one another; at most {MAX_DEPTH} "
            "are read."
        )
    try:
        parsed = _parse_value(value)
        check_depth(parsed)
    except (ValueError, RecursionError) as error:
        raise MotleyError(f"--set {name}={value[:40]}: cannot be read: {error}.") from None
    for step in reversed(steps):
        parsed = {step: parsed}
    return parsed


def _parse_value(text: str) -> Any:
    """Read a TOML value. Quotes may be missing, since a shell removes them: word, [word, word]."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        inside = text[1:-1]
        if text.startswith("[") and text.endswith("]") and not set(inside) & set("[]{}"):
            return [_parse_value(item.strip()) for item in inside.split(",") if item.strip()]
        return text


# ---- files


def presets() -> dict[str, str]:
    """Return every preset's name and the comment on its first line."""
    summaries = {}
    for file in sorted(resources.files("motley.presets").iterdir(), key=lambda file: file.name):
        name, _, ending = file.name.rpartition(".")
        if ending == "toml":
            first_line = file.read_text(encoding="utf-8").splitlines()[0]
            summaries[name] = first_line.removeprefix("# ")
    return summaries


def _preset_values(name: str) -> dict[str, Any]:
    if name not in presets():
        raise MotleyError(unknown("preset", name, presets()))
    file = resources.files("motley.presets") / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def check_depth(value: Any) -> None:
    """Raise a ValueError if lists and tables are nested deeper than any setting is.

    TOML's dotted keys can nest tables a million deep, where Python's own recursion ends.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    if level:
        raise ValueError(f"lists or tables are nested more than {MAX_DEPTH} deep")


def read_toml(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file. An unreadable file is an error that names it."""
    try:
        size = file.stat().st_size
        if size > MAX_TOML_BYTES:
            raise MotleyError(
                f"{file}: has {size:,} bytes; a configuration has at most {MAX_TOML_BYTES:,}."
            )
        # utf-8-sig: some editors on Windows write a byte order mark, which is no TOML.
        values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
        check_depth(values)
        return values
    except FileNotFoundError:
        raise MotleyError(f"{file}: there is no such configuration file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    except RecursionError:
        raise MotleyError(f"{file}: lists or tables are nested too deeply.") from None
    except ValueError as error:  # invalid TOML, or a number with thousands of digits
        raise MotleyError(f"{file}: is not valid TOML: {error}.") from None


def read_resolved(file: Path) -> Config:
    """Return the configuration that was saved with a run."""
    return from_saved(read_toml(file))


def from_saved(values: Table) -> Config:
    """Return the configuration of values that were saved with a run.

    They may have the setting names of an earlier version, and settings that were saved although
    they had no effect. Settings that did not exist then take their defaults.
    """
    return validate(Config, _without_ineffective(TableOf(Config), with_new_names(values)))


def _without_ineffective(table: TableOf, values: Table) -> dict[str, Any]:
    """Return a saved table without keys that belong to other choices than the one that was made."""
    cls: type[Settings] = table.cls
    result = dict(values)
    if table.choice is not None:
        cls = table.choice.class_of(values) or cls
        for key in values:
            if key not in cls.model_fields and table.choice.names_with(key):
                del result[key]
    if cls is ModelSettings and "sizes" in values:
        used = families_of(values["sizes"], values.get("factories", {}))
        for family in set(FAMILIES) - used:
            result.pop(family, None)
    for key, value in result.items():
        inner = table_of(cls.model_fields.get(key))
        if inner is not None and isinstance(value, Mapping):
            result[key] = _without_ineffective(inner, value)
    return result


# ---- paths


def path_settings() -> list[tuple[str, ...]]:
    """Return the keys of all settings that name a file or folder, whatever is chosen by name."""
    return list(dict.fromkeys(_paths_in(Config, ())))


def _paths_in(cls: type[Settings], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, field in cls.model_fields.items():
        if any(isinstance(item, NamesFile) for item in field.metadata):
            yield (*prefix, key)
        table = table_of(field)
        if table is None:
            continue
        classes = table.choice.classes.values() if table.choice else (table.cls,)
        for inner in dict.fromkeys(classes):
            yield from _paths_in(inner, (*prefix, key))


def absolute_paths(values: Table, folder: Path) -> dict[str, Any]:
    """Return settings in which relative paths, which start from `folder`, have become absolute."""
    result = copy.deepcopy(dict(values))
    for *tables, name in path_settings():
        table: Any = result
        for step in tables:
            table = table.get(step) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(table.get(name), str) and table[name]:
            table[name] = str((folder / Path(table[name]).expanduser()).absolute())
    return result
