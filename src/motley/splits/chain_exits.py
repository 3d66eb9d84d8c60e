"""Early exits of any model that is a chain of stages with repeated blocks.

An exit comes after a block, so every block must begin a stage of the chain. Everything else is as
in `exits.py`, whose ResNets and ViTs have their own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.models.facts import blocks_of, head_of, stages_of
from motley.models.inputs import example_inputs
from motley.models.spec import BuiltWith, Stage, declare, spec_of
from motley.models.stages import bind, chain_of, owned, run
from motley.splits.exits import ConvolutionHead, WithExits


class VectorHead(nn.Module):
    """The mean of a map, the first token or a vector; a layer norm of tokens; a linear layer."""

    def __init__(self, width: int, classes: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.norm = nn.LayerNorm(width) if rank == 3 else None
        self.classify = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)[:, 0]
        elif self.rank == 4:
            x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.classify(x)


class ChainWithExits(WithExits):
    """A chain of stages with exits after some of its blocks."""

    #: The stages up to the deepest exit, and of the whole network also those after it.
    stages: tuple[Stage, ...]
    #: Names of the stages that end with a block.
    block_stages: tuple[str, ...]

    def enter(self, x: Tensor) -> Tensor:
        return run([bind(self, stage) for stage in self.stages[: self._first_block]], x)

    def block_chain(self) -> list[Callable[[Tensor], Tensor]]:
        blocks = []
        for stage in self.stages:
            if stage.name in self.block_stages:
                blocks.append(bind(self, stage).run)
        return blocks

    def own_head(self, x: Tensor) -> Tensor:
        after = self._first_block + len(self.block_stages)
        return run([bind(self, stage) for stage in self.stages[after:]], x)

    @property
    def _first_block(self) -> int:
        return [stage.name for stage in self.stages].index(self.block_stages[0])


def check_exits(network: nn.Module) -> tuple[str, ...]:
    """Return the blocks of a network that can have exits. Raise if an exit could not follow one."""
    if spec_of(network).built_with is None:
        raise MotleyError(
            f"split.name = 'grid': {type(network).__name__} has no exits. Allowed are ResNets, "
            "ViTs, and models of your own with repeated blocks."
        )
    blocks = blocks_of(network)
    names = [stage.name for stage in chain_of(network)]
    missing = [block for block in blocks if block not in names]
    if not blocks or missing:
        reason = f"it cannot be cut before {missing[0]!r}" if missing else "it has no blocks"
        raise MotleyError(
            f"split.name = 'grid': {type(network).__name__} has no exits: {reason}. Use a network "
            "of repeated blocks that hand on one tensor."
        )
    return blocks


def add_chain_exits(
    network: nn.Module, cuts: Sequence[int], level: int, head: str, ensemble: bool
) -> WithExits:
    """Turn a network into one with exits that ends at exit number `level`, as `add_exits` does."""
    spec, blocks, chain = spec_of(network), check_exits(network), chain_of(network)
    assert spec.built_with is not None
    heads = []
    for cut in cuts[: level + 1]:
        if cut < len(blocks):
            heads.append(_head(network, blocks[cut - 1], head, spec.built_with))
    is_whole = cuts[level] == len(blocks)
    last = len(chain) - 1 if is_whole else _stage_number(network, blocks[cuts[level] - 1])
    ordinary_head = head_of(network)
    declared = stages_of(network)
    _remove(
        network, set(owned(network, chain[last + 1 :])) - set(owned(network, chain[: last + 1]))
    )
    model = ChainWithExits(network)
    for name, buffer in network.named_buffers(recurse=False):
        persistent = name not in network._non_persistent_buffers_set
        model.register_buffer(name, buffer, persistent=persistent)
    model.stages = declared[: last + 1]
    model.block_stages = blocks[: cuts[level]]
    model.cuts = tuple(cuts[: level + 1])
    model.exits = nn.ModuleList(heads)
    model.ensemble = ensemble
    classifiers = [f"exits.{number}.classify" for number in range(len(heads))]
    if is_whole:
        classifiers.append(ordinary_head)
    branched = replace(
        spec,
        blocks=blocks[: cuts[level]],
        head=classifiers[-1],
        classifiers=tuple(classifiers),
    )
    declare(model, branched)
    return model


def _stage_number(network: nn.Module, name: str) -> int:
    return [stage.name for stage in chain_of(network)].index(name)


def _head(network: nn.Module, block: str, head: str, built_with: BuiltWith) -> nn.Module:
    """Return the head of an exit after a block."""
    number = _stage_number(network, block)
    device = next(network.parameters()).device
    shape = _shape_after(network, number + 1, example_inputs(built_with.shape, 2, device))
    if len(shape) == 4 and head == "convolution":
        return ConvolutionHead(shape[1], built_with.classes)
    if len(shape) not in (2, 3, 4):
        raise MotleyError(
            f"split.name = 'grid': block {block!r} returns shape {tuple(shape)}. Exits need a map, "
            "tokens or a vector per example."
        )
    width = shape[-1] if len(shape) == 3 else shape[1]
    return VectorHead(width, built_with.classes, len(shape))


def _shape_after(network: nn.Module, count: int, inputs: Tensor) -> torch.Size:
    was_training = network.training
    network.eval()  # running statistics must not change
    with torch.no_grad():
        shape = run(chain_of(network)[:count], inputs).shape
    network.train(was_training)
    return shape


def _remove(network: nn.Module, names: set[str]) -> None:
    """Remove the modules and parameters that have only the named parameters."""
    for path, module in list(network.named_modules()):
        prefix = f"{path}." if path else ""
        parameters = [f"{prefix}{name}" for name, _ in module.named_parameters()]
        if path and parameters and names.issuperset(parameters):
            parent, _, name = path.rpartition(".")
            try:
                network.get_submodule(parent)._modules.pop(name, None)
            except AttributeError:
                continue  # a parent was removed
    for name in names:
        network._parameters.pop(name, None)
