"""Checkpoints are restored bit for bit, and after any crash the newest one is complete."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import motley.runs
from motley.core.errors import MotleyError
from motley.privacy import PrivacyLedger
from motley.privacy.accounting import SampledMechanism
from motley.runs import checkpoint
from motley.runs.checkpoint import (
    checkpoints,
    fingerprint,
    load_checkpoint,
    put_aside,
    save_checkpoint,
)
from motley.server.state import ServerState
from tests.runs import crash


def make_server(round_number: int, seed: int = 0, **changes: Any) -> ServerState:
    """Return a server with tensors of many dtypes, different for every round and seed."""
    generator = torch.Generator().manual_seed(1000 * round_number + seed)
    values = torch.randn(3, 4, generator=generator)
    state = {
        "weight": values,
        "half": values.to(torch.bfloat16),
        "double": values.double() / 3,
        "count": torch.tensor(2**40 + round_number),
        "mask": values > 0,
        "bytes": torch.arange(5, dtype=torch.uint8),
        "none": torch.zeros(0, 3),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    }
    averaged = {name: tensor.clone() for name, tensor in state.items()}
    method = {"control/weight": values * 2, "round": torch.tensor(round_number, dtype=torch.int32)}
    stages = {"optimizer": {"first/weight": values / 7}}
    server = ServerState(
        round_number, state, averaged, method, {0: 1, 7: round_number, 123456: 2}, stages
    )
    mechanisms = {"small": {SampledMechanism(3, 2, 1.5): round_number}}
    server = replace(server, ledger=PrivacyLedger(mechanisms, {2: 1, 7: round_number}))
    return replace(server, **changes)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], list[int]]:
    """Return everything about a tensor except its memory layout."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().reshape(-1).view(torch.uint8).tolist(),
    )


def everything(server: ServerState | None) -> object:
    """Return a server as plain values that compare equal only if every bit is equal."""
    if server is None:
        return None
    sections = [
        None if section is None else {name: bits(tensor) for name, tensor in section.items()}
        for section in (
            server.state,
            server.ema,
            server.method_state,
            server.stage_states.get("optimizer"),
        )
    ]
    return server.round_number, sections, server.client_state_rounds, server.ledger


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ema": None},
        {"method_state": {}},
        {"stage_states": {}},
        {"client_state_rounds": {}},
        {"ema": None, "method_state": {}, "stage_states": {}, "client_state_rounds": {}},
    ],
    ids=str,
)
def test_everything_comes_back_bit_for_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    server = make_server(3, **changes)
    save_checkpoint(tmp_path, server, keep=2)
    assert everything(load_checkpoint(tmp_path)) == everything(server)


def test_tensors_come_back_in_their_order(tmp_path: Path) -> None:
    """Sums over the tensors of a state have other last bits in another order."""
    server = make_server(3)
    save_checkpoint(tmp_path, server, keep=1)
    restored = load_checkpoint(tmp_path)
    assert restored is not None
    for section, tensors in server.sections.items():
        assert list(restored.sections[section]) == list(tensors)


def _finite(server: ServerState) -> ServerState:
    return server.map_tensors(
        lambda tensor: tensor.nan_to_num() if tensor.is_floating_point() else tensor
    )


def _without_checksums(path: Path) -> dict[str, Any]:
    """Return the content of server.json as earlier versions wrote it."""
    numbers = json.loads((path / "server.json").read_text())
    for name in ("sha256", "section_sha256", "facts", "names"):
        del numbers[name]
    return numbers


def test_checkpoints_of_earlier_versions_can_be_read(tmp_path: Path) -> None:
    """They have other names for the same tensors and numbers, and no checksums."""
    server = _finite(make_server(3))
    path = save_checkpoint(tmp_path, server, keep=1)
    old_names = {"ema": "averaged", "method_state": "method", "stage-optimizer": "optimizer"}
    for new, old in old_names.items():
        (path / f"{new}.safetensors").rename(path / f"{old}.safetensors")
    numbers = _without_checksums(path)
    numbers["sections"] = [old_names.get(name, name) for name in numbers["sections"]]
    # Numbers of clients were in server.json, not in files of their own.
    for name, key in (("client_state_rounds", "remembered"), ("ledger_uploads", "uploads")):
        tensors = load_file(path / f"{name}.safetensors")
        (path / f"{name}.safetensors").unlink()
        numbers["sections"].remove(name)
        clients = map(str, tensors["clients"].tolist())
        numbers[key] = dict(zip(clients, tensors["numbers"].tolist(), strict=True))
    numbers["spent"] = {**numbers.pop("ledger"), "uploads": numbers.pop("uploads")}
    (path / "server.json").write_text(json.dumps(numbers))
    assert everything(load_checkpoint(tmp_path)) == everything(server)


