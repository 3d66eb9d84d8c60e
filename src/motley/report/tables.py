"""The report's tables, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any

from motley.evaluate import Summary
from motley.report.report_data import Panel, Run, Series
from motley.runs.metrics import OVERALL
from motley.studies.statistics import spread
from motley.tasks import MetricInfo

Rows = list[list[str]]


def final(panel: Panel) -> Rows:
    """Return the final scores of every series: mean of last k, last and best over all sizes.

    The columns per size are means of the last k evaluations.
    """
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
    """Return mean and standard deviation over distinct seeds, as text.

    Several runs of one seed count once, with their mean.
    """
    size = series.key(size)
    per_seed = []
    for runs in series.by_seed.values():
        values = []
        for run in runs:
            outcome = run.outcome(())
            if size in outcome.scores:
                values.append(outcome.metric.scaled(number(outcome.scores[size])))
        if values:
            per_seed.append(fmean(values))
    return _spread_text(series.runs[0].metric, per_seed)


def _spread_text(metric: MetricInfo, values: Sequence[float]) -> str:
    """Return mean and standard deviation of values as text; empty if there are none."""
    over_seeds = spread(values)
    if over_seeds is None:
        return ""
    # A column has the number of seeds, so "(one seed)" is not repeated in every cell.
    return over_seeds.text("" if over_seeds.std is None else None, percent=metric.percent)


#: Columns of the table of client scores: whether they are the personalized ones, and their keys in
#: the metrics (`motley.runs.metrics.summarize_clients`).
CLIENT_COLUMNS = {
    "mean": (False, "mean"),
    "weighted": (False, "weighted"),
    "worst tenth": (False, "worst_tenth"),
    "std": (False, "std"),
    "min": (False, "min"),
    "max": (False, "max"),
    "personalized mean": (True, "mean"),
    "personalized worst tenth": (True, "worst_tenth"),
}


def clients(panel: Panel) -> Rows:
    """Return the last scores of clients of every series, over distinct seeds.

    One row for all clients of a series, and one per size if there are several.
    """
    rows = [["", "clients", "global", *CLIENT_COLUMNS]]
    for series in panel.distinct.values():
        by_seed = _client_tables(series)
        if not by_seed:
            continue
        metric = series.runs[0].metric
        rows.append(_client_row(series.label, metric, by_seed))
        sizes: dict[str, None] = {}  # used as an ordered set
        for tables in by_seed:
            for table in tables:
                sizes |= dict.fromkeys(table["sizes"])
        if len(sizes) > 1:
            for size in sizes:
                rows.append(_client_row(f"{series.label}, {size}", metric, by_seed, size))
    return rows


def _client_tables(series: Series) -> list[list[dict[str, Any]]]:
    """Return, per seed, the last tables of the clients' scores of its runs that have any."""
    by_seed = []
    for runs in series.by_seed.values():
        tables = [run.outcome(()).client_scores for run in runs]
        scored = [table for table in tables if table and table.get("clients")]
        if scored:
            by_seed.append(scored)
    return by_seed


def _client_row(
    name: str, metric: MetricInfo, by_seed: Sequence[Sequence[dict[str, Any]]], size: str = ""
) -> list[str]:
    counts: set[str] = set()
    for tables in by_seed:
        counts.update(str(_table_of(table, False, size).get("clients", 0)) for table in tables)
    global_scores = []
    for tables in by_seed:
        global_scores.append([table["global"].get(size or OVERALL) for table in tables])
    row = [name, ", ".join(sorted(counts)), _of_seeds(metric, global_scores)]
    for personalized, key in CLIENT_COLUMNS.values():
        values = []
        for tables in by_seed:
            values.append([_table_of(table, personalized, size).get(key) for table in tables])
        row.append(_of_seeds(metric, values))
    return row


def _of_seeds(metric: MetricInfo, by_seed: Iterable[Iterable[float | None]]) -> str:
    """Return mean and deviation over seeds as text, given the values of each seed's runs.

    Several runs of one seed count once, with their mean. Missing values are left out.
    """
    means = []
    for values in by_seed:
        shown = [metric.scaled(value) for value in values if value is not None]
        if shown:
            means.append(fmean(shown))
    return _spread_text(metric, means)


