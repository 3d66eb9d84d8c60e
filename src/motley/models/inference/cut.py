"""Check that a model with fewer channels computes as its streams say, in every operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from motley.models.channels import Axis
from motley.models.inference.facts import Inference
from motley.models.inference.record import Attribute, InferenceError
from motley.models.inference.streams import Length, cut_length


def resize_attributes(
    model: nn.Module, attributes: Sequence[tuple[Attribute, Length]], kept: Callable[[Axis], int]
) -> None:
    """Set integers that modules keep as lengths of dimensions, such as `head_dim`, in place."""
    lengths: dict[Attribute, int] = {}
    for attribute, length in attributes:
        number = cut_length(length, kept)
        if lengths.setdefault(attribute, number) != number:
            raise InferenceError(
                f"{attribute} is the length of several dimensions, which would become "
                f"{lengths[attribute]} and {number}. Use two attributes in the module."
            )
    modules = dict(model.named_modules())
    for attribute, number in lengths.items():
        module = modules.get(attribute.path)
        if module is None:
            continue  # a size that ends at an early exit
        if attribute.item is None:
            setattr(module, attribute.name, number)
        else:
            items = list(getattr(module, attribute.name))
            items[attribute.item] = number
            setattr(module, attribute.name, tuple(items))


def check_cut(whole: Inference, narrow: nn.Module, kept: Callable[[Axis], int]) -> None:
    """Record a narrow model, and compare the shape of every result with the expected one.

    A number of channels that is hard-coded in a layer would otherwise be noticed late or never:
    view(b, n, -1, 64) of fewer channels gives fewer heads of 64.
    """
    expected = whole.recording
    advice = (
        "Its code may contain a number of channels. Take it from a tensor's shape, write -1, or "
        "keep it in an integer attribute of the module; or declare ModelSpec.channels."
    )
    try:
        recording = whole.record(narrow, 2, training=True)
    except InferenceError as error:
        raise InferenceError(f"with fewer channels, {error}. {advice}") from error
    for operation, cut in zip(expected.operations, recording.operations, strict=False):
        for value, cut_value in zip(operation.outputs, cut.outputs, strict=False):
            lengths = whole.streams.lengths_of(value)
            wanted = tuple(cut_length(length, kept) for length in lengths)
            shape = recording.values[cut_value].shape
            if cut.name != operation.name or shape != wanted:
                raise InferenceError(
                    f"{expected.describe(operation)} gives {shape} with fewer channels, and "
                    f"{wanted} is needed. {advice}"
                )
