"""The results of a study: our numbers beside the paper's, and whether they differ beyond noise."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from motley.core.errors import MotleyError
from motley.files import markdown_text, write_atomically
from motley.runs.metrics import ACCURACY, OVERALL, MetricsLog, metric_of
from motley.studies.declaration import Study
from motley.studies.measures import CLIENTS, ROUNDS, SCORES, whole_model
from motley.studies.runner import finished, run_path
from motley.studies.statistics import Difference, Spread, against_paper, paired, spread
from motley.studies.sweep import SCALES, Cell, num_runs
from motley.tasks import MetricInfo


@dataclass(frozen=True)
class Result:
    """One cell of the table."""

    cell: Cell
    #: Seed -> value of the measure, for finished runs.
    values: dict[int, float]
    #: Seed -> folder, for finished runs.
    runs: dict[int, str]
    #: The number of finished runs without a value: those that never reached the target.
    unreached: int = 0
    #: The paired difference to the line that this line is compared with.
    comparison: Difference | None = None
    #: The primary metric of the runs.
    metric: MetricInfo = ACCURACY

    @property
    def ours(self) -> Spread | None:
        """Mean and standard deviation over seeds."""
        return spread(list(self.values.values()))

    @property
    def difference(self) -> Difference | None:
        """Our number minus the paper's."""
        ours, paper = self.ours, self.cell.paper
        if ours is None or paper is None:
            return None
        return against_paper(ours, paper.mean, paper.std)

    @property
    def shown(self) -> str:
        """Our number as text, or why there is none."""
        if self.cell.missing:
            return "missing"
        if self.ours is None:
            return self.cell.measure.no_value if self.unreached else "not run"
        suffix = f", {self.unreached} {self.cell.measure.no_value}" if self.unreached else ""
        return f"{self.ours.text(percent=self.in_percent)}{suffix}"

    @property
    def in_percent(self) -> bool:
        """Whether numbers have one decimal: percent and rounds have, other metrics do not."""
        return self.metric.percent or self.cell.measure not in (*SCORES, *CLIENTS)

    @property
    def verdict(self) -> str:
        """Whether the difference to the paper is larger than the noise, in words."""
        return self.difference.verdict if self.difference else ""


def collect(cells: Sequence[Cell], out: Path) -> list[Result]:
    """Read the finished runs of every cell, and compare the lines with each other."""
    results = {(cell.method, cell.column): _read(cell, out) for cell in cells}
    compared = []
    for result in results.values():
        other = results.get((result.cell.against, result.cell.column))
        if other is not None:
            result = replace(result, comparison=_paired_difference(result, other))
        compared.append(result)
    return compared


def _read(cell: Cell, out: Path) -> Result:
    values = {}
    runs = {}
    unreached = 0
    metric: MetricInfo = ACCURACY
    for run in cell.runs:
        if not finished(out, run):
            continue
        metrics = MetricsLog(run_path(out, run) / "metrics.jsonl").read()
        metric = metric_of(metrics)
        value = cell.measure.of(metrics, run.config, cell.target, cell.whole, cell.size)
        runs[run.seed] = f"../runs/{run.key}"
        if value is None:
            unreached += 1
        else:
            values[run.seed] = value
    return Result(cell, values, runs, unreached, metric=metric)


def _paired_difference(result: Result, other: Result) -> Difference | None:
    """Compare two lines over the seeds that both have."""
    seeds = [seed for seed in result.values if seed in other.values]
    ours = [result.values[seed] for seed in seeds]
    theirs = [other.values[seed] for seed in seeds]
    return paired(ours, theirs)


COLUMNS = ("method", "ours", "paper", "ours - paper", "verdict", "compared with")


def table_row(result: Result) -> tuple[str, ...]:
    """Return a result as the texts under `COLUMNS`."""
    cell = result.cell
    compared = ""
    if result.comparison:
        compared = f"{cell.against}: {result.comparison.text(percent=result.in_percent)}"
        if result.comparison.verdict:
            compared += f" ({result.comparison.verdict})"
    return (
        cell.method + cell.which_model + (" (reference)" if cell.is_reference else ""),
        result.shown,
        str(cell.paper or ""),
        result.difference.text(percent=result.in_percent) if result.difference else "",
        result.verdict,
        compared,
    )


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of the columns that have text in at least one row."""
    used = []
    for number in range(len(COLUMNS)):
        if any(row[number] for row in rows):
            used.append(number)
    return used


def columns(results: Sequence[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Yield each column's title and results."""
    for _, group in groupby(results, key=lambda result: result.cell.column):
        members = list(group)
        cell = members[0].cell
        metric = next((result.metric for result in members if result.runs), ACCURACY)
        target = ""
        if cell.target is not None and cell.measure == ROUNDS:
            target = f" to {cell.target:g} {'%' if metric.percent else metric.name}"
        unit = cell.measure.unit_of(metric)
        yield f"{cell.column or 'all'} ({cell.measure}{target}, {unit})", members


