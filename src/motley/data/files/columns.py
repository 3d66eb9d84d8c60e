"""From a table to inputs, targets and clients: the roles of columns, and numbers for all values."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motley.core.errors import MotleyError
from motley.data.arrays import shaped_inputs
from motley.data.files.settings import FileSettings
from motley.data.files.table import Column, Table, parse_number, shown
from motley.data.files.text import cut_or_pad, token_numbers, vocabulary_of
from motley.data.labels import clean_labels, sorted_names, whole_number
from motley.limits import check_data
from motley.models.inputs import InputShape, TableShape, TokenShape, describe_shape

TARGET_NAMES = ("target", "label", "labels", "class", "y")
#: A column of texts with more different values than this, in more than a tenth of the rows, is
#: taken for one of names or sentences.
MANY_CATEGORIES = 100


@dataclass(frozen=True)
class Roles:
    """The names of the columns that have each role."""

    target: str
    #: Empty if there are no natural clients.
    client: str
    features: tuple[str, ...]

    @property
    def required(self) -> tuple[str, ...]:
        """The columns in which no value can be filled in: the target, and the client if any."""
        return (self.target, self.client) if self.client else (self.target,)

    @property
    def used(self) -> tuple[str, ...]:
        """All columns that have a role."""
        return (*self.features, *self.required)


def columns_read_as_text(settings: FileSettings) -> frozenset[str]:
    """Return the columns whose values are names, even if they are written as numbers."""
    targets = (settings.target,) if settings.target else TARGET_NAMES
    named = {*targets, *settings.categories, settings.client}
    return frozenset(named - {""})


def columns_to_read(settings: FileSettings) -> frozenset[str]:
    """Return the columns that are read if the settings name features; empty: all of them."""
    if not settings.features:
        return frozenset()
    return columns_read_as_text(settings) | frozenset(settings.features)


def choose_roles(table: Table, settings: FileSettings) -> Roles:
    """Return the roles of a table's columns; names that are not columns are errors."""
    for name in settings.drop:
        if name not in table.names:  # not `columns`, which lacks the dropped ones
            raise MotleyError(_unknown_column(table, "data.files.drop", name))
    for key in ("features", "categories"):
        for name in getattr(settings, key):
            if name not in table.columns:
                raise MotleyError(_unknown_column(table, f"data.files.{key}", name))
    if settings.client and settings.client not in table.columns:
        raise MotleyError(_unknown_column(table, "data.files.client", settings.client))
    target = _target(table, settings)
    if target == settings.client:
        raise MotleyError(f"{table.path}: column {target!r} cannot be both target and client.")
    if target in settings.features:
        raise MotleyError(f"{table.path}: data.files.features: {target!r} is the target.")
    features = settings.features
    if not features:
        others = [name for name in table.columns if name not in (target, settings.client)]
        features = tuple(others)
    if not features:
        raise MotleyError(f"{table.path}: there is no column besides the target {target!r}.")
    return Roles(target, settings.client, features)


def _unknown_column(table: Table, setting: str, name: str) -> str:
    """Return the message about a column that is not there, with a suggestion and some names."""
    names = table.names
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {matches[0]!r}?" if matches else ""
    return f"{table.path}: {setting} = {name!r}: there is no such column.{hint} {listed(names)}"


def listed(names: Sequence[str]) -> str:
    """Return a sentence with the names of the columns, or of some of them."""
    shown_names = ", ".join(map(repr, names[:20]))
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"Columns: {shown_names}{more}."


def _target(table: Table, settings: FileSettings) -> str:
    names = list(table.columns)
    if settings.target:
        if settings.target not in table.columns:
            raise MotleyError(_unknown_column(table, "data.files.target", settings.target))
        return settings.target
    candidates = [name for name in TARGET_NAMES if name in table.columns]
    if len(candidates) != 1:
        reason = f"both {candidates[0]!r} and {candidates[1]!r} may be" if candidates else "none is"
        raise MotleyError(
            f"{table.path}: which column is the target? By their names {reason}. Set "
            f"data.files.target. {listed(names)}"
        )
    return candidates[0]


