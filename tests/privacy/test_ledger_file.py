"""A ledger file keeps every line, and says so if one is lost or changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from motley.core.errors import MotleyError
from motley.privacy.ledger_file import LedgerFile
from tests.runs import crash

ADVICE = "Restore it."


def ledger(path: Path) -> LedgerFile:
    return LedgerFile(path / "ledger.jsonl", ADVICE)


def add(file: LedgerFile, number: int) -> None:
    file.append({"number": number, "noise": 0.1 * number}, lambda entries: None)


def numbers(file: LedgerFile) -> list[int]:
    return [entry["number"] for entry in file.read()]


def written(path: Path, count: int) -> LedgerFile:
    file = ledger(path)
    for number in range(count):
        add(file, number)
    return file


def test_entries_are_read_back_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    assert not ledger(tmp_path).exists and numbers(ledger(tmp_path)) == []
    written(tmp_path, 3)
    assert ledger(tmp_path).exists and numbers(ledger(tmp_path)) == [0, 1, 2]
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_an_incomplete_last_line_was_never_promised(tmp_path: Path) -> None:
    path = written(tmp_path, 3).path
    whole = path.read_bytes()
    # The kill comes before the number of lines is noted.
    ledger(tmp_path).head.write_text("2\n")
    for end in range(whole[:-1].rfind(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert numbers(ledger(tmp_path)) == [0, 1]
    add(ledger(tmp_path), 7)
    assert numbers(ledger(tmp_path)) == [0, 1, 7]


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, 3).path
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(MotleyError, match=r"ledger\.jsonl(, line|: has [012] complete)"):
            ledger(tmp_path).read()


@pytest.mark.parametrize("kept", [(1, 2), (0, 2), (0, 1), (0, 2, 1), (0, 1, 1, 2), ()])
def test_missing_and_moved_lines_are_found(tmp_path: Path, kept: tuple[int, ...]) -> None:
    path = written(tmp_path, 3).path
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[number] for number in kept))
    with pytest.raises(MotleyError, match=ADVICE):
        ledger(tmp_path).read()


def test_a_deleted_file_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, 3).path
    path.unlink()
    assert ledger(tmp_path).exists
    with pytest.raises(MotleyError, match=r"has 0 complete lines, but 3 were written .*Restore it"):
        ledger(tmp_path).read()
    with pytest.raises(MotleyError, match="has 0 complete lines"):
        add(ledger(tmp_path), 3)


def test_a_refused_entry_is_not_added(tmp_path: Path) -> None:
    file = written(tmp_path, 2)

    def refuse(entries: Any) -> None:
        raise MotleyError(f"{len(entries)} are enough.")

    with pytest.raises(MotleyError, match="2 are enough"):
        file.append({"number": 2}, refuse)
    assert numbers(file) == numbers(ledger(tmp_path)) == [0, 1]


def test_two_processes_add_in_turns(tmp_path: Path) -> None:
    """Each sees what the other has added."""
    first, second = written(tmp_path, 1), ledger(tmp_path)
    add(second, 1)
    add(first, 2)
    add(second, 3)
    assert numbers(first) == numbers(second) == numbers(ledger(tmp_path)) == [0, 1, 2, 3]


def test_a_full_disk_is_named_and_leaves_the_ledger_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write = written(tmp_path, 2), os.write

    def half(descriptor: int, content: memoryview) -> int:
        if len(content) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        with pytest.raises(MotleyError, match=r"ledger\.jsonl: cannot be written: No space left"):
            add(file, 2)
    assert numbers(ledger(tmp_path)) == [0, 1]
    add(file, 2)
    assert numbers(ledger(tmp_path)) == [0, 1, 2]


def test_killed_at_any_moment_no_promised_line_is_lost(tmp_path: Path) -> None:
    """The child is killed before its n-th operation on a file; what it had promised is there."""
    for at in range(1, 20):
        folder = tmp_path / str(at)
        folder.mkdir()

        reading, promised = os.pipe()

        def work(folder: Path = folder, at: int = at, promised: int = promised) -> None:
            crash.watch_operations(
                folder, lambda number: crash.kill_myself() if number == at else None
            )
            for number in range(5):
                add(ledger(folder), number)
                os.write(promised, bytes([number]))

        crash.fork(work)
        os.close(promised)
        with os.fdopen(reading, "rb") as pipe:
            returned = list(pipe.read())
        kept = numbers(ledger(folder))
        assert kept in (returned, [*returned, len(returned)])
        add(ledger(folder), 9)
        assert numbers(ledger(folder)) == [*kept, 9]
