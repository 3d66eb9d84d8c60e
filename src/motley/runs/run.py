"""Start a run, resume it, and run its rounds with callbacks around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from motley.config import Config
from motley.core.errors import MotleyError
from motley.engine import Engine, LocalEngine
from motley.extras import require
from motley.federation import Federation
from motley.runs.callbacks import Callback, DrawTimeline, folder_callbacks
from motley.runs.checkpoint import last_round, load_checkpoint
from motley.runs.folder import RunFolder
from motley.runs.interrupt import one_interrupt
from motley.runs.loggers import build_loggers, require_loggers
from motley.server.record import PendingRecord
from motley.server.state import ServerState


def start_run(
    config: Config,
    path: Path,
    watchers: Iterable[Callback] = (),
    *,
    profile: bool = False,
    engine: Callable[[Federation], Engine] | None = None,
) -> tuple[Federation, ServerState]:
    """Start a run in a new folder and run it to its end.

    Everything is checked before the folder is created. With `profile`, a timeline of the slots is
    drawn at the end. `engine` replaces the engine that the configuration names.
    """
    # Checked before the data set is read, which can take a while.
    RunFolder(path).require_free()
    if profile:
        require("matplotlib", "--profile")
    require_loggers(config)
    federation = Federation(config, memory_folder=path / "clients", engine=engine)
    if profile and not isinstance(federation.engine, LocalEngine):
        raise MotleyError(
            f"engine.name = {config.engine.name!r}: --profile needs the local engine, "
            "because it draws the engine's slots."
        )
    server = federation.initial_state()
    folder = RunFolder.create(path, config)
    callbacks = [*build_loggers(path, config), *folder_callbacks(folder, config)]
    if profile:
        callbacks.append(DrawTimeline(folder.timeline))
    callbacks.extend(watchers)
    with folder.locked():
        server = run_rounds(federation, server, callbacks)
    return federation, server


def resume_run(
    path: Path,
    watchers: Iterable[Callback] = (),
    *,
    engine: Callable[[Federation], Engine] | None = None,
) -> tuple[Federation, ServerState]:
    """Continue a run from its newest checkpoint. A finished run is left as it is."""
    folder = RunFolder.open(path)
    with folder.locked():
        config = folder.read_config()
        federation = Federation(config, memory_folder=folder.clients, engine=engine)
        checkpoint = load_checkpoint(folder.checkpoints)
        if checkpoint is None:
            server = federation.initial_state()
        else:
            _require_same_model(folder, federation, checkpoint)
            server = federation.to_device(checkpoint)
        if server.round_number < config.training.rounds:
            require_loggers(config)
            loggers = build_loggers(path, config)
            callbacks = [*loggers, *folder_callbacks(folder, config), *watchers]
            server = run_rounds(federation, server, callbacks)
    return federation, server


@one_interrupt()
def run_rounds(
    federation: Federation, server: ServerState, callbacks: Iterable[Callback]
) -> ServerState:
    """Run the remaining rounds of the configuration and return the server after the last one.

    A round is complete once every callback has seen it: a round whose metrics were not written is
    run again on resuming. An interruption keeps the last complete round and is raised again.
    """
    callbacks = list(callbacks)
    for callback in callbacks:
        callback.on_start(federation, server)
    delivery = _Delivery(callbacks, server)
    latest = server
    try:
        while latest.round_number < federation.config.training.rounds:
            latest, record = federation.queue_round(latest, delivery.client_finished)
            delivery.deliver()
            delivery.add(latest, record)
    except Exception as error:
        # A full disk makes both a round and the final save fail. Report the first failure.
        with suppress(Exception):
            delivery.finish(error)
        raise
    except BaseException as interruption:
        # If its checkpoint cannot be saved, that failure must be reported.
        delivery.finish(interruption)
        raise
    delivery.finish()
    return delivery.server


class _Delivery:
    """Hands rounds to the callbacks as soon as their records are complete.

    On a GPU, a round may still be evaluated while the next one trains. Its record is kept here
    until the scores have arrived; the loop does not wait for them.
    """

    def __init__(self, callbacks: list[Callback], server: ServerState) -> None:
        self.callbacks = callbacks
        #: The server after the last round that all callbacks have seen.
        self.server = server
        #: The latest round, if the callbacks have not seen it yet.
        self.pending: tuple[ServerState, PendingRecord] | None = None

    def add(self, server: ServerState, record: PendingRecord) -> None:
        """Take over a round that has ended, and deliver it if its record is complete."""
        self.pending = (server, record)
        if record.ready:
            self.deliver()

    def client_finished(self, client: int) -> None:
        """Pass a client's event on, after the previous round if its record is complete by now."""
        if self.pending is not None and self.pending[1].ready:
            self.deliver()
        for callback in self.callbacks:
            callback.on_client(client)

    def deliver(self) -> None:
        """Show the pending round to all callbacks, waiting for its record if necessary."""
        if self.pending is None:
            return
        server, pending = self.pending
        # Cleared first: if a callback fails, `finish` must not show it the same round again.
        self.pending = None
        record = pending.read()
        for callback in self.callbacks:
            callback.on_round(server, record)
        self.server = server

    def finish(self, error: BaseException | None = None) -> None:
        """Deliver the last round and tell all callbacks that the run stops, because of `error`."""
        try:
            self.deliver()
        finally:
            self._stop(error)

    def _stop(self, error: BaseException | None) -> None:
        """Call every `on_exception` and `on_stop`, the last callback's first, even if one raises.

        The progress display of a closed terminal fails, for example, and the checkpoint must be
        saved nevertheless.
        """
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(callback.on_stop, self.server)
                if error is not None:
                    stack.callback(callback.on_exception, error)


def _require_same_model(folder: RunFolder, federation: Federation, checkpoint: ServerState) -> None:
    """Raise if config.toml was edited so that its global state differs from the checkpoint's."""
    configured = {name: tuple(tensor.shape) for name, tensor in federation.split.frame.items()}
    saved = {name: tuple(tensor.shape) for name, tensor in checkpoint.state.items()}
    for name in (*configured, *saved):
        if configured.get(name) != saved.get(name):
            raise MotleyError(
                f"{folder.path} cannot be continued: {folder.config.name} describes a different "
                f"model than the checkpoint of round {checkpoint.round_number}. "
                f"The first difference is {name!r}: {configured.get(name, 'absent')} in the "
                f"configuration, {saved.get(name, 'absent')} in the checkpoint. "
                "Undo the change of the configuration, or start a new run."
            )


def set_rounds(path: Path, rounds: int) -> Config:
    """Change the number of rounds of an existing run, and return its new configuration."""
    folder = RunFolder.open(path)
    with folder.locked():
        config = folder.read_config()
        completed = last_round(folder.checkpoints)
        if rounds < completed:
            raise MotleyError(
                f"--rounds {rounds}: {path} has already completed {completed} rounds."
            )
        if rounds != config.training.rounds:
            training = config.training.model_copy(update={"rounds": rounds})
            config = config.model_copy(update={"training": training})
            folder.write_config(config)
    return config