def check_same_columns(train: Table, test: Table, roles: Roles) -> None:
    """Refuse a test table that lacks a column, or has values of another type in it."""
    for name in roles.used:
        if name not in test.columns:
            raise MotleyError(f"{test.path}: has no column {name!r}, which {train.path} has.")
        train_kind, test_kind = train.columns[name].kind, test.columns[name].kind
        if train_kind != test_kind:
            raise MotleyError(
                f"column {name!r} has {train_kind}s in {train.path} and {test_kind}s in "
                f"{test.path}. If it has categories, add it to data.files.categories."
            )


def missing_counts(table: Table, names: Sequence[str]) -> dict[str, int]:
    """Return the number of missing values of each column that lacks some."""
    counts = {name: int(table.columns[name].missing.sum()) for name in names}
    return {name: count for name, count in counts.items() if count}


def handle_missing(table: Table, roles: Roles, how: str) -> Table:
    """Return a table in which no value is missing that `how` (data.files.missing) does not allow.

    "refuse": a missing value is an error. "drop": the rows with missing values are left out.
    "mean": features may lack values, which the encoder fills in.
    """
    if how == "drop":
        return _complete_rows(table, roles)
    for name in roles.required if how == "mean" else (*roles.required, *roles.features):
        missing = table.columns[name].missing
        if not missing.any():
            continue
        remedies = "'drop' to leave out such rows"
        if name == roles.target:
            subject = f"the target (column {name!r})"
        elif name == roles.client:
            subject = f"the client (column {name!r})"
        else:
            subject = f"column {name!r}"
            remedies += ", or 'mean' to fill them in"
        raise MotleyError(
            f"{table.where(int(np.argmax(missing)))}: {subject} has no value; {missing.sum()} of "
            f"{len(table)} rows lack it. Set data.files.missing to {remedies}."
        )
    return table


def _complete_rows(table: Table, roles: Roles) -> Table:
    incomplete = np.zeros(len(table), dtype=bool)
    for name in roles.used:
        incomplete |= table.columns[name].missing
    if incomplete.all():
        raise MotleyError(f"{table.path}: every row has a missing value; no row is left.")
    return table.rows(~incomplete) if incomplete.any() else table


# ---- targets


def task_of(table: Table, target: str, asked: str) -> str:
    """Return the task: regression if it is asked for, or if the targets have fractions."""
    column = table.columns[target]
    if asked == "next-token":
        raise MotleyError(f"{table.path}: data.files.task = 'next-token' is for plain text.")
    if asked != "auto":
        return asked
    if column.kind == "array":
        return "regression" if column.values.dtype.kind == "f" else "classification"
    texts = {text for text in column.values.tolist() if text is not None}
    if any(parse_number(str(text)) is None for text in texts):
        return "classification"
    has_fractions = any(whole_number(str(text)) is None for text in texts)
    return "regression" if has_fractions else "classification"


def targets_of(table: Table, target: str, task: str) -> Sequence[str] | np.ndarray:
    """Return class names, or the numbers of a regression."""
    column = table.columns[target]
    if column.kind in ("array", "image"):
        if task != "regression" or column.kind == "image":
            raise MotleyError(f"{table.path}: the target {target!r} must be one value per row.")
        return column.values
    if task == "classification":
        return [str(value) for value in column.values]
    numbers = np.empty(len(table), dtype=np.float64)
    for row, value in enumerate(column.values):
        number = parse_number(str(value))
        if number is None:
            raise MotleyError(
                f"{table.where(row)}: the target {shown(value)} is not a number, as a regression "
                "needs it."
            )
        numbers[row] = number
    return numbers


def clients_of(table: Table, client: str) -> list[str] | None:
    """Return the name of each row's client."""
    if not client:
        return None
    column = table.columns[client]
    if column.kind not in ("text", "number"):
        raise MotleyError(f"{table.path}: the client {client!r} must be one name per row.")
    return [str(value) for value in column.values]


# ---- inputs


