"""One line per run below a folder, for `motley list runs`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from motley.core.errors import MotleyError
from motley.runs.folder import RunFolder
from motley.runs.integrity import find_problems
from motley.runs.metrics import OVERALL, MetricsLog, outcome


@dataclass(frozen=True)
class RunOverview:
    """A short description of one run. A run that cannot be read has only a path and a state."""

    path: Path
    state: str
    data: str = ""
    method: str = ""
    preset: str = ""
    #: For example "3 of 20".
    round: str = ""
    #: Mean of the primary metric over sizes: of the last evaluation, and the best.
    last: str = ""
    best: str = ""
    #: Local date and time when the run started.
    began: str = ""


def find_runs(folder: Path) -> list[RunOverview]:
    """Return all runs in a folder and its subfolders, sorted by path."""
    candidates = {file.parent for file in folder.rglob("config.toml")}
    candidates |= {file.parent for file in folder.rglob("metrics.jsonl")}
    runs = []
    for path in sorted(candidates):
        # Other folders contain a config.toml too, such as a deployment's.
        run = RunFolder(path)
        if run.environment.exists() or run.metrics.exists():
            runs.append(_overview(run))
    return runs


def _overview(folder: RunFolder) -> RunOverview:
    try:
        config, _ = folder.read_config_for_display()
        lines = MetricsLog(folder.metrics).read()
        problems = find_problems(folder)
    except (MotleyError, OSError) as error:
        return RunOverview(folder.path, state=f"unreadable: {str(error).splitlines()[0]}")
    summary = outcome(lines, config.evaluation.last_k, ())
    mean = summary.scores.get(OVERALL)
    # Accuracy needs no name: percent says enough.
    name = "" if summary.metric.percent else f" {summary.metric.name}"
    if summary.rounds >= config.training.rounds:
        state = "finished"
    else:
        state = "running" if folder.is_locked() else "unfinished"
    if problems:
        state += f", damaged: {problems[0]}"
    # environment.json is written once, when the run starts; config.toml is replaced by --rounds.
    first_file = folder.environment if folder.environment.exists() else folder.config
    began = datetime.fromtimestamp(first_file.stat().st_mtime)
    return RunOverview(
        path=folder.path,
        state=state,
        data=config.data.name,
        method=config.method.name + (" + InCo" if config.server.inco.active else ""),
        preset=config.preset,
        round=f"{summary.rounds} of {config.training.rounds}",
        last=summary.metric.text(mean.last) + name if mean else "",
        best=summary.metric.text(mean.best) + name if mean else "",
        began=f"{began:%Y-%m-%d %H:%M}",
    )
