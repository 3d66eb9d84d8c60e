"""The base of every settings class, tables with a choice, and the messages about wrong settings."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from motley.core.errors import MotleyError, unknown
from motley.core.registry import Registry

S = TypeVar("S", bound=BaseModel)
Table: TypeAlias = Mapping[str, Any]


def allowing(values: str) -> WrapValidator:
    """Return a validator for a number or a word, whose message names the allowed values.

    pydantic reports one problem for the number and one for the word.
    """

    def validated(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"should be {values}.") from None

    return WrapValidator(validated)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A number from 0 to below 1: a probability, or a momentum.
Fraction = Annotated[float, Field(ge=0, lt=1)]
#: A bound that can be turned off.
Limit: TypeAlias = Annotated[Positive | Literal["off"], allowing('a number above 0, or "off"')]


class NamesFile:
    """Marks a setting whose value is the path of a file or folder.

    Relative paths are resolved when a configuration is read, and a Flower node takes no such
    setting from a server.
    """


#: The path of a file or folder, as text; empty: none.
FilePath: TypeAlias = Annotated[str, NamesFile()]


class Settings(BaseModel):
    """Typed, frozen and closed: an unknown key is an error and is not silently ignored.

    The strings below the attributes are their documentation for users: `motley list settings`
    prints them.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    #: For a table with a key `variant`: the values that each variant gives to other keys of the
    #: table.
    variants: ClassVar[Mapping[str, Table]] = {}
    #: The keys that keep the values of lower layers if a higher layer changes the table's `name` or
    #: `variant`. A dot leads into a table: "transform.variant". None: all keys, because `name` does
    #: not change what they mean.
    lasting: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, /, *values: Any, **keys: Any) -> None:
        """Build the settings from keys, as in `motley.Dirichlet(alpha=0.5)`."""
        name = type(self).__name__
        if values:
            raise MotleyError(
                f"{name}({', '.join(map(repr, values))}): settings are given by name. "
                f"Allowed: {', '.join(type(self).model_fields)}."
            )
        try:
            super().__init__(**keys)
        except ValidationError as error:
            raise MotleyError("\n".join(_problems(type(self), error, name))) from None

    # Validation of a configuration must not call `__init__` for its tables: their problems are
    # reported together, with their paths. Pydantic calls it unless it has this mark.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _fill_from_variant(cls, values: Any) -> Any:
        if not cls.variants or not isinstance(values, Mapping):
            return values
        return with_variant(values, cls.variants, cls.model_fields["variant"].default)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_not_bools(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject true and false, which pydantic would accept as 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
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
        """Accept a word for a list of words, also several with commas: resnet10,resnet14."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        if get_origin(annotation) is tuple and get_args(annotation)[1:] == (...,):
            item = get_args(annotation)[0]
            if get_origin(item) is Annotated:
                item = get_args(item)[0]
            is_text = item is str or get_origin(item) is Literal
            if is_text and isinstance(value, str) and value:
                return [word.strip() for word in value.split(",")]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if item in (int, float) and is_number:
                return [value]
        return value

    @classmethod
    def kept_below(cls, below: Table, above: Table) -> Table:
        """Return the values of a lower layer that stay if a higher layer gives the table others.

        This is for tables without a choice; `Choice.kept_below` is for the others.
        """
        variant = cls.model_fields.get("variant")
        if variant is None or not _changes("variant", variant.default, below, above):
            return below
        return only(below, cls.lasting)


def with_variant(values: Table, variants: Mapping[str, Table], default: str) -> Table:
    """Return a table's values on top of those that its `variant` stands for.

    An unknown variant is left to the validation of the key, which names the allowed ones.
    """
    variant = values.get("variant", default)
    if not isinstance(variant, str) or variant not in variants:
        return values
    return {**variants[variant], **values}


def _changes(key: str, default: Any, below: Table, above: Table) -> bool:
    old = below.get(key, default)
    return bool(above.get(key, old) != old)


def only(values: Table, keys: tuple[str, ...] | None) -> Table:
    """Return some keys of a table; a dot leads into a table inside it. None: all keys."""
    if keys is None:
        return values
    result: dict[str, Any] = {}
    for key in keys:
        first, _, rest = key.partition(".")
        value = values.get(first)
        if rest:
            value = only(value, (rest,)) if isinstance(value, Mapping) else value
        if value is not None:
            result[first] = value
    return result


@dataclass(frozen=True)
class Configured:
    """A user's class with the settings it should have, as an argument of `motley.Federation`."""

    item: type
    settings: Mapping[str, Any]


# ---- tables with a choice


class Choice:
    """A table with one settings class per name. Its key `name` chooses the class.

    It annotates a field, as in

        optimizer: Annotated[OptimizerSettings, OPTIMIZERS] = AdamSettings()

    where OPTIMIZERS is a Choice whose classes derive from OptimizerSettings. This is a
    discriminated union. It differs from pydantic's in three ways: the key has a default, the
    classes may come from a registry that grows, and the error about a key of another choice says
    which names it is for.
    """

    #: Whether the reference of all settings lists the names.
    listed: bool = True

    def __init__(
        self, default: str, classes: Mapping[str, type[Settings]], key: str = "name"
    ) -> None:
        self.default, self.key, self._classes = default, key, classes

    @property
    def classes(self) -> Mapping[str, type[Settings]]:
        """The settings class of each name."""
        return self._classes

    def own_name(self, name: Any) -> Any:
        """Return the name that an alias stands for, and any other value as it is."""
        return name

    def class_of(self, values: Table) -> type[Settings] | None:
        """Return the class of a table's values, or None if they choose nothing that exists."""
        name = self.own_name(values.get(self.key, self.default))
        return self.classes.get(name) if isinstance(name, str) else None

    def unknown_name(self, label: str, name: Any) -> str:
        """Return the message about a name that does not exist; `label` is the table's."""
        *names, last = map(repr, self.classes)
        return f"{label}.{self.key} = {name!r}: should be {', '.join(names)} or {last}."

    def validate(self, values: Table) -> Any:
        """Return the settings of a table's values, for use without a configuration."""
        cls = self.class_of(values)
        if cls is None:
            raise MotleyError(self.unknown_name("table", values.get(self.key, self.default)))
        return validate(cls, values)

    def kept_below(self, below: Table, above: Table) -> Table:
        """Return the values of a lower layer that stay if a higher layer gives the table others."""
        old = self.own_name(below.get(self.key, self.default))
        new = self.own_name(above.get(self.key, old))
        cls = self.class_of({self.key: new})
        if cls is None or cls.lasting is None:
            return below
        if new != old:
            return only(below, cls.lasting)
        kept = cls.kept_below(below, above)
        return kept if kept is below else {**only(below, (self.key,)), **kept}

    def names_with(self, key: str) -> list[str]:
        """Return the names whose tables have a key."""
        return [name for name, cls in self.classes.items() if key in cls.model_fields]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._read, handler(source))

    def _read(self, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name = values.get(self.key, self.default)
        cls = self.class_of(values)
        if cls is None:
            raise PydanticCustomError(
                "unknown_choice", "unknown {name}", {"name": name, "choice": self}
            )
        try:
            return cls.model_validate({**values, self.key: self.own_name(name)})
        except ValidationError as error:
            # Nested errors travel in the context, so that `validate` can report them beside those
            # of other tables.
            context = {"error": error, "problems": Chosen(self, self.own_name(name), cls)}
            raise PydanticCustomError("chosen_table", "{error}", context) from None


class RegistryChoice(Choice):
    """A choice among the entries of a registry, or a user's own by its dotted path."""

    def __init__(
        self,
        default: str,
        registry: Registry[Any],
        settings_of: Callable[[Any], type[Settings]],
        *,
        listed: bool = False,
    ) -> None:
        """Choose among the entries of `registry`, whose settings class `settings_of` returns.

        listed: the reference of all settings lists the names, because `motley list` does not.
        """
        super().__init__(default, {})
        self.registry, self._settings_of, self.listed = registry, settings_of, listed

    @property
    def classes(self) -> Mapping[str, type[Settings]]:
        """The settings class of each registered name."""
        return {entry.name: self._settings_of(entry.item) for entry in self.registry}

    def own_name(self, name: Any) -> Any:
        """Return the name that an alias stands for."""
        if isinstance(name, str) and name in self.registry:
            return self.registry.entry(name).name
        return name

    def class_of(self, values: Table) -> type[Settings] | None:
        """Return the class of a table's values, or None if they choose nothing that exists."""
        name = values.get(self.key, self.default)
        if not isinstance(name, str) or name not in self.registry:
            return None
        return self._settings_of(self.registry[name])

    def unknown_name(self, label: str, name: Any) -> str:
        """Return why a name cannot be resolved."""
        try:
            self.registry.entry(name, f"{label}.{self.key}")
        except MotleyError as error:
            return str(error)
        return f"{label}.{self.key} = {name!r}: cannot be chosen."


@dataclass(frozen=True)
class Chosen:
    """The result of a choice: the name, and its class."""

    choice: Choice
    name: str
    cls: type[Settings]


@dataclass(frozen=True)
class TableOf:
    """A field that is a table: its class, or for a table with a choice the common base class."""

    cls: type[Settings]
    choice: Choice | None = None


def table_of(field: FieldInfo | None) -> TableOf | None:
    """Describe a field that is a table; None if it is a plain value."""
    if field is None:
        return None
    cls = next(_models_in(field.annotation), None)
    if cls is None or not issubclass(cls, Settings) or get_origin(field.annotation) is tuple:
        return None
    choice = next((item for item in field.metadata if isinstance(item, Choice)), None)
    return TableOf(cls, choice)


# ---- messages


def no_effect(values: Any, because: str) -> PydanticCustomError:
    """Return the error about a table that has no effect; `because` follows "has no effect with"."""
    return PydanticCustomError(
        "no_effect", "has no effect with {because}", {"because": because, "values": values}
    )


def validate(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Build `cls` from plain values. Errors name each key, its value and what is allowed."""
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise MotleyError("\n".join(_problems(cls, error, where))) from None


def _problems(
    cls: type[BaseModel], error: ValidationError, where: str, chosen: Chosen | None = None
) -> Iterator[str]:
    for item in error.errors():
        path = [where, *map(str, item["loc"])] if where else list(map(str, item["loc"]))
        label = ".".join(path)
        given = "" if isinstance(item["input"], dict) else f" = {item['input']!r}"
        context = item.get("ctx", {})
        if item["type"] == "chosen_table":
            inner: Chosen = context["problems"]
            yield from _problems(inner.cls, context["error"], label, inner)
        elif item["type"] == "unknown_choice":
            yield context["choice"].unknown_name(label, context["name"])
        elif item["type"] == "no_effect":
            for key, value in flat({label: context["values"]}).items():
                yield f"{key} = {value!r}: has no effect with {context['because']}."
        elif item["type"] == "extra_forbidden":
            yield f"{label}{given}: {_unknown_key(cls, item['loc'], where, chosen)}"
        elif item["type"] == "model_type":
            owner = _owner(cls, item["loc"])
            keys = ", ".join(owner.model_fields if owner else ())
            yield f"{label}{given}: is a table; set a key of it: {keys}."
        elif item["type"] == "tuple_type":
            yield f"{label}{given}: should be a list."
        elif item["type"] == "too_short":
            yield f"{label}{given}: at least {context['min_length']} is needed."
        elif item["type"] == "missing":
            yield f"{label}: is required and was not given."
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            about = f"{label}{given}: " if label else ""
            yield about + message + ("" if message.endswith((".", "?")) else ".")


def _unknown_key(
    cls: type[BaseModel], loc: tuple[int | str, ...], where: str, chosen: Chosen | None
) -> str:
    """Return the message about a key that its table lacks with the chosen name."""
    key = str(loc[-1])
    if chosen is not None and len(loc) == 1:
        names = [repr(name) for name in chosen.choice.names_with(key)]
        if names:
            *others, last = names
            all_names = f"{', '.join(others)} and {last}" if others else last
            choice = f"{where}.{chosen.choice.key} = {chosen.name!r}"
            return f"has no effect with {choice}; it is for {all_names}."
    owner = _owner(cls, loc[:-1])
    return unknown("key", key, owner.model_fields if owner else ())


def _owner(cls: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Follow a key path from `cls` to the class of the table at its end, without list indices."""
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
    """Return a nested table as one with dotted names."""
    result: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{name}."))
        else:
            result[f"{prefix}{name}"] = value
    return result
