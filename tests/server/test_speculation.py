"""Rounds that are queued before the one before them has been checked end as plain rounds do."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.client.learner import Learner
from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.update import ClientUpdate
from motley.engine import LocalEngine
from motley.engine.base import Done, Failure, Job
from motley.federation import Federation
from motley.methods import METHODS
from motley.runs.callbacks import Callback
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.runs.run import resume_run, start_run
from motley.server.pipeline import StageResult
from motley.server.record import RoundRecord
from motley.server.sampling import ClientSampler
from motley.server.state import ServerState
from motley.server.validation import UpdateCheck
from tests.conftest import chosen, tiny_config
from tests.server.test_robust_rounds import Attacked

SHORT = (
    "model.sizes=['mlp1','mlp2','mlp3']",
    "training.steps=2",
    "training.rounds=5",
    "server.ema_decay=0.9",
)


RESNETS = ("model.sizes=['resnet10','resnet14','resnet18']",)
#: Methods that need layers between the first one and the head.
NEEDS_BLOCKS = ("fedin",)


@pytest.fixture
def busy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are never ready when they are started, as on a GPU that is still training."""
    monkeypatch.setattr(UpdateCheck, "ready", property(lambda check: False))


def config(*overrides: str, overlap: bool = True) -> Config:
    return tiny_config(*SHORT, *overrides, f"engine.overlap_rounds={str(overlap).lower()}")


class Counting(Attacked):
    """Counts the rounds that clients were trained for. From a round on, one client sends a number everywhere."""

    def __init__(
        self, federation: Federation, client: int = -1, value: float = 0.0, since: int = 0
    ) -> None:
        super().__init__(federation, client, value)
        self.since = since
        self.rounds: list[int] = []

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[ClientUpdate | Failure]:
        number = jobs[0].round_number
        self.rounds.append(number)
        engine = super() if number >= self.since else self.engine
        return engine.train(jobs, done)


def all_records(federation: Federation) -> list[RoundRecord]:
    """Run a federation; return its records without the seconds, which differ from run to run."""
    return [replace(record, seconds={}) for record in federation.run()]


def final_state(federation: Federation) -> ServerState:
    assert federation.server is not None
    return federation.server


def bits(server: ServerState) -> str:
    """Return a hash of all tensors of a server state."""
    tensors = {}
    for section, state in server.sections.items():
        for name, tensor in state.items():
            tensors[f"{section}/{name}"] = tensor
    return fingerprint(tensors)


@pytest.mark.usefixtures("busy_device")
@pytest.mark.parametrize("method", sorted(METHODS.names()))
def test_every_method_ends_with_the_same_bits(method: str) -> None:
    settings = [*chosen(method), *(RESNETS if method in NEEDS_BLOCKS else ())]
    plain = Federation(config(*settings, overlap=False))
    ahead = Federation(config(*settings))
    engine = ahead.engine = Counting(ahead)
    # As text: a NaN is not equal to itself.
    assert repr(all_records(ahead)) == repr(all_records(plain))
    assert bits(final_state(ahead)) == bits(final_state(plain))
    assert engine.rounds == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("busy_device")
def test_the_next_round_is_queued_only_if_there_is_one() -> None:
    federation = Federation(config())
    engine = federation.engine = Counting(federation)
    list(federation.run(2))
    assert engine.rounds == [1, 2]
    finished: list[int] = []
    server, _ = federation.queue_round(final_state(federation), more_rounds=True)
    assert engine.rounds == [1, 2, 3, 4]
    _, record = federation.queue_round(server, finished.append)
    assert engine.rounds == [1, 2, 3, 4]
    assert sorted(finished) == sorted(record.read().clients)


def test_nothing_is_queued_while_the_device_is_idle() -> None:
    """On a CPU, the training of the next round would only delay the end of this one."""
    federation = Federation(config())
    engine = federation.engine = Counting(federation)
    federation.queue_round(federation.initial_state(), more_rounds=True)
    assert engine.rounds == [1]


@pytest.mark.usefixtures("busy_device")
def test_private_rounds_are_not_queued_ahead() -> None:
    federation = Federation(config("privacy.clip=1.0", "privacy.noise=1.0", "uplink.dtype=fp32"))
    engine = federation.engine = Counting(federation)
    federation.queue_round(federation.initial_state(), more_rounds=True)
    assert engine.rounds == [1]


