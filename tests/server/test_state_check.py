"""A poisoned state is never kept: rounds are undone, the responsible clients named, and the last good state stays."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.config import Config
from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.runs.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from motley.runs.run import start_run
from motley.server import rounds, speculation
from motley.server.aggregation import merge_updates
from motley.server.rounds import Ending, Undone, train_clients
from motley.server.state import ServerState
from motley.server.state_check import ENOUGH, HISTORY, LARGEST, STAGE, StateCheck
from tests.conftest import tiny_config
from tests.server.test_robust_rounds import MLPS, Attacked

SHORT = (
    *MLPS,
    "federation.clients=6",
    "federation.clients_per_round=6",
    "training.steps=2",
    "training.rounds=3",
    "evaluation.every=3",
)


def server(value: float, **more: Any) -> ServerState:
    return replace(ServerState(1, {"w": torch.tensor([value]), "var": torch.tensor([1.0])}), **more)


def check(before: ServerState, after: ServerState, factor: float = 30.0) -> StateCheck:
    return StateCheck(before, after, {"w"}, factor)


# ---- what is checked


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (server(2.0), None),
        (server(math.nan), "the global state would hold a number that is not finite"),
        (server(1e16), "the global state would hold a number of 1e+16"),
        (server(2.0, ema={"w": torch.tensor([math.inf])}), "its moving average would hold"),
        (server(2.0, method_state={"c": torch.tensor([1e30])}), "the method's state would hold"),
        (
            server(2.0, stage_states={"optimizer": {"first/w": torch.tensor([-1e30])}}),
            "the state of the stage 'optimizer' would hold a number of 1e+30",
        ),
    ],
)
def test_numbers_that_are_not_plausible(after: ServerState, problem: str | None) -> None:
    found = check(server(1.0), after, factor=0.0).problem
    assert found is None if problem is None else problem in str(found)
    assert LARGEST == 1e15


def test_a_first_step_is_compared_with_the_parameters() -> None:
    assert check(server(5.0), server(150.0)).problem is None
    problem = check(server(5.0), server(160.0)).problem
    assert problem is not None
    assert "a step of norm 155, and the norm of its parameters is 5" in problem
    assert check(server(5.0), server(1e6), factor=0.0).problem is None


def test_later_steps_are_compared_with_their_median() -> None:
    state = server(1.0)
    for _ in range(HISTORY + 3):
        after = server(float(state.state["w"]) + 0.5, stage_states=state.stage_states)
        state = check(state, after).server
    history = state.stage_states[STAGE]["state"]
    assert history.tolist() == [0.5] * HISTORY
    ahead = float(state.state["w"])
    assert check(state, server(ahead + 14.9)).problem is None
    problem = check(state, server(ahead + 15.1)).problem
    assert problem is not None and "the median of the last 20 steps is 0.5" in problem


def test_rounds_without_a_step_say_nothing_about_the_usual_one() -> None:
    state = server(1.0)
    for _ in range(ENOUGH + 1):
        state = check(state, server(1.0, stage_states=state.stage_states)).server
    assert check(state, server(2.0)).problem is None


def test_the_history_is_saved_with_checkpoints(tmp_path: Path) -> None:
    after = check(server(1.0), server(3.0)).server
    read = read_checkpoint(save_checkpoint(tmp_path, after, keep=1))
    assert read.stage_states[STAGE]["state"].tolist() == [2.0]


# ---- rounds


def poisoned(config: Config, value: float, client: int = 4) -> Federation:
    federation = Federation(config)
    federation.engine = Attacked(federation, client, value)
    return federation


@pytest.mark.parametrize("value", [1e38, 1e30, -3e38])
def test_the_client_that_poisons_a_round_is_left_out_and_named(value: float) -> None:
    federation = poisoned(tiny_config(*SHORT), value)
    without = Federation(tiny_config(*SHORT))
    drop = without.sample
    without.sample = lambda number, attempt=0: [c for c in drop(number) if c != 4]
    for record, _ in zip(federation.run(), without.run(), strict=True):
        assert list(record.refused) == [4]
        assert "the round was undone and ended without it" in record.refused[4]
        assert math.isfinite(record.train_loss)
    assert federation.server is not None and without.server is not None
    # The round ended as if the client had not been there.
    for name, tensor in without.server.state.items():
        assert torch.equal(federation.server.state[name], tensor)
    assert 4 not in federation.server.client_state_rounds


def test_two_attackers_are_found_and_nobody_else() -> None:
    federation = poisoned(tiny_config(*SHORT), 1e38, client=1)
    federation.engine = Attacked(federation, 5, 1e20)
    record = next(iter(federation.run(1)))
    assert sorted(record.refused) == [1, 5]


def test_a_large_client_that_is_not_responsible_is_taken_back() -> None:
    # Client 4 sends 100 everywhere, which is large but usable, and client 2 a huge payload.
    federation = poisoned(
        tiny_config(*SHORT, "method.name=scaffold", "server.max_step_factor=0"), 100.0
    )
    context, before = federation.context, federation.initial_state()
    attempt = train_clients(context, before, 0, lambda client: None)
    updates = []
    for update in attempt.updates:
        if update.client == 2:
            payload = {name: torch.full_like(t, 1e17) for name, t in update.payload.items()}
            small = {name: t * 0 for name, t in update.delta.items()}
            update = replace(update, payload=payload, delta=small)
        if update.client == 4:
            payload = {name: t + 1e3 for name, t in update.payload.items()}
            update = replace(update, payload=payload)
        updates.append(update)
    assert merge_updates(context, before, updates).problem is not None
    check = type(attempt.check)(updates)
    ending = rounds.finish_round(context, before, replace(attempt, updates=updates, check=check))
    assert isinstance(ending, Ending)
    assert list(ending.excluded) == [2]


def test_if_nobody_is_responsible_the_run_stops_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(*SHORT, "server.attempts=2")

    def build(federation: Federation) -> Any:
        local = Federation(config).engine

        class Everyone:
            """All clients send too much from round 3 on."""

            trusted = True

            def train(self, jobs: Any, done: Any) -> Any:
                answers = local.train(jobs, done)
                if jobs[0].round_number < 3:
                    return answers
                changed = []
                for answer in answers:
                    delta = {n: torch.full_like(t, 1e30) for n, t in answer.delta.items()}
                    changed.append(replace(answer, delta=delta))
                return changed

            def __getattr__(self, name: str) -> Any:
                return getattr(local, name)

        return Everyone()

    with pytest.raises(MotleyError) as error:
        start_run(config, tmp_path / "run", engine=build)
    message = str(error.value)
    assert (
        "round 3 was tried 2 times (server.attempts) and never ended with a usable state" in message
    )
    saved = load_checkpoint(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved.round_number == 2
    assert all(tensor.isfinite().all() for tensor in saved.state.values())


def test_honest_rounds_are_never_undone() -> None:
    for overrides in (
        (),
        ("server.optimizer.name=adam", "server.ema_decay=0.9"),
        ("method.name=scaffold",),
    ):
        federation = Federation(tiny_config(*SHORT, *overrides))
        for record in federation.run():
            assert not record.refused


def test_speculation_undoes_rounds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = poisoned(tiny_config(*SHORT), 1e38)
    context, before = federation.context, federation.initial_state()
    attempt = train_clients(context, before, 0, lambda client: None)
    # As on a GPU that is still training: the end is queued before the verdict is known.
    monkeypatch.setattr(type(attempt.check), "ready", property(lambda self: False))
    ending = speculation.finish_round(context, before, attempt)
    assert isinstance(ending, Ending) and list(ending.excluded) == [4]


def test_too_few_updates_repeat_a_round_by_default() -> None:
    federation = Federation(tiny_config(*SHORT))
    assert federation.config.server.min_fraction == 0.2
    context, before = federation.context, federation.initial_state()
    attempt = train_clients(context, before, 0, lambda client: None)
    failures = dict.fromkeys(attempt.clients[:5], "its node is not connected.")
    assert isinstance(
        rounds.finish_round(context, before, replace(attempt, failures=failures)), Undone
    )
    failures.pop(attempt.clients[0])
    assert isinstance(
        rounds.finish_round(context, before, replace(attempt, failures=failures)), Ending
    )
