"""Progress: the live display in a terminal, plain lines elsewhere, and the choice of either."""

from __future__ import annotations

import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from motley.cli import progress as module
from motley.cli.progress import BARS, LiveProgress, PlainProgress, Progress, spark, watch
from motley.evaluate import Score
from motley.runs.folder import RunFolder
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import tiny_config


class Terminal(StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a clock that only the test advances."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


def console() -> Console:
    """Return a terminal that stores its output."""
    return Console(record=True, force_terminal=True, width=100, file=StringIO(), color_system=None)


def start(display: Progress, rounds: int = 10, after: int = 0) -> None:
    """Begin a run of four clients per round on a made-up federation."""
    federation: Any = SimpleNamespace(
        config=tiny_config(f"training.rounds={rounds}"), devices=["cpu"]
    )
    display.on_start(federation, server(after))


def server(number: int) -> ServerState:
    """Return an empty server after a round."""
    return ServerState(number, {}, None, {}, {})


def play(display: Progress, number: int, accuracies: dict[str, float], **more: Any) -> None:
    """Report a round to the display."""
    scores = {size: Score(accuracy, 1.0, ()) for size, accuracy in accuracies.items()}
    display.on_round(server(number), RoundRecord(number, scores=scores, train_loss=0.5678, **more))


def drawn(display: LiveProgress) -> str:
    """Return the current content of the live display."""
    display.console.print(display.draw())
    return display.console.export_text()


@pytest.fixture
def live(clock: Any, monkeypatch: pytest.MonkeyPatch) -> LiveProgress:
    """Return a live display that draws only when asked."""
    display = LiveProgress(console())
    monkeypatch.setattr(display, "live", SimpleNamespace(start=lambda: None, stop=lambda: None))
    return display


# --- the live display


def test_before_the_run_starts_there_is_something_to_draw() -> None:
    assert "no score yet" in drawn(LiveProgress(console()))


def test_the_first_round_shows_the_round_its_clients_and_the_device(
    live: LiveProgress, clock: Any
) -> None:
    start(live)
    assert "client 0/4" in drawn(live) and "  ? left" in drawn(live)
    clock.now += 3
    live.on_client(3)
    head, below = drawn(live).splitlines()
    assert head.startswith("round 1/10 ") and "client 1/4" in head
    assert "  ~2:00 left" in head, "ten rounds of four clients that take three seconds each"
    assert "loss" not in head and "s per round" not in head
    assert below.strip() == "training on cpu, no score yet ..."


def test_a_first_round_that_takes_long_is_announced_with_an_estimate(clock: Any) -> None:
    display = PlainProgress(console())
    start(display, rounds=10)
    for _ in range(3):
        clock.now += 6
        display.on_client(0)
    play(display, 1, {"resnet10": 0.5})
    clock.now += 100
    display.on_client(0)
    first, estimate, done = display.console.export_text().splitlines()
    assert (first, estimate) == ("10 rounds on cpu", "client 2/4  ~0:24 per round  left ~4:00")
    assert done.startswith("round 1/10 "), "only once, and only before the first round is over"


def test_a_round_shows_accuracy_a_size_seconds_a_round_and_time_left(
    live: LiveProgress, clock: Any
) -> None:
    start(live)
    clock.now += 2
    play(live, 1, {"resnet10": 0.25, "resnet14": 0.5})
    clock.now += 4
    play(live, 2, {"resnet10": 0.125, "resnet14": 0.75})
    live.on_client(0)
    live.on_client(2)
    head, titles, small, large = drawn(live).splitlines()
    assert head.startswith("round 3/10 ") and "client 2/4" in head
    assert "3.00 s per round" in head and "0:24 left" in head and "train loss 0.568" in head
    assert titles.split() == ["size", "accuracy", "best", "over", "rounds"]
    assert small.split() == ["resnet10", "12.5%", "25.0%", "▃▂"]
    assert large.split() == ["resnet14", "75.0%", "75.0%", "▅▇"]


def test_the_bar_grows_with_every_client_and_round(live: LiveProgress, clock: Any) -> None:
    start(live, rounds=2)

    def filled() -> float:
        return drawn(live).splitlines()[0].count("━")

    def done() -> float:
        bar: Any = live._head().columns[1]._cells[0]  # type: ignore[union-attr]
        return bar.completed / bar.total

    seen = [done()]
    for number in (1, 2):
        for client in range(4):
            live.on_client(client)
            seen.append(done())
        play(live, number, {"resnet10": 0.5})
        assert done() == number / 2
    assert seen == [0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8, 1]
    assert filled() == 30


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_first_line_stays_one_line_in_any_usual_terminal(
    live: LiveProgress, clock: Any, width: int
) -> None:
    live.console.width = width
    start(live, rounds=500)
    for number in range(1, 200):
        clock.now += 61.5
        play(live, number, {"resnet10": 0.5, "resnet26": 0.25})
    lines = drawn(live).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= width
    assert lines[0].split("  ")[0] == "round 200/500"
    assert (
        lines[0]
        .rstrip()
        .endswith("  client 0/4  61.50 s per round  5:08:32 left  train loss 0.568")
    )
    assert lines[3].rstrip().endswith("▃" * 40)


def test_after_the_last_round_the_display_does_not_count_on(live: LiveProgress, clock: Any) -> None:
    start(live, rounds=1)
    clock.now += 1
    play(live, 1, {"resnet10": 0.5})
    head = drawn(live).splitlines()[0]
    assert head.startswith("round 1/1 ") and "0:00 left" in head


def test_a_resumed_run_goes_on_counting(live: LiveProgress, clock: Any) -> None:
    start(live, rounds=10, after=7)
    assert drawn(live).startswith("round 8/10 ")
    clock.now += 5
    play(live, 8, {"resnet10": 0.5})
    head = drawn(live).splitlines()[0]
    assert head.startswith("round 9/10 ") and "0:10 left" in head


def test_rounds_that_are_not_evaluated_leave_the_last_accuracy(
    live: LiveProgress, clock: Any
) -> None:
    start(live)
    play(live, 1, {})
    assert "no score yet" in drawn(live)
    play(live, 2, {"resnet10": 0.5})
    play(live, 3, {})
    assert drawn(live).splitlines()[-1].split() == ["resnet10", "50.0%", "50.0%", "▅"]


@pytest.mark.parametrize(
    ("seconds", "left"),
    [(0.4, "0:36"), (1, "1:30"), (40, "1:00:00"), (400, "10:00:00"), (0.001, "0:00")],
)
def test_time_left_reads_as_hours_minutes_and_seconds(
    live: LiveProgress, clock: Any, seconds: float, left: str
) -> None:
    start(live, rounds=91)
    clock.now += seconds
    play(live, 1, {})
    assert live.time_left == left


def test_speed_is_that_of_the_last_twenty_rounds(live: LiveProgress, clock: Any) -> None:
    start(live, rounds=100)
    for number in range(1, 31):
        clock.now += 100 if number <= 10 else 2
        play(live, number, {})
    assert live.seconds_per_round == pytest.approx(2)
    assert live.time_left == "2:20"


def test_a_refused_client_is_named_with_its_reason(live: LiveProgress, clock: Any) -> None:
    start(live)
    play(live, 1, {}, refused={3: "its change [fc.weight] holds a number that is not finite."})
    said = live.console.export_text()
    assert (
        "round 1: client 3 was refused: its change [fc.weight] holds a number that is not finite."
        in said
    )


def test_the_real_display_redraws_while_rounds_are_played_and_goes_at_the_end() -> None:
    display = LiveProgress(console())
    start(display)
    alive = display.live._refresh_thread
    try:
        play(display, 1, {"resnet10": 0.5})
        display.live.refresh()
        assert isinstance(alive, threading.Thread) and alive.is_alive()
    finally:
        display.on_stop(server(1))
    alive.join(timeout=5)
    assert not alive.is_alive() and not display.live.is_started
    shown = display.console.export_text(styles=True)
    assert "round 2/10" in shown and "50.0%" in shown


# --- plain lines


def test_plain_progress_is_a_line_a_round(clock: Any) -> None:
    display = PlainProgress(Console(file=StringIO(), width=40))
    start(display, rounds=3, after=1)
    clock.now += 61.5
    play(display, 2, {"resnet10": 0.25, "resnet14": 0.5})
    clock.now += 0.5
    play(display, 3, {})
    accuracy = "resnet10 25.0%  resnet14 50.0%  mean 37.5%"
    assert display.console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "3 rounds on cpu, continuing after round 1",
        f"round 2/3  {accuracy}  train loss 0.568  61.50 s  left 1:02",
        "round 3/3  train loss 0.568  0.50 s  left 0:00",
    ]


