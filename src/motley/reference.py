"""The reference of all settings, made from the settings classes: keys, types, defaults, allowed values, descriptions.

`motley list settings` prints it, and docs/settings.md is the same as Markdown (`motley list settings --markdown`).
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
from motley.data import PARTITIONS
from motley.methods import METHODS
from motley.settings import Limit
from motley.splits import SPLITS

_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "text"}
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}

INTRODUCTION = """# All settings

This page is generated from the code by `motley list settings --markdown`; do not edit it by hand.

A key such as `training.rounds` is written `rounds = 20` under `[training]` in a TOML file, and
`--set training.rounds=20` on the command line. Missing keys take their defaults, or the values of the preset that the
run starts from (`motley list presets`). Unknown keys are rejected, with a suggestion. Relative paths in a TOML file
start from that file's folder, those on the command line from the working folder.
"""


@dataclass(frozen=True)
class Setting:
    """One key of the configuration."""

    key: str
    type: str
    #: As TOML would have it; empty if the key must be given.
    default: str
    allowed: str
    description: str


@dataclass(frozen=True)
class Section:
    """The settings of one table, or those that a choice such as method.name = "fedprox" adds to it."""

    title: str
    description: str
    settings: tuple[Setting, ...]


def sections() -> list[Section]:
    """Return all settings: table by table, and after each the additional keys of its choices."""
    found = list(_tables(Config, ""))
    found += _choices("data.partition", "data.partition.name", [(entry.name, entry.item) for entry in PARTITIONS])
    found += _choices("split", "split.name", [(entry.name, entry.item.Settings) for entry in SPLITS])
    found += _choices("method", "method.name", [(entry.name, entry.item.Settings) for entry in METHODS])
    return [section for section in found if section.settings or section.description]


def _tables(cls: type[BaseModel], prefix: str) -> Iterator[Section]:
    """Yield the keys of a settings class, then its tables."""
    plain = {name: field for name, field in cls.model_fields.items() if _model(field) is None}
    title = f"[{prefix[:-1]}]" if prefix else "Top level"
    if plain:
        yield Section(title, _first_paragraph(cls), tuple(_setting(prefix, *item) for item in plain.items()))
    for name, field in cls.model_fields.items():
        inner = _model(field)
        if inner is not None:
            yield from _tables(inner, f"{prefix}{name}.")


def _choices(prefix: str, chooser: str, classes: Iterable[tuple[str, type[BaseModel]]]) -> Iterator[Section]:
    """Yield, for each class that a key chooses, the settings that only this choice has or that it changes.

    Choices with the same additional settings share one section.
    """
    members: dict[tuple[Setting, ...], list[str]] = {}
    combined: list[Section] = []
    for name, cls in classes:
        base = _base(cls)
        if len(cls.__bases__) > 1:  # FedImpro on top of another method: no need to repeat what both have
            parents = [parent for parent in cls.__bases__ if issubclass(parent, BaseModel)]
            both = " and ".join(f"`{parent.model_fields['name'].default}`" for parent in parents)
            combined.append(Section(f'[{prefix}], if {chooser} = "{name}"', f"The settings of {both}.", ()))
            continue
        own = []
        for key, field in cls.model_fields.items():
            if key != "name" and _model(field) is None and _differs(base.model_fields.get(key), field):
                own.append(_setting(f"{prefix}.", key, field))
        members.setdefault(tuple(own), []).append(name)
    for settings, names in members.items():
        quoted = " or ".join(f'"{name}"' for name in names)
        if settings:
            yield Section(f"[{prefix}], if {chooser} = {quoted}", "", settings)
    yield from combined


def _base(cls: type[BaseModel]) -> type[BaseModel]:
    """Return the settings class whose keys all choices share: the last one before `Settings` itself."""
    family = [ancestor for ancestor in cls.__mro__ if issubclass(ancestor, BaseModel)]
    names = [ancestor.__name__ for ancestor in family]
    return family[names.index("Settings") - 1]


def _differs(base: FieldInfo | None, field: FieldInfo) -> bool:
    return base is None or (base.default, base.description) != (field.default, field.description)


def _model(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _setting(prefix: str, name: str, field: FieldInfo) -> Setting:
    kind, allowed = _type(field.annotation)
    limits = _limits(field.metadata)
    return Setting(
        key=f"{prefix}{name}",
        type=kind,
        default=_default(field) or _resolved(f"{prefix}{name}"),
        allowed=", ".join(part for part in (allowed, limits) if part),
        description=" ".join((field.description or "").split()),
    )


def _type(annotation: Any) -> tuple[str, str]:
    """Return the name of a type, and the values it allows."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation == Limit or (origin in (Union, types.UnionType) and "off" in get_args(inner[-1])):
        return "number", 'above 0, or "off"'
    if origin is Annotated:
        kind, allowed = _type(inner[0])
        limits = ", ".join(part for part in (allowed, _limits(inner[1:])) if part)
        return kind, limits
    if origin is Literal:
        return "text", ", ".join(json.dumps(value) for value in inner)
    if origin is tuple:
        kind, allowed = _type(inner[0])
        return f"list of {_plural(kind)}", f"each {allowed}" if allowed else ""
    return _TYPES.get(annotation, str(annotation)), ""


def _plural(kind: str) -> str:
    return {"text": "texts", "true or false": "booleans"}.get(kind, f"{kind}s")


def _limits(metadata: Iterable[Any]) -> str:
    """Return the bounds of a number in words."""
    words = []
    for item in metadata:
        for part in (item, *getattr(item, "metadata", ())):
            for name, word in _LIMITS.items():
                bound = getattr(part, name, None)
                if bound is not None:
                    words.append(f"{word} {bound:g}" if isinstance(bound, float) else f"{word} {bound}")
    return ", ".join(words)


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return json.dumps(list(value))
    return json.dumps(value)


def _resolved(key: str) -> str:
    """Return the value of a key without a default of its own in an empty configuration, if it has one there."""
    value: Any = Config.model_validate({}).model_dump(mode="json")
    for step in key.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return "" if value is None else json.dumps(value)


def _first_paragraph(cls: type[BaseModel]) -> str:
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
