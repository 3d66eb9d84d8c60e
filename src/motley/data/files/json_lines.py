"""JSON lines: one object per line, whose values are numbers, texts or flat lists of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.delimited import MISSING_MARKS
from motley.data.files.opening import MAX_COLUMNS, lines_of, open_text
from motley.data.files.table import Column, Table, is_read, shown


def read_json_lines(
    path: Path,
    *,
    encoding: str = "auto",
    missing_marks: Sequence[str] = MISSING_MARKS,
    text_columns: Collection[str] = (),
    drop: Collection[str] = (),
    only: Collection[str] = (),
) -> Table:
    """Read records into a table. The first record has all columns; later ones may lack some.

    A value that is null, NaN, absent, or one of `missing_marks` is missing.
    """
    names: tuple[str, ...] = ()
    cells: dict[str, list[Any]] = {}
    lines: list[int] = []
    with open_text(path, encoding) as file:
        for number, line in enumerate(lines_of(file, path), start=1):
            if not line.strip():
                continue
            record = _parse(line, path, number)
            if not lines:
                if len(record) > MAX_COLUMNS:
                    raise MotleyError(
                        f"{path}: {len(record):,} keys are more than {MAX_COLUMNS:,}."
                    )
                names = tuple(record)
                cells = {name: [] for name in names if is_read(name, drop, only)}
            for name in record:
                if name not in names:
                    raise MotleyError(
                        f"{path}, line {number}: the key {name!r} is not in the first record."
                    )
            for name, values in cells.items():
                values.append(record.get(name))
            lines.append(number)
    if not lines:
        raise MotleyError(f"{path} is empty: it has only blank lines.")
    marks = frozenset(mark.strip().lower() for mark in missing_marks)
    columns = {}
    for name, values in cells.items():
        columns[name] = _column(name, values, lines, path, name in text_columns, marks)
    return Table(path, columns, np.array(lines, dtype=np.int64), names)


def _parse(line: str, path: Path, number: int) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!r} occurs twice")
        return record

    try:
        record = json.loads(line, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise MotleyError(f"{path}, line {number}: is not a JSON record: {error}.") from None
    if not isinstance(record, dict):
        raise MotleyError(f"{path}, line {number}: is not a record {{...}} but {shown(record)}.")
    return record


def _column(
    name: str,
    values: list[Any],
    lines: list[int],
    path: Path,
    as_text: bool,
    marks: frozenset[str],
) -> Column:
    """Return a column after checking that all of its values have one type."""
    first_type = ""
    first_line = 0
    for row, value in enumerate(values):
        if isinstance(value, str):
            values[row] = value = None if value.strip().lower() in marks else value.strip()
        elif isinstance(value, float) and math.isnan(value):
            values[row] = value = None
        if value is None:
            continue
        type_name = _type_name(value, f"{path}, line {lines[row]}, column {name!r}")
        if as_text and type_name != "list":
            values[row] = _as_text(value)
            type_name = "text"
        if first_type and type_name != first_type:
            raise MotleyError(
                f"{path}, column {name!r}: mixed types: a {first_type} in line {first_line} and a "
                f"{type_name} in line {lines[row]}."
            )
        if not first_type:
            first_type, first_line = type_name, lines[row]
    if first_type == "list":
        return Column(name, "array", _list_array(name, values, lines, path))
    if first_type == "text":
        texts = np.empty(len(values), dtype=object)
        texts[:] = values
        return Column(name, "text", texts)
    numbers = [math.nan if value is None else float(value) for value in values]
    return Column(name, "number", np.array(numbers, dtype=np.float64))


def _type_name(value: Any, where: str) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        try:
            if math.isfinite(float(value)):
                return "number"
        except OverflowError:
            pass
        raise MotleyError(f"{where}: {shown(value)} is not a finite number.")
    if isinstance(value, list):
        return "list"
    raise MotleyError(f"{where}: nested objects are not read. Write one key per value.")


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _list_array(name: str, values: list[Any], lines: list[int], path: Path) -> np.ndarray:
    """Return lists of numbers, all of one length, as an array."""
    for row, value in enumerate(values):
        where = f"{path}, line {lines[row]}, column {name!r}"
        if value is None:
            raise MotleyError(f"{where}: the list is missing.")
        if len(value) != len(values[0]):
            raise MotleyError(
                f"{where}: a list of {len(value)} numbers; in line {lines[0]} it has "
                f"{len(values[0])}. All lists must be equally long."
            )
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float):
                raise MotleyError(f"{where}: a list must hold numbers, not {shown(item)}.")
    try:
        array = np.array(values)
    except (ValueError, OverflowError) as error:
        raise MotleyError(f"{path}, column {name!r}: {error}.") from None
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise MotleyError(f"{path}, column {name!r}: the lists must hold finite numbers.")
    return array
