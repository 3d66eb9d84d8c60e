"""The measures of a study: numbers computed from a run's metrics."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from motley.config import Config
from motley.core.errors import MotleyError, unknown
from motley.evaluate import rounds_to
from motley.privacy import why_no_scores
from motley.runs.metrics import OVERALL, layer_metrics, metric_of, outcome, scores_of
from motley.tasks import MetricInfo

#: Measures of the primary metric -> the attributes of `Summary` that hold them. Accuracies are in
#: percent.
SCORES = {"mean-of-last-k": "mean_of_last_k", "last": "last", "best": "best"}
#: Measures of clients' scores on their own test examples -> whether they are the personalized ones,
#: and the number in the metrics (`motley.runs.metrics.summarize_clients`). They are means over the
#: last k rounds that scored clients.
CLIENTS = {
    "client-mean": (False, "mean"),
    "client-weighted": (False, "weighted"),
    "client-worst": (False, "worst_tenth"),
    "client-std": (False, "std"),
    "personalized-mean": (True, "mean"),
    "personalized-worst": (True, "worst_tenth"),
}
#: The first round that reaches the study's target, or none.
ROUNDS = "rounds-to"
#: positive:LAYER is how often InCo's beta is above 0 in a layer, in percent, over kernels and
#: rounds (InCo, Table 3).
POSITIVE = "positive"


class Measure(str):
    """The name of a measure, validated."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.checked, core_schema.str_schema())

    @classmethod
    def checked(cls, name: str) -> Measure:
        """Return a measure by its name. Unknown names are rejected."""
        if name in (*SCORES, *CLIENTS, ROUNDS):
            return cls(name)
        prefix, _, layer = name.partition(":")
        if prefix == POSITIVE and layer:
            return cls(name)
        raise ValueError(unknown("measure", name, (*SCORES, *CLIENTS, ROUNDS, f"{POSITIVE}:LAYER")))

    @property
    def unit(self) -> str:
        """The unit of its numbers, if the primary metric is accuracy."""
        return "rounds" if self == ROUNDS else "%"

    @property
    def no_value(self) -> str:
        """The text of a table for finished runs without a value."""
        return "not reached" if self == ROUNDS else "no value"

    def check_config(self, config: Config, key: str) -> None:
        """Raise if a configuration's runs have no such number. `key` says where it was set."""
        reason = why_no_scores(config.privacy, config.has_own_models)
        if reason and self in (*SCORES, ROUNDS):
            raise MotleyError(f"{key} = {self!r}: its runs have no scores: {reason}.")
        if self not in CLIENTS:
            return
        evaluation = config.evaluation
        if evaluation.per_client == "off":
            raise MotleyError(
                f"{key} = {self!r}: needs the scores of clients. Set evaluation.per_client to "
                "'round' or 'all', in the study's `set` or with --set."
            )
        if CLIENTS[self][0] and not evaluation.personalize_epochs:
            raise MotleyError(
                f"{key} = {self!r}: needs evaluation.personalize_epochs above 0, in the study's "
                "`set` or with --set."
            )

    def unit_of(self, metric: MetricInfo) -> str:
        """Return the unit of its numbers for runs with this primary metric."""
        if self not in (*SCORES, *CLIENTS) or metric.percent:
            return self.unit
        return metric.name if metric.higher_is_better else f"{metric.name}, {metric.direction}"

    def of(
        self,
        lines: list[dict[str, Any]],
        config: Config,
        target: float | None,
        whole: bool = False,
        size: str = "",
    ) -> float | None:
        """Return the value of this measure for a run, or None if it has none.

        Scores are means over all sizes, unless `size` names one or `whole` asks for the whole
        model's. Scores of clients are those of all clients, or of the clients that have that size.
        `target` is the score for "rounds-to"; an accuracy in percent.
        """
        if whole and not size:
            whole_size = whole_model(config)
            if whole_size is None:
                return None
            size = whole_size
        if self in CLIENTS:
            return self._of_clients(lines, config.evaluation.last_k, size)
        size = size or OVERALL
        metric = metric_of(lines)
        if self in SCORES:
            summary = outcome(lines, config.evaluation.last_k, ()).scores.get(size)
            return metric.scaled(getattr(summary, SCORES[self])) if summary else None
        if self == ROUNDS:
            if target is None:
                return None
            evaluated = [line for line in lines if size in scores_of(line)]
            rounds = [line["round"] for line in evaluated]
            values = [scores_of(line)[size] for line in evaluated]
            # Not the scores times 100: 100 * 0.57 is less than 57. Scores have six digits.
            unscaled = round(target / 100, 12) if metric.percent else target
            return rounds_to(unscaled, rounds, values, metric)
        layer = self.partition(":")[2]
        fractions = []
        for line in lines:
            fraction = layer_metrics(line, "inco").get(layer, {}).get("positive")
            if fraction is not None:
                fractions.append(fraction)
        return 100 * sum(fractions) / len(fractions) if fractions else None

    def _of_clients(self, lines: list[dict[str, Any]], last_k: int, size: str) -> float | None:
        personalized, name = CLIENTS[self]
        values = []
        for line in lines:
            table = line.get("client_scores") or {}
            if personalized:
                table = table.get("personalized") or {}
            if size:
                table = (table.get("sizes") or {}).get(size) or {}
            if table.get(name) is not None:
                values.append(table[name])
        tail = values[-last_k:]
        return metric_of(lines).scaled(sum(tail) / len(tail)) if tail else None


def whole_model(config: Config) -> str | None:
    """Return the name of the size that is the whole model of a run."""
    return config.split.whole(config.model.sizes)
