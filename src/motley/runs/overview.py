"""A line for every run below a folder, for `motley list runs`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from motley.core.errors import MotleyError
from motley.runs.folder import RunFolder
from motley.runs.metrics import OVERALL, MetricsLog, outcome


@dataclass(frozen=True)
class RunOverview:
    """One run in a few words. A run that cannot be read has a path and a state only."""

    path: Path
    state: str
    data: str = ""
    method: str = ""
    preset: str = ""
    #: "3 of 20"
    round: str = ""
    last: str = ""
    best: str = ""
    #: Date and time when the run began, in local time.
    began: str = ""


def find_runs(folder: Path) -> list[RunOverview]:
    """Return all runs in a folder and its subfolders, in the order of their names."""
    runs = []
    for config in sorted(folder.rglob("config.toml")):
        # Other folders have a config.toml too, such as that of a deployment.
        if (config.parent / "environment.json").exists() or (config.parent / "metrics.jsonl").exists():
            runs.append(_overview(config.parent))
    return runs


def _overview(path: Path) -> RunOverview:
    folder = RunFolder(path)
    try:
        config = folder.read_config()
        lines = MetricsLog(folder.metrics).read()
    except (MotleyError, OSError) as error:
        return RunOverview(path, state=f"unreadable: {str(error).splitlines()[0]}")
    found = outcome(lines, config.evaluation.last_k, ())
    mean = found.accuracy.get(OVERALL)
    finished = found.rounds >= config.training.rounds
    first = folder.environment if folder.environment.exists() else folder.config
    began = datetime.fromtimestamp(first.stat().st_mtime)
    return RunOverview(
        path=path,
        state="finished" if finished else ("running" if folder.is_locked() else "unfinished"),
        data=config.data.name,
        method=config.method.name + (" + InCo" if config.method.inco.active else ""),
        preset=config.preset,
        round=f"{found.rounds} of {config.training.rounds}",
        last=f"{mean.last:.2%}" if mean else "",
        best=f"{mean.best:.2%}" if mean else "",
        began=f"{began:%Y-%m-%d %H:%M}",
    )
