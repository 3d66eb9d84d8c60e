"""Several devices: which ones a setting names, and that a second one changes who trains where and nothing else."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from motley.core.errors import MotleyError
from motley.engine.device import choose_devices
from motley.engine.local import LocalEngine
from motley.engine.other_device_slot import OtherDeviceSlot, copied_to
from motley.engine.pool import SlotPool
from motley.engine.slots import Slot
from motley.engine.timeline import Timeline, draw
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.run import run_rounds
from tests.conftest import tiny_config

CPU = torch.device("cpu")
TWO = "engine.device=cpu,cpu"


def gpus(*numbers: int) -> list[torch.device]:
    return [torch.device("cuda", number) for number in numbers]


def with_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("setting", "count", "expected"),
    [
        ("auto", 0, [CPU]),
        ("auto", 1, gpus(0)),
        ("auto", 3, gpus(0, 1, 2)),
        ("cpu", 2, [CPU]),
        ("cpu,cpu", 0, [CPU, CPU]),
        ("cuda", 3, gpus(0)),
        ("cuda:2", 3, gpus(2)),
        ("cuda:1,cuda:0", 2, gpus(1, 0)),
        ("cuda, cuda:1", 2, gpus(0, 1)),
    ],
)
def test_a_setting_names_devices(
    setting: str, count: int, expected: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(count, monkeypatch)
    assert choose_devices(setting) == expected


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("gpu", "allowed are auto, cpu, cuda, cuda:N, or several GPUs: cuda:0,cuda:1."),
        ("", "allowed are auto, cpu"),
        ("cuda:0,", "allowed are auto, cpu"),
        ("auto,cuda:1", "allowed are auto, cpu"),
        ("cuda:-1", "allowed are auto, cpu"),
        ("cuda:7", "there is no cuda:7 on this machine; it has cpu, cuda:0, cuda:1."),
        ("cuda:0,cuda:300", "there is no cuda:300 on this machine; it has cpu, cuda:0, cuda:1."),
        ("cuda,cuda:0", "a GPU is named twice: allowed is each one once."),
        (
            "cpu,cuda:0",
            "several devices are GPUs only: allowed is cpu, or a list such as cuda:0,cuda:1.",
        ),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_allowed(
    setting: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(2, monkeypatch)
    with pytest.raises(MotleyError, match="^" + re.escape(f"engine.device = '{setting}': {said}")):
        choose_devices(setting)


def test_without_a_gpu_there_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(0, monkeypatch)
    with pytest.raises(MotleyError, match=r"no cuda:0 on this machine; it has cpu\."):
        choose_devices("cuda")


def hashes(*overrides: str) -> tuple[str, str]:
    federation = Federation(tiny_config("training.rounds=2", *overrides))
    server = run_rounds(federation, federation.initial_state(), [])
    return fingerprint(server.state), fingerprint(server.method_state)


@pytest.mark.parametrize("method", ["fedavg", "noisy", "every-hook", "alternating"])
def test_two_devices_give_the_bits_of_one(method: str) -> None:
    settings = (
        f"method.name={method}",
        "data.transform.crop_padding=1",
        "data.transform.flip=true",
    )
    one = hashes("engine.device=cpu", *settings)
    assert hashes(TWO, *settings) == one
    assert hashes("engine.device=cpu,cpu,cpu", "engine.slots=2", *settings) == one


def slots_of(federation: Federation) -> list[Slot]:
    assert isinstance(federation.engine, LocalEngine)
    return list(federation.engine.pool)


def test_every_device_has_its_own_data_and_slots() -> None:
    federation = Federation(
        tiny_config(TWO, "federation.clients_per_round=6", "data.transform.crop_padding=1")
    )
    federation.run_round(federation.initial_state())
    slots = slots_of(federation)
    assert Counter((slot.where, slot.size) for slot in slots) == Counter(
        (where, size) for where in (0, 1) for size in federation.split.sizes
    )
    assert all(isinstance(slot, OtherDeviceSlot) == (slot.where == 1) for slot in slots)
    homes, aways = (
        {slot.learner.data.inputs.data_ptr() for slot in slots if slot.where == w} for w in (0, 1)
    )
    assert len(homes) == len(aways) == 1 and homes != aways


def test_one_device_has_neither_spread_nor_away_slots() -> None:
    federation = Federation(tiny_config("engine.device=cpu"))
    federation.run_round(federation.initial_state())
    assert isinstance(federation.engine, LocalEngine) and isinstance(
        federation.engine.pool, SlotPool
    )
    assert {type(slot) for slot in slots_of(federation)} == {Slot}


def test_a_job_goes_where_the_fewest_steps_are_left() -> None:
    federation = Federation(
        tiny_config(TWO, "engine.slots=4", "model.sizes=['resnet10']", "training.epochs=2")
    )
    server = federation.initial_state()
    assert isinstance(federation.engine, LocalEngine)
    pool, steps = federation.engine.pool, {}
    for client in sorted(range(6), key=lambda c: -federation.engine.clients.samples(c)):  # type: ignore[attr-defined]
        before = [steps.get(where, 0) for where in (0, 1)]
        slot = pool.seat(federation.job(server, 1, client))
        assert slot is not None and slot.where == before.index(min(before))
        steps[slot.where] = before[slot.where] + len(slot.learner.lengths)
    assert set(steps) == {0, 1}


def test_a_full_device_leaves_jobs_to_the_other() -> None:
    federation = Federation(tiny_config(TWO, "engine.slots=1", "model.sizes=['resnet10']"))
    server = federation.initial_state()
    assert isinstance(federation.engine, LocalEngine)
    seats = [federation.engine.pool.seat(federation.job(server, 1, client)) for client in range(3)]
    assert [slot.where if slot else None for slot in seats] == [0, 1, None]


def test_a_job_is_carried_over_and_its_upload_back() -> None:
    federation = Federation(
        tiny_config(TWO, "method.name=every-hook", "model.sizes=['resnet10']", "training.steps=1")
    )
    server = federation.initial_state()
    assert isinstance(federation.engine, LocalEngine)
    federation.engine.pool.seat(federation.job(server, 1, 0))
    job = federation.job(server, 1, 1)
    slot = federation.engine.pool.seat(job)
    assert isinstance(slot, OtherDeviceSlot) and slot.learner.job is not None
    for sent, here in (
        (job.state, slot.learner.job.state),
        (job.broadcast, slot.learner.job.broadcast),
    ):
        assert sent and all(torch.equal(sent[name], here[name]) for name in sent)
        assert not {t.data_ptr() for t in sent.values()} & {t.data_ptr() for t in here.values()}
    assert slot.advance()
    update = slot.unload()
    assert update.client == job.client and update.delta.keys() == job.state.keys()


def test_what_is_in_host_memory_is_not_carried_to_a_gpu() -> None:
    state = {"counts": torch.zeros(3)}
    assert copied_to(state, torch.device("cuda", 1))["counts"] is state["counts"]


def no_room_away(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the second device hold so many slots."""
    make, made = OtherDeviceSlot.__init__, []

    def limited(slot: OtherDeviceSlot, *arguments: object) -> None:
        if len(made) >= count:
            raise torch.OutOfMemoryError("no room")
        make(slot, *arguments)  # type: ignore[arg-type]
        made.append(slot.size)

    monkeypatch.setattr(OtherDeviceSlot, "__init__", limited)


