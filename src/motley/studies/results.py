"""The results of a study: our numbers beside the paper's, and whether the differences are more than noise."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from motley.core.errors import MotleyError
from motley.files import write_atomically
from motley.runs.metrics import OVERALL, MetricsLog
from motley.studies.declaration import Study
from motley.studies.measures import whole_model
from motley.studies.runner import finished, run_path
from motley.studies.statistics import Difference, Spread, against_paper, paired, spread
from motley.studies.sweep import SCALES, Cell


@dataclass(frozen=True)
class Result:
    """One cell of the table."""

    cell: Cell
    #: Seed -> the number of its finished run.
    values: dict[int, float]
    #: Seed -> the folder of its finished run.
    runs: dict[int, str]
    #: Finished runs without a number, because the target was never reached.
    unreached: int = 0
    #: The paired difference to the line that this one is compared with.
    comparison: Difference | None = None

    @property
    def ours(self) -> Spread | None:
        """Mean and deviation over seeds."""
        return spread(list(self.values.values()))

    @property
    def difference(self) -> Difference | None:
        """Ours less the paper's."""
        ours, paper = self.ours, self.cell.paper
        return against_paper(ours, paper.mean, paper.std) if ours and paper else None

    @property
    def shown(self) -> str:
        """Our number as text, or why there is none."""
        if self.cell.missing:
            return "missing"
        if self.ours is None:
            return "not reached" if self.unreached else "not run"
        return str(self.ours) + (f", {self.unreached} not reached" if self.unreached else "")

    @property
    def verdict(self) -> str:
        """Whether the difference to the paper is more than noise."""
        return self.difference.verdict if self.difference else ""


def collect(cells: Sequence[Cell], out: Path) -> list[Result]:
    """Read every cell's finished runs."""
    found = {(cell.method, cell.column): _read(cell, out) for cell in cells}
    return [_compared(result, found.get((result.cell.against, result.cell.column))) for result in found.values()]


def _read(cell: Cell, out: Path) -> Result:
    values, runs, unreached = {}, {}, 0
    for run in cell.runs:
        if finished(out, run):
            path = run_path(out, run)
            value = cell.measure.of(
                MetricsLog(path / "metrics.jsonl").read(), run.config, cell.target, cell.whole, cell.size
            )
            runs[run.seed] = f"../runs/{run.key}"
            if value is None:
                unreached += 1
            else:
                values[run.seed] = value
    return Result(cell, values, runs, unreached)


def _compared(result: Result, other: Result | None) -> Result:
    if other is None:
        return result
    both = [seed for seed in result.values if seed in other.values]
    difference = paired([result.values[seed] for seed in both], [other.values[seed] for seed in both])
    return Result(result.cell, result.values, result.runs, result.unreached, difference)


COLUMNS = ("method", "ours", "paper", "ours - paper", "verdict", "compared with")


def lines(result: Result) -> tuple[str, ...]:
    """Return a cell as a line under `COLUMNS`."""
    cell = result.cell
    compared = ""
    if result.comparison:
        compared = f"{cell.against}: {result.comparison}"
        if result.comparison.verdict:
            compared += f" ({result.comparison.verdict})"
    return (
        cell.method + cell.which_model,
        result.shown,
        str(cell.paper or ""),
        str(result.difference or ""),
        result.verdict,
        compared,
    )


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the numbers of the columns that are not empty in all rows."""
    return [number for number in range(len(COLUMNS)) if any(row[number] for row in rows)]


def columns(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Return the results of each column with the column's title."""
    for _, group in groupby(results, key=lambda result: result.cell.column):
        members = list(group)
        cell = members[0].cell
        target = f" to {cell.target:g} %" if cell.target is not None else ""
        yield f"{cell.column or 'all'} ({cell.measure}{target}, {cell.measure.unit})", members