def missing(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Return every reason why something cannot run, with the names of its lines and data sets."""
    names_by_reason: dict[str, list[str]] = {}
    for cell in cells:
        for name, reason in cell.missing:
            names = names_by_reason.setdefault(reason, [])
            if name not in names:
                names.append(name)
    return names_by_reason


def results_folder(study: Study, scale: str, out: Path) -> Path:
    """Return the folder of a study's results at a scale."""
    return out / f"{study.name}-{scale}"


def save(
    study: Study, scale: str, cells: Sequence[Cell], results: Sequence[Result], out: Path
) -> Path:
    """Write the study's results and return their folder."""
    folder = results_folder(study, scale, out)
    folder.mkdir(parents=True, exist_ok=True)
    description = json.dumps(_to_json(study, scale, cells, results), indent=1)
    write_atomically(folder / "study.json", description.encode())
    write_atomically(folder / "table.csv", _csv(results).encode())
    write_atomically(folder / "table.md", _markdown(study, scale, cells, results).encode())
    return folder


def _to_json(
    study: Study, scale: str, cells: Sequence[Cell], results: Sequence[Result]
) -> dict[str, Any]:
    rows = []
    for title, members in columns(results):
        for result in members:
            row = {
                "method": result.cell.method,
                "column": title,
                "runs": result.runs,
                "shows": _score_key(result.cell),
                "line": table_row(result),
                "missing": [entry.reason for entry in result.cell.missing],
            }
            rows.append(row)
    return {
        "name": study.name,
        "summary": study.summary,
        "paper": study.paper,
        "note": study.note,
        "scale": scale,
        "scale_means": SCALES[scale].summary,
        "planned_runs": num_runs(cells),
        "cells": rows,
        "missing": missing(cells),
    }


def _score_key(cell: Cell) -> str:
    """Return the key of the score in a run's metrics that a cell shows."""
    if cell.whole and cell.runs:
        return whole_model(cell.runs[0].config) or OVERALL
    return cell.size or OVERALL


class SavedCell(BaseModel, strict=True):
    """One row of a saved table: a method on one data set."""

    method: str
    column: str
    #: Seed -> the run's folder, relative to the study's folder.
    runs: dict[str, str]
    shows: str = OVERALL
    line: list[str] = Field(min_length=len(COLUMNS), max_length=len(COLUMNS))
    missing: list[str]


class SavedStudy(BaseModel, strict=True):
    """The content of study.json. A file of someone else may hold anything."""

    name: str
    summary: str
    paper: str
    note: str
    scale: str
    scale_means: str
    planned_runs: int = 0
    cells: list[SavedCell]
    #: Reason -> the names of the missing rows and columns.
    missing: dict[str, list[str]]


def read_saved(folder: Path) -> dict[str, Any]:
    """Return the description of a study that `save` wrote."""
    file = folder / "study.json"
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise MotleyError(f"{file} cannot be read: {error}.") from None
    except RecursionError:
        raise MotleyError(f"{file} cannot be read: its values are nested too deeply.") from None
    try:
        return SavedStudy.model_validate(saved).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its content"
        raise MotleyError(
            f"{file} is not the description of a study: {place}: {first['msg']}. Run the study "
            "again to write it."
        ) from None


CSV_COLUMNS = (
    "method",
    "data",
    "case",
    "measure",
    "mean",
    "std",
    "seeds",
    "paper",
    "paper std",
    "difference",
    "half width",
    "compared with",
    "paired",
    "paired half width",
    "missing",
)


def _csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for result in results:
        cell = result.cell
        ours, difference, comparison = result.ours, result.difference, result.comparison
        row: dict[str, Any] = {
            "method": cell.method,
            "data": cell.data,
            "case": cell.case,
            "measure": cell.measure + cell.which_model,
            "seeds": len(result.values),
            "missing": " ".join(entry.reason for entry in cell.missing),
        }
        if ours:
            row |= {"mean": ours.mean, "std": ours.std}
        if cell.paper:
            row |= {"paper": cell.paper.mean, "paper std": cell.paper.std}
        if difference:
            row |= {"difference": difference.mean, "half width": difference.half_width}
        if comparison:
            row["compared with"] = cell.against
            row["paired"] = comparison.mean
            row["paired half width"] = comparison.half_width
        writer.writerow(row.get(name) for name in CSV_COLUMNS)
    return text.getvalue()


def _markdown(study: Study, scale: str, cells: Sequence[Cell], results: Sequence[Result]) -> str:
    text = [f"# {study.name}: {study.summary}", ""]
    text.append(f"Scale {scale}: {SCALES[scale].summary}. {study.note}".strip())
    for title, members in columns(results):
        rows = [table_row(result) for result in members]
        used = used_columns(rows)
        text += ["", f"## {title}", ""]
        text.append(_markdown_row([COLUMNS[number] for number in used]))
        text.append("|" + "---|" * len(used))
        for row in rows:
            text.append(_markdown_row([row[number] for number in used]))
    names_by_reason = missing(cells)
    if names_by_reason:
        text += ["", "Missing:", ""]
        for reason, names in names_by_reason.items():
            text.append(f"- {', '.join(names)}: {reason}")
    return "\n".join(text) + "\n"


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(markdown_text(cell) for cell in cells)} |"
