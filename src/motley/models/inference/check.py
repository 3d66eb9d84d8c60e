"""Checks of inferred facts on real numbers, before anything is trained with them.

A model gets random weights, and runs on two random inputs. Permuting the channels of a stream in
every layer must not change the result, and neither must running the stages one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from motley.core.part import State
from motley.models.channels import CLASSES, Axis, Channels, axes, positions
from motley.models.inference.record import InferenceError
from motley.models.spec import Stage

#: Largest difference, relative to the largest output. Sums are taken in another order.
TOLERANCE = 1e-3


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Give a model random weights without zeros.

    Initial weights may hide mistakes: biases are 0, and so are some last layers of blocks.
    """
    for parameter in model.parameters():
        if parameter.dim() > 1:
            fan_in = max(1, parameter[0].numel())
            parameter.normal_(std=fan_in**-0.5)
        else:
            parameter.uniform_(0.5, 1.5)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)


def random_state(state: State) -> State:
    """Return random weights without zeros, in the shapes of a state."""
    generator = torch.Generator().manual_seed(0)
    result = {}
    for name, tensor in state.items():
        result[name] = tensor
        if tensor.is_floating_point():
            drawn = torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.5
            result[name] = drawn * tensor[0].numel() ** -0.5 if tensor.dim() > 1 else drawn
    return result


@torch.no_grad()
def wrong_streams(model: nn.Module, channels: Channels, inputs: Tensor) -> list[str]:
    """Return the streams whose permutation changes a model's outputs."""
    model.eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    streams: dict[str, int] = {}
    for tensor_axes in channels.values():
        for axis in tensor_axes:
            if axis is not None and axis.stream != CLASSES:
                streams[axis.stream] = axis.width
    expected = _logits(model, inputs)
    if _unchanged(model, tensors, channels, streams, streams, inputs, expected):
        return []
    wrong = []
    for stream in streams:
        if not _unchanged(model, tensors, channels, streams, [stream], inputs, expected):
            wrong.append(stream)
    return wrong


def _unchanged(
    model: nn.Module,
    tensors: dict[str, Tensor],
    channels: Channels,
    widths: dict[str, int],
    streams: Iterable[str],
    inputs: Tensor,
    expected: Tensor,
) -> bool:
    """Tell whether a model computes the same with the channels of some streams permuted."""
    orders = {stream: torch.randperm(widths[stream]) for stream in streams}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor_axes in axes(channels, tensors).items():
        permuted = before[name]
        for dim, axis in enumerate(tensor_axes):
            if axis is not None and axis.stream in orders:
                permuted = permuted.index_select(dim, _order(axis, orders[axis.stream]))
        tensors[name].copy_(permuted)
    same = close(_logits(model, inputs), expected)
    for name, tensor in tensors.items():
        tensor.copy_(before[name])
    return same


def _order(axis: Axis, order: Tensor) -> Tensor:
    chosen = positions(axis, order)
    assert isinstance(chosen, Tensor)
    return chosen


@torch.no_grad()
def check_stages(model: nn.Module, stages: Sequence[Stage], inputs: Tensor) -> None:
    """Raise if the stages, run in order, do not give the model's outputs, in both modes."""

    def run_stages(x: Tensor) -> Tensor:
        for stage in stages:
            if isinstance(stage.run, str):
                x = model.get_submodule(stage.run)(x)
            else:
                x = stage.run(model, x)
        return x

    for training in (True, False):
        model.train(training)
        mode = "training" if training else "evaluation"
        # Dropout draws the same numbers in both runs.
        expected = _seeded(model, inputs)
        try:
            result = _seeded(run_stages, inputs)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise InferenceError(
                f"stages could not be run in {mode} mode: {type(error).__name__}: {reason}. "
                "Declare ModelSpec.stages."
            ) from error
        if not close(result, expected):
            raise InferenceError(
                f"stages run in order do not compute what the model does in {mode} mode. "
                "Declare ModelSpec.stages."
            )


def close(result: Tensor, expected: Tensor) -> bool:
    """Tell whether two results are the same up to rounding."""
    if result.shape != expected.shape:
        return False
    scale = expected.abs().max().clamp_min(1e-12)
    return bool((result - expected).abs().max() <= TOLERANCE * scale)


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    logits: Tensor = model(inputs)
    return logits


def _seeded(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return function(inputs.clone())
