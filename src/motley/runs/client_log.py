"""The log of client scores, client_scores.jsonl: one JSON line per round that scored clients.

    {"round": 10, "metric": "accuracy", "sizes": {"small": {"clients": [0, 3], "examples": [12, 9],
     "scores": [0.75, 0.8889], "personalized": [0.8333, 1.0]}}, "unscored": [7]}

It is a file of its own, so that metrics.jsonl stays small with many clients.
"""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from motley.runs.line_log import LineLog
from motley.runs.metrics import validation_problem
from motley.server.client_scores import ClientScores

#: Significant digits of a score in the log.
DIGITS = 5


class SizeScores(BaseModel):
    """The scores of one size's clients. All lists have one entry per client.

    A score that is not finite, which JSON cannot represent, is None (null).
    """

    model_config = ConfigDict(strict=True)

    clients: list[int]
    examples: list[int]
    scores: list[float | None]
    #: None: there are no personalized scores.
    personalized: list[float | None] | None = None

    @model_validator(mode="after")
    def _have_one_entry_per_client(self) -> SizeScores:
        for scores in (self.examples, self.scores, self.personalized):
            if scores is not None and len(scores) != len(self.clients):
                raise ValueError("its lists have unlike lengths")
        return self


class ClientLine(BaseModel):
    """The scores of clients after a round."""

    model_config = ConfigDict(strict=True)

    round: int
    metric: str
    sizes: dict[str, SizeScores]
    unscored: list[int]

    def scores(self, *, personalized: bool = False) -> list[float]:
        """Return the finite scores of all clients; empty if there are no personalized ones."""
        scores: list[float | None] = []
        for size in self.sizes.values():
            scores += (size.personalized or []) if personalized else size.scores
        return [score for score in scores if score is not None]


def to_line(round_number: int, scores: ClientScores) -> dict[str, Any]:
    """Return the scores of a round as the JSON object that the log holds."""
    sizes: dict[str, dict[str, Any]] = {}
    for score in scores.scores:
        lists = sizes.setdefault(score.size, {"clients": [], "examples": [], "scores": []})
        lists["clients"].append(score.client)
        lists["examples"].append(score.examples)
        lists["scores"].append(_number(score.score))
        if score.personalized is not None:
            lists.setdefault("personalized", []).append(_number(score.personalized))
    return {
        "round": round_number,
        "metric": scores.metric.name,
        "sizes": sizes,
        "unscored": list(scores.unscored),
    }


def _number(score: float) -> float | None:
    return float(f"{score:.{DIGITS}g}") if math.isfinite(score) else None


class ClientLog(LineLog):
    """The file client_scores.jsonl."""

    def append(self, round_number: int, scores: ClientScores) -> None:
        """Add the line of a round."""
        text = json.dumps(to_line(round_number, scores), separators=(",", ":"))
        self.append_text(round_number, text)

    def truncate(self, round_number: int) -> None:
        """Delete the lines after `round_number`, and a last line that is incomplete."""
        if not self.path.exists():
            return
        kept = []
        for text, line in self._lines():
            if line.round <= round_number:
                kept.append((line.round, text))
        self.keep_texts(kept)

    def last(self) -> ClientLine | None:
        """Return the last line; None if there is none. An incomplete last line is skipped."""
        for text in reversed(self.read_bytes().split(b"\n")[-3:]):
            try:
                return ClientLine.model_validate_json(text)
            except ValidationError:
                continue
        return None

    def read(self) -> list[ClientLine]:
        """Return all lines."""
        return [line for _, line in self._lines()]

    def _lines(self) -> list[tuple[str, ClientLine]]:
        """Return the lines with their texts. An incomplete last line is skipped."""
        return self.parse(_parse, "the scores of clients")


def _parse(text: str) -> ClientLine:
    try:
        return ClientLine.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(validation_problem(error)) from None
