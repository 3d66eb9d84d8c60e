"""Play a run to its end: the rounds, and callbacks for everything that is not the algorithm."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from motley.config import Config
from motley.core.errors import MotleyError
from motley.engine import Engine, LocalEngine
from motley.engine.timeline import Timeline, draw
from motley.extras import require
from motley.federation import Federation
from motley.runs.checkpoint import last_round, load_checkpoint, save_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.interrupt import one_interrupt
from motley.runs.metrics import MetricsLog, overall
from motley.server.record import PendingRecord, RoundRecord
from motley.server.state import ServerState


class Callback:
    """Something that watches a run. Each event has a default that does nothing."""

    def on_start(self, federation: Federation, server: ServerState) -> None:
        """The run begins, or continues, from the given server."""

    def on_client(self, client: int) -> None:
        """A client has finished its local update."""

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        """A round is over."""

    def on_stop(self, server: ServerState) -> None:
        """The run stops after the given server: at its end, or because it was interrupted."""


class KeepMetrics(Callback):
    """Appends every round to the metrics log."""

    def __init__(self, log: MetricsLog) -> None:
        self.log = log

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.log.cut(server.round_number)

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        self.log.append(record)


class KeepCheckpoints(Callback):
    """Saves the server every so many rounds and whenever the run stops."""

    def __init__(self, folder: Path, every: int, keep: int) -> None:
        self.folder, self.every, self.keep = folder, every, keep
        self.saved = -1
        self.named: deque[dict[int, int]] = deque(maxlen=keep)
        """The client memories that each kept checkpoint names, oldest first."""

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.federation = federation
        self.saved = server.round_number if server.round_number else -1

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        if server.round_number % self.every == 0:
            self.save(server)

    def on_stop(self, server: ServerState) -> None:
        self.save(server)
        self.federation.engine.save_memory(
            server.client_state_rounds
        )  # what a broken round filed must not lock the file

    def save(self, server: ServerState) -> None:
        """Save a server that is not saved yet: first what clients remember, then the checkpoint that names it.

        Only then are memories deleted, those that no kept checkpoint names.
        """
        if server.round_number <= self.saved:
            return
        engine = self.federation.engine
        engine.save_memory(server.client_state_rounds)
        save_checkpoint(self.folder, server, self.keep, self.federation.config)
        self.saved = server.round_number
        self.named.append(server.client_state_rounds)
        if len(self.named) == self.keep:
            engine.forget_memory(self.named[0])


class KeepTensorBoard(Callback):
    """Writes TensorBoard event files."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.make = lambda start: SummaryWriter(str(folder), purge_step=start)
        self.writer: Any = None

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.writer = self.make(server.round_number + 1)

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        number = record.round_number
        for size, score in record.scores.items():
            self.writer.add_scalar(f"accuracy/{size}", score.accuracy, number)
            self.writer.add_scalar(f"loss/{size}", score.loss, number)
        if record.scores:
            self.writer.add_scalar("accuracy/mean", overall(record), number)
        self.writer.add_scalar("train/loss", record.train_loss, number)
        for name, value in record.metrics.items():
            self.writer.add_scalar(name, value, number)
        self.writer.add_scalar("seconds/round", sum(record.seconds.values()), number)
        self.writer.flush()

    def on_stop(self, server: ServerState) -> None:
        self.writer.close()


class KeepTimeline(Callback):
    """Draws which client trained in which slot and when, once the run stops."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, federation: Federation, server: ServerState) -> None:
        assert isinstance(federation.engine, LocalEngine)
        self.timeline = federation.engine.clients.timeline = Timeline(*federation.devices)

    def on_stop(self, server: ServerState) -> None:
        spans = self.timeline.spans()
        if spans:
            draw(spans, self.path)


def tensorboard_installed() -> bool:
    """Tell whether event files can be written."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


@one_interrupt()
def play(federation: Federation, server: ServerState, callbacks: Iterable[Callback]) -> ServerState:
    """Play rounds until the configured number; an interruption keeps the last whole round and is passed on.

    A round is whole once every callback has seen it: one whose metrics were not written is played again on resuming.
    On a GPU a round may still be evaluated when the next one begins; callbacks see it as soon as its scores are there.
    """
    callbacks = list(callbacks)
    #: The last round, until the callbacks have seen it.
    unseen: list[tuple[ServerState, PendingRecord]] = []

    def show() -> None:
        nonlocal server
        while unseen:
            after, pending = unseen.pop()
            record = pending.read()
            for callback in callbacks:
                callback.on_round(after, record)
            server = after

    def done(client: int) -> None:
        if unseen and unseen[0][1].ready:
            show()
        for callback in callbacks:
            callback.on_client(client)

    def finish() -> None:
        try:
            show()
        finally:
            _stop(callbacks, server)

    for callback in callbacks:
        callback.on_start(federation, server)
    last = server
    try:
        while last.round_number < federation.config.training.rounds:
            last, pending = federation.queue_round(last, done)
            show()
            unseen.append((last, pending))
            if pending.ready:
                show()
    except Exception:
        with suppress(Exception):  # a full disk makes both a round and its end fail: the first failure is reported
            finish()
        raise
    except BaseException:  # an interruption: if its checkpoint cannot be saved, that must be reported
        finish()
        raise
    finish()
    return server