def test_layout_and_shared_memory_do_not_matter(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    zero = torch.zeros(3)
    row = torch.arange(6.0)
    method = {
        "image": image,
        "a": zero,
        "b": zero,
        "all": row,
        "end": row[2:],
        "turned": image.transpose(0, 3),
    }
    server = make_server(1, method_state=method)
    save_checkpoint(tmp_path, server, keep=1)
    assert everything(load_checkpoint(tmp_path)) == everything(server)


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    assert load_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for number in (0, 2, 4, 6):
        save_checkpoint(tmp_path, make_server(number), keep)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "round-000002",
        "round-000004",
        "round-000006",
    ][-keep:]
    assert len(list(tmp_path.iterdir())) == keep
    assert everything(load_checkpoint(tmp_path)) == everything(make_server(6))


def test_checkpoints_are_sorted_by_number_not_by_spelling(tmp_path: Path) -> None:
    for number in (999_999, 1_000_000):
        save_checkpoint(tmp_path, make_server(number), keep=2)
    (tmp_path / "round-2000000 (copy)").mkdir()
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert loaded.round_number == 1_000_000


# ---- crashes


def _torn(number: int) -> Callable[[dict[str, Tensor], Path], None]:
    """Return a `save_file` that kills the process in the middle of its n-th file."""
    written = 0

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        nonlocal written
        written += 1
        save_file(tensors, path)
        if written == number:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            crash.kill_myself()

    return save


def _prepared(folder: Path, *servers: ServerState) -> Path:
    for server in servers:
        save_checkpoint(folder, server, keep=9)
    return folder


def _check_after_crash(folder: Path, allowed: list[ServerState], keep: int) -> int:
    """Check that an allowed server was saved, and that the next save works and cleans up.

    Return the index of the server that was saved.
    """
    loaded = everything(load_checkpoint(folder))
    expected = [everything(server) for server in allowed]
    assert loaded in expected
    following = make_server(50)
    save_checkpoint(folder, following, keep)
    assert everything(load_checkpoint(folder)) == everything(following)
    assert len(list(folder.iterdir())) <= keep
    assert all(path.name.startswith("round-") for path in folder.iterdir())
    return expected.index(loaded)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("fault", ["killed", "disk full"])
def test_a_crash_before_any_file_operation_leaves_the_old_or_the_new(
    tmp_path: Path, keep: int, fault: str
) -> None:
    oldest, older, newer = make_server(2), make_server(4), make_server(6)

    def save(folder: Path, at: int) -> None:
        def fail(number: int) -> None:
            if number == at and fault == "killed":
                crash.kill_myself()
            if number >= at:
                raise OSError(28, "No space left on device")

        crash.watch_operations(folder, fail)
        save_checkpoint(folder, newer, keep)

    outcomes = []
    for at in range(1, 200):
        folder = _prepared(tmp_path / f"{at}", oldest, older)
        ended = crash.fork(lambda folder=folder, at=at: save(folder, at))
        outcomes.append(_check_after_crash(folder, [older, newer], keep))
        if ended == 0:
            break
        assert ended == (-signal.SIGKILL if fault == "killed" else 1)
    assert at > 10, "the file operations of a save were not counted"
    assert outcomes == sorted(outcomes), "once the new one is there, it stays"
    assert set(outcomes) == {0, 1}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_crash_in_the_middle_of_a_file_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    older, newer = make_server(4), make_server(6)
    _prepared(tmp_path, older)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", _torn(number))
        assert crash.fork(lambda: save_checkpoint(tmp_path, newer, 2)) == -signal.SIGKILL
    assert any(path.name.startswith("unfinished-") for path in tmp_path.iterdir())
    assert _check_after_crash(tmp_path, [older, newer], keep=2) == 0


