"""Initial weights from a file: which tensors fit, and a warning about those that do not."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.limits import check_data

#: A message lists at most this many names of each kind.
MAX_NAMES = 6


def first_layer(module: nn.Module) -> list[str]:
    """Return the names of the parameters of a model's first layer, which gets the images.

    This is the first module with a weight matrix, in the order in which the model registers them.
    """
    for path, layer in module.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
            prefix = f"{path}." if path else ""
            return [f"{prefix}{name}" for name, _ in layer.named_parameters(recurse=False)]
    return []


def load_weights(
    state: State, file: Path, first_layers: Collection[str], *, allow_new_first_layer: bool = False
) -> State:
    """Return a state in which tensors of a file replace tensors of the same name and shape.

    A warning names the tensors that were not replaced. It is an error if one of them is in
    `first_layers` (names in `state`): the later layers were trained on the outputs of the first, so
    a model with a random first layer has lost most of its training.
    """
    setting = f"model.weights = {str(file)!r}"
    weights = _read(file, setting)
    after = dict(state)
    for name, tensor in weights.items():
        if name in state and state[name].shape == tensor.shape:
            after[name] = tensor.to(state[name].dtype)
    not_loaded = [name for name, tensor in state.items() if after[name] is tensor]
    if len(not_loaded) == len(state):
        raise MotleyError(f"{setting}: has no tensor that fits, by name and shape.")
    lost = [name for name in not_loaded if name in first_layers]
    if lost and not allow_new_first_layer:
        raise MotleyError(
            f"{setting}: does not fit the first layer. {_reasons(lost, state, weights)} "
            "Weights for colour images fit grey ones with data.transform.channels = 3. "
            "To start with a random first layer, set model.allow_new_first_layer = true."
        )
    unused = [name for name in weights if name not in state]
    if not_loaded or unused:
        parts = [f"{setting}: {len(not_loaded)} of {len(state)} tensors do not start from it."]
        if not_loaded:
            parts.append(_reasons(not_loaded, state, weights))
        if unused:
            parts.append(f"In the file, but not in the model: {_listed(unused)}.")
        warnings.warn(" ".join(parts), stacklevel=2)
    return after


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a file of weights."""
    weights = _read(file, f"model.weights = {str(file)!r}")
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def _read(file: Path, setting: str) -> dict[str, Tensor]:
    try:
        # Safetensors compares its header with the size of the file, and nothing in it expands.
        check_data(f"{setting}: its tensors", file.stat().st_size)
        return load_file(file)
    except SafetensorError as error:
        raise MotleyError(f"{setting}: is not a safetensors file: {error}.") from None
    except (OSError, ValueError) as error:
        raise MotleyError(f"{setting}: cannot be read: {error}.") from None


def _reasons(names: list[str], state: State, weights: dict[str, Tensor]) -> str:
    """Say why tensors of the model were not loaded."""
    absent = []
    misfits = []
    for name in names:
        if name not in weights:
            absent.append(name)
        else:
            stored, wanted = tuple(weights[name].shape), tuple(state[name].shape)
            misfits.append(f"{name} (it has {stored}, the model {wanted})")
    sentences = []
    if misfits:
        sentences.append(f"Of another shape: {_listed(misfits)}.")
    if absent:
        sentences.append(f"Not in the file: {_listed(absent)}.")
    return " ".join(sentences)


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
