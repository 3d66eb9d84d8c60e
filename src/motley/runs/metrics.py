"""The metrics log, one JSON line per round, and the summary of a run computed from it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from motley import tasks
from motley.evaluate import Score, Summary, rounds_to, summarize
from motley.runs.line_log import LineLog
from motley.server.client_scores import ClientScores, Spread
from motley.server.record import RoundRecord
from motley.tasks import MetricInfo

#: The key of the mean over sizes, beside the names of the sizes.
OVERALL = "mean"
#: The metric of lines that name none: all lines of classifications.
ACCURACY = tasks.ACCURACY


def to_line(record: RoundRecord) -> dict[str, Any]:
    """Return a round's record as the JSON object that the log holds. Empty fields are left out."""
    line: dict[str, Any] = {"round": record.round_number}
    if record.scores:
        line |= _scores_to_line(record.scores)
    if record.why_no_scores:
        line["why_no_scores"] = record.why_no_scores
    if record.client_scores is not None:
        line["client_scores"] = summarize_clients(record.client_scores)
    line["train_loss"] = _number(record.train_loss)
    line["clients"] = record.clients
    if record.refused:
        line["refused"] = _string_keys(record.refused)
    if record.repeated:
        line["repeated"] = [_string_keys(reasons) for reasons in record.repeated]
    if record.idle:
        line["idle"] = record.idle
    line["seconds"] = {phase: round(seconds, 4) for phase, seconds in record.seconds.items()}
    line["bytes"] = {"down": record.bytes_down, "up": record.bytes_up}
    if record.epsilon:
        line["epsilon"] = _numbers(record.epsilon)
    if record.metrics:
        line["metrics"] = _numbers(record.metrics)
    return line


def _scores_to_line(scores: Mapping[str, Score]) -> dict[str, Any]:
    """Return the fields of a line for the scores of every size.

    Accuracy has a field of its own, as in all lines of earlier versions. The other metrics are in
    `scores`, by name. `metric` describes the primary one, unless it is accuracy.
    """
    line: dict[str, Any] = {}
    first = next(iter(scores.values()))
    if first.metric.name != ACCURACY.name:
        line["metric"] = {
            "name": first.metric.name,
            "higher_is_better": first.metric.higher_is_better,
            "percent": first.metric.percent,
        }
    others: dict[str, dict[str, float | None]] = {}
    for name in first.metrics:
        values = {size: score.metrics[name] for size, score in scores.items()}
        values[OVERALL] = sum(values.values()) / len(values)
        if name == ACCURACY.name:
            line["accuracy"] = {size: round(value, 6) for size, value in values.items()}
        else:
            others[name] = _numbers(values)
    if others:
        line["scores"] = others
    line["loss"] = {size: _number(score.loss) for size, score in scores.items()}
    if first.class_accuracy:
        line["class_accuracy"] = {
            size: _rounded(score.class_accuracy) for size, score in scores.items()
        }
    return line


def metric_of(lines: Iterable[Mapping[str, Any]]) -> MetricInfo:
    """Return the primary metric of a run's lines: accuracy, unless a line says otherwise."""
    for line in lines:
        if line.get("metric"):
            return MetricInfo(**line["metric"])
    return ACCURACY


def scores_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return a line's values of the primary metric: size, or `OVERALL` -> value.

    Values that are not finite are left out. Empty if the round was not evaluated.
    """
    metric = metric_of([line])
    if metric.name == ACCURACY.name:
        values: Mapping[str, float | None] = line.get("accuracy") or {}
    else:
        values = (line.get("scores") or {}).get(metric.name) or {}
    return {size: value for size, value in values.items() if value is not None}


def summarize_clients(scores: ClientScores) -> dict[str, Any]:
    """Return the distribution of clients' scores: over all clients, and for each size.

    The scores themselves are in the log of client scores (`runs/client_log.py`).
    """
    summary: dict[str, Any] = {
        "metric": scores.metric.name,
        "unscored": len(scores.unscored),
        "bytes": {"down": scores.bytes_down, "up": scores.bytes_up},
    }
    if scores.scores:
        summary |= _spreads(scores.spread, scores.sizes)
    if scores.personalized_spread() is not None:
        summary["personalized"] = _spreads(scores.personalized_spread, scores.sizes)
    return summary


def _spreads(spread_of: Callable[[str | None], Spread | None], sizes: list[str]) -> dict[str, Any]:
    """Return the numbers of all clients, and of each size in a table `sizes`."""
    tables = {}
    for size in (None, *sizes):
        spread = spread_of(size)
        assert spread is not None
        numbers = _numbers({name: value for name, value in asdict(spread).items()})
        tables[size] = {**numbers, "clients": spread.clients}
    return {**tables.pop(None), "sizes": tables}


def stage_metrics(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a line's metrics that are not per layer, without the prefix `method/`."""
    metrics = {}
    for name, value in (line.get("metrics") or {}).items():
        if name.count("/") == 1:
            metrics[name.removeprefix("method/")] = value
    return metrics


