"""Failing commands print one message and set an exit status, and never show a traceback."""

from __future__ import annotations

import importlib
import io
import json
import re
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from motley.cli import failures
from motley.cli.failures import explain
from motley.core.errors import MotleyError
from tests.cli.conftest import Answer, Command, TinyRun, call, overrides

SMALL = ("model.sizes=resnet10", "federation.clients_per_round=2", "run.tensorboard=false")


def assert_message(answer: Answer, *parts: str, code: int = 2) -> None:
    """Check that a command ended with one message on stderr that contains these parts."""
    assert answer.code == code, answer
    assert "Traceback" not in answer.err + answer.out
    assert answer.err.startswith("motley: "), answer.err
    for part in parts:
        assert part in answer.err, answer.err


# --- which exceptions are explained


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MotleyError("seed = -1: is wrong."), "seed = -1: is wrong."),
        (
            FileNotFoundError(2, "No such file or directory", "x.csv"),
            "x.csv: No such file or directory.",
        ),
        (
            OSError(28, "No space left on device"),
            "the standard output or a file cannot be written: No space left",
        ),
        (
            OSError(18, "Invalid cross-device link", "a", None, "b"),
            "a -> b: Invalid cross-device link.",
        ),
        (
            ConnectionRefusedError(111, "Connection refused"),
            "a file or a connection cannot be used: Connection refused",
        ),
        (
            MemoryError("Unable to allocate 7 TiB"),
            "there is not enough memory: Unable to allocate 7 TiB.",
        ),
        (
            RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried"),
            "there is not enough memory: ",
        ),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[1]"),
            "there is not enough memory: ",
        ),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "there is not enough memory: CUDA",
        ),
        (
            SafetensorError("header too small"),
            "a file cannot be read or written: SafetensorError: header too small.",
        ),
        (sqlite3.DatabaseError("database disk image is malformed"), "client_states.sqlite"),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
            "a file cannot be read or written: ",
        ),
        (
            json.JSONDecodeError("Expecting value", "", 0),
            "a file cannot be read or written: JSONDecodeError",
        ),
        (
            OverflowError("int too large"),
            "a number in the configuration is too large to compute with: int too large.",
        ),
        (
            TypeError("zeros(): Overflow when unpacking long long"),
            "a number in the configuration is too large",
        ),
        (ValueError("embedded null byte"), "a path contains a null character."),
        (
            EOFError("No data left in file"),
            "a file cannot be read or written: EOFError: No data left in file.",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_that_is_not_ours_is_explained(error: Exception, said: str) -> None:
    assert said in (explain(error) or "")


@pytest.mark.parametrize(
    "error", [KeyError("x"), RuntimeError("shapes differ"), AssertionError(), ZeroDivisionError()]
)
def test_a_bug_is_not_explained_away(error: Exception) -> None:
    assert explain(error) is None


def test_real_allocations_that_fail_are_explained() -> None:
    for allocate in (
        lambda: torch.empty(10**15),
        lambda: torch.empty(2**62, 2**10),
        lambda: bytearray(10**15),
    ):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            allocate()
        assert "there is not enough memory" in (explain(raised.value) or ""), raised.value


# --- a bug in Motley


def test_a_bug_is_a_message_with_a_file_for_the_report(
    motley: Command, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Raised in Motley's code, by a call of something that is no function.
    monkeypatch.setattr("motley.cli.show.print_outcome", None)
    monkeypatch.setattr("motley.core.dotted._imported", set())
    answer = motley("show", tiny_run.path)
    said = "TypeError: 'NoneType' object is not callable"
    assert_message(answer, f"this is a bug in Motley, not in your input: {said}.", code=1)
    found = re.search(r"The traceback is in (\S+)\.txt\.", answer.err)
    assert found
    file = Path(found[1] + ".txt")
    text = file.read_text()
    file.unlink()
    assert text.startswith(f"motley show {tiny_run.path}\n") and said in text


def test_a_traceback_can_be_asked_for(
    motley: Command, tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(failures.DEBUG, "1")
    answer = motley("show", tmp_path)
    assert answer.code == 2 and "Traceback" in answer.err and "is not a run" in answer.err


# --- the standard output


class FullOutput(io.StringIO):
    """A standard output on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture
def full_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every command write to a full disk."""
    monkeypatch.setattr("tests.cli.conftest.StringIO", _outputs().__next__)


def _outputs() -> Iterator[io.StringIO]:
    while True:
        yield FullOutput()
        yield io.StringIO()


@pytest.mark.usefixtures("full_output")
@pytest.mark.parametrize(
    "arguments", [("show", "RUN"), ("list", "methods"), ("--version",), ("show", "RUN", "--json")]
)
def test_an_output_that_cannot_be_written_is_a_message(
    motley: Command, tiny_run: TinyRun, arguments: tuple[str, ...]
) -> None:
    answer = motley(*(tiny_run.path if word == "RUN" else word for word in arguments))
    assert_message(answer, "the standard output", "cannot be written: No space left on device.")


@pytest.mark.usefixtures("full_output")
def test_a_run_whose_log_cannot_be_written_trains_to_its_end(
    motley: Command, tmp_path: Path
) -> None:
    answer = motley("run", *overrides(*SMALL), "--out", tmp_path / "run")
    assert_message(
        answer,
        "the standard output cannot be written: No space left on device. The training goes on.",
        "run is complete, but the standard output could not be written: No space left on device.",
        f"To see its results: motley show {tmp_path / 'run'}",
    )
    assert answer.err.count("The training goes on") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "round-000002",
        "round-000003",
    ]


# --- a full disk


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files in this process: writing then fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_in_a_run_is_a_message_and_leaves_no_broken_checkpoint(
    motley: Command, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with largest_file(60_000):
        answer = motley("run", *overrides(*SMALL), "--out", run)
    assert_message(
        answer,
        f"{run / 'checkpoints'}: the checkpoint of round 1 cannot be written: ",
        "File too large",
    )
    assert not list((run / "checkpoints").iterdir())
    with largest_file(60_000):
        again = motley("resume", run)
    assert_message(again, "the checkpoint of round 1 cannot be written")
    assert motley("resume", run).code == 0


def test_a_disk_that_is_full_from_the_start_leaves_no_folder(
    motley: Command, tmp_path: Path
) -> None:
    with largest_file(100):
        answer = motley("run", *overrides(*SMALL), "--out", tmp_path / "run")
    assert_message(answer, "config.toml: cannot be written: File too large.")
    assert not (tmp_path / "run").exists()


def test_metrics_that_cannot_be_written_are_named(
    motley: Command, tiny_run: TinyRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    size = (run / "metrics.jsonl").stat().st_size
    with largest_file(size + 20):
        answer = motley("resume", run, "--rounds", 4)
    assert_message(answer, f"{run / 'metrics.jsonl'}: cannot be written: File too large.")


@pytest.mark.parametrize("command", ["report", "analyze", "bench", "study"])
def test_outputs_on_a_full_disk_are_a_message_and_leave_nothing_behind(
    motley: Command, tiny_run: TinyRun, tmp_path: Path, command: str
) -> None:
    arguments = {
        "report": ("report", tiny_run.path, "-o", "out"),
        "analyze": ("analyze", "sizes", tiny_run.path, "-o", "out"),
        "bench": (
            "bench",
            *overrides(*SMALL, "training.steps=1"),
            *("--rounds=1", "--warm-up=0", "--json=out"),
        ),
        "study": ("study", "inco-table2", "--data", "digits", "--out", "out"),
    }[command]
    with largest_file(10):
        answer = motley(*arguments)
    assert_message(answer, "cannot be written: File too large.")
    assert not list(tmp_path.iterdir())


# --- outputs are opened before anything is computed


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "RUN", "-o", "OUT"),
        ("bench", "--rounds", "1", "--json", "OUT"),
        ("analyze", "sizes", "RUN", "-o", "OUT"),
        ("study", "inco-table2", "--data", "digits", "--out", "OUT"),
    ],
    ids=lambda words: words[0],
)
def test_a_wrong_output_path_is_refused_before_the_computing(
    motley: Command,
    tiny_run: TinyRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    def never(*arguments: object, **options: object) -> None:
        pytest.fail("something was computed")

    for module, name in (
        ("report.page", "render"),
        ("cli.bench", "measure"),
        ("cli.study", "run_study"),
    ):
        monkeypatch.setattr(importlib.import_module(f"motley.{module}"), name, never)
    (tmp_path / "afile").touch()
    words = {"RUN": tiny_run.path, "OUT": "afile/x"}
    answer = motley(*(words.get(word, word) for word in arguments))
    assert_message(answer, "afile/x: cannot be ")
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_a_run_folder_that_cannot_be_made_is_refused_before_the_data_are_read(
    motley: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "motley.runs.run.Federation", lambda *_, **__: pytest.fail("data were read")
    )
    (tmp_path / "afile").touch()
    assert_message(
        motley("run", *overrides(), "--out", "afile/x"),
        "afile/x: cannot be created: afile is a file.",
    )


def test_a_report_goes_to_the_standard_output_or_through_a_link(
    motley: Command, tiny_run: TinyRun, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "folder" / "page.html")
    assert motley("report", tiny_run.path, "-o", "link.html").code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "folder" / "page.html").read_text().startswith("<!doctype html>")
    answer = motley("report", tiny_run.path, "-o", "/dev/null")
    assert (answer.code, answer.out) == (0, "") and answer.err.startswith("/dev/null: ")
    assert Path("/dev/null").exists() and not Path("/dev/null").is_file()


# --- damaged runs


@pytest.fixture
def damaged(tiny_run: TinyRun, tmp_path: Path) -> Path:
    """Return a copy of a run that a test may damage."""
    return Path(shutil.copytree(tiny_run.path, tmp_path / "run"))


@pytest.mark.parametrize(
    "line", ["[1, 2]", "{}", "null", '"x"', '{"round": "1"}', '{"round": 1, "seconds": 3}']
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_damaged_line_of_metrics_is_named_by_every_command(
    motley: Command, damaged: Path, line: str, at: int
) -> None:
    lines = (damaged / "metrics.jsonl").read_text().splitlines()
    lines.insert(at, line)
    (damaged / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for arguments in (
        ("show", damaged),
        ("show", damaged, damaged),
        ("show", damaged, "--json"),
        ("resume", damaged, "--rounds", 4),
        ("report", damaged, "-o", "r.html"),
        ("analyze", "sizes", damaged),
    ):
        answer = motley(*arguments)
        assert_message(
            answer,
            f"{damaged / 'metrics.jsonl'}, line {at + 1}: these are not the metrics of a round: ",
        )


def test_a_number_too_few_among_a_rounds_bytes_is_named(motley: Command, damaged: Path) -> None:
    lines = [json.loads(text) for text in (damaged / "metrics.jsonl").read_text().splitlines()]
    del lines[1]["bytes"]["up"]
    (damaged / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_message(
        motley("show", damaged),
        "line 2: these are not the metrics of a round: bytes.up: field required.",
    )


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b""])
def test_a_damaged_environment_costs_nobody_the_report(
    motley: Command, damaged: Path, content: bytes
) -> None:
    (damaged / "environment.json").write_bytes(content)
    assert motley("show", damaged).code == 0
    assert motley("report", damaged, "-o", "r.html").code == 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "resnet18",
            "resnet34",
            "model.sizes = ['resnet10', 'resnet14', 'resnet34']: rounds 1 to 3 ran with "
            "['resnet10', 'resnet14', 'resnet18'].",
        ),
        (
            "width = 0.0625",
            "width = 0.125",
            "model.resnet.width = 0.125: rounds 1 to 3 ran with 0.0625.",
        ),
        (
            'name = "depth"',
            'name = "grouped"',
            "split.name = 'grouped': rounds 1 to 3 ran with 'depth'.",
        ),
    ],
)
def test_a_configuration_edited_to_another_model_is_refused(
    motley: Command, damaged: Path, old: str, new: str, said: str
) -> None:
    config = damaged / "config.toml"
    text = config.read_text().replace("rounds = 3", "rounds = 4")
    assert old in text
    config.write_text(text.replace(old, new))
    assert_message(motley("resume", damaged), said, "Restore the old values in ")
    # Checkpoints of early versions have no configuration. The model tells, then.
    for file in damaged.glob("checkpoints/*/server.json"):
        values = json.loads(file.read_text())
        for name in ("config", "sha256", "section_sha256"):
            del values[name]
        file.write_text(json.dumps(values))
    assert_message(
        motley("resume", damaged),
        "describes a different model than the checkpoint of round 3. The first difference is ",
    )


