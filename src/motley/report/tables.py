"""The report's tables, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from motley.report.material import Panel, Run, Series, method_title
from motley.studies.statistics import spread

Rows = list[list[str]]


def final(panel: Panel) -> Rows:
    """Return last, best and mean-of-last-k accuracy of every series, and the latter a size."""
    sizes = panel.sizes[1:] if len(panel.sizes) > 2 else []
    rows = [["", "seeds", "last", "best", "mean of last k", *sizes]]
    for series in panel.series.values():
        outcomes = [run.outcome(()).accuracy for run in series.runs if run.evaluated]
        if not outcomes:
            continue
        overall = [accuracy["mean"] for accuracy in outcomes]
        rows.append(
            [
                series.label,
                str(len(outcomes)),
                _percent([summary.last for summary in overall]),
                _percent([summary.best for summary in overall]),
                _percent([summary.mean_of_last_k for summary in overall]),
                *(_percent([a[size].mean_of_last_k for a in outcomes if size in a]) for size in sizes),
            ]
        )
    return rows


def _percent(values: Sequence[float]) -> str:
    return str(spread([100 * value for value in values]) or "")


def targets(panel: Panel) -> tuple[float, ...]:
    """Return the runs' own targets, and the accuracy that even the weakest series reached, in whole percents."""
    own = {target for run in panel.runs() for target in run.config.evaluation.targets}
    best = [run.outcome(()).accuracy["mean"].best for run in panel.runs() if run.evaluated]
    common = {math.floor(100 * min(best)) / 100} - {0.0} if best else set()
    return tuple(sorted(own | common))


def costs(panel: Panel) -> Rows:
    """Return rounds to targets, traffic and time of every series."""
    wanted = targets(panel)
    rows = [["", *(f"rounds to {target:.0%}" for target in wanted), "MB down", "MB up", "seconds", "seconds a round"]]
    for series in panel.series.values():
        outcomes = [run.outcome(wanted) for run in series.runs if run.lines]
        if not outcomes:
            continue
        count = len(outcomes)
        seconds = sum(sum(found.seconds.values()) for found in outcomes) / count
        rows.append(
            [
                series.label,
                *(_rounds([found.rounds_to[target] for found in outcomes]) for target in wanted),
                f"{sum(found.bytes_down for found in outcomes) / count / 1e6:,.1f}",
                f"{sum(found.bytes_up for found in outcomes) / count / 1e6:,.1f}",
                f"{seconds:,.1f}",
                f"{seconds / max(found.rounds for found in outcomes):.2f}",
            ]
        )
    return rows


def _rounds(reached: Sequence[int | None]) -> str:
    return ", ".join("not reached" if number is None else str(number) for number in reached)


def environments(series: Sequence[Series]) -> Rows:
    """Return what every run ran with and on."""
    rows = [["", "seed", "preset", "split", "rounds", "motley", "torch", "hardware"]]
    rows += [_environment(one.label, run) for one in series for run in one.runs]
    return rows


def _environment(label: str, run: Run) -> list[str]:
    config, about = run.config, run.environment
    gpu = about.get("gpu", "none")
    hardware = gpu if gpu != "none" else f"{about.get('cores', '?')} cores, {about.get('processor', '?')}"
    done = run.lines[-1]["round"] if run.lines else 0
    rounds = str(done) if done == config.training.rounds else f"{done} of {config.training.rounds}"
    versions = [str(about.get(name, "?")) for name in ("motley", "torch")]
    title = label if label == method_title(config) else f"{label} ({method_title(config)})"
    return [title, str(config.seed), config.preset or "none", config.split.name, rounds, *versions, hardware]