def missing(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return every reason why something cannot run, and the names of the lines and data sets that it concerns."""
    reasons: dict[str, dict[str, None]] = {}
    for cell in cells:
        for lack in cell.missing:
            reasons.setdefault(lack.reason, {})[lack.name] = None
    return {reason: list(names) for reason, names in reasons.items()}


def results_folder(study: Study, scale: str, out: Path) -> Path:
    """Return the folder of a study's results at a scale."""
    return out / f"{study.name}-{scale}"


def save(study: Study, scale: str, cells: Sequence[Cell], results: Sequence[Result], out: Path) -> Path:
    """Write the study's folder and return it."""
    folder = results_folder(study, scale, out)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "study.json", json.dumps(_plain(study, scale, cells, results), indent=1).encode())
    write_atomically(folder / "table.csv", _csv(results).encode())
    write_atomically(folder / "table.md", _markdown(study, scale, cells, results).encode())
    return folder


def _plain(study: Study, scale: str, cells: Sequence[Cell], results: Sequence[Result]) -> dict[str, Any]:
    about = {"name": study.name, "summary": study.summary, "paper": study.paper, "note": study.note}
    rows = [
        {
            "method": result.cell.method,
            "column": title,
            "runs": result.runs,
            "shows": _size_shown(result.cell),
            "line": lines(result),
            "missing": [lack.reason for lack in result.cell.missing],
        }
        for title, members in columns(results)
        for result in members
    ]
    return {
        **about,
        "scale": scale,
        "scale_means": SCALES[scale].summary,
        "planned_runs": len({run.key for cell in cells for run in cell.runs}),
        "cells": rows,
        "missing": missing(cells),
    }


def _size_shown(cell: Cell) -> str:
    """Return the name of the accuracy in a run's metrics that a cell shows."""
    if cell.whole and cell.runs:
        return whole_model(cell.runs[0].config) or OVERALL
    return cell.size or OVERALL


def read_saved(folder: Path) -> dict[str, Any]:
    """Return the description of a study that `save` wrote."""
    file = folder / "study.json"
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise MotleyError(f"{file} cannot be read: {error}.") from None
    if not isinstance(saved, dict) or not isinstance(saved.get("cells"), list):
        raise MotleyError(f"{file} is not the description of a study. Run the study again: that writes it anew.")
    return saved


CSV = (
    *("method", "data", "case", "measure", "mean", "std", "seeds", "paper", "paper std", "difference", "half width"),
    *("compared with", "paired", "paired half width", "missing"),
)


def _csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV)
    for result in results:
        cell, ours, difference, pair = result.cell, result.ours, result.difference, result.comparison
        row: dict[str, Any] = {
            "method": cell.method,
            "data": cell.data,
            "case": cell.case,
            "measure": cell.measure + cell.which_model,
            "seeds": len(result.values),
            "missing": " ".join(lack.reason for lack in cell.missing),
        }
        if ours:
            row |= {"mean": ours.mean, "std": ours.std}
        if cell.paper:
            row |= {"paper": cell.paper.mean, "paper std": cell.paper.std}
        if difference:
            row |= {"difference": difference.mean, "half width": difference.half_width}
        if pair:
            row |= {"compared with": cell.against, "paired": pair.mean, "paired half width": pair.half_width}
        writer.writerow(row.get(name) for name in CSV)
    return text.getvalue()


def _markdown(study: Study, scale: str, cells: Sequence[Cell], results: Sequence[Result]) -> str:
    text = [f"# {study.name}: {study.summary}", "", f"Scale {scale}: {SCALES[scale].summary}. {study.note}".strip()]
    for title, members in columns(results):
        rows = [lines(result) for result in members]
        used = used_columns(rows)
        text += [
            "",
            f"## {title}",
            "",
            f"| {' | '.join(COLUMNS[number] for number in used)} |",
            "|" + "---|" * len(used),
        ]
        text += [f"| {' | '.join(row[number] for number in used)} |" for row in rows]
    lacking = missing(cells)
    if lacking:
        text += ["", "Missing:", "", *(f"- {', '.join(names)}: {reason}" for reason, names in lacking.items())]
    return "\n".join(text) + "\n"
