"""Where the models of a federation are cut into a low and a high level, and whose features are alike."""

from __future__ import annotations

from motley.core.errors import MotleyError, unknown
from motley.methods.base import FederationInfo
from motley.models.stages import Chain, chain_of, shape_behind


class Levels:
    """One cut for every size: behind a named stage, or in the middle of the shortest model of the size's family."""

    def __init__(self, world: FederationInfo, cut: str) -> None:
        self._blueprints = world.split.blueprints
        self._chains = {size: chain_of(blueprint.module) for size, blueprint in self._blueprints.items()}
        self._stages = {size: self._low_stages(size, cut or self._middle(size)) for size in self._chains}
        lows = {size: chain[: self._stages[size]] for size, chain in self._chains.items()}
        self.shapes = {size: shape_behind(low, world.image) for size, low in lows.items()}
        """Of the features of one image, by size."""
        self.names = {size: low[-1].name for size, low in lows.items()}
        """The last stage of the low level, by size."""

    def of(self, chain: Chain, size: str) -> tuple[Chain, Chain]:
        """Return the low and the high level of a model of a size."""
        return chain[: self._stages[size]], chain[self._stages[size] :]

    def group(self, size: str) -> str:
        """Return a name that sizes have in common if they are cut behind the same stage with features of one shape."""
        return f"{self.names[size]}-{'x'.join(map(str, self.shapes[size]))}"

    def _low_stages(self, size: str, cut: str) -> int:
        names = [stage.name for stage in self._chains[size][:-1]]
        if cut not in names:
            raise MotleyError(f"method.cut = {cut!r}: model {size!r}: {unknown('stage', cut, names)}")
        return names.index(cut) + 1

    def _middle(self, size: str) -> str:
        family = self._blueprints[size].family
        alike = [self._chains[other] for other, b in self._blueprints.items() if b.family == family]
        shortest = min(alike, key=len)
        return shortest[len(shortest) // 2 - 1].name
