"""The metrics log: one JSON line a round, and what a run's lines come to."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.errors import MotleyError
from motley.evaluate import Summary, rounds_to, summarize
from motley.files import write_atomically
from motley.round import Record

OVERALL = "mean"
"""The name of the mean over sizes, beside the sizes' own names."""


def to_line(record: Record) -> dict[str, Any]:
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
    if record.inco:
        line["inco"] = {layer: {n: _number(v) for n, v in row.items()} for layer, row in record.inco.items()}
    if record.method:
        line["method"] = {name: _number(value) for name, value in record.method.items()}
    return line


def overall(record: Record) -> float:
    """Return the mean accuracy over sizes."""
    return sum(score.accuracy for score in record.scores.values()) / len(record.scores)


def _rounded(accuracies: tuple[float | None, ...]) -> list[float | None]:
    """Round accuracies per class; a class without test images stays None, which is null in JSON."""
    return [None if accuracy is None else round(accuracy, 4) for accuracy in accuracies]


def _number(value: float) -> float | None:
    """JSON has no NaN: a number that is not finite is written as null."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


class MetricsLog:
    """The file, appended to a line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: Record) -> None:
        """Add a round's line."""
        with self.path.open("a") as file:
            file.write(json.dumps(to_line(record)) + "\n")

    def cut(self, round_number: int) -> None:
        """Drop lines after a round, and a last line that was not written to its end."""
        kept = [line for line in self.read() if line["round"] <= round_number]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode())

    def read(self) -> list[dict[str, Any]]:
        """Return the lines; one that a kill cut short is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(errors="replace").splitlines()
        read = []
        for number, line in enumerate(lines, start=1):
            try:
                read.append(json.loads(line))
            except json.JSONDecodeError:
                if number < len(lines):
                    raise MotleyError(f"{self.path}, line {number}: is not JSON.") from None
        return read


@dataclass(frozen=True)
class Outcome:
    """What a run's metrics come to."""

    rounds: int
    accuracy: dict[str, Summary]
    """Size, or `mean` for all sizes -> its summary."""
    rounds_to: dict[float, int | None]
    bytes_down: int
    bytes_up: int
    seconds: dict[str, float]
    epsilon: dict[str, float | None]
    """What the run has cost in privacy, where it guards uploads; None is infinite."""


def outcome(lines: list[dict[str, Any]], last_k: int, targets: tuple[float, ...]) -> Outcome:
    """Return last, best and mean-of-last-k accuracy a size and overall, rounds to targets, traffic and time."""
    evaluated = [line for line in lines if "accuracy" in line]
    rounds = [line["round"] for line in evaluated]
    series = {
        name: [line["accuracy"][name] for line in evaluated] for name in (evaluated[0]["accuracy"] if evaluated else ())
    }
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
        epsilon=lines[-1].get("epsilon", {}) if lines else {},
    )
