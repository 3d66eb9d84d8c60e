"""CSV and TSV files: a header line, then one example per line."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.opening import MAX_COLUMNS, MAX_ROWS, lines_of, open_text
from motley.data.files.table import ColumnBuilder, Table, check_names, is_read, parse_number

DELIMITERS = ",;\t|"
MISSING_MARKS = ("", "NA", "N/A", "NaN", "null", "?")
#: Cells that are kept as texts before they are turned into numbers.
CHUNK_CELLS = 2_000_000


def read_delimited(
    path: Path,
    *,
    delimiter: str = "",
    header: bool = True,
    encoding: str = "auto",
    missing_marks: Sequence[str] = MISSING_MARKS,
    text_columns: Collection[str] = (),
    drop: Collection[str] = (),
    only: Collection[str] = (),
) -> Table:
    """Read a CSV file into a table.

    A column is numeric if at least half of its values are numbers; its other values must then be
    missing. `text_columns` are never turned into numbers. `drop` are not read, nor are others than
    `only`, if it names any. Columns without a name are left out: pandas writes its index in such a
    column.
    """
    with open_text(path, encoding) as file:
        try:
            mark = delimiter or _delimiter_of(path, encoding)
            # strict: a quote that is not closed would otherwise swallow the rest of the file.
            rows = csv.reader(lines_of(file, path), delimiter=mark, strict=True)
            return _read(rows, path, header, frozenset(missing_marks), text_columns, drop, only)
        except csv.Error as error:
            raise MotleyError(f"{path}, line {rows.line_num}: {error}.") from None


def _delimiter_of(path: Path, encoding: str) -> str:
    """Return the most frequent delimiter of the first line, outside of quotes."""
    if path.suffix.lower() in (".tsv", ".tab"):
        return "\t"
    with open_text(path, encoding) as file:
        line = next(lines_of(file, path), "")
    unquoted = "".join(line.split('"')[::2])
    counts = {mark: unquoted.count(mark) for mark in DELIMITERS}
    return max(DELIMITERS, key=lambda mark: counts[mark])


def _read(
    rows: Iterator[list[str]],
    path: Path,
    header: bool,
    missing_marks: frozenset[str],
    text_columns: Collection[str],
    drop: Collection[str],
    only: Collection[str],
) -> Table:
    first = next(_filled(rows), None)
    if first is None:
        raise MotleyError(f"{path} is empty: it has only blank lines.")
    if len(first) > MAX_COLUMNS:
        raise MotleyError(f"{path}: {len(first):,} columns are more than {MAX_COLUMNS:,}.")
    names = _column_names(first, header, path)
    marks = frozenset(mark.strip().lower() for mark in missing_marks)
    builders: dict[int, ColumnBuilder] = {}
    for position, name in enumerate(names):
        if name and is_read(name, drop, only):
            builders[position] = ColumnBuilder(name, name in text_columns, marks)
    lines: list[int] = []
    chunk: list[list[str]] = []
    chunk_rows = max(100, min(20_000, CHUNK_CELLS // len(names)))

    def add_chunk() -> None:
        columns = list(zip(*chunk, strict=True))
        chunk_lines = lines[-len(chunk) :]
        for position, builder in builders.items():
            builder.add(columns[position], chunk_lines, path)
        chunk.clear()

    if not header:
        chunk.append(first)
        lines.append(rows.line_num)  # type: ignore[attr-defined]
    for row in _filled(rows):
        line = rows.line_num  # type: ignore[attr-defined]
        if len(row) != len(names):
            raise MotleyError(
                f"{path}, line {line}: has {len(row)} values and the first line {len(names)}."
            )
        chunk.append(row)
        lines.append(line)
        if len(lines) > MAX_ROWS:
            raise MotleyError(f"{path} has more than {MAX_ROWS:,} rows.")
        if len(chunk) == chunk_rows:
            add_chunk()
    if chunk:
        add_chunk()
    if not lines:
        raise MotleyError(f"{path} has a header line and no rows.")
    numbers = np.array(lines, dtype=np.int64)
    columns = {builder.name: builder.build(numbers, path) for builder in builders.values()}
    notes = []
    unnamed = [str(position) for position, name in enumerate(names, start=1) if not name]
    if unnamed:
        notes.append(f"columns without a name are not used: column {', '.join(unnamed[:10])}")
    named = tuple(name for name in names if name)
    return Table(path, columns, numbers, named, "line", tuple(notes))


def _filled(rows: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the rows that are not blank lines."""
    for row in rows:
        if row and (len(row) > 1 or row[0].strip()):
            yield row


def _column_names(first: list[str], header: bool, path: Path) -> list[str]:
    if not header:
        return [str(number) for number in range(1, len(first) + 1)]
    names = [name.strip() for name in first]
    if len(names) > 1 and all(parse_number(name) is not None for name in names):
        raise MotleyError(
            f"{path}: the first line has only numbers and is no header. Add a line with the "
            "columns' names, or set data.files.header = false."
        )
    check_names(names, path)
    return names
