"""`motley show`: the results of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from motley.cli.code import import_for_runs
from motley.cli.terminal import Console, visible
from motley.cli.warnings import warn_about
from motley.config import Config
from motley.core.errors import MotleyError
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.metrics import (
    ACCURACY,
    OVERALL,
    MetricsLog,
    Outcome,
    metric_of,
    outcome,
    scores_of,
    stage_metrics,
)
from motley.runs.privacy_ledger import spent_epsilon
from motley.tasks import MetricInfo


def show(
    paths: list[Path] = typer.Argument(
        ..., metavar="RUN...", help="Folders of runs; several are shown side by side."
    ),
    fingerprint_only: bool = typer.Option(
        False, "--fingerprint", help="Print a hash of the final global state."
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print a JSON list with one object per run."
    ),
) -> None:
    """Show the score per size and overall, the communication and the time of runs."""
    if fingerprint_only and as_json:
        raise MotleyError(
            "--fingerprint and --json: give one of them; --json includes the fingerprint."
        )
    import_for_runs(*paths)
    folders = [RunFolder.open(path) for path in paths]
    warn_about(*paths, model=as_json or fingerprint_only)
    # Names in a run's files may look like rich's markup. They are printed as they are.
    console = Console(markup=False, emoji=False)
    if fingerprint_only:
        for folder in folders:
            digest = _fingerprint(folder)
            if digest is None:
                raise MotleyError(f"{folder.path} has no checkpoint yet.")
            print(digest if len(folders) == 1 else f"{digest}  {visible(str(folder.path))}")
    elif as_json:
        print(json.dumps([as_plain(folder) for folder in folders], indent=2))
    elif len(folders) == 1:
        print_outcome(console, folders[0])
    else:
        console.print(side_by_side(folders))


def _fingerprint(folder: RunFolder) -> str | None:
    server = load_checkpoint(folder.checkpoints)
    return fingerprint(server.state) if server is not None else None


def title(config: Config) -> str:
    """Return a short title: the data set and the method of a run."""
    return f"{config.data.name}, {config.method_label}"


def print_outcome(console: Console, folder: RunFolder) -> None:
    """Print the results of a run."""
    config, missing_code = folder.read_config_for_display()
    if missing_code:
        _say(console, missing_code)
    lines = MetricsLog(folder.metrics).read()
    if not lines:
        _say(console, f"{folder.path} has no finished round yet.")
        return
    result = outcome(lines, config.evaluation.last_k, config.evaluation.targets)
    preset = f"preset {config.preset}, " if config.preset else ""
    about = f" ({preset}split {config.split.name}, seed {config.seed})"
    console.print(Text.assemble((title(config), "bold"), about))
    _say(console, f"round {result.rounds} of {config.training.rounds}")
    _print_scores(console, result, lines)
    metrics = stage_metrics(lines[-1])
    if metrics:
        numbers = ", ".join(f"{name} {_written(value)}" for name, value in metrics.items())
        _say(console, f"{config.method.name}, last round: {numbers}")
    down, up = result.bytes_down / 1e6, result.bytes_up / 1e6
    _say(console, f"communication: {down:,.1f} MB down, {up:,.1f} MB up")
    epsilon = spent_epsilon(folder) or result.epsilon
    if epsilon:
        _print_epsilon(console, epsilon, config)
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in result.seconds.items())
    total = sum(result.seconds.values())
    _say(console, f"time: {total:.1f} s, {total / result.rounds:.2f} s per round ({phases})")


def _print_scores(console: Console, result: Outcome, lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the scores of sizes and of clients, and when targets were reached."""
    if result.scores:
        console.print_numbers(score_table(result))
        others = other_metrics(lines)
        if others:
            _say(console, f"mean over sizes, last evaluation: {others}")
    else:
        reasons = [line["why_no_scores"] for line in lines if line.get("why_no_scores")]
        no_scores = f"no scores: {reasons[-1]}" if reasons else "no round has been evaluated yet"
        _say(console, no_scores)
    if result.client_scores is not None:
        _say(console, client_headline(result.client_scores))
        console.print_numbers(client_table(result))
    for target, number in result.rounds_to.items():
        reached = f"first reached in round {number}" if number is not None else "not reached"
        score = f"{result.metric.text(target, 1)} mean {result.metric.name}"
        _say(console, f"{score}: {reached}")


