"""The result of an analysis, how it is saved, and the registry of all analyses."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.core.errors import MotleyError
from motley.core.registry import Registry
from motley.extras import require
from motley.files import output_file, write_atomically
from motley.runs.metrics import MetricsLog
from motley.settings import Settings

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


class NoSettings(Settings):
    """The settings of an analysis that has none."""


@dataclass(frozen=True)
class Analysis:
    """A function of the folders of runs and of its settings. Most analyses have no settings."""

    name: str
    function: Callable[..., Findings]
    settings_class: type[Settings] = NoSettings
    #: Whether it is defined for classifications only.
    needs_classes: bool = False

    def __call__(self, paths: Sequence[Path], settings: Settings | None = None) -> Findings:
        """Analyze runs. Without `settings`, those with all defaults are used."""
        if self.needs_classes:
            for path in paths:
                self._refuse_other_tasks(path)
        if self.settings_class is NoSettings:
            return self.function(paths)
        return self.function(paths, settings or self.settings_class())

    def _refuse_other_tasks(self, path: Path) -> None:
        """Refuse a run whose log shows that its task has no classes."""
        for line in MetricsLog(path / "metrics.jsonl").read():
            if line.get("scores") and not line.get("class_accuracy"):
                raise MotleyError(
                    f"motley analyze {self.name}: is for classifications, and {path} has the "
                    f"metrics {', '.join(line['scores'])} and no accuracy per class."
                )


ANALYSES: Registry[Analysis] = Registry("analysis")


def analysis(
    name: str, summary: str, settings: type[Settings] = NoSettings, *, classes: bool = False
) -> Callable[[Callable[..., Findings]], Analysis]:
    """Return a decorator that registers a function as an analysis.

    The function takes the folders of runs and, if `settings` is given, an object of that class.
    With `classes`, runs of other tasks than classification are refused.
    """

    def add(function: Callable[..., Findings]) -> Analysis:
        return ANALYSES.register(name, summary)(Analysis(name, function, settings, classes))

    return add


def new_figure(width: float, height: float) -> Figure:
    """Return an empty matplotlib figure. The size is in inches."""
    require("matplotlib", "an analysis")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(
    findings: Findings, folder: Path, name: str, settings: Settings | None = None
) -> list[Path]:
    """Write the table as CSV and as JSON, and the figure as PNG and SVG. Return the files.

    The JSON file also has the settings and the notes. Numbers that are not finite are null there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(findings.columns)
    writer.writerows(findings.rows)
    table = folder / f"{name}.csv"
    write_atomically(table, text.getvalue().encode())
    rows = []
    for row in findings.rows:
        finite = [_finite(value) for value in row]
        rows.append(dict(zip(findings.columns, finite, strict=True)))
    content = {
        "analysis": name,
        "settings": {} if settings is None else settings.model_dump(mode="json"),
        "notes": list(findings.notes),
        "rows": rows,
    }
    numbers = folder / f"{name}.json"
    write_atomically(numbers, (json.dumps(content, indent=1) + "\n").encode())
    pictures = [folder / f"{name}.png", folder / f"{name}.svg"]
    for picture in pictures:
        with output_file(picture) as file:
            findings.figure.savefig(file, format=picture.suffix[1:], dpi=120, bbox_inches="tight")
    return [table, numbers, *pictures]


def _finite(value: Any) -> Any:
    """Return a value, or None for a number that is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