def test_a_device_short_of_memory_gets_fewer_slots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("model.sizes=['resnet10']", "engine.slots=3", "federation.clients_per_round=6")
    expected = hashes("engine.device=cpu", *settings)
    no_room_away(1, monkeypatch)
    federation = Federation(tiny_config("training.rounds=2", TWO, *settings))
    with pytest.warns(UserWarning, match="memory for 1 clients") as said:
        server = run_rounds(federation, federation.initial_state(), [])
    assert len([warning for warning in said if "memory for" in str(warning.message)]) == 1
    assert (fingerprint(server.state), fingerprint(server.method_state)) == expected
    assert Counter(slot.where for slot in slots_of(federation)) == {0: 3, 1: 1}


def test_a_device_without_room_for_one_client_is_to_be_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_room_away(0, monkeypatch)
    with pytest.raises(MotleyError, match=r"leave cpu out of engine\.device"):
        hashes(TWO)


def test_an_interrupted_round_leaves_no_slot_busy_anywhere() -> None:
    federation = Federation(tiny_config(TWO))
    server = federation.initial_state()

    def stop(client: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run_round(server, stop)
    assert not any(slot.busy for slot in slots_of(federation))
    again, _ = federation.run_round(server)
    fresh = Federation(tiny_config("engine.device=cpu"))
    expected, _ = fresh.run_round(fresh.initial_state())
    assert fingerprint(again.state) == fingerprint(expected.state)


def test_the_debug_engine_stays_on_the_home_device() -> None:
    federation = Federation(tiny_config(TWO, "engine.name=debug"))
    assert federation.devices == [CPU]


def test_the_timeline_tells_devices_apart(tmp_path: Path) -> None:
    federation = Federation(tiny_config(TWO, "federation.clients_per_round=6"))
    assert isinstance(federation.engine, LocalEngine)
    timeline = Timeline(*federation.devices)
    federation.engine.record(timeline)
    _, record = federation.run_round(federation.initial_state())
    spans = timeline.spans()
    assert sorted(span.client for span in spans) == record.clients
    assert {span.device for span in spans} == {0, 1}
    devices = {
        span.slot: {other.device for other in spans if other.slot == span.slot} for span in spans
    }
    assert all(len(own) == 1 for own in devices.values())
    assert all(0 <= span.start < span.end for span in spans)
    draw(spans, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
