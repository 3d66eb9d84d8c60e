"""Start a run, resume it, and run its rounds with callbacks around them."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

from motley.config import Config, with_overrides
from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.engine import DebugEngine, Engine, LocalEngine
from motley.extras import require
from motley.federation import Federation
from motley.files import given_path
from motley.runs.callbacks import Callback, DrawTimeline, folder_callbacks
from motley.runs.checkpoint import (
    DamagedCheckpointError,
    Metadata,
    checkpoints,
    put_aside,
    read_checkpoint,
    read_metadata,
    remove_unfinished,
)
from motley.runs.folder import RunFolder
from motley.runs.integrity import (
    Changes,
    changed_data,
    changed_settings,
    data_checksums,
    describe_changes,
    difference,
    log_problem,
    newest_metadata,
    record_change,
    refuse_changes,
    require_same_model,
)
from motley.runs.interrupt import one_interrupt
from motley.runs.loggers import build_loggers, require_loggers
from motley.runs.metrics import MetricsLog
from motley.runs.privacy_ledger import keep_ledger
from motley.server.record import PendingRecord
from motley.server.state import ServerState
from motley.settings import flat

log = logging.getLogger("motley.runs")

#: Kinds of changes that a resumed run accepts only if it is told to.
ACCEPTABLE = ("metrics", "data")


def start_run(
    config: Config,
    path: str | Path,
    watchers: Iterable[Callback] = (),
    *,
    profile: bool = False,
    engine: Callable[[Federation], Engine] | None = None,
) -> tuple[Federation, ServerState]:
    """Start a run in a new folder and run it to its end.

    Everything is checked before the folder is created. With `profile`, a timeline of the slots is
    drawn at the end. `engine` replaces the engine that the configuration names.
    """
    path = given_path(path, "start_run: path")
    if not isinstance(config, Config):
        raise MotleyError(
            f"start_run: config: is {describe(config)}; a motley.Config is expected, such as that "
            "of a federation (federation.config)."
        )
    # Checked before the data set is read, which can take a while.
    RunFolder(path).require_free()
    if profile:
        require("matplotlib", "--profile")
    require_loggers(config)
    federation = Federation(config, client_state_folder=path / "clients", engine=engine)
    if profile and not isinstance(federation.engine, LocalEngine):
        raise MotleyError(
            f"engine.name = {config.engine.name!r}: --profile needs the local engine, "
            "because it draws the engine's slots."
        )
    server = federation.initial_state()
    folder = RunFolder.create(path, config)
    data = data_checksums(federation)
    callbacks = [*build_loggers(path, config), *folder_callbacks(folder, config, data)]
    if profile:
        callbacks.append(DrawTimeline(folder.timeline))
    callbacks.extend(watchers)
    with folder.locked():
        server = keep_ledger(folder, federation, server)
        server = run_rounds(federation, server, callbacks)
    return federation, server


def resume_run(
    path: str | Path,
    watchers: Iterable[Callback] = (),
    *,
    engine: Callable[[Federation], Engine] | None = None,
    accept: Collection[str] = (),
    warn: Callable[[str], object] = log.warning,
    overrides: Collection[str] = (),
    rounds: int | None = None,
) -> tuple[Federation, ServerState]:
    """Continue a run from its newest intact checkpoint. A finished run is left as it is.

    The run is refused if its settings, its data or its metrics were changed since then; `accept`
    names changes that are allowed nevertheless (`ACCEPTABLE`). Everything else that is unusual is
    passed to `warn`.

    `overrides` and `rounds` change settings first (`changed_config`). They are saved only after the
    run could be opened with them: a device that does not exist must not stay in config.toml.
    """
    path = given_path(path, "resume_run: path")
    folder = RunFolder.open(path)
    with folder.locked():
        saved = folder.read_config()
        _settle_edits(folder, saved, warn)
        config = changed_config(path, overrides, rounds)
        federation = Federation(config, client_state_folder=folder.clients, engine=engine)
        data = data_checksums(federation)
        remove_unfinished(folder.checkpoints)
        restored = _restore(folder, federation, warn)
        if restored is None:
            _warn_about_lost_checkpoints(folder, config, warn)
            server = federation.initial_state()
        else:
            server, metadata = restored
            command = _command(path, overrides, rounds)
            _require_same_data(folder, metadata, data, accept, command)
            _require_same_logs(folder, metadata, accept, command)
        unfinished = server.round_number < config.training.rounds
        if unfinished:
            require_loggers(config)
        _save_changes(folder, saved, config)
        if unfinished:
            server = keep_ledger(folder, federation, server)
            loggers = build_loggers(path, config)
            callbacks = [*loggers, *folder_callbacks(folder, config, data), *watchers]
            server = run_rounds(federation, server, callbacks)
    return federation, server


def _settle_edits(folder: RunFolder, config: Config, warn: Callable[[str], object]) -> None:
    """Refuse edits of config.toml that change the training, and record those that do not."""
    metadata = newest_metadata(folder)
    if metadata is None:
        return
    edits = changed_settings(folder, metadata, config)
    refuse_changes(folder, metadata.round_number, edits)
    if edits:
        warn(f"{describe_changes(folder, metadata.round_number, edits)} The run continues with it.")
        _record(folder, metadata.round_number, edits)


def _record(folder: RunFolder, round_number: int, changes: Changes) -> None:
    for setting, (old, new) in changes.items():
        record_change(folder, round_number, setting=setting, old=old, new=new)


def _restore(
    folder: RunFolder, federation: Federation, warn: Callable[[str], object]
) -> tuple[ServerState, Metadata] | None:
    """Return the server of the newest checkpoint that is intact, with all client states it needs.

    Damaged checkpoints after it are renamed. None: there is no checkpoint at all.
    """
    damaged: list[tuple[Path, str]] = []
    for checkpoint in reversed(checkpoints(folder.checkpoints)):
        try:
            server = read_checkpoint(checkpoint)
            require_same_model(folder, federation, server)
            if server.round_number < federation.config.training.rounds:
                # A finished run needs none, and a study deletes them.
                _check_client_states(federation, server)
            restored = federation.to_device(server), read_metadata(checkpoint)
        except DamagedCheckpointError as error:
            damaged.append((checkpoint, f"{error.file.name}: {error.reason}"))
            continue
        except ClientStateError as error:
            damaged.append((checkpoint, str(error).rstrip(".")))
            continue
        for path, reason in damaged:
            aside = put_aside(path)
            warn(
                f"{path} is damaged ({reason}) and was renamed to {aside.name}. The run continues "
                f"from {checkpoint.name}; the rounds after it are run again and their metrics "
                "replaced."
            )
        return restored
    if damaged:
        reasons = [f"{path}: {reason}." for path, reason in damaged]
        raise MotleyError(
            "\n".join(reasons) + f"\n{folder.path} has no other checkpoint. To start again from "
            f"round 1, remove {folder.checkpoints} and resume the run."
        )
    return None


class ClientStateError(MotleyError):
    """A client state that a checkpoint refers to is missing or damaged."""


def _check_client_states(federation: Federation, server: ServerState) -> None:
    """Raise if a client state that the server refers to cannot be read.

    States of clients elsewhere are checked there, when they are used.
    """
    if isinstance(federation.engine, DebugEngine | LocalEngine):
        try:
            federation.engine.clients.states.check(server.client_state_rounds)
        except MotleyError as error:
            raise ClientStateError(str(error)) from None


def _warn_about_lost_checkpoints(
    folder: RunFolder, config: Config, warn: Callable[[str], object]
) -> None:
    """Warn if there are more rounds in the metrics than a run completes before it saves one."""
    lines = MetricsLog(folder.metrics).read()
    if len(lines) > config.run.checkpoint_every:
        warn(
            f"{folder.checkpoints} has no checkpoint, but {folder.metrics.name} has "
            f"{len(lines)} rounds. They are run again from the beginning."
        )


def _require_same_data(
    folder: RunFolder,
    metadata: Metadata,
    data: dict[str, str],
    accept: Collection[str],
    command: str,
) -> None:
    changed = changed_data(metadata, data)
    if not changed:
        return
    problem = f"the {changed} are not those of rounds 1 to {metadata.round_number}"
    if "data" not in accept:
        raise MotleyError(
            f"{folder.path} cannot be continued: {problem}. Restore the data, or start a new run. "
            f"To continue with other data nevertheless: {command} --accept data"
        )
    record_change(folder, metadata.round_number, accepted="data", problem=problem)


def _require_same_logs(
    folder: RunFolder, metadata: Metadata, accept: Collection[str], command: str
) -> None:
    problem = log_problem(folder, metadata)
    if not problem:
        return
    if "metrics" not in accept:
        raise MotleyError(
            f"{problem} Restore the file. To continue with the file as it is: "
            f"{command} --accept metrics"
        )
    record_change(folder, metadata.round_number, accepted="metrics", problem=problem)


def _command(path: Path, overrides: Collection[str], rounds: int | None) -> str:
    """Return the command that resumes a run with these changes."""
    words = ["motley", "resume", str(path)]
    if rounds is not None:
        words += ["--rounds", str(rounds)]
    for override in overrides:
        words += ["--set", override]
    return shlex.join(words)


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
        rounds = federation.config.training.rounds
        while latest.round_number < rounds:
            more_rounds = latest.round_number + 1 < rounds
            latest, record = federation.queue_round(
                latest, delivery.client_finished, more_rounds=more_rounds
            )
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
    else:
        delivery.finish()
    finally:
        federation.end_workers()
    return delivery.server


class _Delivery:
    """Hands rounds to the callbacks as soon as their records are complete.

    A round may still be evaluated while the next one trains. Its record is kept here
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


