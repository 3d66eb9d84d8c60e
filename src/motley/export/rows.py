"""The user's own tables and texts, turned into inputs exactly as the run's data set was.

A table's columns are standardized with the means of the training rows, and categories have numbers
that depend on the training rows. Both are needed to read further rows, so they are exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motley.core.errors import MotleyError
from motley.data.arrays import shaped_inputs
from motley.data.files.columns import Encoder
from motley.data.files.delimited import read_delimited
from motley.data.files.reading import Reading
from motley.data.files.settings import FileSettings
from motley.data.files.table import Table
from motley.data.files.text import read_texts, token_numbers


@dataclass(frozen=True)
class RowReader:
    """Reads tables, if there is an encoder, and plain text, if there is a vocabulary."""

    settings: FileSettings
    encoder: Encoder | None = None
    vocabulary: tuple[str, ...] = ()

    @classmethod
    def of(cls, reading: Reading, settings: FileSettings) -> RowReader:
        """Return a reader for further rows of the files that were read."""
        return cls(settings, reading.encoder, reading.vocabulary)

    def read_table(self, path: Path) -> np.ndarray:
        """Return the inputs of a CSV file. A column with targets may be there, and is ignored."""
        encoder, settings = self.encoder, self.settings
        assert encoder is not None
        wanted = (*encoder.numbers, *encoder.categories)
        table = read_delimited(
            path,
            delimiter=settings.delimiter,
            header=settings.header,
            encoding=settings.encoding,
            missing_marks=settings.missing_marks,
            text_columns=frozenset(encoder.categories),
            only=frozenset(wanted),
        )
        self._check(table, wanted)
        rows = encoder.inputs(table)
        if settings.inputs in ("array", "signal"):
            rows, _ = shaped_inputs(rows, settings.inputs, str(path))
        return rows

    def _check(self, table: Table, wanted: tuple[str, ...]) -> None:
        assert self.encoder is not None
        missing = [name for name in wanted if name not in table.columns]
        if missing:
            raise MotleyError(f"{table.path}: lacks the column {missing[0]!r}.")
        for name in wanted:
            column = table.columns[name]
            if name in self.encoder.numbers and column.kind != "number":
                raise MotleyError(f"{table.path}: column {name!r} must have numbers.")
            if self.settings.missing != "mean" and column.missing.any():
                row = int(np.argmax(column.missing))
                raise MotleyError(
                    f"{table.where(row)}, column {name!r}: has no value. With data.files.missing = "
                    "'mean' the run would have replaced missing values."
                )

    def read_text(self, path: Path, length: int) -> np.ndarray:
        """Return the last `length` characters of a text file, as numbers."""
        text = "".join(file.text for file in read_texts(path, self.settings.encoding))
        if len(text) < length:
            raise MotleyError(
                f"{path}: has {len(text)} characters, and the model reads sequences of {length}."
            )
        return token_numbers(text[-length:], self.vocabulary)

    def to_json(self) -> dict[str, Any]:
        """Return the values that a card stores."""
        values: dict[str, Any] = {"vocabulary": list(self.vocabulary)}
        if self.encoder is not None:
            values |= {
                "numbers": list(self.encoder.numbers),
                "means": self.encoder.means.tolist(),
                "scales": self.encoder.scales.tolist(),
                "categories": {
                    name: list(names) for name, names in self.encoder.categories.items()
                },
            }
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any], settings: FileSettings) -> RowReader:
        """Return the reader whose values a card stores."""
        encoder = None
        if "numbers" in values:
            categories = {str(name): tuple(names) for name, names in values["categories"].items()}
            encoder = Encoder(
                tuple(values["numbers"]),
                np.array(values["means"], dtype=float),
                np.array(values["scales"], dtype=float),
                categories,
                (),
            )
        return cls(settings, encoder, tuple(values["vocabulary"]))