def _print_epsilon(console: Console, epsilon: Mapping[str, Any], config: Config) -> None:
    model = _epsilon(epsilon.get("model"))
    upload = _epsilon(epsilon.get("upload"))
    _say(
        console,
        f"client-level epsilon: {model} (adversary sees the global models), "
        f"{upload} (adversary sees individual updates), delta {config.privacy.delta:g}",
    )
    if config.reveals_scores:
        note = "epsilon does not cover the scores that clients report (privacy.reveal_scores)"
        _say(console, note)


def _say(console: Console, text: str) -> None:
    """Print text, which may have paths and names in it, without colours, markup or line breaks."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _written(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _epsilon(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.2f}"


def score_table(result: Outcome) -> Table:
    """Return one row per size and one for their mean."""
    metric = result.metric
    table = Table("size", "last", "best", "best round", f"mean of last {result.averaged}")
    if metric.name != ACCURACY.name:
        table.title = f"{metric.name} ({metric.direction})"
    for column in table.columns[1:]:
        column.justify = "right"
    for name, summary in result.scores.items():
        if name == OVERALL:
            table.add_section()
        table.add_row(
            name,
            metric.text(summary.last),
            metric.text(summary.best),
            str(summary.best_round),
            metric.text(summary.mean_of_last_k),
            style="bold" if name == OVERALL else "",
        )
    return table


def other_metrics(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the last mean over sizes of every metric that is not the primary one, as text."""
    primary = metric_of(lines).name
    evaluated = [line for line in lines if scores_of(line)]
    metrics = dict(evaluated[-1].get("scores") or {})
    if "accuracy" in evaluated[-1]:
        metrics[ACCURACY.name] = evaluated[-1]["accuracy"]
    texts = []
    for name, values in metrics.items():
        if name != primary:
            texts.append(f"{name} {_written(values.get(OVERALL))}")
    return ", ".join(texts)


# ---- scores of clients

#: Columns of the table of client scores, and the keys of their numbers in the metrics.
SPREAD_COLUMNS = {
    "mean": "mean",
    "weighted": "weighted",
    "worst tenth": "worst_tenth",
    "std": "std",
    "min": "min",
    "max": "max",
}


def client_headline(scores: Mapping[str, Any]) -> str:
    """Say how many clients were scored, and when."""
    unscored = scores["unscored"]
    without = f", {unscored} without a score" if unscored else ""
    clients = scores.get("clients", 0)
    return f"clients on their own test data, round {scores['round']}: {clients} scored{without}"


def client_table(result: Outcome) -> Table:
    """Return one row per size and one for all clients, beside the global score.

    With personalized scores, each has a second row.
    """
    table = Table("size", "clients", "global", *SPREAD_COLUMNS)
    for column in table.columns[1:]:
        column.justify = "right"
    scores = result.client_scores or {}
    personalized = scores.get("personalized") or {}
    sizes = scores.get("sizes") or {}
    for size in sizes:
        after = (personalized.get("sizes") or {}).get(size)
        _add_spread(table, result, size, sizes[size], after)
    table.add_section()
    if scores.get("clients"):
        _add_spread(table, result, OVERALL, scores, personalized)
    return table


def _add_spread(
    table: Table,
    result: Outcome,
    size: str,
    spread: Mapping[str, Any],
    after: Mapping[str, Any] | None,
) -> None:
    """Add the row of a size, or of all clients, and one for the scores after local training."""
    name, style = ("all clients", "bold") if size == OVERALL else (size, "")
    of_round = (result.client_scores or {}).get("global") or {}
    overall = _score(result.metric, of_round.get(size))
    row = [_score(result.metric, spread[key]) for key in SPREAD_COLUMNS.values()]
    table.add_row(name, str(spread["clients"]), overall, *row, style=style)
    if after:
        row = [_score(result.metric, after[key]) for key in SPREAD_COLUMNS.values()]
        table.add_row("  personalized", "", "", *row, style=style)


def _score(metric: MetricInfo, value: float | None) -> str:
    return "" if value is None else metric.text(value)


# ---- several runs