def test_an_analysis_refuses_a_configuration_edited_to_another_model(
    motley: Command, damaged: Path
) -> None:
    config = damaged / "config.toml"
    text = config.read_text()
    assert "width = 0.0625" in text
    config.write_text(text.replace("width = 0.0625", "width = 0.125"))
    assert_message(
        motley("analyze", "cka", damaged),
        "config.toml describes a different model than the checkpoint of round ",
    )


def test_sizes_needs_a_round_with_scores(motley: Command, damaged: Path) -> None:
    (damaged / "metrics.jsonl").write_text("")
    assert_message(motley("analyze", "sizes", damaged), "has no evaluated round.")


@pytest.mark.parametrize("name", ["server.json", "state.safetensors"])
def test_a_damaged_checkpoint_is_named(motley: Command, damaged: Path, name: str) -> None:
    (damaged / "checkpoints" / "round-000003" / name).write_bytes(b"\x93\x12")
    advice = "`motley resume` continues from the one before it, round-000002."
    for arguments in (("show", damaged, "--fingerprint"), ("show", damaged, "--json")):
        assert_message(motley(*arguments), name, "cannot be read", advice)
    answer = motley("resume", damaged, "--rounds", 4)
    assert answer.code == 0
    assert f"round-000003 is damaged ({name}: " in answer.err
    assert "was renamed to damaged-round-000003. The run continues from round-000002" in answer.err


# --- requests that are too large


@pytest.mark.parametrize(
    "override",
    [
        "training.batch_size=1000000000000",
        "model.resnet.width=1e9",
        "data.transform.resize=1000000",
        "server.lr=1e300",
        "engine.client_state_host_gib=1e300",
    ],
)
def test_a_value_that_no_machine_can_handle_is_a_message(
    motley: Command, tmp_path: Path, override: str
) -> None:
    answer = motley(
        "run", *overrides(*SMALL, "training.rounds=1", override), "--out", tmp_path / "run"
    )
    assert_message(answer, "too large to compute with" if "1e300" in override else "memory")


def test_a_file_of_weights_that_is_none_is_named_and_leaves_no_folder(
    motley: Command, tmp_path: Path
) -> None:
    (tmp_path / "afile").write_text("no weights")
    answer = motley("run", *overrides(*SMALL, "model.weights=afile"), "--out", "run")
    assert_message(answer, f"model.weights = '{tmp_path / 'afile'}': is not a safetensors file: ")
    assert not (tmp_path / "run").exists()


def test_the_helper_for_these_tests_sees_clean_exits() -> None:
    assert call("--version").code == 0
