"""CSV and TSV files: a header line, then one example per line."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    reader = _ChunkedReader(path, builders, len(names))
    if not header:
        reader.add(first, rows.line_num)  # type: ignore[attr-defined]
    for row in _filled(rows):
        reader.add(row, rows.line_num)  # type: ignore[attr-defined]
    reader.end_chunk()
    if not reader.lines:
        raise MotleyError(f"{path} has a header line and no rows.")
    numbers = np.array(reader.lines, dtype=np.int64)
    columns = {builder.name: builder.build(numbers, path) for builder in builders.values()}
    named = tuple(name for name in names if name)
    return Table(path, columns, numbers, named, "line", _notes_on_unnamed(names))


def _notes_on_unnamed(names: Sequence[str]) -> tuple[str, ...]:
    """Return a remark on the columns without a name, or none."""
    unnamed = [str(position) for position, name in enumerate(names, start=1) if not name]
    if not unnamed:
        return ()
    return (f"columns without a name are not used: column {', '.join(unnamed[:10])}",)


class _ChunkedReader:
    """Collects rows, and hands them to the builders of the columns chunk by chunk.

    Texts of a whole file would take many times the memory of the numbers that they stand for.
    """

    def __init__(self, path: Path, builders: Mapping[int, ColumnBuilder], num_columns: int) -> None:
        self._path, self._builders, self._num_columns = path, builders, num_columns
        self._chunk: list[list[str]] = []
        self._chunk_rows = max(100, min(20_000, CHUNK_CELLS // num_columns))
        #: The line number of every row.
        self.lines: list[int] = []

    def add(self, row: list[str], line: int) -> None:
        """Add a row, which ends in this line of the file."""
        if len(row) != self._num_columns:
            raise MotleyError(
                f"{self._path}, line {line}: has {len(row)} values and the first line "
                f"{self._num_columns}."
            )
        self._chunk.append(row)
        self.lines.append(line)
        if len(self.lines) > MAX_ROWS:
            raise MotleyError(f"{self._path} has more than {MAX_ROWS:,} rows.")
        if len(self._chunk) == self._chunk_rows:
            self.end_chunk()

    def end_chunk(self) -> None:
        """Hand the collected rows to the builders."""
        if not self._chunk:
            return
        columns = list(zip(*self._chunk, strict=True))
        chunk_lines = self.lines[-len(self._chunk) :]
        for position, builder in self._builders.items():
            builder.add(columns[position], chunk_lines, self._path)
        self._chunk.clear()


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
