"""The base of every settings class, and the message a user gets when a setting is wrong."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from motley.errors import MotleyError, unknown

S = TypeVar("S", bound=BaseModel)


class Settings(BaseModel):
    """Typed, frozen, and closed: a key nobody knows is an error, not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


def validate(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Build `cls` from plain values; on failure name each key, what was given and what is allowed."""
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise MotleyError("\n".join(_problems(cls, error, where))) from None


def _problems(cls: type[BaseModel], error: ValidationError, where: str) -> Iterator[str]:
    for item in error.errors():
        path = [where, *map(str, item["loc"])] if where else list(map(str, item["loc"]))
        label = ".".join(path)
        if item["type"] == "extra_forbidden":
            owner = _owner(cls, item["loc"][:-1])
            yield f"{label}: {unknown('key', str(item['loc'][-1]), owner.model_fields if owner else ())}"
        elif item["type"] == "missing":
            yield f"{label}: is required and was not given."
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
            yield f"{label}{given}: {message}" + ("" if message.endswith((".", "?")) else ".")


def _owner(cls: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Follow a key path from `cls` to the settings class that was to hold its last key."""
    owner: type[BaseModel] | None = cls
    for step in path:
        field = owner.model_fields.get(str(step)) if owner else None
        owner = next(_models_in(field.annotation), None) if field else None
    return owner


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in get_args(annotation):
        yield from _models_in(inner)
