"""Where FedImpro cuts models into a low and a high level, and which sizes' features are alike."""

from __future__ import annotations

from motley.core.errors import MotleyError, unknown
from motley.models import InputShape
from motley.models.stages import Chain, chain_of, shape_behind
from motley.splits.base import Split


class Cut:
    """One cut per size: behind a named stage, or in the middle of its family's shortest model."""

    def __init__(self, split: Split, image: InputShape, stage: str) -> None:
        self._blueprints = split.blueprints
        self._chains = {size: chain_of(b.module) for size, b in self._blueprints.items()}
        #: Number of stages in the low level, by size.
        self._low_stages: dict[str, int] = {}
        #: The shape of one image's features, by size.
        self.shapes = {}
        #: The last stage of the low level, by size.
        self.names: dict[str, str] = {}
        for size, chain in self._chains.items():
            self._low_stages[size] = self._count_low_stages(size, stage or self._middle_stage(size))
            low = self._low_stages[size]
            self.shapes[size] = shape_behind(self._blueprints[size].module, low, image)
            self.names[size] = chain[low - 1].name

    def levels(self, chain: Chain, size: str) -> tuple[Chain, Chain]:
        """Return the low and the high level of a model of a size."""
        return chain[: self._low_stages[size]], chain[self._low_stages[size] :]

    def group(self, size: str) -> str:
        """Return a name that sizes share if they are cut behind the same stage and their features
        have one shape.
        """
        return f"{self.names[size]}-{'x'.join(map(str, self.shapes[size]))}"

    def _count_low_stages(self, size: str, stage: str) -> int:
        names = [bound.name for bound in self._chains[size][:-1]]
        if stage not in names:
            raise MotleyError(
                f"method.cut = {stage!r}: model {size!r}: {unknown('stage', stage, names)}"
            )
        return names.index(stage) + 1

    def _middle_stage(self, size: str) -> str:
        family = self._blueprints[size].family
        same_family = [s for s, blueprint in self._blueprints.items() if blueprint.family == family]
        shortest = min((self._chains[other] for other in same_family), key=len)
        return shortest[len(shortest) // 2 - 1].name
