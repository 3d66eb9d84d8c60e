"""Train a round of a finished run again, to obtain the client models that a run does not keep.

Every random choice is keyed, so the round after a checkpoint can be repeated; on a CPU the result
is bit-identical to the run's. Runs that keep many checkpoints (`run.keep_checkpoints`) can be
analyzed over rounds.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from motley.checks import refuse_global_model
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator
from motley.core.update import ClientUpdate
from motley.data import Examples
from motley.data.device import device_data
from motley.federation import Federation
from motley.runs.checkpoint import checkpoints, read_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.integrity import require_same_model
from motley.server.state import ServerState

#: Progress of an analysis, one message per slow step. `motley analyze` prints them.
log = logging.getLogger("motley.analysis")


@dataclass(frozen=True)
class TrainedClient:
    """A client right after its local update."""

    client: int
    size: str
    delta: State
    #: The state of the client's model: the received part plus the delta.
    state: State


@contextmanager
def open_run(path: Path) -> Iterator[tuple[Federation, list[ServerState]]]:
    """Open a run for analysis: its federation, and the servers of all checkpoints, oldest first.

    The run is not changed: client states are copied to a temporary folder. If the run has none
    (a study deletes them), clients start with their initial state.
    """
    folder = RunFolder.open(path)
    saved = checkpoints(folder.checkpoints)
    if not saved:
        raise MotleyError(f"{path} has no checkpoint yet.")
    log.info("opening %s", path)
    with tempfile.TemporaryDirectory() as temporary:
        client_states = Path(temporary) / "clients"
        if folder.clients.exists():
            shutil.copytree(folder.clients, client_states)
        federation = Federation(folder.read_config(), client_state_folder=client_states)
        refuse_global_model(federation.method)  # analyses are about deltas and the global model
        servers = []
        for checkpoint in saved:
            server = read_checkpoint(checkpoint)
            require_same_model(folder, federation, server)
            server = federation.to_device(server)
            if not client_states.exists():
                server = replace(server, client_state_rounds={})
            servers.append(server)
        yield federation, servers


def all_checkpoints(paths: Iterable[Path]) -> Iterator[tuple[str, Federation, ServerState]]:
    """Yield every checkpoint of some runs: the run's name, its federation, and the server."""
    for path in paths:
        with open_run(path) as (federation, servers):
            for server in servers:
                yield path.name, federation, server


def train_next_round(
    federation: Federation, server: ServerState, clients: Iterable[int] | None = None
) -> list[TrainedClient]:
    """Train the clients of the round after `server`. Failed clients are left out.

    By default these are the clients that the run sampled; `clients` are others.
    """
    round_number = server.round_number + 1
    if clients is None:
        clients = federation.sample(round_number)
    jobs = {client: federation.job(server, round_number, client) for client in clients}
    log.info("training %d clients of round %d again", len(jobs), round_number)
    with federation.numerics():
        answers = federation.engine.train(list(jobs.values()), lambda client: None)
    trained = []
    for update in answers:
        if isinstance(update, ClientUpdate):
            job = jobs[update.client]
            state = {name: tensor + update.delta[name] for name, tensor in job.state.items()}
            trained.append(TrainedClient(update.client, job.size, update.delta, state))
    return trained


def model_of(federation: Federation, size: str, state: Mapping[str, Tensor]) -> nn.Module:
    """Return a model of a size with the given state, in evaluation mode."""
    model = federation.split.build(size).to(federation.device)
    model.load_state_dict(dict(state))
    return model.eval()


def global_model(federation: Federation, server: ServerState, size: str) -> nn.Module:
    """Return the global model of a size, as it is evaluated."""
    return federation.model(size, server)


def probe_images(federation: Federation, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` test images, transformed as for evaluation, and their labels."""
    test = federation.dataset.test
    return examples_at(federation, test, np.arange(min(count, len(test))))


def client_examples(
    federation: Federation, client: int, max_count: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return a client's training images without augmentation, and their labels."""
    rows = federation.partition.of(client)[:max_count]
    return examples_at(federation, federation.dataset.train, rows)


def sampled_rows(rows: np.ndarray, count: int, seed: int, *which: int | str) -> np.ndarray:
    """Return at most `count` of some rows, drawn without replacement, in ascending order.

    `which` identifies the choice: the same seed and arguments give the same rows.
    """
    if len(rows) > count:
        rows = generator(seed, "analysis", *which).choice(rows, count, replace=False)
    return np.sort(rows)


def examples_at(
    federation: Federation, examples: Examples, rows: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return the images and labels of some rows, transformed as for evaluation."""
    chosen = examples.rows(rows)
    transform = federation.config.data.transform
    data = device_data(chosen, transform, federation.device, augment=False)
    return data.batch(torch.arange(len(data), device=federation.device))
