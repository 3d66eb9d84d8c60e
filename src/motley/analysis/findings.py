"""The result of an analysis, how it is saved, and the registry of all analyses."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.core.registry import Registry
from motley.extras import require
from motley.files import output_file, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Findings:
    """The result of an analysis: a table and a figure."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    figure: Figure
    #: Messages about numbers that could not be computed.
    notes: tuple[str, ...] = ()


#: Name -> a function of the folders of runs.
ANALYSES: Registry[Callable[[Sequence[Path]], Findings]] = Registry("analysis")


def new_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure. The size is in inches."""
    require("matplotlib", "an analysis")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(findings: Findings, folder: Path, name: str) -> list[Path]:
    """Write the table as CSV and the figure as PNG and SVG. Return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(findings.columns)
    writer.writerows(findings.rows)
    table = folder / f"{name}.csv"
    write_atomically(table, text.getvalue().encode())
    pictures = [folder / f"{name}.png", folder / f"{name}.svg"]
    for picture in pictures:
        with output_file(picture) as file:
            findings.figure.savefig(file, format=picture.suffix[1:], dpi=120, bbox_inches="tight")
    return [table, *pictures]
