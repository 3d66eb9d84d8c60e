"""The last layers of a federation's sizes, for methods that compute them at the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.methods.base import Collection
from motley.methods.info import FederationInfo
from motley.methods.step import Step
from motley.models.facts import classifiers_of
from motley.models.projection import representation_and_answer
from motley.models.tied import second_names
from motley.splits.base import Split


@dataclass(frozen=True)
class LastLayer:
    """A linear last layer: the global names of its tensors, and the length of its inputs."""

    weight: str
    bias: str | None
    width: int


def last_layers(split: Split, method: str) -> dict[str, LastLayer]:
    """Return the last layer of every size. Sizes that share it have equal entries.

    A method that asks needs exactly one linear last layer, which the size holds as a whole. If a
    size has none, the error names the method.
    """
    layers = {}
    for size, blueprint in split.blueprints.items():
        paths = classifiers_of(blueprint.module)
        module = blueprint.module.get_submodule(paths[0]) if len(paths) == 1 else None
        if not isinstance(module, nn.Linear):
            raise MotleyError(
                f"method.name = {method!r}: computes the last layer of a model, and {size!r} "
                "declares no single linear one (motley.models.spec). Choose another model or split."
            )
        _check_own_tensors(blueprint.module, paths[0], size, method)
        part = split.part(size)
        weight = part[f"{paths[0]}.weight"]
        if weight.index is not None:
            raise MotleyError(
                f"method.name = {method!r}: computes whole last layers, and {size!r} holds a slice "
                f"of {weight.name!r}. Use a split in which sizes differ in depth, such as "
                "split.name = 'depth', or 'grouped'."
            )
        bias = part[f"{paths[0]}.bias"].name if module.bias is not None else None
        layers[size] = LastLayer(weight.name, bias, module.in_features)
    return layers


def _check_own_tensors(model: nn.Module, head: str, size: str, method: str) -> None:
    """Raise if a tensor of the last layer is in use elsewhere, too, as with a tied embedding.

    A last layer is computed for given inputs. Written into the other place as well, it would change
    these inputs; left out there, the model would load one of two values for one tensor.
    """
    for second, first in second_names(model).items():
        for name, other in ((second, first), (first, second)):
            if name.rpartition(".")[0] == head:
                raise MotleyError(
                    f"method.name = {method!r}: computes the last layer of a model, and in "
                    f"{size!r} {name!r} of the last layer is the same tensor as {other!r}, which "
                    "would change with it. Choose a model whose last layer has tensors of its own, "
                    "or another method."
                )


def is_calibration_due(info: FederationInfo, every: int, round_number: int) -> bool:
    """Tell whether a round ends with a calibration: the last, and each `every`-th (0: none)."""
    if round_number == info.rounds:
        return True
    return every > 0 and round_number % every == 0


def last_inputs(
    step: Step, batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs of the last layer in double precision, and the labels, of each batch.

    The model runs in evaluation mode, as it will with the last layer that is computed from them.
    """
    step.model.eval()
    try:
        for images, labels in batches:
            with torch.no_grad():
                features, _ = representation_and_answer(step.model, images)
            yield features.double(), labels
    finally:
        step.model.train()


def finite(collections: Sequence[Collection]) -> list[Collection]:
    """Return the collections without NaN and infinite values, on which no last layer can be fitted.

    Clients that are to be trusted send them too if training diverges. On a GPU a round may also be
    ended before an invalid update is found and the round's end repeated without it
    (`motley.server.speculation`).
    """
    usable = []
    for collection in collections:
        if all(bool(tensor.isfinite().all()) for tensor in collection.values.values()):
            usable.append(collection)
    return usable