def _stop(callbacks: Iterable[Callback], server: ServerState) -> None:
    """Tell all callbacks that the run stops, the last one first, even if one of them raises.

    The display of a terminal that was closed fails, and the checkpoint must be saved all the same.
    """
    with ExitStack() as stack:
        for callback in callbacks:
            stack.callback(callback.on_stop, server)


def folder_callbacks(folder: RunFolder, config: Config) -> list[Callback]:
    """Return the callbacks that fill a run's folder; the checkpoint comes last, as it ends what can be played again."""
    keep: list[Callback] = [KeepMetrics(MetricsLog(folder.metrics))]
    if config.run.tensorboard and tensorboard_installed():
        keep.append(KeepTensorBoard(folder.tensorboard))
    return [*keep, KeepCheckpoints(folder.checkpoints, config.run.checkpoint_every, config.run.keep_checkpoints)]


def begin(
    config: Config,
    path: Path,
    watchers: Iterable[Callback] = (),
    *,
    profile: bool = False,
    engine: Callable[[Federation], Engine] | None = None,
) -> tuple[Federation, ServerState]:
    """Start a run in a new folder and play it to its end. Nothing is written before everything has been checked."""
    RunFolder(path).refuse_taken()  # before the data are read, which can take a while
    if profile:
        require("matplotlib", "--profile")
    federation = Federation(config, memory_folder=path / "clients", engine=engine)
    if profile and not isinstance(federation.engine, LocalEngine):
        raise MotleyError(f"engine.name = {config.engine.name!r}: only the local engine has slots to draw.")
    server = federation.initial_state()
    folder = RunFolder.create(path, config)
    drawn = [KeepTimeline(folder.timeline)] if profile else []
    with folder.locked():
        server = play(federation, server, [*folder_callbacks(folder, config), *drawn, *watchers])
    return federation, server


def resume(
    path: Path, watchers: Iterable[Callback] = (), *, engine: Callable[[Federation], Engine] | None = None
) -> tuple[Federation, ServerState]:
    """Continue a run from its newest checkpoint; a finished run is left as it is."""
    folder = RunFolder.open(path)
    with folder.locked():
        config = folder.read_config()
        federation = Federation(config, memory_folder=folder.clients, engine=engine)
        saved = load_checkpoint(folder.checkpoints)
        if saved is not None:
            _refuse_another_model(folder, federation, saved)
        server = federation.to_device(saved) if saved is not None else federation.initial_state()
        if server.round_number < config.training.rounds:
            server = play(federation, server, [*folder_callbacks(folder, config), *watchers])
    return federation, server


def _refuse_another_model(folder: RunFolder, federation: Federation, saved: ServerState) -> None:
    """Raise if the configuration, edited by hand, describes another global state than the checkpoint holds."""
    expected = {name: tuple(tensor.shape) for name, tensor in federation.split.frame.items()}
    found = {name: tuple(tensor.shape) for name, tensor in saved.state.items()}
    different = [name for name in (*expected, *found) if expected.get(name) != found.get(name)]
    if different:
        name = different[0]
        raise MotleyError(
            f"{folder.path} cannot be continued: {folder.config.name} describes another model than its checkpoint of "
            f"round {saved.round_number} holds. The first difference is {name!r}: "
            f"{expected.get(name, 'absent')} by the configuration, {found.get(name, 'absent')} in the checkpoint. "
            "Undo the change of the configuration, or start a new run."
        )


def set_rounds(path: Path, rounds: int) -> Config:
    """Change the number of rounds of an existing run, and return its new configuration."""
    folder = RunFolder.open(path)
    with folder.locked():
        config = folder.read_config()
        played = last_round(folder.checkpoints)
        if rounds < played:
            raise MotleyError(f"--rounds {rounds}: {path} has already played {played} rounds; they cannot be undone.")
        if rounds != config.training.rounds:
            training = config.training.model_copy(update={"rounds": rounds})
            config = config.model_copy(update={"training": training})
            folder.write_config(config)
    return config
