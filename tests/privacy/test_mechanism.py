"""With differential privacy, a client sends a bounded delta with the stated noise, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from motley import ServerStage, StageResult
from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.engine import LocalEngine
from motley.federation import Federation
from motley.privacy import DPMechanism, PrivacySettings
from motley.privacy.mechanism import clip_by_norm
from motley.runs.checkpoint import fingerprint
from motley.runs.run import resume_run, start_run
from motley.server.state import ServerState
from tests.conftest import refused, tiny_config

BATCH = "split.normalization_statistics=batch"
WIDTH = ("split.name=width", "model.sizes=['resnet10']", "split.rates=[0.5,1.0]")
CLIPPED = (BATCH, "privacy.clip=0.5", "run.tensorboard=false")


def norm(state: State) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in state.values()))


def delta(scale: float = 1.0) -> State:
    numbers = torch.Generator().manual_seed(3)
    return {
        "a": scale * torch.randn(200, 300, generator=numbers),
        "b": scale * torch.randn(50, generator=numbers),
    }


def uploads(federation: Federation) -> dict[int, State]:
    jobs = federation.jobs(federation.initial_state())
    return {
        answer.client: answer.delta for answer in federation.engine.train(jobs, lambda client: None)
    }  # type: ignore[union-attr]


# ---- clip


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6, 1e18])
def test_the_norm_of_a_delta_is_bounded_and_its_direction_kept(scale: float) -> None:
    before, after = delta(scale), clip_by_norm(delta(scale), 2.0)
    assert norm(after) <= 2.0 * (1 + 1e-6)
    factor = min(1.0, 2.0 / norm(before))
    for name in before:
        torch.testing.assert_close(after[name], before[name] * factor)


def test_a_short_delta_keeps_its_bits() -> None:
    assert fingerprint(clip_by_norm(delta(1e-4), 2.0)) == fingerprint(delta(1e-4))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_delta_that_is_not_finite_becomes_zero(bad: float) -> None:
    broken = {**delta(), "c": torch.tensor([0.0, bad])}
    assert norm(clip_by_norm(broken, 2.0)) == 0.0
    assert norm(clip_by_norm({"a": torch.zeros(3)}, 2.0)) == 0.0


# ---- noise


@pytest.mark.parametrize("fresh", [False, True])
def test_noise_has_the_stated_standard_deviation(fresh: bool) -> None:
    mechanism = DPMechanism(PrivacySettings(clip=0.25, noise=3.0), 1, fresh)
    drawn = [
        mechanism.privatize(delta(), round_number, client)["a"] - clip_by_norm(delta(), 0.25)["a"]
        for round_number in (1, 2)
        for client in (0, 1)
    ]
    together = torch.stack(drawn).flatten().double() / 0.75
    count = len(together)
    assert abs(float(together.mean())) < 5 / math.sqrt(count)
    assert abs(float(together.std()) - 1) < 5 / math.sqrt(2 * count)
    assert abs(float((together.abs() < 0.6744898).double().mean()) - 0.5) < 2.5 / math.sqrt(count)
    correlations = np.corrcoef(torch.stack([one.flatten() for one in drawn]).numpy())
    assert np.abs(correlations - np.eye(4)).max() < 5 / math.sqrt(count / 4)


def test_noise_is_keyed_by_round_and_client_or_always_new() -> None:
    settings = PrivacySettings(clip=1.0, noise=1.0)
    keyed, fresh = DPMechanism(settings, 1), DPMechanism(settings, 1, fresh=True)
    zero = {"a": torch.zeros(200, 300)}

    def noise(mechanism: DPMechanism, round_number: int = 1, client: int = 2) -> torch.Tensor:
        return mechanism.privatize(zero, round_number, client)["a"]

    assert torch.equal(noise(keyed), noise(keyed))
    for other in (noise(keyed, round_number=2), noise(keyed, client=3)):
        assert (noise(keyed) - other).std() > 1.4
    assert (noise(fresh) - noise(fresh)).std() > 1.4


def test_two_answers_of_a_node_do_not_tell_whether_their_deltas_are_equal() -> None:
    """Both become zero here, as after an overflow that the server provokes in two ways."""
    mechanism = DPMechanism(PrivacySettings(clip=1.0, noise=1.0), 1, fresh=True)
    first = mechanism.privatize({"a": torch.tensor([1.0, math.inf])}, 1, 2)["a"]
    second = mechanism.privatize({"a": torch.tensor([math.nan, 1.0])}, 1, 2)["a"]
    assert not (first == second).any()


# ---- in a federation


@pytest.mark.parametrize("engine", ["local", "debug"])
def test_every_upload_is_bounded_and_says_nothing_else(engine: str) -> None:
    federation = Federation(tiny_config(*CLIPPED, f"engine.name={engine}"))
    jobs = federation.jobs(federation.initial_state())
    for answer in federation.engine.train(jobs, lambda client: None):
        assert norm(answer.delta) <= 0.5 * (1 + 1e-6)  # type: ignore[union-attr]
        assert (answer.num_examples, answer.num_steps, answer.payload) == (1, 1, {})  # type: ignore[union-attr]
        assert math.isnan(answer.loss)  # type: ignore[union-attr]


@pytest.mark.parametrize("keeps", ["split.private=head", "method.name=ditto", "method.name=moon"])
def test_a_client_that_diverges_does_not_keep_a_broken_model(keeps: str) -> None:
    """The server cannot reject its update, which becomes zero, nor see the loss."""
    federation = Federation(tiny_config(*CLIPPED, keeps, "training.optimizer.lr=1e38"))
    _, record = federation.run_round(federation.initial_state())
    assert not record.refused
    engine = federation.engine
    assert isinstance(engine, LocalEngine)
    for client in record.clients:
        stored = engine.clients.states.store.load(client, 1)
        assert stored
        assert all(tensor.isfinite().all() for tensor in stored.values())


def test_a_wide_bound_without_noise_changes_no_bit() -> None:
    plain = uploads(Federation(tiny_config(BATCH)))
    wide = uploads(Federation(tiny_config(BATCH, "privacy.clip=1e9")))
    assert {client: fingerprint(state) for client, state in plain.items()} == {
        client: fingerprint(state) for client, state in wide.items()
    }


def test_clients_trained_in_one_batch_are_privatized_too() -> None:
    mlp = ("model.sizes=['mlp2']", "split.name=homogeneous", "privacy.clip=0.01")
    for state in uploads(Federation(tiny_config(*mlp, "engine.vmap_clients=4"))).values():
        assert norm(state) <= 0.01 * (1 + 1e-6)


def test_a_resumed_run_adds_the_same_noise(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    settings = (*CLIPPED, "privacy.noise=0.1", "method.name=InCoAvg")
    _, whole = start_run(tiny_config(*settings), tmp_path / "whole")
    _, half = start_run(tiny_config(*settings, "training.rounds=1"), tmp_path / "half")
    file = tmp_path / "half" / "config.toml"
    file.write_text(file.read_text().replace("rounds = 1\n", "rounds = 3\n"))
    _, resumed = resume_run(tmp_path / "half")
    assert half.round_number == 1 and fingerprint(resumed.state) == fingerprint(whole.state)
    assert resumed.ledger == whole.ledger


# ---- rejected configurations


@pytest.mark.parametrize(
    "method", ["scaffold", "fednova", "feddyn", "fedspeed", "fedin", "fedimpro", "heterofl"]
)
def test_methods_that_do_more_than_average_deltas_are_rejected(method: str) -> None:
    split = WIDTH if method == "heterofl" else ()
    with pytest.raises(
        MotleyError, match=rf"method.name = '{method}': privacy.clip = 0.5 protects deltas that are"
    ):
        Federation(tiny_config(*CLIPPED, f"method.name={method}", *split))


@pytest.mark.parametrize("method", ["fedprox", "moon", "InCoAvg"])
def test_methods_that_only_average_deltas_are_accepted(method: str) -> None:
    Federation(tiny_config(*CLIPPED, f"method.name={method}"))


def test_running_statistics_are_refused() -> None:
    with pytest.raises(
        MotleyError,
        match=r"split.normalization_statistics = 'per-size': privacy.clip = 1 .*Use 'batch'",
    ):
        Federation(tiny_config("privacy.clip=1", "split.normalization_statistics=per-size"))


def test_exits_with_statistics_of_their_own_are_refused_too() -> None:
    exits = ("method.name=scalefl", "split.name=grid", "model.sizes=['resnet18']", BATCH)
    with pytest.raises(
        MotleyError, match=r"'batch': privacy.clip = 1 .*'exits.*\. Use models without batch norm\."
    ):
        Federation(tiny_config("privacy.clip=1", *exits))


@pytest.mark.parametrize("moving", ["split.channels=rolling", "federation.size_assignment=dynamic"])
def test_parts_that_move_are_refused(moving: str) -> None:
    with pytest.raises(
        MotleyError,
        match=r"privacy.clip = 0.5: epsilon is known only if every client keeps its part",
    ):
        Federation(tiny_config(*CLIPPED, *WIDTH, moving))


class KeepUpdates(ServerStage):
    """Counts the updates that it is given."""

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        return StageResult(server, aggregate, {"seen": float(len(updates))})


class KeepMean(KeepUpdates):
    sees_updates = False


def with_stage(stage: type[ServerStage], *overrides: str) -> Federation:
    path = f"{stage.__module__}:{stage.__name__}"
    return Federation(tiny_config(f"server.stages=[{{name='{path}'}}]", *overrides))


def test_a_stage_that_sees_single_updates_is_refused() -> None:
    said = (
        r"server\.stages\.0\.name = '[\w.]*test_mechanism:KeepUpdates': epsilon for "
        r"privacy\.clip = 0\.5 .*Stages whose class has sees_updates = False are allowed"
    )
    with pytest.raises(MotleyError, match=said):
        with_stage(KeepUpdates, *CLIPPED)


def test_a_stage_that_needs_no_updates_is_given_none() -> None:
    (private,) = with_stage(KeepMean, *CLIPPED).run(rounds=1)
    assert private.metrics["keepmean/seen"] == 0
    (open_,) = with_stage(KeepUpdates).run(rounds=1)
    assert open_.metrics["keepupdates/seen"] == 4


def test_settings_that_contradict_each_other() -> None:
    assert "noise = 1 is in units of clip, which is 0" in refused("privacy.noise=1")
    assert refused("privacy.clip=1", "server.weighting=samples").startswith(
        "server.weighting = 'samples': with privacy.clip"
    )
    assert refused("privacy.clip=1", "federation.sampler=fedml").startswith(
        "federation.sampler = 'fedml': the guarantee of privacy.clip = 1 assumes"
    )
    assert refused("privacy.clip=1", "uplink.dtype=fp16").startswith(
        "uplink.dtype = 'fp16': the cost of privacy.clip = 1"
    )
    assert "privacy.delta = 1" in refused("privacy.delta=1")
    assert refused("privacy.clip=1", "server.max_norm=2").startswith(
        "server.max_norm = 2: epsilon for privacy.clip = 1 is computed for a mean of noised deltas"
    )
    assert tiny_config("privacy.clip=1", "server.max_norm=auto").server.max_norm == "auto"


@pytest.mark.parametrize("setting", ["clip=1e-30", "clip=1e21", "clip=inf", "clip=nan"])
def test_norms_that_single_precision_cannot_noise_are_refused(setting: str) -> None:
    """A server could use them to get rid of a node's noise."""
    assert f"privacy.{setting.partition('=')[0]}" in refused(f"privacy.{setting}")
    assert "privacy.noise" in refused("privacy.clip=1", "privacy.noise=inf")