@dataclass(frozen=True, eq=False)
class Encoder:
    """How the columns of a table become inputs; fitted to the training rows.

    A category's number is its place in the sorted list of the training part's categories, plus one.
    0 stands for missing values and for categories that do not occur in the training part.
    """

    numbers: tuple[str, ...]
    means: np.ndarray
    scales: np.ndarray
    categories: dict[str, tuple[str, ...]]
    #: The columns whose training values are all the same.
    constant: tuple[str, ...]

    @property
    def shape(self) -> TableShape:
        """The shape of a row."""
        sizes = tuple(len(names) + 1 for names in self.categories.values())
        return TableShape(len(self.numbers), sizes)

    def inputs(self, table: Table) -> np.ndarray:
        """Return float32 rows: numbers, then categories."""
        columns = len(self.numbers) + len(self.categories)
        check_data(f"{table.path}: its {len(table)} rows of {columns}", len(table) * columns * 4)
        rows = np.empty((len(table), columns), dtype=np.float32)
        for position, name in enumerate(self.numbers):
            values = table.columns[name].values
            filled = np.where(np.isnan(values), self.means[position], values)
            if self.scales[position]:
                filled = (filled - self.means[position]) / self.scales[position]
            with np.errstate(over="ignore"):
                rows[:, position] = filled
            finite = np.isfinite(rows[:, position])
            if not finite.all():
                row = int(np.argmin(finite))
                raise MotleyError(
                    f"{table.where(row)}, column {name!r}: {values[row]:g} is too large for single "
                    "precision."
                )
        for position, (name, names) in enumerate(self.categories.items(), len(self.numbers)):
            rows[:, position] = _category_numbers(table.columns[name].values, names)
        return rows


def _category_numbers(texts: np.ndarray, names: tuple[str, ...]) -> list[int]:
    """Return the number of each text among the training part's categories; 0 if it is not there.

    If these are whole numbers, 3 and 3.0 are one category.
    """
    number_of = {name: number for number, name in enumerate(clean_labels(names), start=1)}
    are_whole = all(whole_number(name) is not None for name in names)
    numbers = {}
    for text in set(texts.tolist()):
        whole = whole_number(text) if are_whole and text is not None else None
        numbers[text] = number_of.get(text if whole is None else str(whole), 0)
    return [numbers[text] for text in texts.tolist()]


def fit_encoder(table: Table, features: Sequence[str], settings: FileSettings) -> Encoder:
    """Return the encoder for the training rows."""
    numbers: list[str] = []
    means: list[float] = []
    scales: list[float] = []
    constant: list[str] = []
    categories: dict[str, tuple[str, ...]] = {}
    for name in features:
        column = table.columns[name]
        if column.kind == "number":
            mean, scale = _mean_and_scale(column, table)
            if scale == 0:
                constant.append(name)
            numbers.append(name)
            means.append(mean)
            # A scale of 0 means that the values stay as they are.
            scales.append((scale or 1.0) if settings.standardize else 0.0)
        elif column.kind == "text":
            categories[name] = _categories(column, table, name in settings.categories)
        else:
            raise MotleyError(
                f"{table.path}: column {name!r} holds {column.kind}s and cannot be combined with "
                "other columns. Name the columns to use with data.files.features."
            )
    return Encoder(tuple(numbers), np.array(means), np.array(scales), categories, tuple(constant))


