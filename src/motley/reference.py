"""The reference of all settings, generated from the settings classes.

It lists keys, types, defaults, allowed values and descriptions. `motley list settings` prints it,
and docs/settings.md is the same as Markdown (`motley list settings --markdown`).
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from motley.config import Config
from motley.settings import Choice, TableOf, table_of

#: Python types and pydantic's bounds -> words for users.
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "text"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

INTRODUCTION = """# All settings

This page is generated from the code by `motley list settings --markdown`; do not edit it by hand.

A key such as `training.rounds` is written `rounds = 20` under `[training]` in a TOML file, and
`--set training.rounds=20` on the command line. Missing keys take their defaults, or the values of
the preset that the run starts from (`motley list presets`). Unknown keys are rejected, with a
suggestion. Relative paths in a TOML file are relative to that file's folder, those on the command
line to the working folder.

A configuration is merged from layers: a preset, a TOML file, `--set`. Tables are merged key by key,
and the higher layer wins. If it changes the `name` or `variant` of a table, the keys that lower
layers gave to that table are dropped, because they belonged to the old choice; the tables below say
which keys are kept. Likewise, another `model.sizes` drops the tables of model families that are no
longer used. A key that has no effect with the chosen name is rejected, with the names that it is
for. `motley config` prints all settings of a run with the layer that each value comes from.
"""


@dataclass(frozen=True)
class Setting:
    """One key of the configuration."""

    key: str
    type: str
    #: The default in TOML syntax. Empty if the key is required.
    default: str
    allowed: str
    description: str


@dataclass(frozen=True)
class Section:
    """The settings of one table, or those that a choice like method.name = "fedprox" adds to it."""

    title: str
    description: str
    settings: tuple[Setting, ...]


def sections() -> list[Section]:
    """Return all settings: table by table, and after each the additional keys of its choices."""
    all_sections = list(_tables(TableOf(Config), ""))
    return [section for section in all_sections if section.settings or section.description]


def _tables(table: TableOf, prefix: str) -> Iterator[Section]:
    """Yield the keys of a table, then the keys of its choices, then the tables inside it."""
    settings = []
    for name, field in table.cls.model_fields.items():
        if table_of(field) is None:
            settings.append(describe(prefix, name, field, table.choice))
    if settings:
        title = f"[{prefix[:-1]}]" if prefix else "Top level"
        description = f"{first_paragraph(table.cls)} {_kept_keys(table, prefix)}".strip()
        yield Section(title, description, tuple(settings))
    if table.choice is not None:
        yield from _choices(table.cls, prefix[:-1], table.choice)
    for name, field in table.cls.model_fields.items():
        inner = table_of(field)
        if inner is not None:
            yield from _tables(inner, f"{prefix}{name}.")


def _kept_keys(table: TableOf, prefix: str) -> str:
    """Return a sentence about the keys that stay if a higher layer makes another choice."""
    if not table.cls.lasting:
        return ""
    keys = ", ".join(f"`{prefix}{key}`" for key in table.cls.lasting)
    return f"Kept from lower layers if `{prefix}name` changes: {keys}."


def _choices(base: type[BaseModel], prefix: str, choice: Choice) -> Iterator[Section]:
    """Yield the settings that a choice adds to the base class's, or whose defaults it changes.

    Choices with the same additional settings share one section.
    """
    chooser = f"{prefix}.{choice.key}"
    names_by_settings: dict[tuple[Setting, ...], list[str]] = {}
    combined: list[Section] = []
    for name, cls in choice.classes.items():
        if len(cls.__bases__) > 1:
            # FedImpro combined with another method: refer to both instead of repeating their keys.
            parents = [parent for parent in cls.__bases__ if issubclass(parent, BaseModel)]
            both = " and ".join(f"`{parent.model_fields['name'].default}`" for parent in parents)
            title = f'[{prefix}], if {chooser} = "{name}"'
            combined.append(Section(title, f"The settings of {both}.", ()))
            continue
        additional = []
        for key, field in cls.model_fields.items():
            if key == choice.key or table_of(field) is not None:
                continue
            if _differs(base.model_fields.get(key), field):
                additional.append(describe(f"{prefix}.", key, field))
        names_by_settings.setdefault(tuple(additional), []).append(name)
    for settings, names in names_by_settings.items():
        quoted = " or ".join(f'"{name}"' for name in names)
        if settings:
            yield Section(f"[{prefix}], if {chooser} = {quoted}", "", settings)
    yield from combined


def _differs(base: FieldInfo | None, field: FieldInfo) -> bool:
    return base is None or (base.default, base.description) != (field.default, field.description)


def describe(prefix: str, name: str, field: FieldInfo, choice: Choice | None = None) -> Setting:
    """Describe a key; `choice` is the choice that its table has, if any."""
    type_name, allowed = _type(field.annotation)
    if choice is not None and name == choice.key and choice.listed:
        allowed = ", ".join(json.dumps(option) for option in choice.classes)
    limits = _limits(field.metadata)
    return Setting(
        key=f"{prefix}{name}",
        type=type_name,
        default=_default(field) or _resolved(f"{prefix}{name}"),
        allowed=", ".join(part for part in (allowed, limits) if part),
        description=" ".join((field.description or "").split()),
    )


def _type(annotation: Any) -> tuple[str, str]:
    """Return the name of a type, and the values that it allows."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType) and get_origin(inner[-1]) is Literal:
        # A number or a word.
        type_name, limits = _type(inner[0])
        words = " or ".join(json.dumps(word) for word in get_args(inner[-1]))
        return type_name, f"{limits}, or {words}"
    if origin in (Union, types.UnionType) and all(member in _TYPES for member in inner):
        return ", or ".join(_TYPES[member] for member in inner), ""
    if origin is Annotated:
        type_name, allowed = _type(inner[0])
        limits = ", ".join(part for part in (allowed, _limits(inner[1:])) if part)
        return type_name, limits
    if origin is Literal:
        return "text", ", ".join(json.dumps(value) for value in inner)
    if origin is dict:
        return "table", ""
    if origin is tuple and _is_table(inner[0]):
        return "list of tables", ""
    if origin is tuple:
        type_name, allowed = _type(inner[0])
        return f"list of {_plural(type_name)}", f"each {allowed}" if allowed else ""
    return _TYPES.get(annotation, str(annotation)), ""


