"""`motley run` and `motley resume`: a folder, a table, one-line errors, and interruptions."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import motley as package
from motley.config import load_config, read_resolved
from motley.runs.interrupt import one_interrupt
from tests.cli.conftest import Command, TinyRun, overrides
from tests.conftest import TINY, tiny_config

ROUND = re.compile(
    r"round (\d)/3  resnet10 [\d.]+%  resnet14 [\d.]+%  resnet18 [\d.]+%  mean [\d.]+%"
    r"  train loss \d+\.\d{3}  \d+\.\d\d s  left \d+:\d\d"
)
SMALL = (
    "model.sizes=['resnet10']",
    "federation.clients_per_round=2",
    "evaluation.every=5",
    "run.tensorboard=false",
)


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Return the modification time and the content of each file in a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def kept(path: Path | str) -> str:
    """Return the last two lines of a run's output."""
    name = shlex.quote(str(path))
    commands = f"motley show {name}, motley report {name}, motley analyze sizes {name}"
    return f"kept in {path}\nnext: {commands}\n"


def child(*arguments: object, **options: object) -> subprocess.Popen[str]:
    """Start the command line in its own process, where Ctrl-C works however pytest was started."""
    return subprocess.Popen(
        [sys.executable, "-m", "motley", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        text=True,
        **options,  # type: ignore[call-overload]
    )


# --- a run


def test_a_run_that_is_not_in_a_terminal_prints_a_line_a_round_and_ends_with_the_table(
    motley: Command, tiny_run: TinyRun
) -> None:
    code, out, err = tiny_run.answer
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "3 rounds on cpu"
    rounds = [ROUND.fullmatch(line) for line in lines[1:4]]
    assert [found and found[1] for found in rounds] == ["1", "2", "3"]
    assert "\n".join(lines[4:-2]) + "\n" == motley("show", tiny_run.path).out
    assert "\n".join(lines[-2:]) + "\n" == kept(tiny_run.path)
    assert "\x1b" not in out


def test_the_printed_accuracies_are_those_of_the_metrics(tiny_run: TinyRun) -> None:
    lines = [
        json.loads(text) for text in (tiny_run.path / "metrics.jsonl").read_text().splitlines()
    ]
    for values, printed in zip(lines, tiny_run.answer.out.splitlines()[1:], strict=False):
        for name, accuracy in values["accuracy"].items():
            assert f"  {name} {100 * accuracy:.1f}%" in printed
        assert f"train loss {values['train_loss']:.3f}" in printed


def test_the_resolved_configuration_is_kept_with_the_run(tiny_run: TinyRun) -> None:
    expected = tiny_config(
        "evaluation.last_k=2", "evaluation.targets=[0.01, 1.0]", "server.inco.variant=official"
    )
    assert read_resolved(tiny_run.path / "config.toml") == expected


def test_a_second_run_into_the_same_folder_is_refused_and_changes_nothing(
    motley: Command, tiny_run: TinyRun
) -> None:
    before = snapshot(tiny_run.path)
    code, out, err = motley("run", *overrides("seed=2"), "--out", tiny_run.path)
    assert (code, out) == (2, "")
    assert (
        err.startswith(f"motley: {tiny_run.path} already exists")
        and f"motley resume {tiny_run.path}" in err
    )
    assert snapshot(tiny_run.path) == before and len(before) > 5


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(
    motley: Command, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    code, _, err = motley("run", *overrides(), "--out", tmp_path)
    assert code == 2 and "already exists" in err and "resume" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_finished_run_resumed_prints_its_table_and_changes_no_result(
    motley: Command, tmp_path: Path
) -> None:
    one = ("training.rounds=1", *SMALL)
    run = tmp_path / "my [red]run[/red] \\[1]"
    first = motley("run", *overrides(*one), "--out", run)
    assert first.code == 0 and first.out.endswith(kept(run))
    metrics, mark = (run / "metrics.jsonl").read_text(), motley("show", run, "--fingerprint").out
    again = motley("resume", run)
    finished = "This run is already finished.\n"
    assert again == (0, f"{finished}{motley('show', run).out}{kept(run)}", "")
    assert (run / "metrics.jsonl").read_text() == metrics
    assert motley("show", run, "--fingerprint").out == mark


def test_runs_without_a_name_take_the_next_free_folder(motley: Command, tmp_path: Path) -> None:
    small = overrides("training.rounds=1", *SMALL)
    (tmp_path / "runs" / "quickstart-2").mkdir(parents=True)
    for expected in ("quickstart-1", "quickstart-3"):
        answer = motley("run", *small)
        assert answer.out.endswith(kept(f"runs/{expected}"))
        assert (tmp_path / "runs" / expected / "metrics.jsonl").exists()


def test_a_run_from_a_file_is_named_after_its_data_and_method(
    motley: Command, tmp_path: Path
) -> None:
    config = load_config(overrides=[*TINY, "training.rounds=1", *SMALL])
    (tmp_path / "mine.toml").write_text(
        config.to_toml().replace('preset = "quickstart"', 'preset = ""')
    )
    answer = motley("run", "mine.toml", "--set", "seed=3")
    assert answer.out.endswith(kept("runs/digits-fedavg-1"))
    assert read_resolved(
        tmp_path / "runs" / "digits-fedavg-1" / "config.toml"
    ) == config.model_copy(update={"preset": "", "seed": 3})


# --- rejected invocations


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("run", "--set", "training.round=3"),
            "training.round = 3: unknown key 'round'. Did you mean 'rounds'?",
        ),
        (
            ("run", "--set", "federation.size_fractions=[1,2]"),
            "federation.size_fractions = [1.0, 2.0]: 5 fractions are needed",
        ),
        (
            ("run", "--set", "federation.clients_per_round=21"),
            "there are only federation.clients = 20 clients.",
        ),
        (("run", "--set", "data.partition=iid"), "data.partition = 'iid': is a table"),
        (("run", "--set", "rounds"), "--set 'rounds': write it as table.key=value"),
        (("run", "--set", "data.name=[bold]x[/bold]"), "unknown data set '[bold]x[/bold]'."),
        (("run", "--set", r"data.name='a\[b]'"), r"unknown data set 'a\\[b]'."),
        (
            ("run", "--preset", "quickstrat"),
            "unknown preset 'quickstrat'. Did you mean 'quickstart'?",
        ),
        (("run", "none.toml"), "none.toml: there is no such configuration file."),
        (
            ("run", "--set", "engine.device=tpu"),
            "engine.device = 'tpu': allowed are auto, cpu, cuda, cuda:N, or several",
        ),
        (
            ("run", "--set", "split.name=homogeneous"),
            "split.name = 'homogeneous' takes exactly one size.",
        ),
        (("run", "--set", "data.name=npz"), "data set 'npz' needs a path"),
        (("resume", "nowhere"), "nowhere is not a run: there is no config.toml in it."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_problem_is_one_message_on_stderr_and_leaves_no_folder(
    motley: Command, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = motley(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("motley: ") and said in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_message_is_not_broken_into_lines(motley: Command) -> None:
    _, _, err = motley("run", "--set", f"data.name={'x' * 400}")
    assert f"'{'x' * 400}'" in err and err.count("\n") == 1


def test_an_option_that_is_none_is_refused(motley: Command) -> None:
    code, out, err = motley("run", "--rounds", "3")
    assert (code, out) == (2, "") and "No such option" in err and "--rounds" in err


def test_the_version_is_printed(motley: Command) -> None:
    assert motley("--version") == (0, f"{package.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("resume",),
        ("show",),
        ("list",),
        ("study",),
        ("report",),
        ("plan",),
        ("deploy", "init"),
    ],
)
def test_help_describes_every_argument(motley: Command, arguments: tuple[str, ...]) -> None:
    out = motley(*arguments, "--help").out
    _, _, panel = out.partition("Arguments")
    panel, _, _ = panel.partition("Options")
    rows = [line for line in panel.splitlines() if re.match(r"│ [* ] +[a-z]", line)]
    assert rows
    for row in rows:
        assert re.search(r"  [A-Z][a-z]*\b[ ,:(]", row), f"no description: {row}"


def test_help_names_every_command(motley: Command) -> None:
    answer = motley("--help")
    assert answer.code == 0
    assert all(re.search(rf"\b{name}\b", answer.out) for name in ("run", "resume", "show", "list"))


# --- in its own process


def test_an_error_of_the_real_process_goes_to_stderr_with_code_2(tmp_path: Path) -> None:
    process = child("show", "nowhere", cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == "motley: nowhere is not a run: there is no config.toml in it.\n"


def test_ctrl_c_saves_and_tells_how_to_resume_and_the_result_is_the_same(
    motley: Command, tmp_path: Path
) -> None:
    """No checkpoint is due before the end, so the run resumes from the one that Ctrl-C saved."""
    run = tmp_path / "a run"
    arguments = overrides(*SMALL, "training.rounds=12", "run.checkpoint_every=12")
    process = child("run", *arguments, "--out", run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    lines: list[str] = []
    while not (lines and lines[-1].startswith("round 2/12")):
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    stopped = re.fullmatch(
        rf"Stopped after round (\d+)\. To continue: motley resume '{re.escape(str(run))}'",
        out.splitlines()[-1],
    )
    assert stopped and 1 <= int(stopped[1]) < 12
    resumed = motley("resume", run)
    assert resumed.code == 0
    assert resumed.out.startswith(f"12 rounds on cpu, continuing after round {stopped[1]}\n")
    metrics = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["round"] for text in metrics] == list(range(1, 13))
    assert "round 12 of 12" in resumed.out and resumed.out.endswith(kept(run))
    whole = tmp_path / "undisturbed"
    assert motley("run", *arguments, "--out", whole).code == 0
    assert motley("show", run, "--fingerprint").out == motley("show", whole, "--fingerprint").out


@pytest.mark.parametrize(
    ("kind", "gap"),
    [
        (signal.SIGINT, 0.0),
        (signal.SIGINT, 0.001),
        (signal.SIGINT, 0.005),
        (signal.SIGTERM, 0.001),
        (signal.SIGHUP, 0.001),
    ],
)
def test_a_second_signal_does_not_break_what_the_first_one_saves(
    tmp_path: Path, kind: signal.Signals, gap: float
) -> None:
    arguments = overrides(*SMALL, "training.rounds=500", "run.checkpoint_every=500")
    process = child(
        "run", *arguments, "--out", tmp_path / "run", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("round 2/500"):
        assert process.poll() is None, process.communicate()
    process.send_signal(kind)
    time.sleep(gap)
    process.send_signal(kind)
    out, _ = process.communicate(timeout=60)
    assert "To continue: motley resume" in out
    written = len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
    saved = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert saved in (
        [f"round-{written:06d}"],
        [f"round-{written - 1:06d}"],
    )  # its last line may be incomplete


def test_a_terminal_that_is_closed_costs_no_round(tmp_path: Path) -> None:
    """When a connection drops, the run gets SIGHUP and its display can no longer be written."""
    ours, theirs = pty.openpty()
    arguments = overrides(*SMALL, "training.rounds=500", "run.checkpoint_every=500")
    run = tmp_path / "run"
    with (tmp_path / "err.txt").open("w") as errors:
        process = child("run", *arguments, "--out", run, stdin=theirs, stdout=theirs, stderr=errors)
    os.close(theirs)
    metrics = run / "metrics.jsonl"
    began = time.monotonic()
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() - began < 60
        select.select([ours], [], [], 0.05)
        with suppress(OSError):
            os.read(ours, 65536)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 130, (tmp_path / "err.txt").read_text()
    (saved,) = (run / "checkpoints").iterdir()
    written = len(metrics.read_text().splitlines())
    assert saved.name in (f"round-{written:06d}", f"round-{written - 1:06d}")
    assert "Traceback" not in (tmp_path / "err.txt").read_text()


def test_nohup_keeps_its_meaning(tmp_path: Path) -> None:
    with one_interrupt():
        assert signal.getsignal(signal.SIGHUP) not in (signal.SIG_DFL, signal.SIG_IGN)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with one_interrupt():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_gets_the_live_display_and_at_the_end_the_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = child(
        "run", *overrides(*SMALL, "evaluation.every=1"), "--out", tmp_path / "run", stdout=theirs
    )
    os.close(theirs)
    shown = b""
    began = time.monotonic()
    while time.monotonic() - began < 60:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux: the other end was closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.decode())
    assert b"\x1b[?25l" in shown and shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert re.search(
        r"round [123]/3 .* client [0-2]/2 +(\d\.\d\d s per round +)?(\?|~?\d+:\d\d) left", text
    )
    assert "train loss" in text and "mean of last 3" in text and "kept in " in text
    assert not re.search(r"round 1/3  resnet10", text)