def test_a_crash_while_a_round_is_saved_again(tmp_path: Path) -> None:
    older, before, again = make_server(2), make_server(4), make_server(4, seed=1)

    def save(folder: Path, at: int) -> None:
        crash.watch_operations(folder, lambda number: crash.kill_myself() if number == at else None)
        save_checkpoint(folder, again, 2)

    outcomes = []
    for at in range(1, 200):
        folder = _prepared(tmp_path / f"{at}", older, before)
        ended = crash.fork(lambda folder=folder, at=at: save(folder, at))
        outcomes.append(_check_after_crash(folder, [older, before, again], keep=2))
        if ended == 0:
            break
    assert {1, 2} <= set(outcomes)
    assert outcomes[-1] == 2


def test_leftovers_of_any_round_are_ignored_and_cleaned(tmp_path: Path) -> None:
    older = make_server(4)
    _prepared(tmp_path, older)
    for name in ("unfinished-000003", "unfinished-000009", "unfinished-round-000001"):
        shutil.copytree(tmp_path / "round-000004", tmp_path / name)
        (tmp_path / name / "server.json").unlink()
    assert _check_after_crash(tmp_path, [older], keep=2) == 0


def test_a_checkpoint_is_on_disk_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For power failures: files are flushed before the rename, and the parent folder after it."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(source: Any, target: Any, **options: Any) -> None:
        events.append("rename")
        rename(source, target, **options)

    if not Path("/proc/self/fd").exists():
        pytest.skip("the names of open files are not available")
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save_checkpoint(tmp_path, make_server(1), keep=2)
    at = events.index("rename")
    sections = {
        f"{name}.safetensors"
        for name in (
            "state",
            "ema",
            "method_state",
            "stage-optimizer",
            "client_state_rounds",
            "ledger_uploads",
        )
    }
    assert set(events[:at]) == {*sections, "server.json", "unfinished-000001"}
    assert events[at + 1 :] == [tmp_path.name]


# ---- damaged files


def _break(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {"empty": b"", "cut": content[: len(content) // 2], "garbage": b"\x93" * len(content)}[
                how
            ]
        )


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "garbage"])
@pytest.mark.parametrize(
    "file",
    [
        *(f"{name}.safetensors" for name in ("state", "ema", "method_state", "stage-optimizer")),
        "server.json",
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, how: str) -> None:
    older = make_server(2)
    _prepared(tmp_path, older, make_server(4))
    _break(tmp_path / "round-000004" / file, how)
    with pytest.raises(MotleyError, match=f"round-000004/{file} cannot be read") as caught:
        load_checkpoint(tmp_path)
    assert "continues from the one before it, round-000002." in str(caught.value)
    put_aside(tmp_path / "round-000004")
    assert everything(load_checkpoint(tmp_path)) == everything(older)


@pytest.mark.parametrize(
    "file",
    [
        *(f"{name}.safetensors" for name in ("state", "ema", "method_state", "stage-optimizer")),
        "server.json",
    ],
)
def test_every_flipped_bit_is_noticed(tmp_path: Path, file: str) -> None:
    path = save_checkpoint(tmp_path, make_server(4), keep=1) / file
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 40)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(MotleyError, match=f"round-000004/{file} cannot be read"):
            load_checkpoint(tmp_path)
    path.write_bytes(content)
    assert everything(load_checkpoint(tmp_path)) == everything(make_server(4))


def test_values_that_are_not_finite_are_noticed_where_no_checksum_vouches_for_them(
    tmp_path: Path,
) -> None:
    path = save_checkpoint(tmp_path, make_server(4), keep=1)
    assert load_checkpoint(tmp_path) is not None, "the run itself wrote them"
    (path / "server.json").write_text(json.dumps(_without_checksums(path)))
    with pytest.raises(MotleyError, match="'odd' has values that are not finite"):
        load_checkpoint(tmp_path)