def _mean_and_scale(column: Column, table: Table) -> tuple[float, float]:
    present = column.values[~np.isnan(column.values)]
    if not len(present):
        raise MotleyError(
            f"{table.path}: column {column.name!r} has no value in any training row. Leave it out "
            "with data.files.drop."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        mean, scale = float(present.mean()), float(present.std())
    if not np.isfinite([mean, scale]).all():
        raise MotleyError(
            f"{table.path}: column {column.name!r} has values up to {np.abs(present).max():g}, "
            "which are too large to compute with."
        )
    # Rounding may leave a tiny deviation for values that are all the same.
    return mean, 0.0 if present.min() == present.max() else scale


def _categories(column: Column, table: Table, asked: bool) -> tuple[str, ...]:
    texts = [text for text in column.values.tolist() if text is not None]
    # pandas writes a column of whole numbers with a missing value as 3.0, and another part of the
    # table, or rows to predict, as 3.
    names = sorted_names(clean_labels(texts))
    if not names:
        raise MotleyError(
            f"{table.path}: column {column.name!r} has no value in any training row. Leave it out "
            "with data.files.drop."
        )
    if not asked and len(names) > MANY_CATEGORIES and len(names) > len(texts) / 10:
        raise MotleyError(
            f"{table.path}: column {column.name!r} has {len(names):,} different texts in "
            f"{len(texts):,} rows, such as {shown(names[0])}, so they are hardly categories. Leave "
            "it out with data.files.drop, use it with data.files.categories, or read it as "
            "characters with data.files.inputs = 'text' and data.files.features."
        )
    return names


def table_inputs(
    train: Table, test: Table | None, features: Sequence[str], settings: FileSettings
) -> tuple[np.ndarray, np.ndarray | None, InputShape, Encoder | None]:
    """Return the inputs of both parts, their shape, and the encoder of a table's rows."""
    if settings.inputs == "text":
        return (*_text_inputs(train, test, features, settings.sequence_length), None)
    if len(features) == 1 and train.columns[features[0]].kind in ("array", "image"):
        return (*_array_inputs(train, test, features[0], settings), None)
    if settings.inputs not in ("auto", "table", "array", "signal"):
        raise MotleyError(
            f"{train.path}: data.files.inputs = {settings.inputs!r} does not fit columns of "
            "numbers and categories; use 'table'."
        )
    encoder = fit_encoder(train, features, settings)
    inputs = encoder.inputs(train)
    test_inputs = None if test is None else encoder.inputs(test)
    if settings.inputs not in ("array", "signal"):
        return inputs, test_inputs, encoder.shape, encoder
    if encoder.categories:
        name = next(iter(encoder.categories))
        raise MotleyError(
            f"{train.path}: column {name!r} has categories; data.files.inputs = "
            f"{settings.inputs!r} needs numbers."
        )
    inputs, shape = shaped_inputs(inputs, settings.inputs, str(train.path))
    if test_inputs is not None:
        test_inputs, _ = shaped_inputs(test_inputs, settings.inputs, str(train.path))
    return inputs, test_inputs, shape, encoder


def _array_inputs(
    train: Table, test: Table | None, name: str, settings: FileSettings
) -> tuple[np.ndarray, np.ndarray | None, InputShape]:
    """Return the inputs of both parts from one column of arrays or images, and their shape."""
    where = f"{train.path}, column {name!r}"
    inputs, shape = shaped_inputs(train.columns[name].values, settings.inputs, where)
    if test is None:
        return inputs, None, shape
    where = f"{test.path}, column {name!r}"
    test_inputs, test_shape = shaped_inputs(test.columns[name].values, settings.inputs, where)
    return inputs, test_inputs, common_shape(shape, test_shape, str(test.path))


def common_shape(train: InputShape, test: InputShape, where: str) -> InputShape:
    """Return the shape of both parts. Vocabularies may differ; the larger one counts."""
    if isinstance(train, TokenShape) and isinstance(test, TokenShape):
        test = test._replace(vocabulary=max(train.vocabulary, test.vocabulary))
        train = train._replace(vocabulary=test.vocabulary)
    if train != test:
        raise MotleyError(
            f"{where}: test inputs are {describe_shape(test)}, and training inputs are "
            f"{describe_shape(train)}."
        )
    return train


def _text_inputs(
    train: Table, test: Table | None, features: Sequence[str], length: int
) -> tuple[np.ndarray, np.ndarray | None, InputShape]:
    name = features[0]
    if len(features) > 1 or train.columns[name].kind != "text":
        raise MotleyError(
            f"{train.path}: data.files.inputs = 'text' needs one column of texts; name it with "
            "data.files.features."
        )
    texts = [text or "" for text in train.columns[name].values]
    vocabulary = vocabulary_of(texts)
    check_data(f"{train.path}: {len(texts)} texts of {length} characters", len(texts) * length * 8)

    def encoded(part: Table) -> np.ndarray:
        rows = [
            cut_or_pad(token_numbers(text or "", vocabulary), length)
            for text in part.columns[name].values
        ]
        return np.stack(rows)

    test_inputs = None if test is None else encoded(test)
    return encoded(train), test_inputs, TokenShape(length, len(vocabulary) + 1)
