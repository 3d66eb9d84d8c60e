"""Callbacks: everything that happens around a run's rounds and is not part of the algorithm."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from motley.config import Config
from motley.core.errors import MotleyError
from motley.engine import LocalEngine
from motley.engine.timeline import Timeline, draw
from motley.federation import Federation
from motley.runs.checkpoint import save_checkpoint
from motley.runs.client_log import ClientLog
from motley.runs.folder import RunFolder
from motley.runs.integrity import RunFacts
from motley.runs.metrics import MetricsLog, overall
from motley.server.client_scores import ClientScores
from motley.server.record import RoundRecord
from motley.server.state import ServerState


class Callback:
    """Watches a run. By default every event does nothing."""

    def on_start(self, federation: Federation, server: ServerState) -> None:
        """Called before the first round; the run starts or continues from `server`."""

    def on_client(self, client: int) -> None:
        """Called after a client has finished its local update."""

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        """Called after each round, with the server after that round."""

    def on_exception(self, error: BaseException) -> None:
        """Called before `on_stop` if an exception ends the run, or KeyboardInterrupt."""

    def on_stop(self, server: ServerState) -> None:
        """Called when the run stops, whether finished, interrupted or failed.

        `server` is the server after the last complete round.
        """


class WriteMetrics(Callback):
    """Appends one line per round to the metrics log."""

    def __init__(self, log: MetricsLog) -> None:
        self.log = log

    def on_start(self, federation: Federation, server: ServerState) -> None:
        # Rounds after the checkpoint are run again and written again.
        self.log.truncate(server.round_number)

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        self.log.append(record)


class WriteClientScores(Callback):
    """Appends one line per round that scored clients to the log of client scores."""

    def __init__(self, log: ClientLog) -> None:
        self.log = log

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.log.truncate(server.round_number)

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        if record.client_scores is not None:
            self.log.append(record.round_number, record.client_scores)


class SaveCheckpoints(Callback):
    """Saves a checkpoint every `every` rounds and when the run stops. Keeps the newest `keep`.

    `facts` are about the run's folder and are saved with every checkpoint.
    """

    def __init__(self, folder: Path, every: int, keep: int, facts: RunFacts | None = None) -> None:
        self.folder = folder
        self.every = every
        self.keep = keep
        self.facts = facts
        #: The round of the newest checkpoint; -1 before the first.
        self.saved_round = -1
        #: For each checkpoint that is kept, oldest first, the client states that it refers to
        #: (client -> round of the state).
        self.client_states: deque[Mapping[int, int]] = deque(maxlen=keep)

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.federation = federation
        self.saved_round = server.round_number if server.round_number else -1

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        if server.round_number % self.every == 0:
            self.save(server)

    def on_stop(self, server: ServerState) -> None:
        self.save(server)
        # Also if nothing was left to save: an interrupted round may have begun a transaction in
        # the client store, and an open transaction keeps the file locked.
        self.federation.engine.save_client_states(server.client_state_rounds)

    def save(self, server: ServerState) -> None:
        """Save a checkpoint, unless this round has one already.

        The order makes a kill at any moment harmless, and a power failure, too: client states and
        metrics are on disk before the checkpoint that refers to them, and states are deleted only
        afterwards, when no kept checkpoint refers to them.
        """
        if server.round_number <= self.saved_round:
            return
        engine = self.federation.engine
        engine.save_client_states(server.client_state_rounds)
        facts = {}
        if self.facts is not None:
            self.facts.flush()
            facts = self.facts.at(server.round_number)
        save_checkpoint(self.folder, server, self.keep, self.federation.config, facts)
        self.saved_round = server.round_number
        self.client_states.append(server.client_state_rounds)
        if len(self.client_states) == self.keep:
            engine.forget_client_states(self.client_states[0])


class WriteTensorBoard(Callback):
    """Writes TensorBoard event files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None
        self._excepthook = threading.excepthook

    def on_start(self, federation: Federation, server: ServerState) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events are written by a thread of TensorBoard. If that fails, on a full disk, it raises
        # the exception twice: in the thread, where Python would print a traceback, and at the next
        # call of the writer, which ends the run with a message.
        self._excepthook = threading.excepthook
        threading.excepthook = self._skip_tensorboard
        # TensorBoard hides the events of an earlier, interrupted process from `purge_step` on.
        try:
            with self._errors_named():
                self._wait_for_next_second()
                self.writer = SummaryWriter(str(self.folder), purge_step=server.round_number + 1)
        except BaseException:
            threading.excepthook = self._excepthook
            raise

    def _wait_for_next_second(self) -> None:
        """Wait while the folder has an event file of the current second; at most one second.

        TensorBoard reads event files in the order of their names, which begin with the time in
        whole seconds. If a run is resumed within the second in which it began, the file of the
        resumed run could come first, and would then hide the steps that it has itself.
        """
        while any(self.folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.02)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise MotleyError(f"{self.folder}: cannot be written: {reason}.") from None

    def _skip_tensorboard(self, arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            self._excepthook(arguments)

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        with self._errors_named():
            self._write(record)

    def _write(self, record: RoundRecord) -> None:
        number = record.round_number
        for size, score in record.scores.items():
            for name, value in score.metrics.items():
                self.writer.add_scalar(f"{name}/{size}", value, number)
            self.writer.add_scalar(f"loss/{size}", score.loss, number)
        if record.scores:
            metric = next(iter(record.scores.values())).metric
            self.writer.add_scalar(f"{metric.name}/mean", overall(record), number)
        if record.client_scores is not None:
            self._write_client_scores(record.client_scores, number)
        self.writer.add_scalar("train/loss", record.train_loss, number)
        for name, value in record.metrics.items():
            self.writer.add_scalar(name, value, number)
        self.writer.add_scalar("seconds/round", sum(record.seconds.values()), number)
        self.writer.flush()

    def _write_client_scores(self, scores: ClientScores, number: int) -> None:
        spreads = {
            "clients": scores.spread(),
            "personalized_clients": scores.personalized_spread(),
        }
        for tag, spread in spreads.items():
            if spread is not None:
                for name in ("mean", "weighted", "worst_tenth", "std"):
                    self.writer.add_scalar(f"{tag}/{name}", getattr(spread, name), number)

    def on_stop(self, server: ServerState) -> None:
        try:
            with self._errors_named():
                self.writer.close()
        finally:
            threading.excepthook = self._excepthook


class DrawTimeline(Callback):
    """Draws which client trained in which slot and when, once the run stops."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, federation: Federation, server: ServerState) -> None:
        assert isinstance(federation.engine, LocalEngine)
        self.timeline = Timeline(*federation.devices)
        federation.engine.record(self.timeline)

    def on_stop(self, server: ServerState) -> None:
        spans = self.timeline.spans()
        if spans:
            draw(spans, self.path)


def tensorboard_installed() -> bool:
    """Return whether event files can be written."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


def folder_callbacks(folder: RunFolder, config: Config, data: Mapping[str, str]) -> list[Callback]:
    """Return the callbacks that write a run's folder. `data` has checksums of the run's data.

    The checkpoint is last: once it is saved, its rounds are never run again, so everything else
    about them must already be written.
    """
    metrics, client_scores = MetricsLog(folder.metrics), ClientLog(folder.client_scores)
    callbacks: list[Callback] = [WriteMetrics(metrics), WriteClientScores(client_scores)]
    if config.run.tensorboard and tensorboard_installed():
        callbacks.append(WriteTensorBoard(folder.tensorboard))
    callbacks.append(
        SaveCheckpoints(
            folder.checkpoints,
            config.run.checkpoint_every,
            config.run.keep_checkpoints,
            RunFacts(folder, [metrics, client_scores], data),
        )
    )
    return callbacks
