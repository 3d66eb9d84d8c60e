"""Epsilon counts everything that clients were asked for, whatever happens to the run."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dp_accounting")

from motley.core.errors import MotleyError
from motley.engine.base import Failure
from motley.federation import Federation
from motley.privacy import Accountant, PrivacyLedger
from motley.privacy.releases import ReleaseCounter
from motley.runs.callbacks import Callback
from motley.runs.checkpoint import fingerprint
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog
from motley.runs.privacy_ledger import RunLedger, keep_ledger, spent_epsilon
from motley.runs.run import resume_run, start_run
from tests.cli.conftest import call
from tests.conftest import tiny_config
from tests.privacy.test_accounting import directly
from tests.runs import crash

SETTINGS = (
    "model.sizes=['mlp1']",
    "split.name=homogeneous",
    "training.steps=1",
    "training.rounds=6",
    "evaluation.every=3",
    "run.checkpoint_every=3",
    "run.tensorboard=false",
    "privacy.clip=0.5",
    "privacy.noise=2",
)
NAME = "privacy-ledger.jsonl"


def epsilons(folder: Path) -> dict[str, float]:
    """Return what `motley show` prints."""
    return {
        adversary: math.inf if value is None else value
        for adversary, value in spent_epsilon(RunFolder(folder)).items()
    }


# ---- kills


class Killed(BaseException):
    """Ends a run in the test's own process; what happens to its folder then is not looked at."""


class KillAt(Callback):
    """Copies the run's folder at the n-th event, as `kill -9` would leave it, and ends the run.

    Events are: a client has finished, a round is complete (its metrics may or may not be written,
    and its checkpoint too).
    """

    def __init__(self, event: int, folder: Path, copy: Path) -> None:
        self.events_left, self.folder, self.copy = event, folder, copy
        #: Client -> how often the engine was asked to train it.
        self.trained: Counter[int] = Counter()

    def on_start(self, federation: Federation, server: Any) -> None:
        train = federation.engine.train

        def counted(jobs: Any, done: Any) -> Any:
            self._event()  # the clients are in the ledger, and not asked yet
            self.trained.update(job.client for job in jobs)
            return train(jobs, done)

        federation.engine.train = counted  # type: ignore[method-assign]

    def on_client(self, client: int) -> None:
        self._event()

    def on_round(self, server: Any, record: Any) -> None:
        self._event()

    def _event(self) -> None:
        self.events_left -= 1
        if self.events_left == 0:
            shutil.copytree(self.folder, self.copy)
            raise Killed


