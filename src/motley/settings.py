"""The base class of all settings, and the messages about wrong settings."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from motley.core.errors import MotleyError, unknown

S = TypeVar("S", bound=BaseModel)


def _limit(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        raise ValueError('should be a number above 0, or "off".') from None


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A bound that can be turned off.
Limit: TypeAlias = Annotated[Positive | Literal["off"], WrapValidator(_limit)]


class Settings(BaseModel):
    """Typed and immutable settings. Unknown keys are errors.

    The strings below the attributes are documentation for users: `motley list settings` prints them.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_not_bools(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject true and false, which pydantic would accept as 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in (int, float):
            raise ValueError("should be a number")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _integers_fit_into_64_bits(cls, value: Any) -> Any:
        """Reject integers that neither TOML nor torch can hold."""
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError("should be below 2^63")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _one_value_is_a_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept a single value for a list, and words separated by commas: resnet10,resnet14."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if get_origin(annotation) is tuple and get_args(annotation)[1:] == (...,):
            item = get_args(annotation)[0]
            if get_origin(item) is Annotated:
                item = get_args(item)[0]
            if item is str and isinstance(value, str) and value:
                return [word.strip() for word in value.split(",")]
            if item in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
                return [value]
        return value


def validate(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Build `cls` from plain values. The error names each wrong key, its value and what is allowed."""
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise MotleyError("\n".join(_problems(cls, error, where))) from None


def _problems(cls: type[BaseModel], error: ValidationError, where: str) -> Iterator[str]:
    for item in error.errors():
        path = [where, *map(str, item["loc"])] if where else list(map(str, item["loc"]))
        label = ".".join(path)
        given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
        if item["type"] == "extra_forbidden":
            owner = _owner(cls, item["loc"][:-1])
            yield f"{label}{given}: {unknown('key', str(item['loc'][-1]), owner.model_fields if owner else ())}"
        elif item["type"] == "model_type":
            owner = _owner(cls, item["loc"])
            yield f"{label}{given}: is a table; set a key of it: {', '.join(owner.model_fields if owner else ())}."
        elif item["type"] == "tuple_type":
            yield f"{label}{given}: should be a list."
        elif item["type"] == "missing":
            yield f"{label}: is required and was not given."
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            about = f"{label}{given}: " if label else ""
            yield about + message + ("" if message.endswith((".", "?")) else ".")


def _owner(cls: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Follow a key path from `cls` to the settings class at its end. List indices are skipped."""
    owner: type[BaseModel] | None = cls
    for step in path:
        if isinstance(step, int):
            continue
        field = owner.model_fields.get(step) if owner else None
        owner = next(_models_in(field.annotation), None) if field else None
    return owner


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for inner in get_args(annotation):
        yield from _models_in(inner)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested table to one with dotted names."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{name}."))
        else:
            result[f"{prefix}{name}"] = value
    return result
