"""InclusiveFL's split: layers by depth, but each size has its own last block and head."""

from __future__ import annotations

import re
from functools import cached_property

from motley.core.errors import MotleyError
from motley.splits.base import SPLITS
from motley.splits.depth import Depth

_BLOCK = re.compile(r"^(blocks|layer4|layers)\.(\d+)\.")
"""Where a family's last blocks are: a transformer's or a perceptron's layers, or stage 4 of a ResNet."""


@SPLITS.register(
    "inclusive",
    "layers by depth, but a size's last block and its head are its own",
    paper="InclusiveFL, KDD 2022",
)
class Inclusive(Depth):
    """`depth`, with last blocks a size."""

    def global_name(self, size: str, name: str) -> str:
        block = self._number(name)
        after_blocks = name.startswith(("fc.", "head.", "norm."))
        return f"{size}/{name}" if after_blocks or block == self.last[size] else name

    @cached_property
    def last(self) -> dict[str, int]:
        """Size -> the number of its last block."""
        found = {}
        for size, blueprint in self.blueprints.items():
            numbers = [n for name in blueprint.module.state_dict() if (n := self._number(name)) is not None]
            if not numbers:
                raise MotleyError(
                    f"model.sizes: {size!r} has no blocks; split.name = 'inclusive' is for ResNets and ViTs."
                )
            found[size] = max(numbers)
        return found

    @cached_property
    def by_depth(self) -> tuple[str, ...]:
        """The sizes, the smallest first."""
        return tuple(reversed(self._largest_first))

    def taught_by(self, size: str, larger: str) -> dict[str, list[str]]:
        """Return which tensors of a larger size teach each parameter of this size's last block.

        The keys are global names, the values names within the larger size: the tensors at the same
        place in its blocks from there on that have the same shape.
        """
        shapes = {name: tensor.shape for name, tensor in self.blueprints[larger].module.named_parameters()}
        found = {}
        for name, parameter in self.blueprints[size].module.named_parameters():
            if self._number(name) != self.last[size]:
                continue
            places = [_BLOCK.sub(rf"\g<1>.{n}.", name) for n in range(self.last[size], self.last[larger] + 1)]
            teachers = [place for place in places if shapes.get(place) == parameter.shape]
            if teachers:
                found[self.global_name(size, name)] = teachers
        return found

    def _number(self, name: str) -> int | None:
        found = _BLOCK.match(name)
        return int(found.group(2)) if found else None
