"""Check, before training starts, that models return what their task needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models.inputs import ImageShape, InputShape, example_inputs
from motley.splits.base import OWN_MODELS, Split
from motley.tasks import CLASSIFICATION, Task


def check_outputs(
    split: Split,
    sizes: Iterable[str],
    shape: InputShape,
    classes: int,
    task: Task = CLASSIFICATION,
    target_dims: Sequence[int] = (),
) -> None:
    """Run each model on two empty examples, in training and evaluation mode, and check its output.

    `target_dims` are the dimensions of one example's targets. Motley's own image models are
    skipped: they are tested, and a forward pass of each size would double the time until a small
    run starts. Its models for sequences are run without values, because their outputs depend on a
    setting.
    """
    for size in sizes:
        blueprint = split.blueprints[size].module
        is_built_in = type(blueprint).__module__.startswith(OWN_MODELS)
        if is_built_in and isinstance(shape, ImageShape) and task.has_classes:
            continue
        if is_built_in:
            _check(_outputs(blueprint, size, shape, "meta"), size, classes, task, target_dims)
            continue
        model = split.build(size)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise MotleyError(
                f"model.sizes: {size!r} has no parameter that can be trained: it has none, or all "
                "have requires_grad = False."
            )
        _check_types(model, size)
        for training in (True, False):
            outputs = _outputs(model.train(training), size, shape)
            _check(outputs, size, classes, task, target_dims)


def _outputs(model: nn.Module, size: str, shape: InputShape, device: str = "cpu") -> object:
    inputs = example_inputs(shape, 2, device)
    version = inputs._version
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs: object = model(inputs)
    except MotleyError:
        raise
    except Exception as error:  # a user's model can raise anything
        raise MotleyError(
            f"model.sizes: {size!r} cannot be fed a batch of shape {tuple(inputs.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if inputs._version != version:
        # The test set is kept in memory, so every evaluation would see other examples.
        raise MotleyError(
            f"model.sizes: {size!r} changes its input in place, and the same test examples are "
            "used in every evaluation. Use operations that return a new tensor, such as x * 2 "
            "instead of x.mul_(2), and nn.ReLU() instead of nn.ReLU(inplace=True) on the input."
        )
    return outputs


def _check_types(model: nn.Module, size: str) -> None:
    """Refuse complex tensors, whose imaginary parts an average would drop."""
    for name, tensor in model.state_dict().items():
        if tensor.is_complex():
            raise MotleyError(
                f"model.sizes: {size!r} has the tensor {name!r} of type {tensor.dtype}; real "
                "numbers are needed. torch.view_as_real stores a complex tensor as one."
            )


def _check(
    outputs: object, size: str, classes: int, task: Task, target_dims: Sequence[int]
) -> None:
    expected = task.expected_outputs(target_dims, classes)
    if not isinstance(outputs, torch.Tensor):
        actual = f"a {type(outputs).__name__}"
    elif (
        outputs.dim() == 0
        or len(outputs) != 2
        or not task.fits(outputs.shape[1:], target_dims, classes)
    ):
        actual = f"shape {tuple(outputs.shape)} for 2 examples"
    elif not outputs.is_floating_point():
        actual = f"{outputs.dtype}"
    else:
        return
    raise MotleyError(
        f"model.sizes: {size!r} returns {actual}; a model returns {expected}."
        f"{_hint(outputs, target_dims)}"
    )


def _hint(outputs: object, target_dims: Sequence[int]) -> str:
    """Say which setting of the built-in sequence models changes the number of outputs."""
    if not isinstance(outputs, torch.Tensor):
        return ""
    if target_dims and outputs.dim() == 2:
        return " Models for sequences have a setting for it: output = 'every'."
    if not target_dims and outputs.dim() == 3:
        return " Models for sequences have a setting for it: output = 'last'."
    return ""
