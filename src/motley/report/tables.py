"""The report's tables, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from motley.evaluate import Summary
from motley.report.material import Panel, Run, Series, method_title
from motley.studies.statistics import spread

Rows = list[list[str]]


def final(panel: Panel) -> Rows:
    """Return the last, best and mean-of-last-k accuracy of every series, and the latter per size."""
    sizes = panel.sizes[1:] if len(panel.sizes) > 2 else []
    rows = [["", "seeds", "mean of last k", "last", "best", *sizes]]
    for series in panel.series.values():
        if not any(run.evaluated for run in series.runs):
            continue
        row = [series.label, series.count]
        row.append(_over_seeds(series, "mean", lambda summary: summary.mean_of_last_k))
        row.append(_over_seeds(series, "mean", lambda summary: summary.last))
        row.append(_over_seeds(series, "mean", lambda summary: summary.best))
        for size in sizes:
            row.append(_over_seeds(series, size, lambda summary: summary.mean_of_last_k))
        rows.append(row)
    return rows


def _over_seeds(series: Series, size: str, number: Callable[[Summary], float]) -> str:
    """Return the mean and deviation over distinct seeds. Several runs of one seed contribute their mean, once."""
    size = series.key(size)
    per_seed = []
    for runs in series.by_seed.values():
        values = []
        for run in runs:
            accuracy = run.outcome(()).accuracy
            if size in accuracy:
                values.append(100 * number(accuracy[size]))
        if values:
            per_seed.append(fmean(values))
    found = spread(per_seed)
    if found is None:
        return ""
    # The column of seeds says how many there are, so that "(one seed)" need not be in every cell.
    return f"{found.mean:.1f}" if found.std is None else str(found)


def targets(panel: Panel) -> tuple[float, ...]:
    """Return the runs' own targets, and the accuracy that even the weakest run reached, in whole percents."""
    own = {target for run in panel.runs() for target in run.config.evaluation.targets}
    best = [run.outcome(()).accuracy["mean"].best for run in panel.runs() if run.evaluated]
    common = {math.floor(100 * min(best)) / 100} - {0.0} if best else set()
    return tuple(sorted(own | common))


def costs(panel: Panel) -> Rows:
    """Return rounds to targets, traffic and time of every series."""
    wanted = targets(panel)
    rows = [["", *(f"rounds to {target:.0%}" for target in wanted), "MB down", "MB up", "seconds", "seconds per round"]]
    for series in panel.distinct.values():
        outcomes = [run.outcome(wanted) for run in series.runs if run.lines]
        if not outcomes:
            continue
        count = len(outcomes)
        reached = []
        for target in wanted:
            # Targets are about the mean over sizes, which is not what a line about one size shows.
            mean = series.headline == "mean"
            reached.append(_rounds([found.rounds_to[target] for found in outcomes]) if mean else "-")
        seconds = sum(sum(found.seconds.values()) for found in outcomes) / count
        rows.append(
            [
                series.label,
                *reached,
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
    """Return the seed, preset, split, versions and hardware of every run."""
    rows = [["", "folder", "seed", "preset", "split", "rounds", "motley", "torch", "hardware"]]
    rows += [_environment(one.label, run) for one in series for run in one.runs]
    return rows


def _environment(label: str, run: Run) -> list[str]:
    config, about = run.config, run.environment
    gpu = str(about.get("gpu", "none"))
    hardware = gpu if gpu != "none" else f"{about.get('cores', '?')} cores, {about.get('processor', '?')}"
    if not about:
        hardware = "unknown (environment.json cannot be read)"
    done = run.rounds_done
    rounds = str(done) if done == config.training.rounds else f"{done} of {config.training.rounds}"
    versions = [str(about.get(name, "?")) for name in ("motley", "torch")]
    title = label if label == method_title(config) else f"{label} ({method_title(config)})"
    folder = run.path.resolve().name
    return [title, folder, str(config.seed), config.preset or "none", config.split.name, rounds, *versions, hardware]
