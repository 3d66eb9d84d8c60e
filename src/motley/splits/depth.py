"""Splits by depth: a layer has the same name in every size that has it."""

from __future__ import annotations

from motley.core.errors import MotleyError
from motley.splits.base import SPLITS, Split


@SPLITS.register(
    "depth",
    "sizes share the blocks they have in common: stages of ResNets, layers of ViTs",
    paper="InCo Aggregation, ICLR 2024",
    aliases=("stage", "layer", "layer-wise"),
)
class Depth(Split):
    """Sizes share every layer whose name they have in common."""

    def global_name(self, size: str, name: str) -> str:
        return name

    def check(self) -> None:
        families = {blueprint.family for blueprint in self.blueprints.values()}
        if len(families) > 1:
            raise MotleyError(
                f"model.sizes = {list(self.sizes)!r}: families {sorted(families)} share no layers. "
                "Use split.name = 'grouped' for unrelated architectures."
            )
        super().check()


@SPLITS.register("homogeneous", "one size for all clients: plain FedAvg")
class Homogeneous(Depth):
    """Every client holds the whole model."""

    def check(self) -> None:
        if len(self.sizes) != 1:
            prefix = f"model.sizes = {list(self.sizes)!r}"
            raise MotleyError(f"{prefix}: split.name = 'homogeneous' takes exactly one size.")
        super().check()


@SPLITS.register(
    "grouped",
    "nothing is shared between sizes: one FedAvg per size, also for unrelated architectures",
    paper="FedDF, NeurIPS 2020 (its per-architecture averaging)",
    aliases=("per-architecture",),
)
class Grouped(Split):
    """Each size is a separate federation: global names are prefixed by the size."""

    def global_name(self, size: str, name: str) -> str:
        return f"{size}/{name}"
