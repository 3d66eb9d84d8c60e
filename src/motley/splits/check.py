"""A try of models that are not Motley's own, before anything is trained: what they return must be logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models import ImageShape
from motley.splits.base import OWN_MODELS, Split


def check_outputs(split: Split, sizes: Iterable[str], shape: ImageShape, classes: int) -> None:
    """Feed sizes two black images, in training and in evaluation, and refuse those that return no logits.

    Motley's own models are left out: they are tested, and a forward pass of each size would double the time until a
    small run starts.
    """
    for size in sizes:
        if type(split.blueprints[size].module).__module__.startswith(OWN_MODELS):
            continue
        model = split.build(size)
        for training in (True, False):
            outputs = _outputs(model.train(training), size, shape)
            _check(outputs, size, classes)


def _outputs(model: nn.Module, size: str, shape: ImageShape) -> object:
    images = torch.zeros(2, *shape)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs: object = model(images)
    except MotleyError:
        raise
    except Exception as error:  # a user's model can raise anything
        raise MotleyError(
            f"model.sizes: {size!r} cannot be fed a batch of shape {tuple(images.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return outputs


def _check(outputs: object, size: str, classes: int) -> None:
    wanted = f"a model returns a tensor of logits, one row per image and one column for each of {classes} classes"
    if not isinstance(outputs, torch.Tensor):
        raise MotleyError(f"model.sizes: {size!r} returns a {type(outputs).__name__}; {wanted}.")
    if outputs.shape != (2, classes):
        raise MotleyError(
            f"model.sizes: {size!r} returns shape {tuple(outputs.shape)} for 2 images, not (2, {classes}); {wanted}."
        )
    if not outputs.is_floating_point():
        raise MotleyError(f"model.sizes: {size!r} returns {outputs.dtype}; {wanted}.")
