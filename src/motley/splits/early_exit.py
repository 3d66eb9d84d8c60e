"""Inference that stops at the first exit that is confident enough.

Each example leaves at the first exit whose largest class probability reaches a threshold; the rest
of the batch goes on, so that later blocks process fewer examples. All remaining examples leave at
the last exit. If a network's output is the mean over its exits (DepthFL), the output at an exit is
the mean over the exits up to there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from motley.core.errors import MotleyError
from motley.splits.exits import WithExits


@dataclass(frozen=True)
class ExitOutputs:
    """The logits of a batch, and for each example the exit that they come from, counted from 0."""

    logits: Tensor
    exits: Tensor


@dataclass(frozen=True)
class ExitCosts:
    """Floating-point operations for one example."""

    #: Of an example that leaves at each exit. The heads of all exits before it are included,
    #: because the network has to compute them.
    at_exits: tuple[int, ...]
    #: Of the network without early exits.
    full: int

    def mean_fraction(self, exits: Tensor) -> float:
        """Return the mean cost of examples that left at `exits`, relative to the full network."""
        counts = torch.bincount(exits, minlength=len(self.at_exits)).tolist()
        total = sum(cost * count for cost, count in zip(self.at_exits, counts, strict=True))
        return total / (self.full * len(exits))


def exits_of(model: nn.Module, needed_for: str) -> WithExits:
    """Return a model as one whose examples can leave early, or raise."""
    if not isinstance(model, WithExits) or len(model.cuts) < 2:
        raise MotleyError(
            f"{needed_for}: this model has no early exit. Models of split.name = 'grid' (ScaleFL, "
            "DepthFL) have them, except for the smallest size."
        )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is None:
            raise MotleyError(
                f"{needed_for}: with split.normalization_statistics = 'batch' an example's output "
                "depends on the other examples of its batch, and these change as examples leave. "
                "Use 'shared' or 'per-size'."
            )
    return model


@torch.no_grad()
def stop_early(model: WithExits, inputs: Tensor, threshold: float) -> ExitOutputs:
    """Compute a batch; each example leaves at the first exit that reaches the threshold."""
    last = len(model.cuts) - 1
    rows = torch.arange(inputs.shape[0], device=inputs.device)  # the examples that go on
    exits = torch.full_like(rows, last)
    finished: list[tuple[Tensor, Tensor]] = []  # rows, and their logits
    blocks = model.block_chain()
    x = model.enter(inputs)
    passed = 0
    logits_sum: Tensor | None = None
    for number, cut in enumerate(model.cuts):
        for block in blocks[passed:cut]:
            x = block(x)
        passed = cut
        logits = model.logits_at(number, x)
        if model.ensemble:
            logits_sum = logits if logits_sum is None else logits_sum + logits
            logits = logits_sum / (number + 1)
        leaves = is_confident(logits, threshold)
        if number == last:
            leaves = torch.ones_like(leaves)
        finished.append((rows[leaves], logits[leaves]))
        exits[rows[leaves]] = number
        stays = ~leaves
        rows, x = rows[stays], x[stays]
        if logits_sum is not None:
            logits_sum = logits_sum[stays]
        if not len(rows):
            break
    result = torch.empty(inputs.shape[0], finished[0][1].shape[1], device=inputs.device)
    for finished_rows, logits in finished:
        result[finished_rows] = logits.to(result.dtype)
    return ExitOutputs(result, exits)


def is_confident(logits: Tensor, threshold: float) -> Tensor:
    """Tell for each example whether its largest class probability reaches a threshold."""
    return logits.softmax(1).amax(1) >= threshold


def choose_exits(exit_logits: Sequence[Tensor], threshold: float, ensemble: bool) -> ExitOutputs:
    """Return the result of `stop_early`, given the logits of all exits (`WithExits.exit_logits`).

    It saves nothing, but many thresholds can be tried with one pass through the network.
    """
    logits = torch.zeros_like(exit_logits[0])
    exits = torch.full((len(logits),), -1, device=logits.device)
    logits_sum = torch.zeros_like(logits)
    for number, own_logits in enumerate(exit_logits):
        logits_sum = logits_sum + own_logits
        current = logits_sum / (number + 1) if ensemble else own_logits
        leaves = is_confident(current, threshold)
        if number == len(exit_logits) - 1:
            leaves = torch.ones_like(leaves)
        leaves = leaves & (exits < 0)
        logits[leaves] = current[leaves]
        exits[leaves] = number
    return ExitOutputs(logits, exits)


def exit_costs(model: WithExits, example: Tensor) -> ExitCosts:
    """Count the operations of a network for a batch of one example."""
    # On the meta device: shapes are computed, values are not.
    model = copy.deepcopy(model).to("meta")
    x, trunk = _counted(model.enter, example.to("meta"))
    blocks = model.block_chain()
    passed = heads = 0
    costs = []
    for number, cut in enumerate(model.cuts):
        for block in blocks[passed:cut]:
            x, flops = _counted(block, x)
            trunk += flops
        passed = cut
        _, head = _counted(partial(model.logits_at, number), x)
        heads += head
        costs.append(trunk + heads)
    return ExitCosts(tuple(costs), trunk + (heads if model.ensemble else head))


def _counted(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, int]:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = function(x)
    return output, counter.get_total_flops()


class AtExit(nn.Module):
    """A network that ends at one of its exits, as an ordinary model."""

    def __init__(self, model: WithExits, number: int) -> None:
        """`number` is that of the exit, counted from 0."""
        super().__init__()
        self.model, self.number = model, number

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the exit, or the mean over the exits up to it."""
        model, passed = self.model, 0
        x = model.enter(x)
        blocks = model.block_chain()
        logits = []
        for number, cut in enumerate(model.cuts[: self.number + 1]):
            for block in blocks[passed:cut]:
                x = block(x)
            passed = cut
            if model.ensemble or number == self.number:
                logits.append(model.logits_at(number, x))
        return sum(logits[1:], logits[0]) / len(logits)
