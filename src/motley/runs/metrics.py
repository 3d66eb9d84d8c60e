"""The metrics log: one JSON line per round, and the summary of a run's lines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from motley.core.errors import MotleyError
from motley.evaluate import Summary, rounds_to, summarize
from motley.files import write_atomically
from motley.server.record import RoundRecord

#: The name of the mean over sizes, beside the sizes' own names.
OVERALL = "mean"


def to_line(record: RoundRecord) -> dict[str, Any]:
    """Return a record as plain values."""
    line: dict[str, Any] = {"round": record.round_number}
    if record.scores:
        scores = record.scores
        line["accuracy"] = {size: round(score.accuracy, 6) for size, score in scores.items()}
        line["accuracy"][OVERALL] = round(overall(record), 6)
        line["loss"] = {size: _number(score.loss) for size, score in scores.items()}
        line["class_accuracy"] = {size: _rounded(score.class_accuracy) for size, score in scores.items()}
    line["train_loss"] = _number(record.train_loss)
    line["clients"] = record.clients
    if record.refused:
        line["refused"] = {str(client): reason for client, reason in record.refused.items()}
    if record.repeated:
        line["repeated"] = [{str(client): reason for client, reason in reasons.items()} for reasons in record.repeated]
    if record.idle:
        line["idle"] = record.idle
    line["seconds"] = {phase: round(seconds, 4) for phase, seconds in record.seconds.items()}
    line["bytes"] = {"down": record.bytes_down, "up": record.bytes_up}
    if record.epsilon:
        line["epsilon"] = {who: _number(value) for who, value in record.epsilon.items()}
    if record.metrics:
        line["metrics"] = {name: _number(value) for name, value in record.metrics.items()}
    return line


def stage_numbers(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the numbers of a line's metrics that are not per layer. The method's come without `method/`."""
    metrics = line.get("metrics") or {}
    return {name.removeprefix("method/"): value for name, value in metrics.items() if name.count("/") == 1}


def layer_numbers(line: Mapping[str, Any], stage: str) -> dict[str, dict[str, float | None]]:
    """Return what a stage reports per layer in a line's metrics: layer -> name -> number."""
    layers: dict[str, dict[str, float | None]] = {}
    for name, value in (line.get("metrics") or {}).items():
        reporter, *layer, number = name.split("/")
        if reporter == stage and layer:
            layers.setdefault("/".join(layer), {})[number] = value
    return layers


def overall(record: RoundRecord) -> float:
    """Return the mean accuracy over sizes."""
    return sum(score.accuracy for score in record.scores.values()) / len(record.scores)


def _rounded(accuracies: tuple[float | None, ...]) -> list[float | None]:
    """Round accuracies per class; a class without test images stays None, which is null in JSON."""
    return [None if accuracy is None else round(accuracy, 4) for accuracy in accuracies]


def _number(value: float) -> float | None:
    """JSON has no NaN: a number that is not finite is written as null."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Line(BaseModel):
    """The fields that every line of metrics must have, and those whose values are computed with. Others are kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    round: int
    seconds: dict[str, float]
    bytes: dict[str, int]
    accuracy: dict[str, float] | None = None
    clients: list[int] | None = None
    epsilon: dict[str, float | None] | None = None
    metrics: dict[str, float | None] | None = None
    # Earlier versions wrote these two instead of `metrics`; see `_with_metrics`.
    method: dict[str, float | None] | None = None
    inco: dict[str, dict[str, float | None]] | None = None


class MetricsLog:
    """The file, to which one line per round is appended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: RoundRecord) -> None:
        """Add a round's line."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(to_line(record)) + "\n")
        except OSError as error:
            raise MotleyError(f"{self.path}: cannot be written: {error.strerror}.") from None

    def cut(self, round_number: int) -> None:
        """Drop lines after a round, and a last line that was not written to its end."""
        kept = [line for line in self.read() if line["round"] <= round_number]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def read(self) -> list[dict[str, Any]]:
        """Return the lines, checked. A last line that a kill cut short is left out."""
        if not self.path.exists():
            return []
        texts = self.path.read_text(errors="replace").splitlines()
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(texts, start=1):
            try:
                line = json.loads(text)
            except (json.JSONDecodeError, RecursionError):
                if number < len(texts):
                    raise self._damaged(number, "it is not JSON") from None
                continue
            problem = _problem(line)
            if problem:
                raise self._damaged(number, problem)
            lines.append(_with_metrics(line))
        return lines

    def _damaged(self, number: int, problem: str) -> MotleyError:
        return MotleyError(
            f"{self.path}, line {number}: is not the metrics of a round: {problem}. Remove the line to continue."
        )


def _with_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line whose `metrics` hold what earlier versions wrote as `method` and `inco`."""
    old = {f"method/{name}": value for name, value in (line.get("method") or {}).items()}
    for layer, row in (line.get("inco") or {}).items():
        for name, value in row.items():
            old[f"inco/{layer}/{name}"] = value
    if not old:
        return line
    rest = {key: value for key, value in line.items() if key not in ("method", "inco")}
    return {**rest, "metrics": {**old, **(line.get("metrics") or {})}}


def _problem(line: object) -> str:
    """Say why a line cannot be the metrics of a round; empty if it can."""
    try:
        Line.model_validate(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg'].lower()}" if where else "it is not a table of values"
    assert isinstance(line, dict)
    if missing := [way for way in ("down", "up") if way not in line["bytes"]]:
        return f"bytes.{missing[0]}: field required"
    return ""


@dataclass(frozen=True)
class Outcome:
    """The summary of a run's metrics."""

    rounds: int
    #: Size, or `mean` for the mean over sizes -> its summary.
    accuracy: dict[str, Summary]
    rounds_to: dict[float, int | None]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]
    #: The privacy that the run has spent, if it adds noise to updates; None is infinite.
    epsilon: dict[str, float | None]
    #: The number of accuracies that the mean of the last ones is over: `last_k`, or fewer if there are fewer.
    averaged: int


def outcome(lines: list[dict[str, Any]], last_k: int, targets: tuple[float, ...]) -> Outcome:
    """Return last, best and mean-of-last-k accuracy per size and overall, rounds to targets, traffic and time."""
    evaluated = [line for line in lines if line.get("accuracy")]
    rounds = [line["round"] for line in evaluated]
    series: dict[str, list[float]] = {}
    for name in evaluated[0]["accuracy"] if evaluated else ():
        if all(name in line["accuracy"] for line in evaluated):
            series[name] = [line["accuracy"][name] for line in evaluated]
    seconds: dict[str, float] = {}
    for line in lines:
        for phase, value in line["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + value
    return Outcome(
        rounds=lines[-1]["round"] if lines else 0,
        accuracy={name: summarize(rounds, values, last_k) for name, values in series.items()},
        rounds_to={target: rounds_to(target, rounds, series.get(OVERALL, [])) for target in targets},
        bytes_down=sum(line["bytes"]["down"] for line in lines),
        bytes_up=sum(line["bytes"]["up"] for line in lines),
        seconds=seconds,
        epsilon=(lines[-1].get("epsilon") or {}) if lines else {},
        averaged=min(last_k, len(evaluated)),
    )
