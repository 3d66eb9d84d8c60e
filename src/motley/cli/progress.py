"""The progress of a run: a live display in a terminal, plain lines elsewhere.

Training continues if the display cannot be written: see `Progress.say`.
"""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from motley.cli.show import print_outcome
from motley.cli.terminal import Console
from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.runs.callbacks import Callback
from motley.runs.folder import RunFolder
from motley.runs.metrics import ACCURACY, overall
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.tasks import MetricInfo

BARS = "▁▂▃▄▅▆▇█"
#: Without a terminal, print an estimate if the first round takes longer than this many seconds.
PATIENCE = 10.0


class Progress(Callback):
    """The numbers that all displays show: the progress, the speed and the score per size."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rounds = self.round_number = self.clients = self.clients_done = 0
        self.device = ""
        self.began = time.perf_counter()
        self.durations: deque[float] = deque(maxlen=20)
        self.history: dict[str, list[float]] = {}
        self.metric: MetricInfo = ACCURACY
        self.record: RoundRecord | None = None
        self.output_error: OSError | None = None

    def say(self, text: str) -> None:
        """Print a line. If that fails (a full disk, a closed terminal), the training goes on.

        A closed pipe (`motley run | head`) does stop the run, as it stops other programs: rich
        raises SystemExit for it, and the run saves a checkpoint.
        """
        if self.output_error is not None:
            return
        try:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        except OSError as error:
            self.lose_output(error)

    def lose_output(self, error: OSError) -> None:
        """Stop printing, and report the reason on stderr once."""
        self.output_error = error
        reason = f"the standard output cannot be written: {error.strerror}"
        text = f"motley: {reason}. The training goes on."
        with suppress(OSError):
            Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)

    def on_start(self, federation: Federation, server: ServerState) -> None:
        self.rounds = federation.config.training.rounds
        self.clients = federation.config.federation.clients_per_round
        self.round_number = server.round_number
        self.device = ", ".join(str(device) for device in federation.devices)
        self.began = time.perf_counter()

    def on_client(self, client: int) -> None:
        self.clients_done += 1

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        now = time.perf_counter()
        self.durations.append(now - self.began)
        self.began, self.clients_done = now, 0
        self.record, self.round_number = record, record.round_number
        for size, score in record.scores.items():
            self.metric = score.metric
            self.history.setdefault(size, []).append(score.value)
        for client, reason in record.refused.items():
            self.say(f"round {record.round_number}: client {client} was refused: {reason}")

    def on_stop(self, server: ServerState) -> None:
        self.round_number = server.round_number

    @property
    def seconds_per_round(self) -> float:
        """The mean over the last rounds. In the first round, an estimate from its clients, or 0."""
        if self.durations:
            return sum(self.durations) / len(self.durations)
        if self.clients_done:
            return (time.perf_counter() - self.began) / self.clients_done * self.clients
        return 0.0

    @property
    def time_left(self) -> str:
        """The time until the end of the run at the current speed.

        A tilde marks an estimate from single clients, before the first round is complete.
        """
        if not self.seconds_per_round:
            return "?"
        left = clock_time(self.seconds_per_round * (self.rounds - self.round_number))
        return left if self.durations else f"~{left}"


def clock_time(seconds: float) -> str:
    """Return a duration as 1:02:03, or 2:03 below an hour."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


class PlainProgress(Progress):
    """One line per round."""

    estimated = False

    def on_start(self, federation: Federation, server: ServerState) -> None:
        super().on_start(federation, server)
        after = f", continuing after round {server.round_number}" if server.round_number else ""
        self.say(f"{self.rounds} rounds on {self.device}{after}")

    def on_client(self, client: int) -> None:
        super().on_client(client)
        waited = time.perf_counter() - self.began
        if not self.durations and not self.estimated and waited > PATIENCE:
            self.estimated = True
            clients = f"client {self.clients_done}/{self.clients}"
            per_round = clock_time(self.seconds_per_round)
            self.say(f"{clients}  ~{per_round} per round  left {self.time_left}")

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        super().on_round(server, record)
        parts = [f"round {record.round_number}/{self.rounds}"]
        scores = record.scores
        if scores and not self.metric.percent:
            parts.append(self.metric.name)
        parts += [f"{size} {self.metric.text(score.value, 1)}" for size, score in scores.items()]
        parts += [f"mean {self.metric.text(overall(record), 1)}"] if scores else []
        parts += [
            f"train loss {record.train_loss:.3f}",
            f"{self.durations[-1]:.2f} s",
            f"left {self.time_left}",
        ]
        self.say("  ".join(parts))


