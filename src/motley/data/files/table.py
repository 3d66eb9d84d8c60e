"""A table in memory: named columns of numbers, texts or arrays, with the line of each row."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from motley.core.errors import MotleyError

ColumnKind = Literal["number", "text", "array", "image"]


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table.

    number: float64 of shape (N,), NaN if a value is missing. text: objects of shape (N,), which are
    strings, or None if a value is missing. array: numbers of shape (N, ...). image: uint8 of shape
    (N, height, width, channels).
    """

    name: str
    kind: ColumnKind
    values: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """A mask of the rows whose value is missing."""
        if self.kind == "number":
            return np.isnan(self.values)
        if self.kind == "text":
            return np.array([value is None for value in self.values], dtype=bool)
        return np.zeros(len(self.values), dtype=bool)

    def rows(self, chosen: np.ndarray) -> Column:
        """Return some rows of the column, given by numbers or by a mask."""
        return Column(self.name, self.kind, self.values[chosen])


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of equal length, and where each row comes from."""

    path: Path
    columns: dict[str, Column]
    #: The number of each row in its file, counted from 1, as messages name it.
    lines: np.ndarray
    #: All columns of the file, also those that are not read.
    names: tuple[str, ...] = ()
    #: "line" for text files, "row" for others.
    line_word: str = "line"
    #: Remarks for the user, such as columns that are not used.
    notes: tuple[str, ...] = ()
    #: Column -> the names of its classes, if the file declares them.
    class_names: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, row: int) -> str:
        """Return the place of a row for messages: "data.csv, line 17"."""
        return f"{self.path}, {self.line_word} {self.lines[row]}"

    def rows(self, chosen: np.ndarray) -> Table:
        """Return some rows, given by numbers or by a mask."""
        columns = {name: column.rows(chosen) for name, column in self.columns.items()}
        return replace(self, columns=columns, lines=self.lines[chosen])


class ColumnBuilder:
    """Collects the cells of one column of a text file, chunk by chunk.

    The first chunk decides whether the column has numbers or texts, so that the cells of a numeric
    column need not be kept as texts. A column named in `as_text` is always one of texts.
    """

    def __init__(self, name: str, as_text: bool, marks: frozenset[str]) -> None:
        self.name = name
        self._marks = marks
        self._as_text = as_text
        self._is_number = False
        self._started = False
        self._numbers: list[np.ndarray] = []
        self._texts: list[str | None] = []
        # One string object per distinct text, because categories repeat.
        self._seen: dict[str, str] = {}

    def add(self, cells: Sequence[str], where: Sequence[int], path: Path) -> None:
        """Add the cells of some rows. `where` has their lines."""
        if not self._started:
            self._started = True
            self._is_number = not self._as_text and self._looks_numeric(cells)
        if self._is_number:
            self._numbers.append(self._as_numbers(cells, where, path))
        else:
            self._add_texts(cells)

    def build(self, lines: np.ndarray, path: Path) -> Column:
        """Return the column."""
        if self._is_number:
            return Column(self.name, "number", np.concatenate(self._numbers))
        if not self._as_text:
            self._refuse_mostly_numbers(lines, path)
        values = np.empty(len(self._texts), dtype=object)
        values[:] = self._texts
        return Column(self.name, "text", values)

    def _looks_numeric(self, cells: Sequence[str]) -> bool:
        """Tell whether at least half of the values that are not missing are numbers."""
        present = [cell for cell in cells if not self._is_missing(cell)]
        numeric = sum(parse_number(cell) is not None for cell in present)
        return 2 * numeric >= len(present)

    def _is_missing(self, cell: str) -> bool:
        return cell.strip().lower() in self._marks

    def _as_numbers(self, cells: Sequence[str], where: Sequence[int], path: Path) -> np.ndarray:
        numbers = _plain_numbers(cells)
        if numbers is not None:
            return numbers
        numbers = np.empty(len(cells), dtype=np.float64)
        for row, cell in enumerate(cells):
            number = parse_number(cell)
            if number is None or math.isnan(number):
                if not self._is_missing(cell):
                    self._refuse_text(cell, where[row], path)
                number = math.nan
            elif math.isinf(number):
                raise MotleyError(
                    f"{path}, line {where[row]}, column {self.name!r}: {shown(cell)} is not a "
                    "finite number."
                )
            numbers[row] = number
        return numbers

    def _add_texts(self, cells: Sequence[str]) -> None:
        for cell in cells:
            text = cell.strip()
            if text.lower() in self._marks:
                self._texts.append(None)
            else:
                self._texts.append(self._seen.setdefault(text, text))

    def _refuse_mostly_numbers(self, lines: np.ndarray, path: Path) -> None:
        numeric = 0
        present = 0
        first_text = -1
        is_number = {text: parse_number(text) is not None for text in self._seen}
        for row, text in enumerate(self._texts):
            if text is None:
                continue
            present += 1
            if is_number[text]:
                numeric += 1
            elif first_text < 0:
                first_text = row
        if first_text >= 0 and 2 * numeric >= present:
            self._refuse_text(self._texts[first_text] or "", int(lines[first_text]), path)

    def _refuse_text(self, cell: str, line: int, path: Path) -> None:
        raise MotleyError(
            f"{path}, line {line}, column {self.name!r}: {shown(cell)} is not a number, and most "
            "other values of the column are. If it stands for a missing value, add it to "
            "data.files.missing_marks; if the column has categories, add the column to "
            "data.files.categories."
        )


def _plain_numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Return the numbers of cells that are all finite numbers, or None. This is the usual case."""
    try:
        numbers = np.array(list(map(float, cells)), dtype=np.float64)
    except ValueError:
        return None
    if not np.isfinite(numbers).all() or "_" in "".join(cells):
        return None
    return numbers


def parse_number(text: str) -> float | None:
    """Return the number that a cell holds, or None. 1_000, which Python reads, is not a number."""
    try:
        number = float(text)
    except ValueError:
        return None
    return None if "_" in text else number


def shown(text: object) -> str:
    """Return a value for a message, shortened."""
    written = repr(text)
    return written if len(written) <= 60 else f"{written[:57]}..."


def is_read(name: str, drop: Collection[str], only: Collection[str]) -> bool:
    """Tell whether a column is read: it is not dropped, and it is among `only`, if any are."""
    return name not in drop and (not only or name in only)


def check_names(names: Sequence[str], path: Path) -> None:
    """Refuse a column name that occurs twice."""
    first: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        if name and name in first:
            raise MotleyError(
                f"{path}: the column name {name!r} occurs twice, as columns {first[name]} and "
                f"{number}. Rename one of them."
            )
        first[name] = number
