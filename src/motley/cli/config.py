"""`motley config`: all settings of a run, with documentation and the origin of every value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
import typer

from motley.cli.code import import_beside
from motley.config import Config, Resolved, load_with_origins
from motley.reference import Setting, describe, first_paragraph
from motley.settings import Settings, TableOf, table_of

#: A comment has the first sentence of a description, and those after it up to this many characters.
LENGTH = 110


def config(
    file: Path | None = typer.Argument(
        None, help="A TOML file; without one, the quickstart preset."
    ),
    preset: str = typer.Option("", help="Start from a named preset (motley list presets)."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting; repeatable."
    ),
    plain: bool = typer.Option(False, "--plain", help="Without comments, as a run saves it."),
) -> None:
    """Print all settings of a run, with their documentation and where each value comes from.

    Takes the same file, preset and overrides as `motley run`, and trains nothing. The output is a
    TOML file itself. `motley list settings` also prints the settings of all other choices.
    """
    import_beside(file)
    resolved = load_with_origins(file, preset=preset, overrides=set_)
    if plain:
        print(resolved.config.to_toml(), end="")
        return
    print("\n".join(annotated(resolved)))


def annotated(resolved: Resolved) -> Iterator[str]:
    """Yield the lines of a configuration as TOML, with comments."""
    yield "# Behind every value: where it comes from (default, a preset, a file or --set)."
    yield "# A name behind a comma is a paper's name for a method, which stands for the value."
    yield from _table(TableOf(Config), resolved.config, "", resolved)


def _table(table: TableOf, settings: Settings, prefix: str, resolved: Resolved) -> Iterator[str]:
    """Yield the keys of a table, then the tables inside it."""
    fields = type(settings).model_fields
    values = settings.model_dump(mode="json")
    if prefix:
        yield ""
        yield f"# {first_paragraph(table.cls)}"
        yield f"[{prefix[:-1]}]"
    for name, field in fields.items():
        if table_of(field) is not None or name not in values:
            continue
        # The key of a choice is documented by the class that all choices have in common.
        is_choice = table.choice is not None and name == table.choice.key
        documented = table.cls.model_fields[name] if is_choice else field
        yield f"# {_one_line(describe(prefix, name, documented, table.choice))}"
        yield f"{name} = {_toml(values[name])}  # {_origin(settings, prefix, name, resolved)}"
    for name, field in fields.items():
        inner = table_of(field)
        if inner is not None and name in values:
            yield from _table(inner, getattr(settings, name), f"{prefix}{name}.", resolved)


def _one_line(setting: Setting) -> str:
    """Return the first sentences of a description, and the allowed values if they are words."""
    line, *others = re.split(r"(?<=\.) ", setting.description)
    for sentence in others:
        if len(line) + len(sentence) >= LENGTH:
            break
        line += f" {sentence}"
    words = setting.allowed if setting.allowed.startswith('"') else ""
    return f"{line} ({words})" if words else line


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{_key(key)} = {_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(items)} }}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def _origin(settings: Settings, prefix: str, name: str, resolved: Resolved) -> str:
    """Return where a value comes from.

    Values that no layer gave are defaults, or belong to the table's variant.
    """
    key = f"{prefix}{name}"
    origin = resolved.origins.get(key)
    if origin is not None:
        return origin
    # A table of free keys, such as model.options, has one origin per key.
    inside = [text for other, text in resolved.origins.items() if other.startswith(f"{key}.")]
    if inside:
        return ", ".join(dict.fromkeys(inside))
    variant = getattr(settings, "variant", "")
    if variant and getattr(settings, name) != type(settings).model_fields[name].default:
        return f"variant {variant}"
    return "default"
