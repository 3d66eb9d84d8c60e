"""Settings that had another name in an earlier version.

A configuration that a user writes is rejected with the new name. A configuration that was saved
with a run is read as if it had been written with the new names, so that old runs can still be
resumed and shown.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from motley.core.errors import MotleyError


@dataclass(frozen=True)
class Rename:
    """The new name of a key and, if its values were renamed too, the new value for each old one."""

    key: str
    values: Mapping[Any, Any] = field(default_factory=dict)


RENAMED: dict[str, Rename] = {
    "server.average": Rename("server.ema_decay"),
    "server.step": Rename("server.lr"),
    "server.weights": Rename("server.weighting"),
    "server.min_share": Rename("server.min_fraction"),
    "training.clip": Rename("training.max_grad_norm"),
    "training.lr_drops": Rename("training.lr_milestones"),
    "training.lr_drop": Rename("training.lr_gamma"),
    "engine.stack": Rename("engine.vmap_clients"),
    "engine.fused": Rename("engine.kernels"),
    "engine.memory_share": Rename("engine.client_state_gpu_fraction"),
    "engine.memory_gib": Rename("engine.client_state_host_gib"),
    "engine.flower.most_mib": Rename("engine.flower.max_reply_mib"),
    "transit.upload": Rename("uplink.dtype"),
    "transit.noise": Rename("uplink.noise"),
    "federation.assign": Rename("federation.size_assignment"),
    "federation.shares": Rename("federation.size_fractions"),
    "federation.sampling": Rename("federation.sampler", {"seed": "uniform", "round": "fedml"}),
    "model.resnet.taps": Rename("model.resnet.trim_dead_taps", {"all": False, "effective": True}),
    "split.answer": Rename("split.output"),
    "run.keep": Rename("run.keep_checkpoints"),
    "data.transform.preset": Rename("data.transform.variant"),
    "method.preset": Rename("method.variant"),
    "method.inco.preset": Rename("server.inco.variant"),
    "method.inco.variant": Rename("server.inco.variant"),
    "method.inco.granularity": Rename("server.inco.granularity"),
    "method.inco.sign": Rename("server.inco.sign"),
    "method.inco.products": Rename("server.inco.products"),
    "method.inco.normalize": Rename("server.inco.normalize"),
    "method.inco.optimize": Rename("server.inco.optimize"),
    "method.inco.theta_max": Rename("server.inco.theta_max"),
    "method.inco.element_max": Rename("server.inco.element_max"),
    "method.inco.epsilon": Rename("server.inco.epsilon"),
    "server.statistics": Rename("server.statistics.name"),
    "server.statistics_every": Rename("server.statistics.every"),
    "server.statistics_clients": Rename("server.statistics.clients"),
}


def reject_old_names(values: Mapping[str, Any]) -> None:
    """Raise an error that gives the new name of every old key in `values`."""
    problems = []
    for old, rename in RENAMED.items():
        if not _has(values, old):
            continue
        problem = f"{old} was renamed to {rename.key}"
        value = _get(values, old)
        if isinstance(value, str) and value in rename.values:
            problem += f"; the value {value!r} is now {json.dumps(rename.values[value])}"
        problems.append(f"{problem}.")
    if problems:
        raise MotleyError("\n".join(problems))


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give old keys and values of a saved configuration their new names."""
    result = copy.deepcopy(dict(values))
    for old, rename in RENAMED.items():
        if not _has(result, old):
            continue
        value = _pop(result, old)
        if isinstance(value, str):
            value = rename.values.get(value, value)
        _put(result, rename.key, value)
    return result


def _tables(values: Any, names: list[str]) -> Iterator[Any]:
    """Yield `values` and the tables inside it along a path; None if there is no such table."""
    yield values
    for name in names:
        values = values.get(name) if isinstance(values, Mapping) else None
        yield values


def _get(values: Mapping[str, Any], key: str) -> Any:
    *_, value = _tables(values, key.split("."))
    return value


def _has(values: Mapping[str, Any], key: str) -> bool:
    """Tell whether a key has a value.

    A table does not count: server.statistics was a text, and is a table now.
    """
    *path, name = key.split(".")
    *_, table = _tables(values, path)
    return isinstance(table, Mapping) and name in table and not isinstance(table[name], Mapping)


def _pop(values: dict[str, Any], key: str) -> Any:
    """Remove a key and return its value; a table that is empty afterwards is removed too."""
    *path, name = key.split(".")
    tables = list(_tables(values, path))
    value = tables[-1].pop(name)
    for table, inner in reversed(list(zip(tables, path, strict=False))):
        if not table[inner]:
            del table[inner]
    return value


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *path, name = key.split(".")
    table = values
    for step in path:
        table = table.setdefault(step, {})
    table.setdefault(name, value)
