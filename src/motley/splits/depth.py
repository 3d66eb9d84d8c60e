"""Splits by depth: a layer has the same name in every size that has it."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import torch

from motley.core.errors import MotleyError
from motley.splits.base import SPLITS, Split, is_own_model


@SPLITS.register(
    "depth",
    "sizes share the blocks they have in common: stages of ResNets, layers of ViTs",
    paper="InCo Aggregation, ICLR 2024",
    aliases=("stage", "layer", "layer-wise"),
)
class Depth(Split):
    """Sizes share every tensor whose name they have in common.

    Motley's own models that disagree on a shape are refused: they were not meant to be combined.
    Users' models have no such plan behind them. They share the tensors that have the same name and
    shape. If sizes disagree on the shape of a name, each shape is a tensor of its own in the global
    state, shared by the sizes that have this shape. Its global name begins with the first of them.
    """

    def global_name(self, size: str, name: str) -> str:
        return self._disputed.get((size, name), name)

    @cached_property
    def _disputed(self) -> dict[tuple[str, str], str]:
        """The global names of users' tensors whose shape is not the same in all sizes."""
        if any(is_own_model(blueprint.module) for blueprint in self.blueprints.values()):
            return {}
        sizes_by_shape: dict[str, dict[torch.Size, list[str]]] = {}
        for size, blueprint in self.blueprints.items():
            for name, tensor in blueprint.module.state_dict().items():
                sizes_by_shape.setdefault(name, {}).setdefault(tensor.shape, []).append(size)
        global_names = {}
        for name, by_shape in sizes_by_shape.items():
            if len(by_shape) == 1:
                continue
            for sizes in by_shape.values():
                for size in sizes:
                    global_names[size, name] = f"{sizes[0]}/{name}"
        return global_names

    def _check_sharing(self) -> None:
        """Reject users' sizes that have nothing in common with any other size."""
        names_of: dict[str, list[str]] = {}
        owners: Counter[str] = Counter()
        for size in self.sizes:
            names_of[size] = [self.global_name(size, name) for name in self.parameters_of(size)]
            owners.update(names_of[size])
        for size, names in names_of.items():
            if names and all(owners[name] == 1 for name in names):
                raise MotleyError(
                    f"model.sizes: {size!r} has no parameter with the same name and shape as one "
                    f"of another size, so split.name = {self.settings.name!r} would share nothing. "
                    "Use split.name = 'grouped' if that is intended."
                )

    def check(self) -> None:
        families = {blueprint.family for blueprint in self.blueprints.values()}
        if len(families) > 1:
            raise MotleyError(
                f"model.sizes = {list(self.sizes)!r}: families {sorted(families)} share no layers. "
                "Use split.name = 'grouped' for unrelated architectures."
            )
        super().check()
        own = any(is_own_model(blueprint.module) for blueprint in self.blueprints.values())
        if len(self.sizes) > 1 and not own:
            self._check_sharing()


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