def _table_of(scores: dict[str, Any], personalized: bool, size: str) -> dict[str, Any]:
    """Return one table of the clients' scores; an empty one if there is none."""
    table: dict[str, Any] = scores
    if personalized:
        table = table.get("personalized") or {}
    if size:
        table = (table.get("sizes") or {}).get(size) or {}
    return table


def targets(panel: Panel) -> tuple[float, ...]:
    """Return the runs' configured targets, and one that all runs reached.

    The latter is the best score of the weakest run, rounded to a whole percent, or to two digits,
    in the direction that is easier to reach.
    """
    values: set[float] = set()
    best = []
    for run in panel.runs():
        values.update(run.config.evaluation.targets)
        if run.evaluated:
            best.append(run.outcome(()).scores["mean"].best)
    if best:
        values.update(_common_target(best, panel.metric))
    return tuple(sorted(values))


def _common_target(best: Sequence[float], metric: MetricInfo) -> list[float]:
    """Return a rounded value that the weakest of several runs reached, or none."""
    weakest = min(best) if metric.higher_is_better else max(best)
    if metric.percent:
        unit = 0.01
    elif weakest > 0:
        unit = 10.0 ** (math.floor(math.log10(weakest)) - 1)
    else:
        return []
    direction = math.floor if metric.higher_is_better else math.ceil
    # 0.57 / 0.01 is slightly less than 57. Scores have six digits.
    common = round(direction(round(weakest / unit, 6)) * unit, 12)
    return [common] if common > 0 else []


def costs(panel: Panel) -> Rows:
    """Return rounds to targets, and traffic and time (means over runs), of every series."""
    all_targets = targets(panel)
    headings = []
    for target in all_targets:
        headings.append(f"rounds to {panel.metric.text(target, 0)}")
    rows = [["", *headings, "MB down", "MB up", "seconds", "seconds per round"]]
    for series in panel.distinct.values():
        outcomes = [run.outcome(all_targets) for run in series.runs if run.lines]
        if not outcomes:
            continue
        row = [series.label]
        for target in all_targets:
            # Targets are about the mean over sizes. A series that shows one size has no entry.
            if series.headline == "mean":
                row.append(_rounds([outcome.rounds_to[target] for outcome in outcomes]))
            else:
                row.append("-")
        seconds = fmean(sum(outcome.seconds.values()) for outcome in outcomes)
        row.append(f"{fmean(outcome.bytes_down for outcome in outcomes) / 1e6:,.1f}")
        row.append(f"{fmean(outcome.bytes_up for outcome in outcomes) / 1e6:,.1f}")
        row.append(f"{seconds:,.1f}")
        # Runs may have different numbers of rounds, if some have not finished.
        row.append(f"{seconds / fmean(outcome.rounds for outcome in outcomes):.2f}")
        rows.append(row)
    return rows


def _rounds(reached: Sequence[int | None]) -> str:
    return ", ".join("not reached" if number is None else str(number) for number in reached)


def environments(series: Sequence[Series]) -> Rows:
    """Return the seed, preset, split, versions and hardware of every run."""
    rows = [["", "folder", "seed", "preset", "split", "rounds", "motley", "torch", "hardware"]]
    for one_series in series:
        for run in one_series.runs:
            rows.append(_environment(one_series.label, run))
    return rows


def _environment(label: str, run: Run) -> list[str]:
    config, environment = run.config, run.environment
    gpu = str(environment.get("gpu", "none"))
    if not environment:
        hardware = "unknown (environment.json cannot be read)"
    elif gpu != "none":
        hardware = gpu
    else:
        hardware = f"{environment.get('cores', '?')} cores, {environment.get('processor', '?')}"
    method = config.method_label
    done, total = run.rounds_done, config.training.rounds
    return [
        label if label == method else f"{label} ({method})",
        run.path.resolve().name,
        str(config.seed),
        config.preset or "none",
        config.split.name,
        str(done) if done == total else f"{done} of {total}",
        str(environment.get("motley", "?")),
        str(environment.get("torch", "?")),
        hardware,
    ]