@pytest.mark.parametrize("seed", range(3))
def test_epsilon_never_decreases_whatever_is_killed(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(seed)
    config = tiny_config(*SETTINGS)
    asked: Counter[int] = Counter()
    shown = {"model": 0.0, "upload": 0.0}
    folder, kills, done = tmp_path / "0", 0, False
    while not done:
        copy = tmp_path / str(kills + 1)
        killer = KillAt(numbers.randrange(1, 16) if kills < 5 else 10**6, folder, copy)
        try:
            if kills == 0:
                start_run(config, folder, [killer])
            else:
                resume_run(folder, [killer])
            done = True
        except Killed:
            folder, kills = copy, kills + 1
        asked += killer.trained
        # Nothing that was sent is forgotten, and what is reported does not go down.
        now = epsilons(folder)
        assert all(now[adversary] >= shown[adversary] for adversary in now)
        assert now["upload"] >= directly(2 / 2, max(asked.values(), default=0)) * (1 - 1e-9)
        for line in MetricsLog(folder / "metrics.jsonl").read():
            assert all(line["epsilon"][key] <= now[key] * (1 + 1e-5) for key in now)
        shown = now
    assert kills == 5 and sum(asked.values()) > 4 * 6
    series = [
        json.loads(line)["epsilon"]["upload"] for line in (folder / NAME).read_text().splitlines()
    ]
    assert series == sorted(series)
    (last,) = [line for line in MetricsLog(folder / "metrics.jsonl").read() if line["round"] == 6]
    assert last["epsilon"] == pytest.approx(shown, rel=1e-5)


class DieAfter(Callback):
    """Kills this process when the first client of the round after `rounds` has finished."""

    def __init__(self, rounds: int) -> None:
        self.clients_left = 4 * rounds

    def on_client(self, client: int) -> None:
        if self.clients_left == 0:
            crash.kill_myself()
        self.clients_left -= 1


def test_a_killed_process_is_charged_for_what_it_asked(tmp_path: Path) -> None:
    """Killed in round 5 with a checkpoint of round 3: rounds 4 and 5 cost twice."""
    folder = tmp_path / "run"
    config = tiny_config(*SETTINGS)
    assert crash.fork(lambda: start_run(config, folder, [DieAfter(4)])) == -9
    before = epsilons(folder)
    _, whole = start_run(tiny_config(*SETTINGS), tmp_path / "whole")
    _, resumed = resume_run(folder)
    assert fingerprint(resumed.state) == fingerprint(whole.state)
    sample = Federation(tiny_config(*SETTINGS)).sample
    expected = Counter(client for number in range(1, 7) for client in sample(number))
    assert whole.ledger.uploads == expected
    expected.update([*sample(4), *sample(5)])
    assert resumed.ledger.uploads == expected
    assert epsilons(folder)["upload"] == pytest.approx(directly(2 / 2, max(expected.values())))
    assert epsilons(folder)["upload"] > epsilons(tmp_path / "whole")["upload"]
    assert epsilons(folder)["model"] > epsilons(tmp_path / "whole")["model"] > before["model"]
    shown = call("show", folder).out
    assert f"{epsilons(folder)['upload']:.2f} (adversary sees individual updates)" in shown


def test_the_ledger_of_an_undisturbed_run_is_that_of_its_rounds(tmp_path: Path) -> None:
    _, server = start_run(tiny_config(*SETTINGS), tmp_path / "run")
    federation = Federation(tiny_config(*SETTINGS))
    expected = federation.initial_state()
    for _ in range(6):
        expected, record = federation.run_round(expected)
    assert server.ledger == expected.ledger
    assert epsilons(tmp_path / "run") == pytest.approx(record.epsilon)
    assert (tmp_path / "run" / NAME).stat().st_mode & 0o077 == 0


def test_without_privacy_there_is_no_ledger(tmp_path: Path) -> None:
    config = tiny_config(*SETTINGS, "privacy.noise=0", "privacy.clip=0", "training.rounds=1")
    start_run(config, tmp_path / "run")
    assert not list((tmp_path / "run").glob("privacy*"))


# ---- attempts and rejected updates


def failing(federation: Federation, attempts: Sequence[int]) -> None:
    """Make clients 0 to 3 fail in the given calls of the engine, after they have trained."""
    train, calls = federation.engine.train, 0

    def unlucky(jobs: Any, done: Any) -> Any:
        nonlocal calls
        calls += 1
        answers = train(jobs, done)
        if calls not in attempts:
            return answers
        return [Failure(answer.client, "lost.") for answer in answers]

    federation.engine.train = unlucky  # type: ignore[method-assign]


class Spoil(Callback):
    """Makes attempts fail."""

    def __init__(self, *attempts: int) -> None:
        self.attempts = attempts

    def on_start(self, federation: Federation, server: Any) -> None:
        failing(federation, self.attempts)


PATIENT = ("server.min_fraction=0.5", "server.attempts=3", "training.rounds=2")


def test_failed_attempts_and_a_failed_round_are_charged(tmp_path: Path) -> None:
    """Round 1 needs its second attempt; round 2 fails three times and ends the process."""
    config, folder = tiny_config(*SETTINGS, *PATIENT), tmp_path / "run"
    with pytest.raises(MotleyError, match="round 2 was tried 3 times"):
        start_run(config, folder, [Spoil(1, 3, 4, 5)])
    sample = Federation(config).sample
    expected = Counter([*sample(1, 0), *sample(1, 1)])
    for attempt in range(3):
        expected.update(sample(2, attempt))
    (line,) = MetricsLog(folder / "metrics.jsonl").read()
    assert epsilons(folder)["upload"] == pytest.approx(directly(2 / 2, max(expected.values())))
    assert epsilons(folder)["upload"] > line["epsilon"]["upload"]
    assert epsilons(folder)["model"] == pytest.approx(line["epsilon"]["model"], rel=1e-5)
    _, server = resume_run(folder)
    expected.update(sample(2, 0))
    assert server.ledger.uploads == expected
    assert server.ledger.rounds == {"mlp1": {(6, 4, 4.0): 2}}


def test_rejected_updates_are_charged_and_their_noise_is_not_relied_on(tmp_path: Path) -> None:
    class Reject(Callback):
        def on_start(self, federation: Federation, server: Any) -> None:
            train = federation.engine.train

            def losing(jobs: Any, done: Any) -> Any:
                first, *others = train(jobs, done)
                assert not isinstance(first, Failure)
                for tensor in first.delta.values():
                    tensor.fill_(math.nan)
                return [first, *others]

            federation.engine.train = losing  # type: ignore[method-assign]

    config = tiny_config(*SETTINGS, "training.rounds=1")
    _, server = start_run(config, tmp_path / "run", [Reject()])
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == [str(line["clients"][0])]
    assert server.ledger.uploads == dict.fromkeys(line["clients"], 1)
    assert server.ledger.rounds == {"mlp1": {(6, 4, 3.0): 1}}


def test_an_attempt_that_was_merged_and_undone_is_charged(tmp_path: Path) -> None:
    """No step is short enough, so both attempts are undone: that depends on every update."""
    strict = ("server.max_step_factor=1e-9", "server.attempts=2", "training.rounds=1")
    config, folder = tiny_config(*SETTINGS, *strict), tmp_path / "run"
    with pytest.raises(MotleyError, match="never ended with a usable state"):
        start_run(config, folder)
    log = RunLedger(folder / NAME, accountant(), PrivacyLedger())
    sample = Federation(config).sample
    assert log.ledger.uploads == Counter([*sample(1, 0), *sample(1, 1)])
    assert log.ledger.rounds == {"mlp1": {(6, 4, 1.0): 2}}


class Push(Callback):
    """Has client 4 send a delta within its clip that moves the state too far."""

    def on_start(self, federation: Federation, server: Any) -> None:
        train = federation.engine.train

        def pushing(jobs: Any, done: Any) -> Any:
            answers = train(jobs, done)
            for answer in answers:
                if not isinstance(answer, Failure) and answer.client == 4:
                    for tensor in answer.delta.values():
                        tensor.fill_(4e3)
            return answers

        federation.engine.train = pushing  # type: ignore[method-assign]


LOOSE = ("privacy.clip=1e6", "privacy.noise=1e-6", "training.rounds=1")


@pytest.mark.parametrize("in_folder", [True, False])
def test_without_an_excluded_update_only_a_clients_own_noise_counts(
    tmp_path: Path, in_folder: bool
) -> None:
    config = tiny_config(*SETTINGS, *LOOSE)
    if in_folder:
        _, server = start_run(config, tmp_path / "run", [Push()])
    else:
        federation = Federation(config)
        Push().on_start(federation, None)
        server, record = federation.run_round(federation.initial_state())
        assert list(record.refused) == [4]
    assert server.ledger.rounds == {"mlp1": {(6, 4, 1.0): 1}}


@pytest.mark.parametrize("in_folder", [True, False])
def test_an_excluded_update_is_charged_even_if_no_other_is_of_its_size(
    tmp_path: Path, in_folder: bool
) -> None:
    """Everyone sees that the round ended without client 4, which depends on its update."""
    sizes = (
        "split.name=depth",
        "model.sizes=['mlp1','mlp3']",
        "federation.clients_per_round=6",
        "federation.sizes=['mlp1','mlp1','mlp1','mlp1','mlp3','mlp1']",
    )
    config = tiny_config(*SETTINGS, *LOOSE, *sizes)
    if in_folder:
        _, server = start_run(config, tmp_path / "run", [Push()])
    else:
        federation = Federation(config)
        Push().on_start(federation, None)
        server, record = federation.run_round(federation.initial_state())
        assert list(record.refused) == [4]
    assert server.ledger.rounds == {"mlp1": {(5, 5, 1.0): 1}, "mlp3": {(1, 1, 1.0): 1}}


# ---- the new model


@pytest.mark.parametrize(
    "scores",
    [
        ("evaluation.per_client=round", "evaluation.client_test_fraction=0.2"),
        ("split.name=depth", "split.private=head"),
    ],
    ids=["global model", "own models"],
)
def test_the_mean_is_on_disk_before_clients_get_the_new_model(
    tmp_path: Path, scores: tuple[str, ...]
) -> None:
    """Clients that report scores receive the model after the round, and the run is killed then."""
    folder = tmp_path / "run"

    class DieBeforeScores(Callback):
        def on_start(self, federation: Federation, server: Any) -> None:
            def die(*arguments: Any) -> Any:
                raise Killed

            federation.engine.collect = die  # type: ignore[method-assign]

    every_round = ("privacy.reveal_scores=true", "evaluation.every=1")
    config = tiny_config(*SETTINGS, *every_round, *scores)
    with pytest.raises(Killed):
        start_run(config, folder, [DieBeforeScores()])
    lines = [json.loads(line) for line in (folder / NAME).read_text().splitlines()]
    assert len(lines) == 3
    assert "asked" in lines[1] and "merged" in lines[2]


# ---- the same round twice


def accountant() -> Accountant:
    federation = Federation(tiny_config(*SETTINGS))
    assert federation.accountant is not None
    return federation.accountant


def test_a_mean_of_the_same_clients_twice_is_one_sampling_with_less_noise() -> None:
    """Two Gaussian mechanisms on the same clients are one with 1 / k = 1 / 4 + 1 / 2."""
    counter = ReleaseCounter(accountant())
    clients = [0, 2, 4, 5]
    counter.add_mean(7, 0, clients, clients)
    once = counter.accountant.epsilon(counter.ledger)["model"]
    counter.add_mean(7, 0, clients, clients[:2])
    assert counter.ledger.rounds == {"mlp1": {(6, 4, 1 / (1 / 4 + 1 / 2)): 1}}
    twice = counter.accountant.epsilon(counter.ledger)["model"]
    assert once < twice
    assert twice == pytest.approx(directly(math.sqrt(4 / 3) * 2 / 2, 1, asked=4, clients=6))
    assert PrivacyLedger.from_json(counter.ledger.to_json()) == counter.ledger  # type: ignore[arg-type]


def test_a_smaller_sample_the_second_time_does_not_lower_epsilon() -> None:
    counter = ReleaseCounter(accountant())
    counter.add_mean(1, 0, range(6), range(6))
    once = counter.accountant.epsilon(counter.ledger)["model"]
    counter.add_mean(1, 0, [3], [3])
    assert counter.ledger.rounds == {"mlp1": {(6, 6, 1 / (1 / 6 + 1)): 1}}
    assert counter.accountant.epsilon(counter.ledger)["model"] > once


def test_two_independent_samplings_would_be_counted_too_low() -> None:
    """With 4 of 400 clients, sampling protects much; it must not be relied on twice."""
    together = directly(math.sqrt(1 / 2) * 0.5, 1, asked=4, clients=400)
    apart = directly(0.5, 2, asked=4, clients=400)
    assert together > 1.2 * apart


# ---- damage


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 rounds, killed in round 5, with a checkpoint of round 3."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    copy = folder.with_name("copy")
    with pytest.raises(Killed):
        start_run(tiny_config(*SETTINGS), folder, [KillAt(4 * 6 + 3, folder, copy)])
    assert len(MetricsLog(copy / "metrics.jsonl").read()) == 4
    return copy


def delete(folder: Path) -> None:
    (folder / NAME).unlink()


def delete_both(folder: Path) -> None:
    """Leave the checkpoint and the metrics, as an earlier version of Motley did."""
    for file in folder.glob(f"{NAME}*"):
        file.unlink()


def edit_line(folder: Path) -> None:
    text = (folder / NAME).read_text()
    (folder / NAME).write_text(text.replace('"round": 2,', '"round": 1,'))


def shorten(folder: Path) -> None:
    """Keep a ledger that is whole, but of the first round only, and hide how long it was."""
    lines = (folder / NAME).read_text().splitlines(keepends=True)
    (folder / NAME).write_text("".join(lines[:3]))
    (folder / f"{NAME}.head").unlink()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (delete, r"privacy-ledger\.jsonl: has 0 complete lines, but 10 were written"),
    "edited": (edit_line, r"privacy-ledger\.jsonl, line 4: is damaged"),
    "shortened": (shorten, r"accounts for an epsilon of .* but metrics\.jsonl reported"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_does_not_go_on_with_a_lower_epsilon(
    interrupted: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    act, message = DAMAGES[damage]
    act(folder)
    metrics = (folder / "metrics.jsonl").read_text()
    result = call("resume", folder)
    assert result.code != 0
    assert "Traceback" not in result.err
    assert re.search(message, result.err), result.err
    assert (folder / "metrics.jsonl").read_text() == metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("privacy.noise=3",), r"privacy\.noise = 3\.0: the run began with 2\.0"),
        (("privacy.delta=0.1",), r"privacy\.delta = 0\.1: the run began with 1e-05"),
        (("privacy.clip=9",), r"privacy\.clip = 9\.0: the run began with 0\.5"),
        (
            ("privacy.clip=0", "privacy.noise=0"),
            r"privacy\.clip = 0: the run began with \[privacy\]",
        ),
    ],
)
def test_settings_of_privacy_stay_as_they_were(
    interrupted: Path, settings: tuple[str, ...], message: str
) -> None:
    federation = Federation(tiny_config(*SETTINGS, *settings))
    with pytest.raises(MotleyError, match=message):
        keep_ledger(RunFolder(interrupted), federation, federation.initial_state())