def test_a_checkpoint_under_another_number_is_not_used(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_server(4), keep=1).rename(tmp_path / "round-000009")
    with pytest.raises(MotleyError, match="it is about round 4"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        3,
        {"round": 1, "sections": ["state", "method_state"], "client_state_rounds": []},
        {"round": None, "sections": ["state", "method_state"], "client_state_rounds": {}},
        {"round": 1, "sections": [], "client_state_rounds": {}},
        {"round": 1, "sections": ["state", "method_state"], "client_state_rounds": {"me": 1}},
    ],
    ids=str,
)
def test_unexpected_json_is_rejected(tmp_path: Path, content: object) -> None:
    path = save_checkpoint(tmp_path, make_server(1), keep=1)
    (path / "server.json").write_text(json.dumps(content))
    with pytest.raises(MotleyError, match="round-000001"):
        load_checkpoint(tmp_path)


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["state.safetensors", "server.json"])
def test_a_pickle_in_disguise_is_not_run(tmp_path: Path, file: str) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", make_server(1), keep=1)
    payload = pickle.dumps(_Payload(tmp_path / "run"))
    (path / file).write_bytes(payload)
    with pytest.raises(MotleyError):
        load_checkpoint(tmp_path / "checkpoints")
    assert not (tmp_path / "run").exists()
    pickle.loads(payload)
    assert (tmp_path / "run").exists(), "the payload itself must work, or the test shows nothing"


def test_runs_import_no_unpickler() -> None:
    names: set[str] = set()
    for file in Path(motley.runs.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names.add(f"{node.value.id}.{node.attr}")
    assert "json.loads" in names, "the search works"
    assert not {
        name
        for name in names
        if name.split(".")[0] in ("pickle", "cloudpickle", "dill", "joblib", "shelve")
    }
    assert not names & {"torch.load", "np.load", "numpy.load"}


# ---- fingerprints


def test_fingerprint_sees_names_types_and_shapes() -> None:
    value = torch.arange(6, dtype=torch.int32)
    states = [
        {},
        {"a": value},
        {"b": value},
        {"a": value, "b": value},
        {"a": value.view(2, 3)},
        {"a": value.view(3, 2)},
        {"a": value.view(torch.float32)},
        {"a": value.view(torch.uint8)},
        {"a": torch.zeros(0)},
        {"a": torch.zeros(0, 2)},
        {"a": torch.tensor(0.0)},
        {"a": torch.tensor(-0.0)},
        {"a": torch.tensor([0.0])},
        {"a": torch.tensor(False)},
        {"a": torch.tensor(0, dtype=torch.bfloat16)},
        {"a": torch.tensor(0, dtype=torch.float16)},
    ]
    assert len({fingerprint(state) for state in states}) == len(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_fingerprint_sees_each_bit(dtype: torch.dtype) -> None:
    value = torch.ones(3, dtype=dtype)
    seen = {fingerprint({"a": value})}
    places = 3 * value.element_size()
    for place in range(places):
        for bit in range(8):
            flipped = value.clone()
            flipped.view(torch.uint8)[place] ^= 1 << bit
            seen.add(fingerprint({"a": flipped}))
    assert len(seen) == 8 * places + 1


def test_fingerprint_does_not_see_layout_order_or_gradient() -> None:
    image, row = torch.randn(2, 3, 4, 5), torch.randn(4)
    plain = fingerprint({"image": image, "row": row})
    laid_out = image.to(memory_format=torch.channels_last)
    strided = torch.stack([row, row], dim=1)[:, 0]
    assert laid_out.stride() != image.stride()
    assert strided.stride() != row.stride()
    assert fingerprint({"image": laid_out, "row": strided}) == plain
    assert fingerprint({"row": row, "image": image}) == plain
    assert fingerprint({"image": image.clone().requires_grad_(), "row": row}) == plain


def test_fingerprint_is_the_same_in_every_version() -> None:
    """Fingerprints are compared across machines and releases, so their format must not change."""
    by_hand = hashlib.sha256(
        b"a|torch.int16|(2,)|\x01\x00\x02\x00" + b"b|torch.float32|()|\x00\x00\x80?"
    ).hexdigest()
    state = {"b": torch.tensor(1.0), "a": torch.tensor([1, 2], dtype=torch.int16)}
    assert fingerprint(state) == by_hand