@pytest.mark.usefixtures("busy_device")
@pytest.mark.parametrize("value", [float("nan"), 1e38])
@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "ccvr", "ditto", "fedimpro-scaffold", "heterofl", "spherefed"]
)
def test_a_round_that_ends_without_a_client_is_the_start_of_the_next(
    value: float, method: str
) -> None:
    """The training that was queued from the state with that client is dropped, whatever it has stored."""
    ends, engines = [], []
    for overlap in (False, True):
        federation = Federation(
            config(*chosen(method), "federation.clients_per_round=6", overlap=overlap)
        )
        engine = federation.engine = Counting(federation, client=2, value=value, since=3)
        records = all_records(federation)
        assert [list(record.refused) for record in records] == [[], [], [2], [2], [2]]
        ends.append((repr(records), bits(final_state(federation))))
        engines.append(engine)
    assert ends[0] == ends[1]
    # Rounds 4 and 5 were trained once from states that did not stay.
    assert engines[1].rounds == [1, 2, 3, 4, 4, 5, 5]


class RefusesNaN:
    """A stage that raises an error about numbers that no accepted update has."""

    name = "refuses-nan"

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        if any(tensor.isnan().any() for tensor in aggregate.delta.values()):
            raise ValueError("a NaN")
        return StageResult(server, aggregate)


