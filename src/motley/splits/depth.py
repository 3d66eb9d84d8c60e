"""Splits by name: sizes differ in depth, and a layer has the same name in every size that has it."""

from __future__ import annotations

from motley.core.errors import MotleyError
from motley.splits.base import SPLITS, Split


@SPLITS.register(
    "depth",
    "a size holds the blocks it has: stage splitting of ResNets, layer splitting of ViTs",
    paper="InCo Aggregation, ICLR 2024",
    aliases=("stage", "layer", "layer-wise"),
)
class Depth(Split):
    """Every size shares each of its layers with every other size that has a layer of that name."""

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


@SPLITS.register("homogeneous", "one size for everybody: plain FedAvg")
class Homogeneous(Depth):
    """Every client holds everything."""

    def check(self) -> None:
        if len(self.sizes) != 1:
            raise MotleyError(f"model.sizes = {list(self.sizes)!r}: split.name = 'homogeneous' takes exactly one size.")
        super().check()


@SPLITS.register(
    "grouped",
    "nothing is shared between sizes: FedAvg a size, also for unrelated architectures",
    paper="FedDF, NeurIPS 2020 (its per-architecture averaging)",
    aliases=("per-architecture",),
)
class Grouped(Split):
    """Each size is a federation of its own: global names carry the size."""

    def global_name(self, size: str, name: str) -> str:
        return f"{size}/{name}"
