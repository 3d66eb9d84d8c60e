"""Clients after their turn: what a run does not keep, played again from what it keeps.

Every random choice is keyed, so the round after a checkpoint can be trained again: on a CPU bit for bit as the run had
it. A run that keeps many checkpoints (`run.keep_checkpoints`) can be looked at over rounds.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import State, take
from motley.core.update import ClientUpdate
from motley.data import Examples
from motley.data.device import DeviceData
from motley.federation import Federation
from motley.round import Record, Server
from motley.runs.checkpoint import checkpoints, read_checkpoint
from motley.runs.folder import RunFolder


@dataclass(frozen=True)
class Trained:
    """A client right after its turn."""

    client: int
    size: str
    change: State
    state: State
    """What it was sent, with its change: its own model."""


@contextmanager
def opened(path: Path) -> Iterator[tuple[Federation, list[Server]]]:
    """Open a run for looking at: its federation, and the servers of all checkpoints, oldest first.

    What clients remember is copied, so nothing of the run changes; where it is gone, clients begin anew.
    """
    folder = RunFolder.open(path)
    saved = checkpoints(folder.checkpoints)
    if not saved:
        raise MotleyError(f"{path} has no checkpoint yet.")
    with tempfile.TemporaryDirectory() as scratch:
        memory = Path(scratch) / "clients"
        if folder.clients.exists():
            shutil.copytree(folder.clients, memory)
        federation = Federation(folder.read_config(), memory_folder=memory)
        servers = [federation.to_device(read_checkpoint(checkpoint)) for checkpoint in saved]
        known = memory.exists()
        yield federation, [server if known else replace(server, remembered={}) for server in servers]


def kept_rounds(paths: Iterable[Path]) -> Iterator[tuple[str, Federation, Server]]:
    """Yield every checkpoint that the runs have kept: a run's name, its federation, and the server."""
    for path in paths:
        with opened(path) as (federation, servers):
            for server in servers:
                yield path.name, federation, server


def next_round(federation: Federation, server: Server) -> list[Trained]:
    """Train the clients of the round after a server's."""
    record = Record(server.round_number + 1)
    jobs = {job.client: job for job in federation.jobs(server, record)}
    uploads = federation.engine.train(list(jobs.values()), lambda client: None)
    return [
        Trained(
            upload.client,
            jobs[upload.client].size,
            upload.delta,
            {name: tensor + upload.delta[name] for name, tensor in jobs[upload.client].state.items()},
        )
        for upload in uploads
        if isinstance(upload, ClientUpdate)
    ]


def model_of(federation: Federation, size: str, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a model of a size with a client's own state, for evaluation."""
    model = federation.split.build(size).to(federation.device)
    model.load_state_dict(dict(state))
    return model.eval()


def global_model(federation: Federation, server: Server, size: str) -> nn.Module:
    """Return a size's model as the server hands it out."""
    return model_of(federation, size, take(server.model, federation.split.evaluated(size, server.round_number)))


def probe_images(federation: Federation, count: int) -> tuple[Tensor, Tensor]:
    """Return the first test images, transformed as for evaluation, and their labels."""
    data = DeviceData(federation.dataset.test, federation.config.data.transform, federation.device, augment=False)
    return data.batch(torch.arange(min(count, len(data)), device=federation.device))


def own_examples(federation: Federation, client: int, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Return a client's training images without augmentation, all or the first of them, and their labels."""
    rows, train = federation.partition.of(client)[:most], federation.dataset.train
    own = Examples(train.images[rows], train.labels[rows])
    data = DeviceData(own, federation.config.data.transform, federation.device, augment=False)
    return data.batch(torch.arange(len(data), device=federation.device))