def layer_metrics(line: Mapping[str, Any], stage: str) -> dict[str, dict[str, float | None]]:
    """Return the metrics per layer that a stage reports in a line: layer -> name -> value."""
    layers: dict[str, dict[str, float | None]] = {}
    for metric, value in (line.get("metrics") or {}).items():
        reporter, *layer, name = metric.split("/")
        if reporter == stage and layer:
            layers.setdefault("/".join(layer), {})[name] = value
    return layers


def overall(record: RoundRecord) -> float:
    """Return the mean of the primary metric over sizes."""
    return sum(score.value for score in record.scores.values()) / len(record.scores)


def _rounded(accuracies: tuple[float | None, ...]) -> list[float | None]:
    """Round the accuracies per class. None marks a class without test images."""
    return [None if accuracy is None else round(accuracy, 4) for accuracy in accuracies]


def _number(value: float) -> float | None:
    """Round to six digits. NaN and infinity, which JSON cannot represent, become None (null)."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in values.items()}


def _string_keys(reasons: Mapping[int, str]) -> dict[str, str]:
    return {str(client): reason for client, reason in reasons.items()}


#: A number of bytes or examples. A larger one cannot come from a run, and floats cannot hold it.
Count = Annotated[int, Field(ge=0, lt=2**63)]
_STRICT = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class MetricTable(BaseModel):
    """The fields of `MetricInfo`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    higher_is_better: bool
    percent: bool


class Traffic(BaseModel):
    """Bytes sent to clients and received from them."""

    model_config = _STRICT

    down: Count
    up: Count


class SpreadTable(BaseModel):
    """The fields of `Spread`, all of them missing if no client was scored."""

    model_config = _STRICT

    clients: Count = 0
    mean: float | None = None
    weighted: float | None = None
    worst_tenth: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None


class SpreadsTable(SpreadTable):
    """The numbers of all clients, and of each size."""

    sizes: dict[str, SpreadTable] | None = None


class ClientScoresTable(SpreadsTable):
    """The result of `summarize_clients`."""

    metric: str
    unscored: Count
    bytes: Traffic
    personalized: SpreadsTable | None = None


class Line(BaseModel):
    """The types of the fields that Motley computes with. Other fields are allowed and kept."""

    model_config = _STRICT

    round: Annotated[int, Field(ge=1, lt=2**63)]
    seconds: dict[str, float]
    bytes: Traffic
    accuracy: dict[str, float] | None = None
    loss: dict[str, float | None] | None = None
    train_loss: float | None = None
    class_accuracy: dict[str, list[float | None]] | None = None
    client_scores: ClientScoresTable | None = None
    metric: MetricTable | None = None
    scores: dict[str, dict[str, float | None]] | None = None
    clients: list[int] | None = None
    why_no_scores: str | None = None
    refused: dict[str, str] | None = None
    repeated: list[dict[str, str]] | None = None
    idle: list[int] | None = None
    epsilon: dict[str, float | None] | None = None
    metrics: dict[str, float | None] | None = None
    # Earlier versions wrote these two instead of `metrics` (see `_upgrade`).
    method: dict[str, float | None] | None = None
    inco: dict[str, dict[str, float | None]] | None = None