def test_privacy_is_not_switched_on_in_the_middle_of_a_run(tmp_path: Path) -> None:
    federation = Federation(tiny_config(*SETTINGS))
    server = replace(federation.initial_state(), round_number=3)
    with pytest.raises(MotleyError, match=r"privacy\.clip = 0\.5: the first 3 rounds of the run"):
        keep_ledger(RunFolder(tmp_path), federation, server)
    assert not list(tmp_path.iterdir())


def test_a_run_of_an_earlier_version_is_charged_for_its_reported_rounds(
    interrupted: Path, tmp_path: Path
) -> None:
    """There is no ledger, and a checkpoint of round 3; the metrics know of round 4."""
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    delete_both(folder)
    sample = Federation(tiny_config(*SETTINGS)).sample
    expected = Counter(client for number in (1, 2, 3, 4, 4, 5, 6) for client in sample(number))
    _, server = resume_run(folder)
    assert server.ledger.uploads == expected
    assert server.ledger.rounds == {"mlp1": {(6, 4, 4.0): 5, (6, 4, 2.0): 1}}


def test_the_ledger_of_another_run_is_named(tmp_path: Path) -> None:
    """It has a client 77, and this run has six clients."""
    log = RunLedger(tmp_path / NAME, accountant(), PrivacyLedger())
    entry = {"round": 1, "attempt": 0, "sampled": [0, 77], "merged": [0, 77], "alone": False}
    log.file.append(entry, lambda entries: None)
    with pytest.raises(MotleyError, match=r"privacy-ledger\.jsonl: does not belong to this run"):
        RunLedger(tmp_path / NAME, accountant(), PrivacyLedger())
