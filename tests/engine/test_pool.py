"""Slots where memory is short: fewer of them, said once, and the same result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from motley.client.job import Job
from motley.client.learner import Learner
from motley.core.errors import MotleyError
from motley.engine.local import LocalEngine
from motley.engine.pool import SlotPool
from motley.engine.slots import Slot
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.run import run_rounds
from tests.conftest import tiny_config


@contextmanager
def room_for(count: int, where: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let the device hold so many slots: one more runs out of memory, when it is made or when it first loads."""
    made: list[int] = []
    dropped: list[int] = []
    make, load, drop = Slot.__init__, Slot.load, SlotPool._drop

    def count_up(slot: Slot, *arguments: object) -> None:
        if where == "make" and len(made) - len(dropped) >= count:
            raise torch.OutOfMemoryError("no room")
        make(slot, *arguments)  # type: ignore[arg-type]
        made.append(id(slot))

    def check(slot: Slot, *arguments: object) -> None:
        if where == "load" and len(made) - len(dropped) > count:
            raise torch.OutOfMemoryError("no room")
        load(slot, *arguments)  # type: ignore[arg-type]

    def count_down(pool: SlotPool, slot: Slot) -> None:
        drop(pool, slot)
        dropped.append(id(slot))

    monkeypatch.setattr(Slot, "__init__", count_up)
    monkeypatch.setattr(Slot, "load", check)
    monkeypatch.setattr(SlotPool, "_drop", count_down)
    yield made


def hash_after(*overrides: str) -> str:
    federation = Federation(
        tiny_config("federation.clients_per_round=6", "training.rounds=2", *overrides)
    )
    return fingerprint(run_rounds(federation, federation.initial_state(), []).state)


@pytest.mark.parametrize("where", ["make", "load"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_fewer_slots_give_the_same_result_and_say_so_once(
    count: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hash_after("engine.slots=2")
    with (
        room_for(count, where, monkeypatch),
        pytest.warns(UserWarning, match=f"memory for {count} clients") as said,
    ):
        assert hash_after("engine.slots=2") == expected
    assert len([warning for warning in said if "memory for" in str(warning.message)]) == 1


def test_no_room_for_a_single_client_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        room_for(0, "make", monkeypatch),
        pytest.raises(MotleyError, match=r"resnet.*training\.batch_size"),
    ):
        hash_after()


def test_slots_are_made_when_needed_and_kept() -> None:
    federation = Federation(tiny_config("engine.slots=2", "federation.clients_per_round=6"))
    server, _ = federation.run_round(federation.initial_state())
    pool = federation.engine.pool  # type: ignore[attr-defined]
    slots = list(pool)
    assert len(slots) == 6 and not any(slot.busy for slot in slots)
    federation.run_round(server)
    assert list(pool) == slots


def test_slots_are_free_again_after_an_interruption_while_one_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A notebook goes on after Ctrl-C. It would wait forever for a slot that nobody trains in."""
    federation = Federation(tiny_config("federation.clients_per_round=6"))
    server, _ = federation.run_round(federation.initial_state())
    load, lead = Learner.load, Slot.lead
    clients: list[int] = []
    led: list[Slot] = []

    def interrupted(learner: Learner, job: Job, *arguments: Any) -> None:
        clients.append(job.client)
        if len(clients) == 3:
            raise KeyboardInterrupt
        load(learner, job, *arguments)

    def noted(slot: Slot) -> None:
        led.append(slot)
        lead(slot)

    monkeypatch.setattr(Learner, "load", interrupted)
    monkeypatch.setattr(Slot, "lead", noted)
    with pytest.raises(KeyboardInterrupt):
        federation.run_round(server)
    slots = list(federation.engine.pool)  # type: ignore[attr-defined]
    assert not any(slot.busy for slot in slots)
    # What comes next on the server's stream must not run beside their work on a GPU.
    assert led == slots
    after, _ = federation.run_round(server)
    expected, _ = Federation(federation.config).run_round(server)
    assert fingerprint(after.state) == fingerprint(expected.state)


def test_a_slot_is_free_again_after_an_interrupted_personalization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scoring = (
        "evaluation.per_client=all",
        "evaluation.client_test_fraction=0.2",
        "evaluation.personalize_epochs=0.2",
    )
    federation = Federation(tiny_config("model.sizes=['mlp1']", *scoring))
    load = Learner.load

    def interrupted(learner: Learner, job: Job, *arguments: Any) -> None:
        if job.collection == "personalized-score":
            raise KeyboardInterrupt
        load(learner, job, *arguments)

    monkeypatch.setattr(Learner, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        federation.run_round(federation.initial_state())
    assert not any(slot.busy for slot in federation.engine.pool)  # type: ignore[attr-defined]


def test_urgent_jobs_have_slots_of_their_own_while_there_is_room() -> None:
    federation = Federation(tiny_config("model.sizes=['mlp1']"))
    engine = federation.engine
    assert isinstance(engine, LocalEngine)
    pool, server = SlotPool(engine.clients, per_size=2), federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(3)]
    first, second = pool.seat(jobs[0], urgent=True), pool.seat(jobs[1], urgent=False)
    assert first is not None and second is not None and first.urgent and not second.urgent
    assert pool.seat(jobs[2], urgent=True) is None
    second.busy = False
    assert pool.seat(jobs[2], urgent=True) is second  # better than waiting
    first.busy = second.busy = False
    assert pool.seat(jobs[0], urgent=False) is second and pool.seat(jobs[1], urgent=False) is first