def _is_table(annotation: Any) -> bool:
    inner = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(inner) is Annotated:
        inner = get_args(inner)[0]
    return isinstance(inner, type) and issubclass(inner, BaseModel)


def _plural(type_name: str) -> str:
    return {"text": "texts", "true or false": "booleans"}.get(type_name, f"{type_name}s")


def _limits(metadata: Iterable[Any]) -> str:
    """Return the bounds of a number in words."""
    texts = []
    for item in metadata:
        # A pydantic field inside an Annotated type has its bounds in its own metadata list.
        for constraint in (item, *getattr(item, "metadata", ())):
            for name, word in _LIMITS.items():
                bound = getattr(constraint, name, None)
                if bound is not None:
                    number = f"{bound:g}" if isinstance(bound, float) else str(bound)
                    texts.append(f"{word} {number}")
    return ", ".join(texts)


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "{}" if field.default_factory is dict else ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value)


def _resolved(key: str) -> str:
    """Return the value of a key in an empty configuration, or an empty string if it has none.

    For keys without a static default, whose value is computed when a configuration is validated.
    """
    value: Any = Config.model_validate({}).model_dump(mode="json")
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else json.dumps(value)


def first_paragraph(cls: type[BaseModel]) -> str:
    """Return the first paragraph of a class's documentation, on one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def markdown() -> str:
    """Return the reference as the content of docs/settings.md."""
    lines = [INTRODUCTION]
    for section in sections():
        lines.append(f"## {section.title}\n")
        if section.description:
            lines.append(f"{section.description}\n")
        if section.settings:
            lines.append("| key | type | default | allowed | description |")
            lines.append("|---|---|---|---|---|")
        for setting in section.settings:
            cells = (
                f"`{setting.key}`",
                setting.type,
                f"`{setting.default}`" if setting.default else "required",
                setting.allowed,
                setting.description,
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        if section.settings:
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"
