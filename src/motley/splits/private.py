"""Private tensors: the part of a client's model that never leaves the client.

In the picture of one global state, a private tensor is a name prefixed by the client: every client
holds its own, and nobody else holds it. The server would have nothing to average there, so such
names are left out of the global state altogether. A client keeps its private tensors in its client
state (`motley.client.own_model`).

`split.private` names them, in any combination:

- head (FedPer, FedRep): the layers that output one value per class;
- body (LG-FedAvg): everything else;
- normalization (FedBN): parameters and running statistics of all normalization layers;
- names of tensors or modules, in which `*` and `?` match any characters: "layer4", "*.bias".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from motley.core.errors import MotleyError
from motley.models.facts import classifiers_of
from motley.models.stages import is_within

HEAD, BODY, NORMALIZATION = "head", "body", "normalization"
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def private_names(
    chosen: Sequence[str], models: Mapping[str, nn.Module]
) -> dict[str, frozenset[str]]:
    """Return the private names of every size; `chosen` is `split.private`, `models` by size."""
    names: dict[str, frozenset[str]] = {}
    matched: set[str] = set()
    for size, model in models.items():
        private: set[str] = set()
        for choice in chosen:
            matching = _matching(choice, size, model)
            if matching:
                matched.add(choice)
            private |= matching
        if private and private == set(model.state_dict()):
            raise MotleyError(
                f"split.private = {list(chosen)}: leaves {size!r} nothing to share. "
                "Use method.name = 'local' to train every client's model alone."
            )
        names[size] = frozenset(private)
    for choice in chosen:
        if choice not in matched:
            raise MotleyError(_without_match(choice, chosen, models))
    return names


def _matching(choice: str, size: str, model: nn.Module) -> set[str]:
    """Return the tensors of a model that one entry of `split.private` stands for."""
    tensors = set(model.state_dict())
    if choice in (HEAD, BODY):
        head = _within(tensors, _head(choice, size, model))
        return head if choice == HEAD else tensors - head
    if choice == NORMALIZATION:
        norms = [path for path, module in model.named_modules() if isinstance(module, NORMS)]
        return _within(tensors, norms)
    paths = [path for path, _ in model.named_modules() if path]  # "" is the model itself
    modules = [path for path in paths if fnmatchcase(path, choice)]
    by_name = {name for name in tensors if fnmatchcase(name, choice)}
    return by_name | _within(tensors, modules)


def _head(choice: str, size: str, model: nn.Module) -> Sequence[str]:
    """Return the layers that output one value per class."""
    layers = classifiers_of(model)
    if not layers:
        raise MotleyError(
            f"split.private = {choice!r}: {size!r} declares no head (motley.models.spec). Name the "
            f"private tensors or modules instead: {_examples(model)}."
        )
    return layers


def _within(tensors: set[str], paths: Sequence[str]) -> set[str]:
    """Return the tensors that are inside of one of the modules."""
    inside = set()
    for name in tensors:
        if any(is_within(name, path) for path in paths):
            inside.add(name)
    return inside


def _without_match(choice: str, chosen: Sequence[str], models: Mapping[str, nn.Module]) -> str:
    prefix = f"split.private = {list(chosen)}: "
    if choice == NORMALIZATION:
        return f"{prefix}{', '.join(models)} have no normalization layers with tensors."
    first = next(iter(models.values()))
    return (
        f"{prefix}{choice!r} is neither 'head', 'body' or 'normalization' nor the name of a module "
        f"or tensor of {', '.join(models)}; there are {_examples(first)}."
    )


def _examples(model: nn.Module) -> str:
    """Return the first and the last modules with tensors of their own, as examples of names."""
    paths = []
    for path, module in model.named_modules():
        if path and next(module.parameters(recurse=False), None) is not None:
            paths.append(repr(path))
    if len(paths) > 6:
        paths = [*paths[:3], "...", *paths[-3:]]
    return ", ".join(paths)
