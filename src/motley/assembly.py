"""The objects that a configuration names: its split, its sizes, its method, and the clients that a process plays.

A federation puts all of them together (`federation.py`), a node those of its one client (`client.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.engine import Clients, DebugEngine, LocalEngine
from motley.engine.memory import MemoryStore
from motley.limits import allocating, check_fits
from motley.methods import METHODS, FederationInfo, Method
from motley.models import MODELS, ImageShape
from motley.models.projection import with_projection
from motley.privacy import DPMechanism, refuse_leaks
from motley.splits import SPLITS, Split


def assign_sizes(config: Config, round_number: int = 0) -> tuple[str, ...]:
    """Return the size of every client, by client id; a round has its own where sizes are dynamic."""
    sizes, clients = config.split.sizes(config.model.sizes), config.federation.clients
    if config.federation.sizes:
        return config.federation.sizes
    shares = np.array(config.federation.size_fractions or (1.0,) * len(sizes))
    ends = np.rint(np.cumsum(shares) / shares.sum() * clients).astype(int)
    with allocating(f"federation.clients = {clients}: a size for each of them"):
        blocks = np.repeat(np.arange(len(sizes)), np.diff(ends, prepend=0))
        if config.federation.size_assignment in ("random", "dynamic"):
            which = (round_number,) if config.federation.size_assignment == "dynamic" else ()
            blocks = generator(config.seed, "sizes", *which).permutation(blocks)
        elif config.federation.size_assignment == "alternate":
            counts = [count for count in np.bincount(blocks) if count]
            place = np.concatenate([np.linspace(0, 1, count, endpoint=False) for count in counts])
            blocks = blocks[np.argsort(place, kind="stable")]
        return tuple(sizes[block] for block in blocks)


def size_in_bytes(state: State) -> int:
    """Return how many bytes a state is on its way."""
    return sum(tensor.nbytes for tensor in state.values())


def build_split(config: Config, shape: ImageShape, classes: int) -> Split:
    """Return the split of a configuration for the shape of its images. Its models have no memory yet."""

    def build(size: str) -> Any:
        architecture = MODELS[size]
        model = architecture.build(getattr(config.model, architecture.family), shape, classes)
        return with_projection(model, config.model.projection)

    builds = {size: partial(build, size) for size in config.model.sizes}
    return SPLITS[config.split.name](builds, config.split, config.seed)


def check_weights_fit(split: Split, sizes: Iterable[str], device: torch.device) -> None:
    """Refuse a size if the global state, a client's model and its gradients are larger than all the memory."""
    for size in sizes:
        weights = size_in_bytes(split.blueprints[size].module.state_dict())
        check_fits(
            f"model.sizes: three copies of the weights of {size!r} (state, model, gradients)", 3 * weights, device
        )


def build_method(
    config: Config,
    split: Split,
    sizes: tuple[str, ...],
    shape: ImageShape,
    classes: int,
    drawn: Callable[[int, int], str],
) -> Method:
    """Return the method of a configuration, if it goes together with the other settings.

    `drawn` returns the size of a client in a round; it is asked if sizes are drawn anew in every round.
    """
    dynamic = config.federation.size_assignment == "dynamic"
    info = FederationInfo(
        split,
        sizes,
        classes,
        config.seed,
        config.training,
        shape,
        config.evaluation.every,
        drawn if dynamic else None,
    )
    method = METHODS[config.method.name](config.method, info)
    refuse_states_of_other_parts(config, split, method)
    refuse_leaks(config.privacy, split, method, statistics=config.server.statistics.name, dynamic_sizes=dynamic)
    return method


def refuse_states_of_other_parts(config: Config, split: Split, method: Method) -> None:
    """Refuse methods that keep client state of a part if a client's next part is another."""
    if config.federation.size_assignment == "dynamic":
        why = "federation.size_assignment = 'dynamic'"
    elif split.moves:
        why = f"split.channels = {getattr(config.split, 'channels', '')!r}"
    else:
        return
    if config.uplink.dtype != "fp32":
        raise MotleyError(
            f"uplink.dtype = {config.uplink.dtype!r}: clients remember what rounding took from their "
            f"parts, which {why} changes from round to round. Use 'fp32', or parts that stay."
        )
    if method.requirements.client_state:
        raise MotleyError(
            f"method.name = {config.method.name!r}: its clients remember something of their parts, which "
            f"{why} changes from round to round. Choose another method, or parts that stay."
        )


def build_clients(
    config: Config,
    method: Method,
    copies: Sequence[DeviceData],
    partition: Partition,
    folder: Path | None,
    *,
    secret: bytes | None = None,
    lean: bool = False,
) -> Clients:
    """Return the clients that this process plays, with a copy of the examples on each device.

    `folder` is for the clients' states. `secret` keys the noise of `privacy`; without one, it is the run's seed.
    `lean`: see `Clients`.
    """
    return Clients(
        method,
        copies[0],
        partition,
        config.training,
        precision=config.engine.precision,
        kernels=chosen_kernels(config),
        compiled=compiles(config),
        seed=config.seed,
        memory=_store(config, folder, [data.device for data in copies]),
        elsewhere=copies[1:],
        dp=DPMechanism(config.privacy, config.seed, secret) if config.privacy.active else None,
        encoding=config.uplink.dtype,
        lean=lean,
    )


def build_engine(config: Config, clients: Clients) -> DebugEngine | LocalEngine:
    """Return the engine that plays clients in this process."""
    if config.engine.name == "debug":
        return DebugEngine(clients)
    return LocalEngine(clients, config.engine.slots, config.engine.vmap_clients)


def chosen_kernels(config: Config) -> frozenset[str]:
    """Return the names of Motley's own kernels that a run uses on a GPU; the debug engine uses none."""
    return frozenset() if config.engine.name == "debug" else config.engine.kernel_names


def compiles(config: Config) -> bool:
    """Tell whether models are compiled; in the debug engine they never are."""
    return config.engine.compile and config.engine.name != "debug"


def _store(config: Config, folder: Path | None, devices: Sequence[torch.device]) -> MemoryStore:
    """Return the store of the clients' states: on a GPU only if all of them train on it."""
    near = 0
    if devices[0].type == "cuda" and len(devices) == 1:
        near = int(config.engine.client_state_gpu_fraction * torch.cuda.get_device_properties(devices[0]).total_memory)
    return MemoryStore(folder, int(config.engine.client_state_host_gib * 2**30), near, devices[0])