class LiveProgress(Progress):
    """A table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.live = Live(
            console=console, get_renderable=self.draw, refresh_per_second=4, transient=True
        )

    def on_start(self, federation: Federation, server: ServerState) -> None:
        super().on_start(federation, server)
        self.live.start()

    def on_stop(self, server: ServerState) -> None:
        super().on_stop(server)
        try:
            self.live.stop()
        except OSError as error:  # the terminal was closed
            self.lose_output(error)

    def draw(self) -> RenderableType:
        """Return the current display. rich calls this from its own thread."""
        return Group(self._head(), self._table())

    def _head(self) -> RenderableType:
        text = partial(Column, no_wrap=True)
        bar = Column(max_width=30)  # the only column that shrinks in a narrow terminal
        grid = Table.grid(text(), bar, text(), text(), text(), text(), padding=(0, 2))
        round_fraction = self.clients_done / self.clients if self.clients else 0.0
        grid.add_row(
            Text(f"round {min(self.round_number + 1, self.rounds)}/{self.rounds}", style="bold"),
            ProgressBar(total=max(self.rounds, 1), completed=self.round_number + round_fraction),
            f"client {self.clients_done}/{self.clients}",
            f"{self.seconds_per_round:.2f} s per round" if self.durations else "",
            f"{self.time_left} left",
            f"train loss {self.record.train_loss:.3f}" if self.record else "",
        )
        return grid

    def _table(self) -> RenderableType:
        if not self.history:
            return Text(f"training on {self.device}, no score yet ...", style="dim")
        metric = self.metric
        table = Table("size", metric.name, "best", "over rounds", box=None)
        # A copy, because the training thread may add a size meanwhile.
        for size, values in list(self.history.items()):
            top = 1.0 if metric.percent else max(values)
            last, best = metric.text(values[-1], 1), metric.text(metric.best(values), 1)
            table.add_row(size, last, best, spark(values, top=top))
        return table


def spark(values: list[float], width: int = 40, top: float = 1.0) -> str:
    """Draw values from 0 to `top` as at most `width` bars. The last value is always included."""
    step = max(1, math.ceil(len(values) / width))
    shown = values[::-1][::step][::-1]
    bars = []
    for value in shown:
        height = value / top if top > 0 and math.isfinite(value) else 0.0
        bars.append(BARS[max(0, min(len(BARS) - 1, int(height * len(BARS))))])
    return "".join(bars)


@contextmanager
def watch(path: Path) -> Iterator[Progress]:
    """Show a run's progress, then its results, or how to continue it after an interruption."""
    # Names of sizes may look like rich's markup. They are printed as they are.
    console = Console(markup=False, emoji=False)
    redrawable = console.is_interactive and console.file.isatty()
    progress = LiveProgress(console) if redrawable else PlainProgress(console)
    try:
        yield progress
    except KeyboardInterrupt:
        if RunFolder(path).config.exists():
            after = f" after round {progress.round_number}" if progress.rounds else ""
            command = f"motley resume {shlex.quote(str(path))}"
            progress.say(f"\nStopped{after}. To continue: {command}")
        else:
            progress.say("\nStopped before it began.")
        raise SystemExit(130) from None
    name = shlex.quote(str(path))
    if progress.output_error is not None:
        reason = progress.output_error.strerror
        raise MotleyError(
            f"the run is complete, but the standard output could not be written: {reason}. "
            f"To see its results: motley show {name}"
        )
    print_outcome(console, RunFolder.open(path))
    progress.say(f"kept in {path}")
    progress.say(f"next: motley show {name}, motley report {name}, motley analyze sizes {name}")
