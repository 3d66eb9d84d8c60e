"""The configuration of a finished run, for readers who lack the user's own code in it.

`motley show` and `motley report` need a run's settings and its numbers, and neither needs its
method or models. Without the modules that define them, their settings cannot be checked, so they
are shown as they were saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import isabstract
from typing import Any

from pydantic import ConfigDict
from pydantic.fields import FieldInfo

from motley.config.renames import with_new_names
from motley.config.schema import Config, ModelSettings, ServerSettings, TaskSettings
from motley.models import MODELS
from motley.server.pipeline import STAGES
from motley.settings import RegistryChoice, Settings, Table, TableOf, table_of


def missing_plugins(values: Table) -> list[str]:
    """Return the names in a saved configuration that cannot be resolved here."""
    return list(_missing(TableOf(Config), values))


def _missing(table: TableOf, values: Table) -> Iterator[str]:
    """Yield the names in a table, and in the tables inside of it, that cannot be resolved."""
    choice = table.choice
    if isinstance(choice, RegistryChoice):
        name = values.get(choice.key, choice.default)
        if name not in choice.registry:
            yield str(name)
    for key, field in table.cls.model_fields.items():
        inner, value = table_of(field), values.get(key)
        if inner is not None and isinstance(value, Mapping):
            yield from _missing(inner, value)
    # These tables name members of registries in fields of their own.
    if table.cls is ModelSettings:
        yield from _missing_models(values)
    elif table.cls is TaskSettings:
        saved = TaskSettings.model_construct(**values)
        for _, registry, name in saved.references():
            if name not in registry:
                yield name
    elif table.cls is ServerSettings:
        for stage in values.get("stages", ()):
            if stage.get("name") not in STAGES:
                yield str(stage.get("name"))


def _missing_models(values: Table) -> Iterator[str]:
    """Yield the sizes whose model is not here. A size is a model's name unless it has a factory."""
    factories = values.get("factories", {})
    for size in values.get("sizes", ()):
        if factories.get(size, size) not in MODELS:
            yield str(size)


def for_display(values: Table) -> Config:
    """Return a saved configuration without checking it. Nothing can be built from it."""
    config = _constructed(TableOf(Config), with_new_names(values))
    assert isinstance(config, Config)
    return config


def _constructed(table: TableOf, values: Table) -> Settings:
    cls = table.choice.class_of(values) if table.choice is not None else table.cls
    if cls is None:
        cls = _Saved if isabstract(table.cls) else _open(table.cls)
    fields: dict[str, Any] = {}
    for key, value in values.items():
        fields[key] = _value(cls.model_fields.get(key), value)
    for key, field in cls.model_fields.items():
        inner = table_of(field)
        if key not in fields and inner is not None and field.default is not None:
            fields[key] = _constructed(inner, {})
    return cls.model_construct(**fields)


def _value(field: FieldInfo | None, value: Any) -> Any:
    table = table_of(field)
    if table is not None and isinstance(value, Mapping):
        return _constructed(table, value)
    if isinstance(value, list):
        entries = []
        for entry in value:
            is_table = isinstance(entry, Mapping)
            entries.append(_Saved.model_construct(**entry) if is_table else entry)
        return tuple(entries)
    return value


class _Saved(Settings, extra="allow"):
    """A table whose class is not known."""


def _open(base: type[Settings]) -> type[Settings]:
    """Return a class that takes any key beside the keys of `base`."""
    config = ConfigDict(extra="allow")
    saved: type[Settings] = type("Saved", (base,), {"model_config": config})
    return saved
