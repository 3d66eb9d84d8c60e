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
                names = tuple(record)
                if len(names) > MAX_COLUMNS:
                    raise MotleyError(f"{path}: {len(names):,} keys are more than {MAX_COLUMNS:,}.")
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
    cells: list[Any] = []
    column_type = ""  # of the first value that is not missing, which is in line `first_line`
    first_line = 0
    for value, line in zip(values, lines, strict=True):
        if _is_missing(value, marks):
            cells.append(None)
            continue
        cell = value.strip() if isinstance(value, str) else value
        type_name = _type_name(cell, f"{path}, line {line}, column {name!r}")
        if as_text and type_name != "list":
            cell, type_name = _as_text(cell), "text"
        if not column_type:
            column_type, first_line = type_name, line
        if type_name != column_type:
            raise MotleyError(
                f"{path}, column {name!r}: mixed types: a {column_type} in line {first_line} and a "
                f"{type_name} in line {line}."
            )
        cells.append(cell)
    if column_type == "list":
        return Column(name, "array", _list_array(name, cells, lines, path))
    if column_type == "text":
        texts = np.empty(len(cells), dtype=object)
        texts[:] = cells
        return Column(name, "text", texts)
    numbers = [math.nan if cell is None else float(cell) for cell in cells]
    return Column(name, "number", np.array(numbers, dtype=np.float64))


def _is_missing(value: Any, marks: frozenset[str]) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in marks
    return value is None or (isinstance(value, float) and math.isnan(value))


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
