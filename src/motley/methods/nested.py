"""Nested depths: clients with large models also train the smaller sizes that are inside of theirs.

With a split by depth, a ResNet10 is a ResNet26 without some of its blocks. Clients of different
sizes share the blocks that both have, but each size trains them together with its own other blocks.
Here a client's loss has a term for each of its students, the smaller sizes that it trains:

    CE(z) + w / n  sum over its n students of  (1 - d) CE(z_i) + d T^2 KL(z / T || z_i / T)

where z_i are the logits of the client's own model without the blocks that student i lacks, and z is
detached in the divergence. With mixup, all of them have the same mixed inputs, and CE is the mean
of the losses for both targets. It costs further passes and no communication. Slimmable networks (Yu
et al., ICLR 2019; Yu and Huang, ICCV 2019) do this in width, on one machine. In a federation of
equal models this is FedAvg.

**BatchNorm.** In a student's pass, norms normalize with the batch, and running statistics stay as
they are: they follow the whole model only. A smaller size is evaluated with the statistics of the
clients of its own size if they are kept per size (`split.normalization_statistics`), and otherwise
with the mean over the clients of all sizes, whose networks differ. A size that no client has should
not have statistics of its own: they would stay as they were initialized.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.methods.base import METHODS, ClientAlgorithm, Method, MethodSettings, Requirements
from motley.methods.distillation import kl_divergence
from motley.methods.info import ClientInfo
from motley.methods.step import Step
from motley.models.facts import blocks_of
from motley.models.stages import BoundStage, chain_of, is_within
from motley.splits.base import Split


class NestedSettings(MethodSettings):
    """The settings of nested depths."""

    name: str = "nested"
    students: Literal["smallest", "all"] = "smallest"
    """The smaller sizes that a client trains: the smallest, or all. Each costs a pass per step."""
    weight: float = Field(default=1.0, ge=0)
    """Weight of the students' loss, beside 1 for the client's own size. 0: FedAvg."""
    distill: float = Field(default=0.5, ge=0, le=1)
    """Fraction of a student's loss that is distillation from the client's own size. The rest is the
    loss on the labels.
    """
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the distillation."""


class NestedClient(ClientAlgorithm):
    """FedAvg with a loss for the smaller sizes inside of the client's model."""

    settings: NestedSettings

    def __init__(self, settings: MethodSettings, info: ClientInfo) -> None:
        super().__init__(settings, info)
        #: Size -> for each of its students, the blocks that the student lacks.
        self.lacking = students_of(info.split)
        if self.settings.students == "smallest":
            self.lacking = {size: students[:1] for size, students in self.lacking.items()}

    def loss(self, step: Step) -> Tensor:
        logits = step.model(step.inputs)
        total = step.task_loss(logits, step.targets)
        students = self.lacking[step.size]
        if not students or not self.settings.weight:
            return total
        share, teacher = self.settings.distill, logits.detach().float()
        for lacking in students:
            with step.preserve_buffers():
                student_logits = logits_without(step.model, step.inputs, lacking)
            label_loss = step.task_loss(student_logits, step.targets)
            divergences = kl_divergence(teacher, student_logits.float(), self.settings.temperature)
            student_loss = (1 - share) * label_loss + share * divergences.mean()
            total = total + self.settings.weight / len(students) * student_loss
        return total


def students_of(split: Split) -> dict[str, list[frozenset[str]]]:
    """Return `lacking_blocks` of every size; raise if no size has another one inside of it."""
    lacking = {size: lacking_blocks(split, size) for size in split.sizes}
    if len(split.sizes) > 1 and not any(lacking.values()):
        raise MotleyError(
            f"split.name = {split.settings.name!r}: method.name = 'nested' needs a size that is "
            f"another one without some of its blocks, and none of {', '.join(split.sizes)} is. Use "
            "split.name = 'depth' with sizes that share blocks, such as resnet10 and resnet18, or "
            "another method."
        )
    return lacking


def lacking_blocks(split: Split, size: str) -> list[frozenset[str]]:
    """Return, for every smaller size inside of a size, the blocks that it lacks.

    The smallest size comes first. A size is inside of another one if they share all of its
    parameters, and the other one's further parameters are those of some blocks.
    """
    model = split.blueprints[size].module
    own = global_names(split, size)
    students = []
    for other in split.smallest_first:
        shared = global_names(split, other)
        if not shared or not shared.items() <= own.items():
            continue
        further = own.keys() - shared.keys()
        lacking = set()
        for block in blocks_of(model):
            names = {name for name in own if is_within(name, block)}
            if names and names <= further:
                lacking.add(block)
        if lacking and all(_is_in_any(name, lacking) for name in further):
            check_removable(model, lacking, size)
            students.append(frozenset(lacking))
    return students


def global_names(split: Split, size: str) -> dict[str, str]:
    """Return the global names of a size's parameters, or nothing if it holds slices of some.

    Sizes of other splits than `depth` may have equal names for tensors that they do not share, or
    of which they hold different slices.
    """
    part = split.whole_part(size)
    pieces = {name: part[name] for name in split.parameters_of(size)}
    if any(piece.index is not None for piece in pieces.values()):
        return {}
    return {name: piece.name for name, piece in pieces.items()}


def logits_without(model: nn.Module, inputs: Tensor, lacking: Collection[str]) -> Tensor:
    """Return the output of a model without some of its blocks."""
    x = inputs
    for stage in chain_of(model):
        inside = _blocks_inside(stage, lacking)
        if not inside:
            x = stage.run(x)
            continue
        if inside.issuperset(stage.members):
            continue  # the stage is such a block
        (member,) = stage.members  # a sequence of blocks, see `check_removable`
        for name, block in model.get_submodule(member).named_children():
            if f"{member}.{name}" not in lacking:
                x = block(x)
    return x


def check_removable(model: nn.Module, lacking: Collection[str], size: str) -> None:
    """Check that a model can be run without some blocks.

    A stage must be such a block, have none of them, or be a sequence whose elements they are.
    """
    for stage in chain_of(model):
        inside = _blocks_inside(stage, lacking)
        if not inside or inside.issuperset(stage.members):
            continue
        if not inside <= _elements(model, stage):
            raise MotleyError(
                f"method.name = 'nested': {size!r} cannot be run without the blocks "
                f"{sorted(inside)}, because its stage {stage.name!r} does not run them one after "
                "the other. Choose another method, or declare the blocks as stages of the model."
            )


def _blocks_inside(stage: BoundStage, blocks: Collection[str]) -> set[str]:
    """Return those of some blocks that a stage consists of or contains."""
    return {block for block in blocks if _is_in_any(block, stage.members)}


def _elements(model: nn.Module, stage: BoundStage) -> set[str]:
    """Return the paths of the elements of a stage that is a sequence; none for other stages."""
    if len(stage.members) != 1:
        return set()
    (member,) = stage.members
    module = model.get_submodule(member)
    if not isinstance(module, nn.Sequential) or module is not stage.run:
        return set()
    return {f"{member}.{name}" for name, _ in module.named_children()}


def _is_in_any(name: str, paths: Collection[str]) -> bool:
    return any(is_within(name, path) for path in paths)


@METHODS.register(
    "nested",
    "clients also train the smaller sizes inside of their own, taught by the whole model",
    paper="slimmable networks, ICLR 2019, in depth",
)
class Nested(Method):
    """FedAvg with another loss."""

    Settings = NestedSettings
    Client = NestedClient
    requirements = Requirements(own_training=True, stages=True, classes=True, mixed_classes=True)
