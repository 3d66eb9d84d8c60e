"""Output files and folders: written completely or not at all, and checked before a computation."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from motley.core.errors import MotleyError
from motley.files import check_new_folder, is_stream, output_file, output_folder, write_atomically


def test_a_file_is_replaced_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with output_file(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), output_file(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink() and target.read_text() == "new"
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "elsewhere" / "not yet")
    write_atomically(dangling, b"made")
    assert dangling.is_symlink() and (tmp_path / "elsewhere" / "not yet").read_text() == "made"


def test_a_device_is_written_to_and_stays_a_device() -> None:
    device = Path("/dev/null")
    before = device.stat()
    write_atomically(device, b"gone")
    assert device.stat().st_rdev == before.st_rdev and is_stream(device)
    assert not Path("/dev/null.unfinished").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_device_raises_an_error_and_stays_a_device() -> None:
    with pytest.raises(MotleyError, match="/dev/full: cannot be written: No space left on device"):
        write_atomically(Path("/dev/full"), b"too much")
    assert is_stream(Path("/dev/full"))


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"through")
    reader.join(10)
    assert read == [b"through"] and pipe.is_fifo()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("folder", "is a folder; give the name of a file."),
        ("nowhere/x", "cannot be written: there is no folder"),
        ("file/x", "cannot be written: there is no folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_rejected_before_the_block(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(MotleyError) as raised, output_file(tmp_path / name):
        pytest.fail("the block was entered")
    assert str(raised.value).startswith(f"{tmp_path / name}: ") and said in str(raised.value)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_is_created_and_removed_again_if_nothing_was_written(tmp_path: Path) -> None:
    with output_folder(tmp_path / "a" / "b") as folder:
        assert folder.is_dir() and not list(folder.iterdir())
    assert folder.is_dir()
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "c" / "d"):
        raise ZeroDivisionError
    assert not (tmp_path / "c").exists()
    with pytest.raises(ZeroDivisionError), output_folder(tmp_path / "e"):
        (tmp_path / "e" / "result").touch()
        raise ZeroDivisionError
    assert (tmp_path / "e" / "result").exists()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_is_a_file_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MotleyError, match="file"), output_folder(tmp_path / name):
        pytest.fail("the block was entered")


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs /proc, in which no folder can be created"
)
def test_a_folder_that_cannot_be_created_is_rejected() -> None:
    with (
        pytest.raises(MotleyError, match="/proc/nothing: cannot be written: "),
        output_folder(Path("/proc/nothing")),
    ):
        pytest.fail("the block was entered")


def test_a_new_folder_is_checked_without_being_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_new_folder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(MotleyError, match="file is a file"):
        check_new_folder(tmp_path / "file" / "run")
