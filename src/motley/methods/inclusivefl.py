"""InclusiveFL: a size's last block learns from the next larger size.

Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022.
Momentum distillation mixes the delta d of a size's last block, before anything is averaged between
sizes, with the mean delta of the next larger size's blocks from there to that size's last one:

    d <- (1 - beta) d + beta mean(d of these blocks)

This is the paper's formula; in the released code the mix is never applied. The paper is about
transformers. In ResNets the last block is that of stage 4, and of the larger size's blocks in that
stage, only tensors of the same shape as the last block's take part. InCo comes after it.

The split chooses the shared tensors. `split.name = "inclusive"` is the paper's: a size keeps
its last block and its head to itself. With "depth" all layers are shared, with "grouped" none,
which are the aggregations of FedIN's Tables 1 and 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise

import torch
from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.merge import Aggregate, merge
from motley.core.part import Piece, State
from motley.core.update import ClientUpdate
from motley.methods.base import METHODS, Method, MethodSettings, Requirements, ServerAlgorithm
from motley.methods.info import FederationInfo
from motley.models.stages import is_within
from motley.splits.base import Split
from motley.splits.depth import Depth, Grouped
from motley.splits.inclusive import last_blocks

#: Local name of a parameter -> local names of the larger size's parameters that teach it.
Teachers = dict[str, list[str]]


class InclusiveFLSettings(MethodSettings):
    """InclusiveFL's own setting."""

    name: str = "inclusivefl"
    beta: float = Field(default=0.2, ge=0, le=1)
    """Weight of the next larger size's delta in the delta of a size's last block (momentum
    distillation). 0: no distillation, only the sharing of layers that split.name
    chooses.
    """


class InclusiveFLServer(ServerAlgorithm):
    """FedAvg, and momentum distillation between sizes."""

    settings: InclusiveFLSettings

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        super().__init__(settings, info)
        split = info.split
        if not isinstance(split, Depth | Grouped):
            raise MotleyError(
                f"split.name = {split.settings.name!r}: method.name = 'inclusivefl' is for sizes "
                "of different depths. Use split.name = 'inclusive' (a size's last block and head "
                "are its own), 'depth' (all layers are shared) or 'grouped' (none are)."
            )
        #: Size -> the next larger one, and its tensors that teach the smaller size.
        self._lessons: dict[str, tuple[str, Teachers]] = {}
        for size, larger in pairwise(split.smallest_first):
            teachers = teachers_of(split, size, larger)
            if teachers:
                self._lessons[size] = (larger, teachers)
        # One size has no larger one to learn from, and InclusiveFL is FedAvg by definition.
        if len(split.sizes) > 1 and not self._lessons:
            raise MotleyError(
                f"model.sizes = {list(split.sizes)!r}: with method.name = 'inclusivefl' a size's "
                "last block learns from blocks of the next larger size that have its shape, and "
                "there are none. Name sizes of one family, or use method.name = 'fedavg'."
            )

    def aggregate(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        if not self.settings.beta:
            return merge(state, updates)
        teachers = {}
        for size in {update.size for update in updates}:
            teachers[size] = self._teachers(state, size, updates)
        return merge(state, [self._taught(update, teachers[update.size]) for update in updates])

    def _teachers(self, state: State, size: str, updates: Sequence[ClientUpdate]) -> State:
        """Return the delta that each tensor of a size's last block is mixed with.

        It is empty if no client of the next larger size took part.
        """
        if size not in self._lessons:
            return {}
        larger, lessons = self._lessons[size]
        sources = set(chain.from_iterable(lessons.values()))
        means = _mean_of_size(state, larger, sources, updates)
        if not means:
            return {}
        teachers = {}
        for name, names in lessons.items():
            teachers[name] = torch.stack([means[source] for source in names]).mean(0)
        return teachers

    def _taught(self, update: ClientUpdate, teachers: Mapping[str, Tensor]) -> ClientUpdate:
        delta = dict(update.delta)
        for name, teacher in teachers.items():
            # d <- (1 - beta) d + beta mean(d of these blocks)
            delta[name] = torch.lerp(update.delta[name], teacher, self.settings.beta)
        return replace(update, delta=delta)


@METHODS.register(
    "inclusivefl",
    "a size's last block learns from the next larger size",
    paper="Liu et al., KDD 2022",
)
class InclusiveFL(Method):
    """FedAvg, with another server half."""

    Settings = InclusiveFLSettings
    Server = InclusiveFLServer
    requirements = Requirements(own_aggregation=True)


def teachers_of(split: Split, size: str, larger: str) -> Teachers:
    """Return which tensors of a larger size teach each parameter of a size's last block.

    They are the tensors of equal shape at the same place in the larger size's blocks, starting with
    the block at this depth.
    """
    blocks = last_blocks(size, split.blueprints[size])
    deeper_blocks = last_blocks(larger, split.blueprints[larger])[len(blocks) - 1 :]
    shapes = {}
    for name, parameter in split.blueprints[larger].module.named_parameters():
        shapes[name] = parameter.shape
    teachers: Teachers = {}
    for name, parameter in split.blueprints[size].module.named_parameters():
        if not is_within(name, blocks[-1]):
            continue
        place = name.removeprefix(blocks[-1])
        candidates = [block + place for block in deeper_blocks]
        alike = [source for source in candidates if shapes.get(source) == parameter.shape]
        if alike:
            teachers[name] = alike
    return teachers


def _mean_of_size(
    state: State, size: str, names: set[str], updates: Sequence[ClientUpdate]
) -> State:
    """Return the mean delta of some tensors over the clients of a size, under its own names."""
    part = {name: Piece(name) for name in sorted(names)}
    of_size = [replace(update, part=part) for update in updates if update.size == size]
    return merge(state, of_size).delta