# --- the line of bars


def test_spark_maps_shares_to_eight_bars() -> None:
    assert spark([]) == ""
    assert spark([0.0, 1.0]) == "▁█"
    assert spark([step / 8 for step in range(8)]) == BARS
    assert spark([0.124, 0.126, 0.874, 0.876]) == "▁▂▇█"


def test_spark_is_thinned_to_its_width_and_ends_with_the_newest() -> None:
    for length in range(1, 200):
        values = [0.0] * (length - 1) + [1.0]
        line = spark(values, width=40)
        assert line[-1] == "█" and line.count("█") == 1
        assert len(line) <= 40 and (length > 40 or len(line) == length)
    rising = spark([step / 100 for step in range(100)], width=10)
    assert list(rising) == sorted(rising) and len(set(rising)) == 8


# --- which display, and how it ends


@pytest.mark.parametrize(
    ("file", "environment", "kind"),
    [
        (Terminal, {"TERM": "xterm"}, LiveProgress),
        (Terminal, {"TERM": "dumb"}, PlainProgress),
        (StringIO, {"TERM": "xterm"}, PlainProgress),
        (StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}, PlainProgress),
    ],
)
def test_the_live_display_is_for_terminals_that_can_redraw(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    file: type[StringIO],
    environment: dict[str, str],
    kind: type[Progress],
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", file())
    RunFolder.create(tmp_path / "run", tiny_config())
    with watch(tmp_path / "run") as display:
        assert type(display) is kind


def stopped(path: Path, monkeypatch: pytest.MonkeyPatch, *, after: int | None) -> str:
    """Return the output when Ctrl-C ends a run, before it started or `after` that many rounds."""
    out = StringIO()
    monkeypatch.setattr("sys.stdout", out)
    with pytest.raises(SystemExit) as left, watch(path) as display:
        if after is not None:
            start(display)
            display.on_stop(server(after))
            out.truncate(0)
            out.seek(0)
        raise KeyboardInterrupt
    assert left.value.code == 130
    return out.getvalue()


def test_ctrl_c_tells_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, tiny_config())
    assert (
        stopped(run, monkeypatch, after=4)
        == f"\nStopped after round 4. To continue: motley resume {run}\n"
    )
    assert stopped(run, monkeypatch, after=None) == f"\nStopped. To continue: motley resume {run}\n"


def test_the_command_to_resume_can_be_pasted_whatever_the_folder_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / ("my [bold]run[/bold] " + "x" * 150)
    RunFolder.create(run, tiny_config())
    assert (
        stopped(run, monkeypatch, after=1)
        == f"\nStopped after round 1. To continue: motley resume '{run}'\n"
    )


def test_ctrl_c_before_anything_was_written_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stopped(tmp_path / "none", monkeypatch, after=None) == "\nStopped before it began.\n"
