"""InclusiveFL's split: layers by depth, but each size has its own last block and head."""

from __future__ import annotations

from functools import cached_property

from motley.core.errors import MotleyError
from motley.models.facts import blocks_of
from motley.models.stages import chain_of, is_within
from motley.splits.base import SPLITS, Blueprint
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
        members = {}
        for size, blueprint in self.blueprints.items():
            last_block = last_blocks(size, blueprint)[-1]
            members[size] = (last_block, *_after_block(blueprint, last_block))
        return members


def last_blocks(size: str, blueprint: Blueprint) -> tuple[str, ...]:
    """Return the last group of a size's blocks: all blocks of a ViT, stage 4 of a ResNet."""
    blocks = blocks_of(blueprint.module)
    if not blocks:
        raise MotleyError(
            f"model.sizes: {size!r} has no blocks; InclusiveFL (split.name = 'inclusive', "
            "method.name = 'inclusivefl') is for models with repeated blocks, such as ResNets and "
            "ViTs."
        )
    group = blocks[-1].rpartition(".")[0]
    return tuple(block for block in blocks if block.rpartition(".")[0] == group)


def _after_block(blueprint: Blueprint, last_block: str) -> list[str]:
    """Return the members of all stages after the one with this block."""
    members: list[str] = []
    is_after = False
    for stage in chain_of(blueprint.module):
        if is_after:
            members += stage.members
        is_after = is_after or any(is_within(last_block, member) for member in stage.members)
    return members