def side_by_side(folders: Sequence[RunFolder]) -> Table:
    """Return a table with one column per run: main settings, scores, traffic and time."""
    runs = [as_plain(folder, with_fingerprint=False) for folder in folders]
    table = Table("")
    for folder in folders:
        table.add_column(str(folder.path), justify="right", overflow="fold")
    for key in ("data", "method", "inco", "split", "preset", "seed"):
        values = [str(run[key] or "") for run in runs]
        if any(values):
            table.add_row(key, *values)
    rounds = [f"{run['round']} of {run['rounds']}" for run in runs]
    table.add_row("round", *rounds, end_section=True)
    _add_score_rows(table, runs)
    _add_client_rows(table, runs)
    table.add_row("MB down", *(f"{run['bytes']['down'] / 1e6:,.1f}" for run in runs))
    table.add_row("MB up", *(f"{run['bytes']['up'] / 1e6:,.1f}" for run in runs))
    table.add_row("seconds", *(f"{sum(run['seconds'].values()):,.1f}" for run in runs))
    return table


def _add_score_rows(table: Table, runs: Sequence[Mapping[str, Any]]) -> None:
    """Add the last and the best score of every size that some run has, and of their mean."""
    sizes: dict[str, None] = {}  # used as an ordered set
    for run in runs:
        sizes |= dict.fromkeys(run["scores"])
    sizes.pop(OVERALL, None)
    metrics = [run["metric"] for run in runs]
    # Runs of different tasks can be shown beside each other: each column has its own metric.
    has_one_metric = len(set(metrics)) == 1
    if not has_one_metric:
        table.add_row("metric", *metrics)
    word = metrics[0] if has_one_metric else "score"
    for key in ("last", "best"):
        for size in sizes:
            table.add_row(f"{key} {word}, {size}", *_score_texts(runs, size, key))
        means = _score_texts(runs, OVERALL, key)
        table.add_row(f"{key} {word}, {OVERALL}", *means, style="bold", end_section=True)


def _add_client_rows(table: Table, runs: Sequence[Mapping[str, Any]]) -> None:
    """Add the scores of clients, if some run has any."""
    for words, table_of in (("clients", _client_scores), ("personalized", _personalized)):
        if not any(table_of(run) for run in runs):
            continue
        for column, key in SPREAD_COLUMNS.items():
            row = [_score(_metric(run), table_of(run).get(key)) for run in runs]
            table.add_row(f"{words}: {column}", *row, end_section=key == "max")


def _client_scores(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return run["client_scores"] or {}


def _personalized(run: Mapping[str, Any]) -> Mapping[str, Any]:
    return _client_scores(run).get("personalized") or {}


def _metric(run: Mapping[str, Any]) -> MetricInfo:
    return MetricInfo(run["metric"], run["higher_is_better"], run["percent"])


def _score_texts(runs: Sequence[Mapping[str, Any]], size: str, key: str) -> list[str]:
    """Return one score of a size per run; empty if the run does not have it."""
    texts = []
    for run in runs:
        value = run["scores"].get(size, {}).get(key)
        texts.append(_score(_metric(run), value))
    return texts


def as_plain(folder: RunFolder, *, with_fingerprint: bool = True) -> dict[str, Any]:
    """Return the results of a run as plain values, for JSON."""
    config, _ = folder.read_config_for_display()
    lines = MetricsLog(folder.metrics).read()
    result = outcome(lines, config.evaluation.last_k, config.evaluation.targets)
    scores = {}
    for size, summary in result.scores.items():
        scores[size] = {
            "last": summary.last,
            "best": summary.best,
            "best_round": summary.best_round,
            "mean_of_last": summary.mean_of_last_k,
        }
    inco = config.server.inco
    plain: dict[str, Any] = {
        "run": str(folder.path),
        "data": config.data.name,
        "method": config.method.name,
        "inco": inco.variant if inco.active else None,
        "split": config.split.name,
        "preset": config.preset or None,
        "seed": config.seed,
        "round": result.rounds,
        "rounds": config.training.rounds,
        "finished": result.rounds >= config.training.rounds,
        "metric": result.metric.name,
        "higher_is_better": result.metric.higher_is_better,
        "percent": result.metric.percent,
        "scores": scores,
        "accuracy": scores if result.metric.name == ACCURACY.name else None,
        "mean_of_last_rounds": result.averaged,
        "client_scores": result.client_scores,
        "rounds_to": {str(target): number for target, number in result.rounds_to.items()},
        "bytes": {"down": result.bytes_down, "up": result.bytes_up},
        "seconds": result.seconds,
        "epsilon": spent_epsilon(folder) or result.epsilon or None,
    }
    if with_fingerprint:
        plain["fingerprint"] = _fingerprint(folder)
    return plain
