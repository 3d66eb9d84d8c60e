"""InclusiveFL's split: layers by depth, but each size has its own last block and head."""

from __future__ import annotations

from functools import cached_property

from motley.core.errors import MotleyError
from motley.models.stages import chain_of, is_within
from motley.splits.base import SPLITS
from motley.splits.depth import Depth


@SPLITS.register(
    "inclusive",
    "layers by depth, but a size's last block and its head are its own",
    paper="InclusiveFL, KDD 2022",
)
class Inclusive(Depth):
    """`depth`, with one last block per size."""

    def global_name(self, size: str, name: str) -> str:
        is_own = any(is_within(name, member) for member in self._own_members[size])
        return f"{size}/{name}" if is_own else name

    @cached_property
    def _own_members(self) -> dict[str, tuple[str, ...]]:
        """Size -> its last block, and the members of all stages after it."""
        return {
            size: (self._siblings[size][-1], *self._after_blocks(size)) for size in self.blueprints
        }

    def _after_blocks(self, size: str) -> list[str]:
        module, last_block = self.blueprints[size].module, self._siblings[size][-1]
        members: list[str] = []
        is_after = False
        for stage in chain_of(module):
            if is_after:
                members += stage.members
            is_after = is_after or any(is_within(last_block, member) for member in stage.members)
        return members

    @cached_property
    def _siblings(self) -> dict[str, tuple[str, ...]]:
        """Size -> its last group of blocks: all blocks of a ViT, those of stage 4 of a ResNet."""
        siblings = {}
        for size, blueprint in self.blueprints.items():
            blocks = blueprint.spec.blocks
            if not blocks:
                raise MotleyError(
                    f"model.sizes: {size!r} has no blocks; split.name = 'inclusive' is for ResNets "
                    "and ViTs."
                )
            group = blocks[-1].rpartition(".")[0]
            siblings[size] = tuple(block for block in blocks if block.rpartition(".")[0] == group)
        return siblings

    @cached_property
    def by_depth(self) -> tuple[str, ...]:
        """The sizes, the smallest first."""
        return tuple(reversed(self._largest_first))

    def taught_by(self, size: str, larger: str) -> dict[str, list[str]]:
        """Return which tensors of a larger size teach each parameter of this size's last block.

        The keys are global names, the values names within the larger size: the tensors of equal
        shape at the same place in its blocks, starting with the block at this depth.
        """
        shapes = {
            name: tensor.shape for name, tensor in self.blueprints[larger].module.named_parameters()
        }
        siblings = self._siblings[size]
        deeper_blocks = self._siblings[larger][len(siblings) - 1 :]
        taught = {}
        for name, parameter in self.blueprints[size].module.named_parameters():
            if not is_within(name, siblings[-1]):
                continue
            place = name.removeprefix(siblings[-1])
            teachers = [
                block + place
                for block in deeper_blocks
                if shapes.get(block + place) == parameter.shape
            ]
            if teachers:
                taught[self.global_name(size, name)] = teachers
        return taught