class MetricsLog(LineLog):
    """The file metrics.jsonl, to which one line per round is appended."""

    def append(self, record: RoundRecord) -> None:
        """Add a round's line."""
        self.append_text(record.round_number, json.dumps(to_line(record)))

    def truncate(self, round_number: int) -> None:
        """Delete the lines after `round_number`, and a last line that is incomplete."""
        kept = []
        for text, line in self._lines():
            if line["round"] <= round_number:
                kept.append((line["round"], text))
        self.keep_texts(kept)

    def read(self) -> list[dict[str, Any]]:
        """Return the lines, validated. An incomplete last line, left by a kill, is skipped."""
        return [_upgrade(line) for _, line in self._lines()]

    def _lines(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the lines with their texts. Their rounds must rise."""
        last_round = 0

        def parse(text: str) -> dict[str, Any]:
            nonlocal last_round
            line = _parse(text)
            if line["round"] <= last_round:
                raise ValueError(f"round: is {line['round']}, after a line of round {last_round}")
            last_round = line["round"]
            return line

        return self.parse(parse, "the metrics of a round")


def _upgrade(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the tables `method` and `inco` of earlier versions in `metrics`."""
    if not (line.get("method") or line.get("inco")):
        return line
    upgraded = dict(line)
    metrics = {}
    for name, value in (upgraded.pop("method", None) or {}).items():
        metrics[f"method/{name}"] = value
    for layer, coefficients in (upgraded.pop("inco", None) or {}).items():
        for name, value in coefficients.items():
            metrics[f"inco/{layer}/{name}"] = value
    upgraded["metrics"] = metrics
    return upgraded


def _parse(text: str) -> dict[str, Any]:
    """Return a line's object. Raise ValueError with the reason if it is no round's metrics."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    try:
        Line.model_validate(line)
    except ValidationError as error:
        raise ValueError(validation_problem(error)) from None
    assert isinstance(line, dict)
    return line


def validation_problem(error: ValidationError) -> str:
    """Return the first problem as "key: reason"."""
    first = error.errors(include_input=False, include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg'].lower()}" if key else "not a JSON object"


@dataclass(frozen=True)
class Outcome:
    """The summary of a run's metrics."""

    #: The number of completed rounds.
    rounds: int
    #: The primary metric, which `scores` and `rounds_to` are about.
    metric: MetricInfo
    #: Size, or `OVERALL` for the mean over sizes -> summary of its values of the primary metric.
    scores: dict[str, Summary]
    rounds_to: dict[float, int | None]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]
    #: The privacy spent by the run, if updates are noised. None stands for infinity.
    epsilon: dict[str, float | None]
    #: The number of evaluations that `mean_of_last_k` is over: at most `last_k`.
    averaged: int
    #: The last scores of clients (`summarize_clients`), with their round; None if there are none.
    client_scores: dict[str, Any] | None = None

    @property
    def accuracy(self) -> dict[str, Summary]:
        """The scores, if the primary metric is accuracy; else empty."""
        return self.scores if self.metric.name == ACCURACY.name else {}


def outcome(lines: list[dict[str, Any]], last_k: int, targets: tuple[float, ...]) -> Outcome:
    """Summarize a run: scores (last, best, mean of last k), rounds to targets, traffic, time."""
    metric = metric_of(lines)
    evaluated = [line for line in lines if scores_of(line)]
    # Each has the rounds in which it was evaluated: if clients' own models are, a size has a
    # score only in rounds in which some client of that size was asked. The line with most sizes
    # has them in the best order.
    fullest = max((scores_of(line) for line in evaluated), key=len, default={})
    rounds: dict[str, list[int]] = {name: [] for name in fullest}
    series: dict[str, list[float]] = {name: [] for name in fullest}
    for line in evaluated:
        for name, value in scores_of(line).items():
            rounds.setdefault(name, []).append(line["round"])
            series.setdefault(name, []).append(value)
    seconds: dict[str, float] = {}
    for line in lines:
        for phase, value in line["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    return Outcome(
        rounds=lines[-1]["round"] if lines else 0,
        metric=metric,
        scores={
            name: summarize(rounds[name], values, last_k, metric) for name, values in series.items()
        },
        rounds_to={
            target: rounds_to(target, rounds.get(OVERALL, []), series.get(OVERALL, []), metric)
            for target in targets
        },
        bytes_down=sum(line["bytes"]["down"] for line in lines),
        bytes_up=sum(line["bytes"]["up"] for line in lines),
        seconds=seconds,
        epsilon=(lines[-1].get("epsilon") or {}) if lines else {},
        averaged=min(last_k, len(evaluated)),
        client_scores=last_client_scores(lines),
    )


def last_client_scores(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the last summary of clients' scores; None if there is none.

    It has the round, and as `global` the scores of every size on the test set in that round.
    """
    for line in reversed(lines):
        if line.get("client_scores"):
            return {"round": line["round"], "global": scores_of(line), **line["client_scores"]}
    return None
