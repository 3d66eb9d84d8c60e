"""Check, before training starts, that users' models return logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models.inputs import InputShape, example_inputs
from motley.splits.base import OWN_MODELS, Split


def check_outputs(split: Split, sizes: Iterable[str], shape: InputShape, classes: int) -> None:
    """Run each model on two empty examples, in training and evaluation mode, and check its output.

    Motley's own models are skipped: they are tested, and a forward pass of each size would double
    the time until a small run starts.
    """
    for size in sizes:
        if type(split.blueprints[size].module).__module__.startswith(OWN_MODELS):
            continue
        model = split.build(size)
        for training in (True, False):
            outputs = _outputs(model.train(training), size, shape)
            _check(outputs, size, classes)


def _outputs(model: nn.Module, size: str, shape: InputShape) -> object:
    inputs = example_inputs(shape, 2)
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
    return outputs


def _check(outputs: object, size: str, classes: int) -> None:
    expected = f"one row of {classes} logits per image"
    if not isinstance(outputs, torch.Tensor):
        actual = f"a {type(outputs).__name__}"
    elif outputs.shape != (2, classes):
        actual = f"shape {tuple(outputs.shape)} for 2 images, not (2, {classes})"
    elif not outputs.is_floating_point():
        actual = f"{outputs.dtype}"
    else:
        return
    raise MotleyError(f"model.sizes: {size!r} returns {actual}; a model returns {expected}.")