@pytest.mark.usefixtures("busy_device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_stage_may_rely_on_the_check_of_the_updates(overlap: bool) -> None:
    settings = ("federation.clients_per_round=6", "training.rounds=3")
    federation = Federation(config(*settings, overlap=overlap))
    federation.engine = Counting(federation, client=2, value=float("nan"), since=2)
    federation.pipeline.insert(1, RefusesNaN())
    assert [list(record.refused) for record in all_records(federation)] == [[], [2], [2]]


@pytest.mark.usefixtures("busy_device")
def test_other_errors_of_a_stage_are_raised() -> None:
    class Fails(RefusesNaN):
        def __call__(
            self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
        ) -> StageResult:
            if server.round_number == 3:
                raise ValueError("wrong in round 3")
            return StageResult(server, aggregate)

    federation = Federation(config())
    federation.pipeline.insert(1, Fails())
    with pytest.raises(ValueError, match="wrong in round 3"):
        list(federation.run())
    assert final_state(federation).round_number == 2


@pytest.mark.usefixtures("busy_device")
def test_a_round_is_repeated_with_other_clients() -> None:
    ends = []
    for overlap in (False, True):
        settings = ("server.min_fraction=1", "server.attempts=5", "training.rounds=3")
        federation = Federation(config(*settings, overlap=overlap))
        federation.engine = Counting(federation, client=2, value=float("nan"), since=2)
        records = all_records(federation)
        ends.append((repr(records), bits(final_state(federation))))
    assert any(record.repeated for record in records)
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("busy_device")
def test_another_state_is_not_continued_with_the_queued_training() -> None:
    federation = Federation(config())
    plain = Federation(config(overlap=False))
    start = federation.initial_state()
    federation.queue_round(start, more_rounds=True)
    other = replace(start, state={name: 2 * tensor for name, tensor in start.state.items()})
    after, _ = federation.run_round(replace(other, round_number=1))
    expected, _ = plain.run_round(replace(other, round_number=1))
    assert bits(after) == bits(expected)


@pytest.mark.usefixtures("busy_device")
def test_parts_that_are_replaced_between_rounds_take_effect() -> None:
    federation = Federation(config())
    server, _ = federation.queue_round(federation.initial_state(), more_rounds=True)
    federation.sample = ClientSampler(6, 2, seed=5)
    _, record = federation.run_round(server)
    assert record.clients == federation.sample(2)
    assert len(record.clients) == 2


@pytest.mark.usefixtures("busy_device")
def test_an_error_of_the_next_round_leaves_the_current_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = LocalEngine.train

    def failing(
        engine: LocalEngine, jobs: Sequence[Job], done: Done
    ) -> Sequence[ClientUpdate | Failure]:
        if jobs[0].round_number == 4:
            raise MotleyError("out of memory")
        return train(engine, jobs, done)

    monkeypatch.setattr(LocalEngine, "train", failing)
    with pytest.raises(MotleyError, match="out of memory"):
        start_run(config(), tmp_path / "run")
    assert len(MetricsLog(tmp_path / "run" / "metrics.jsonl").read()) == 3


class ShortOfMemory(Counting):
    """Has no memory for the first training of some rounds."""

    def __init__(self, federation: Federation, *failing: int, client: int = -1) -> None:
        super().__init__(federation, client, float("nan"))
        self.failing = set(failing)

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[ClientUpdate | Failure]:
        number = jobs[0].round_number
        if number in self.failing:
            self.failing.remove(number)
            self.rounds.append(number)
            raise MotleyError("out of memory")
        return super().train(jobs, done)


@pytest.mark.usefixtures("busy_device")
def test_rounds_do_not_overlap_any_more_if_there_is_no_memory_for_two() -> None:
    plain = Federation(config(overlap=False))
    expected = repr(all_records(plain))
    federation = Federation(config())
    engine = federation.engine = ShortOfMemory(federation, 3, 5)
    server = federation.initial_state()
    records = []
    with pytest.warns(UserWarning, match="rounds do not overlap from now on.*out of memory"):
        for _ in range(3):
            server, pending = federation.queue_round(server, more_rounds=True)
            records.append(replace(pending.read(), seconds={}))
    assert engine.rounds == [1, 2, 3, 3]
    engine.failing.clear()
    for _ in range(2):
        server, pending = federation.queue_round(server, more_rounds=True)
        records.append(replace(pending.read(), seconds={}))
    assert engine.rounds == [1, 2, 3, 3, 4, 5]
    assert repr(records) == expected
    assert bits(server) == bits(final_state(plain))


@pytest.mark.usefixtures("busy_device")
def test_an_error_in_training_that_is_dropped_anyway_is_no_reason_to_stop() -> None:
    """A state that is not usable may have caused it. Here, client 2 has spoilt round 3."""
    federation = Federation(config("federation.clients_per_round=6", "training.rounds=6"))
    engine = federation.engine = ShortOfMemory(federation, 4, client=2)
    engine.since = 3
    all_records(federation)
    assert engine.rounds == [1, 2, 3, 4, 4, 5, 5, 6, 6]


@pytest.mark.usefixtures("busy_device")
def test_an_error_while_a_client_is_loaded_is_raised_in_its_own_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its slot must be free for the second try, which would otherwise wait for it without end."""
    load = Learner.load

    def failing(learner: Learner, job: Job, *arguments: Any) -> None:
        if job.round_number == 3:
            raise MotleyError("cannot be loaded")
        load(learner, job, *arguments)

    monkeypatch.setattr(Learner, "load", failing)
    federation = Federation(config("model.sizes=['mlp1']"))
    with pytest.raises(MotleyError, match="cannot be loaded"):
        list(federation.run())
    assert final_state(federation).round_number == 2


class CopyFolder(Callback):
    """Copies a run's folder after every round, as it is found after a kill at that moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        copy = self.folder.with_name(f"after-{server.round_number}")
        shutil.copytree(self.folder, copy)
        (copy / "lock").unlink(missing_ok=True)


@pytest.mark.usefixtures("busy_device")
@pytest.mark.parametrize("host_gib", [1, 0])
@pytest.mark.parametrize("since", [None, 3], ids=["accepted", "refused"])
@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_every_checkpoint_can_be_continued(
    method: str,
    since: int | None,
    host_gib: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint is saved when two more rounds have stored client states. It needs the older ones.

    Without host memory, the newer states are written to the file at once. If client 2 is refused
    from some round on, it continues from the state before that, and training that was queued from
    its newer states is dropped.
    """
    train = LocalEngine.train

    def with_a_nan(engine: LocalEngine, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        updates = train(engine, jobs, done)
        if since is None or jobs[0].round_number < since:
            return updates
        nan = torch.tensor(float("nan"))
        return [replace(update, loss=nan) if update.client == 2 else update for update in updates]

    monkeypatch.setattr(LocalEngine, "train", with_a_nan)
    overrides = (
        *chosen(method),
        f"engine.client_state_host_gib={host_gib}",
        "federation.clients_per_round=6",
        "run.checkpoint_every=1",
        "run.keep_checkpoints=1",
        "training.rounds=6",
    )
    folder = tmp_path / "run"
    _, expected = start_run(config(*overrides), folder, [CopyFolder(folder)])
    assert expected.client_state_rounds[2] == (6 if since is None else since - 1)
    plain = Federation(config(*overrides, overlap=False))
    all_records(plain)
    assert bits(expected) == bits(final_state(plain))
    for number in range(1, 6):
        _, resumed = resume_run(tmp_path / f"after-{number}")
        assert bits(resumed) == bits(expected)
