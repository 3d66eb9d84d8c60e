"""The measures of a study: numbers that are read from a run's metrics."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from motley.config import Config
from motley.core.errors import unknown
from motley.evaluate import rounds_to
from motley.runs.metrics import OVERALL, layer_numbers, outcome

#: Accuracies in percent -> their names in a run's summary.
ACCURACIES = {"mean-of-last-k": "mean_of_last_k", "last": "last", "best": "best"}
#: The first round that reaches the target of the study, or none.
ROUNDS = "rounds-to"
#: positive:LAYER is how often InCo's beta is above 0 in a layer, in percent, over kernels and rounds (InCo, Table 3).
POSITIVE = "positive"


class Measure(str):
    """The name of a measure, checked."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls.checked, core_schema.str_schema())

    @classmethod
    def checked(cls, name: str) -> Measure:
        """Return a measure; an unknown name is rejected."""
        kind, colon, layer = name.partition(":")
        if name in (*ACCURACIES, ROUNDS) or (kind == POSITIVE and colon and layer):
            return cls(name)
        raise ValueError(unknown("measure", name, (*ACCURACIES, ROUNDS, f"{POSITIVE}:LAYER")))

    @property
    def unit(self) -> str:
        """The unit of its numbers."""
        return "rounds" if self == ROUNDS else "%"

    def of(
        self,
        lines: list[dict[str, Any]],
        config: Config,
        target: float | None,
        whole: bool = False,
        size: str = "",
    ) -> float | None:
        """Return the number of a run, or None if it has none.

        Accuracies are the mean over all sizes, or those of the `whole` model or of one `size`.
        """
        size = size or (whole_model(config) or "" if whole else OVERALL)
        if self in ACCURACIES:
            summary = outcome(lines, config.evaluation.last_k, ()).accuracy.get(size)
            return 100 * getattr(summary, ACCURACIES[self]) if summary else None
        if self == ROUNDS:
            evaluated = [line for line in lines if "accuracy" in line] if target is not None else []
            accuracies = [100 * line["accuracy"][size] for line in evaluated]
            return rounds_to(target or 0.0, [line["round"] for line in evaluated], accuracies)
        layer = self.partition(":")[2]
        rows = [row for line in lines if (row := layer_numbers(line, "inco").get(layer))]
        shares = [share for row in rows if (share := row.get("positive")) is not None]
        return 100 * sum(shares) / len(shares) if shares else None


def whole_model(config: Config) -> str | None:
    """Return the name of the size that is the whole model of a run."""
    return config.split.whole(config.model.sizes)
