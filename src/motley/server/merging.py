"""The settings of the rule that combines the clients' deltas (`motley.core.robust`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import Field

from motley.core.robust import (
    CenteredClipping,
    Krum,
    Median,
    RobustRule,
    TooFew,
    TrimmedMean,
)
from motley.settings import Choice, Positive, Settings, allowing


class MergeSettings(Settings):
    """How the clients' deltas are combined: by their mean, or by a rule that few malicious clients
    move little. Such a rule counts every client once.
    """

    lasting = ()

    name: str = "mean"
    """The rule, for every coordinate over the clients that hold it. mean: FedAvg's. trimmed-mean
    and median: per coordinate. krum: multi-Krum among the clients of a size. centered-clipping: the
    mean of deltas that are clipped around the result.
    """

    def rule(self, parameters: Collection[str]) -> RobustRule | None:
        """Return the rule, given the global names of parameters; None for the mean."""
        return None


class RobustSettings(MergeSettings):
    """A robust rule."""

    too_few: TooFew = "keep"
    """The treatment of coordinates that too few clients of a round hold: keep leaves them as they
    are in this round, mean averages them without protection. The metric method/merge_too_few is
    their share. Three clients are needed; krum needs 2 * attackers + 3 clients of a size.
    """


class TrimmedMeanSettings(RobustSettings):
    """The mean without the largest and the smallest values."""

    name: Literal["trimmed-mean"] = "trimmed-mean"
    trim: float = Field(default=0.2, ge=0, lt=0.5)
    """Fraction of the values that is dropped on either side, rounded up: the fraction of malicious
    clients that the rule withstands.
    """

    def rule(self, parameters: Collection[str]) -> RobustRule | None:
        """Return the rule."""
        return TrimmedMean(self.trim, self.too_few)


class MedianSettings(RobustSettings):
    """The median."""

    name: Literal["median"] = "median"

    def rule(self, parameters: Collection[str]) -> RobustRule | None:
        """Return the rule."""
        return Median(self.too_few)


class KrumSettings(RobustSettings):
    """Multi-Krum."""

    name: Literal["krum"] = "krum"
    attackers: int = Field(default=1, ge=0)
    """Number of malicious clients per size and round that the rule withstands; as many are left
    out. A size needs 2 * attackers + 3 clients in a round.
    """

    def rule(self, parameters: Collection[str]) -> RobustRule | None:
        """Return the rule."""
        return Krum(parameters, self.attackers, self.too_few)


class CenteredClippingSettings(RobustSettings):
    """Centered clipping."""

    name: Literal["centered-clipping"] = "centered-clipping"
    radius: Annotated[Positive | Literal["auto"], allowing('a number above 0, or "auto"')] = "auto"
    """Largest distance of a client's delta from the estimate. auto: the median of the round's
    distances, relative to the square root of the number of parameters.
    """
    iterations: int = Field(default=3, ge=1)
    """Number of times that the estimate is improved; it starts at zero."""

    def rule(self, parameters: Collection[str]) -> RobustRule | None:
        """Return the rule."""
        radius = None if self.radius == "auto" else float(self.radius)
        return CenteredClipping(parameters, radius, self.iterations, self.too_few)


#: Chosen by server.merge.name.
MERGES = Choice(
    "mean",
    {
        "mean": MergeSettings,
        "trimmed-mean": TrimmedMeanSettings,
        "median": MedianSettings,
        "krum": KrumSettings,
        "centered-clipping": CenteredClippingSettings,
    },
)
