"""Run folders: one run per folder, and one process at a time."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from motley.config import Config, load_config, presets
from motley.core.errors import MotleyError
from motley.files import write_atomically
from motley.runs.folder import RunFolder, next_free
from motley.runs.run import start_run
from tests.conftest import tiny_config
from tests.runs import crash


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file of a folder with its content and modification time."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---- a new folder


@pytest.mark.parametrize("file", ["notes.txt", "config.toml", ".hidden", "deep/down/file"])
def test_a_folder_that_is_not_empty_is_rejected_and_left_alone(tmp_path: Path, file: str) -> None:
    out = tmp_path / "run"
    (out / file).parent.mkdir(parents=True)
    (out / file).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(MotleyError, match="already exists and is not empty") as caught:
        RunFolder.create(out, tiny_config())
    assert contents(tmp_path) == before
    assert ("motley resume" in str(caught.value)) == (file == "config.toml")


def test_a_file_of_that_name_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.write_text("mine")
    for path in (out, out / "below"):
        with pytest.raises(MotleyError, match=str(path)):
            RunFolder.create(path, tiny_config())
    assert out.read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
def test_a_new_or_empty_folder_is_accepted(tmp_path: Path, exists: bool) -> None:
    out = tmp_path / "deep" / "run"
    if exists:
        out.mkdir(parents=True)
    RunFolder.create(out, tiny_config())
    assert {path.name for path in out.iterdir()} == {"config.toml", "environment.json", ".lock"}
    environment = json.loads((out / "environment.json").read_text())
    assert environment.keys() >= {"motley", "python", "torch", "cores", "gpu"}


def test_of_two_simultaneous_runs_one_gets_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run creates its folder between the check and the first write of the first run."""
    mkdir, rivals = Path.mkdir, [tiny_config("seed=2")]

    def slow(path: Path, *arguments: object, **options: object) -> None:
        if rivals:
            RunFolder.create(tmp_path / "run", rivals.pop())
        mkdir(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", slow)
    with pytest.raises(MotleyError, match="already exists"):
        RunFolder.create(tmp_path / "run", tiny_config("seed=1"))
    assert RunFolder.open(tmp_path / "run").read_config().seed == 2


def test_start_run_writes_nothing_before_everything_is_checked(tmp_path: Path) -> None:
    config = tiny_config("data.name=npz", f"data.path={tmp_path}/none.npz")
    with pytest.raises(MotleyError):
        start_run(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# ---- its configuration


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(load_config(preset=name), id=name) for name in presets()),
        pytest.param(
            tiny_config(
                "server.inco.variant=official",
                "data.partition.name=iid",
                "evaluation.targets=[0.5, 0.1]",
                "federation.size_fractions=[1, 2, 0.5]",
                "training.optimizer.lr=1e-7",
            ),
            id="overridden",
        ),
    ],
)
def test_the_configuration_is_saved_unchanged(tmp_path: Path, config: Config) -> None:
    folder = RunFolder.create(tmp_path / "run", config)
    read = RunFolder.open(tmp_path / "run").read_config()
    assert read == config
    assert type(read.method) is type(config.method)
    assert read.model_dump() == config.model_dump()
    assert folder.config.read_text() == read.to_toml()


def test_a_folder_without_a_run_is_not_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(MotleyError, match=r"is not a run: there is no config\.toml"):
            RunFolder.open(path)


# ---- its lock


def test_a_second_process_is_rejected_while_the_first_lives(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", tiny_config())
    ready, signal_ready = os.pipe()
    holder = os.fork()
    if holder == 0:
        with folder.locked():
            os.write(signal_ready, b"!")
            time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"!"
        with pytest.raises(MotleyError, match="being written by another process"), folder.locked():
            pytest.fail("two processes have locked the same run")
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    with folder.locked():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_that_lives_longer_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Workers of a killed run may be alive for a moment when the run is resumed."""
    folder = RunFolder.create(tmp_path / "run", tiny_config())
    reading, writing = os.pipe()
    ready, signal_ready = os.pipe()
    with folder.locked():
        child = os.fork()
        if not child:
            os.close(writing)
            os.write(signal_ready, b"!")
            os.read(reading, 1)  # until the other process has closed its end
            os._exit(0)
        assert os.read(ready, 1) == b"!"
    with folder.locked():
        pass
    os.close(writing)
    os.waitpid(child, 0)


def test_the_lock_ends_with_its_block_also_after_an_error(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", tiny_config())
    with pytest.raises(ZeroDivisionError), folder.locked():
        raise ZeroDivisionError
    with folder.locked(), pytest.raises(MotleyError, match="another process"), folder.locked():
        pytest.fail("the same run was locked twice")


# ---- files and names


@pytest.mark.parametrize("old", [None, b"old"])
def test_a_crash_leaves_the_old_or_the_new_file(tmp_path: Path, old: bytes | None) -> None:
    path, new = tmp_path / "file", b"new" * 1000

    def write(at: int) -> None:
        crash.watch_operations(
            tmp_path, lambda number: crash.kill_myself() if number == at else None
        )
        write_atomically(path, new)

    contents_after = []
    for at in range(1, 20):
        if old is not None:
            path.write_bytes(old)
        ended = crash.fork(lambda at=at: write(at))
        contents_after.append(path.read_bytes() if path.exists() else None)
        if ended == 0:
            break
    assert contents_after == [old, old, new]
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_the_next_free_name(tmp_path: Path) -> None:
    assert next_free(tmp_path / "none", "run").name == "run-1"
    for taken in ("run-1", "run-3", "other-2"):
        (tmp_path / taken).mkdir()
    assert next_free(tmp_path, "run") == tmp_path / "run-2"
    (tmp_path / "run-2").write_text("a file counts as well")
    assert next_free(tmp_path, "run") == tmp_path / "run-4"