def set_rounds(path: Path, rounds: int) -> Config:
    """Change the number of rounds of an existing run, and return its new configuration."""
    return change_settings(path, (), rounds)


def change_settings(path: Path, overrides: Collection[str], rounds: int | None = None) -> Config:
    """Change settings of an existing run, record the changes and return its new configuration.

    Prefer `resume_run`, which saves no setting that the run cannot be opened with.
    """
    folder = RunFolder.open(path)
    with folder.locked():
        changed = changed_config(path, overrides, rounds)
        _save_changes(folder, folder.read_config(), changed)
    return changed


def changed_config(path: Path, overrides: Collection[str], rounds: int | None = None) -> Config:
    """Return the configuration that an existing run would have with other settings.

    Settings that change the training are refused once a round is saved. `rounds` is the new number
    of rounds.
    """
    folder = RunFolder.open(path)
    config = folder.read_config()
    option = "--set training.rounds"
    changed = with_overrides(config, overrides)
    if rounds is not None:
        option = "--rounds"
        training = changed.training.model_copy(update={"rounds": rounds})
        changed = changed.model_copy(update={"training": training})
    completed = _completed_rounds(folder)
    changes = _differences(config, changed)
    if changed.training.rounds < completed and (rounds is not None or changes):
        raise MotleyError(
            f"{option} {changed.training.rounds}: {path} has already completed {completed} rounds."
        )
    if completed:
        refuse_changes(folder, completed, changes)
    return changed


def _save_changes(folder: RunFolder, config: Config, changed: Config) -> None:
    """Write the new configuration of a run, and record how it differs from the old one."""
    changes = _differences(config, changed)
    if changes:
        _record(folder, _completed_rounds(folder), changes)
        folder.write_config(changed)


def _completed_rounds(folder: RunFolder) -> int:
    metadata = newest_metadata(folder)
    return metadata.round_number if metadata is not None else 0


def _differences(config: Config, changed: Config) -> Changes:
    return difference(flat(config.model_dump(mode="json")), flat(changed.model_dump(mode="json")))
