"""What clients remember is filed under client and round, and the round that counts is the server's word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from motley.engine.memory import MemoryStore
from motley.errors import MotleyError


def memory(value: float) -> dict[str, Tensor]:
    return {"own": torch.full((2, 3), float(value)), "turns": torch.tensor(int(value))}


def value(found: dict[str, Tensor]) -> float:
    """Return what a memory was made from."""
    number = found["own"][0, 0].item()
    assert torch.equal(found["own"], torch.full((2, 3), number))
    assert found["turns"].dtype == torch.int64
    assert found["turns"].item() == number
    return number


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_memory_is_found_by_client_and_round(tmp_path: Path) -> None:
    for store in (MemoryStore(), MemoryStore(tmp_path)):
        for client, number in ((0, 1), (0, 2), (7, 1)):
            store.put(client, number, memory(10 * client + number))
        assert [value(store.get(*which)) for which in ((0, 1), (0, 2), (7, 1))] == [1, 2, 71]
    assert files(tmp_path) == set(), "nothing is written before a checkpoint is made"


def test_a_memory_is_a_copy(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    live = memory(1)
    live["own"].requires_grad_()
    store.put(0, 1, live)
    with torch.no_grad():
        live["own"].fill_(5)
    found = store.get(0, 1)
    assert value(found) == 1
    assert not found["own"].requires_grad


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for store in (MemoryStore(), MemoryStore(tmp_path)):
        store.put(3, 1, memory(1))
        with pytest.raises(MotleyError, match="client 3 after round 2 is missing"):
            store.get(3, 2)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "2.safetensors").write_bytes(content)
    with pytest.raises(MotleyError, match=r"3/2\.safetensors cannot be read"):
        MemoryStore(tmp_path).get(3, 2)


def test_an_empty_memory_takes_no_room(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    store.put(0, 1, {})
    store.save({0: 1})
    store.forget_older({0: 1})
    assert files(tmp_path) == set()


# ---- saved


def test_saved_memories_outlive_the_process(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    store.put(0, 1, memory(1))
    store.put(7, 2, memory(72))
    store.save({0: 1, 7: 2})
    later = MemoryStore(tmp_path)
    assert (value(later.get(0, 1)), value(later.get(7, 2))) == (1, 72)


def test_every_bit_is_saved_whatever_the_layout(tmp_path: Path) -> None:
    """On a GPU weights are channels last; a memory may be a view, and two names may be one tensor."""
    image = torch.randn(2, 3, 4, 5)
    strange = {
        "channels last": image.to(memory_format=torch.channels_last),
        "turned": image.transpose(0, 3),
        "same": image,
        "again": image,
        "half": image.to(torch.bfloat16),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "flag": torch.tensor(True),
    }
    store = MemoryStore(tmp_path)
    store.put(0, 1, strange)
    store.save({0: 1})
    for found in (store.get(0, 1), MemoryStore(tmp_path).get(0, 1)):
        assert found.keys() == strange.keys()
        for name, tensor in strange.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name
    assert MemoryStore(tmp_path).get(0, 1)["odd"].signbit().tolist() == strange["odd"].signbit().tolist()


def test_only_the_named_round_is_written_and_once(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    for number in (1, 2, 3):
        store.put(0, number, memory(number))
    store.put(1, 3, memory(13))
    store.save({0: 2})
    assert files(tmp_path) == {"0/2.safetensors"}
    written = (tmp_path / "0" / "2.safetensors").stat().st_mtime_ns
    store.save({0: 2})
    assert (tmp_path / "0" / "2.safetensors").stat().st_mtime_ns == written
    store.save({0: 3, 1: 3})
    assert files(tmp_path) == {"0/2.safetensors", "0/3.safetensors", "1/3.safetensors"}


def test_saving_drops_older_ones_from_memory_and_keeps_newer(tmp_path: Path) -> None:
    for store in (MemoryStore(), MemoryStore(tmp_path)):
        for number in (1, 2, 3):
            store.put(0, number, memory(number))
        store.put(1, 1, memory(11))
        store.save({0: 2})
        assert value(store.get(0, 2)) == 2
        assert value(store.get(0, 3)) == 3
        assert value(store.get(1, 1)) == 11, "a client the server does not name yet keeps what it has"
        with pytest.raises(MotleyError, match="missing"):
            store.get(0, 1)


def test_a_file_of_a_round_that_was_never_completed_is_replaced(tmp_path: Path) -> None:
    before = MemoryStore(tmp_path)
    before.put(0, 4, memory(66))
    before.save({0: 4})
    after = MemoryStore(tmp_path)
    after.put(0, 4, memory(4))
    assert value(after.get(0, 4)) == 4
    after.save({0: 4})
    assert value(MemoryStore(tmp_path).get(0, 4)) == 4


def test_a_resumed_store_saves_what_it_did_not_touch(tmp_path: Path) -> None:
    """Most clients are not in most rounds: their files stay, unread and unwritten."""
    first = MemoryStore(tmp_path)
    first.put(0, 1, memory(1))
    first.put(1, 1, memory(11))
    first.save({0: 1, 1: 1})
    second = MemoryStore(tmp_path)
    second.put(1, 2, memory(12))
    second.save({0: 1, 1: 2})
    third = MemoryStore(tmp_path)
    assert (value(third.get(0, 1)), value(third.get(1, 2))) == (1, 12)


def test_an_unfinished_file_is_not_taken_for_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(tmp_path)
    store.put(0, 1, memory(1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.save({0: 1})
    assert files(tmp_path) != set()
    with pytest.raises(MotleyError, match="missing"):
        MemoryStore(tmp_path).get(0, 1)
    store.save({0: 1})
    assert files(tmp_path) == {"0/1.safetensors"}
    assert value(MemoryStore(tmp_path).get(0, 1)) == 1


# ---- forgotten


def test_forgetting_deletes_what_is_older_than_named(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    for number in (1, 9, 10, 11):
        store.put(0, number, memory(number))
        store.put(1, number, memory(number))
        store.save({0: number, 1: number})
    store.forget_older({0: 10})
    assert files(tmp_path / "0") == {"10.safetensors", "11.safetensors"}
    assert len(files(tmp_path / "1")) == 4, "a client that is not named keeps all"
    store.forget_older({0: 11, 1: 9, 5: 3})
    assert files(tmp_path / "0") == {"11.safetensors"}
    assert files(tmp_path / "1") == {"9.safetensors", "10.safetensors", "11.safetensors"}
    assert value(MemoryStore(tmp_path).get(0, 11)) == 11


def test_a_new_process_forgets_what_an_older_one_left(tmp_path: Path) -> None:
    before = MemoryStore(tmp_path)
    for number in (1, 2, 3):
        before.put(0, number, memory(number))
        before.save({0: number})
    MemoryStore(tmp_path).forget_older({0: 3})
    assert files(tmp_path) == {"0/3.safetensors"}


def test_there_may_be_nothing_to_forget(tmp_path: Path) -> None:
    MemoryStore().forget_older({0: 1})
    MemoryStore(tmp_path / "none").forget_older({0: 1})
    assert not (tmp_path / "none").exists()
