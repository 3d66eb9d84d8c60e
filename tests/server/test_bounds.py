"""Bounds on updates: the limits by hand, and whole federations with one client that breaks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from motley.config import Config
from motley.core.part import Piece
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.privacy.settings import PrivacySettings
from motley.runs.checkpoint import read_checkpoint, save_checkpoint
from motley.server.bounds import ENOUGH, HISTORY, STAGE, UpdateBounds
from motley.server.state import ServerState
from motley.server.validation import UpdateCheck, report_error
from tests.conftest import tiny_config
from tests.server.test_robust_rounds import MLPS, Attacked

PART = {"w": Piece("w"), "running_var": Piece("running_var"), "count": Piece("count")}
RECEIVED = {
    "w": torch.tensor([3.0, 4.0]),
    "running_var": torch.tensor([1.0]),
    "count": torch.tensor(5),
}
SERVER = ServerState(0, dict(RECEIVED))


def bounds(max_norm: float | str = "auto", factor: float = 3.0, clips: bool = True) -> UpdateBounds:
    return UpdateBounds(
        max_norm,  # type: ignore[arg-type]
        factor,
        clips,
        lambda size: {"w"},
        PrivacySettings(),
    )


def update(client: int, norm: float, *, var: float = 0.1, count: int = 3) -> ClientUpdate:
    """Return an update whose parameters' delta has a norm."""
    delta = {
        "w": torch.tensor([norm, 0.0]),
        "running_var": torch.tensor([var]),
        "count": torch.tensor(count),
    }
    return ClientUpdate(
        client=client, delta=delta, part=PART, received=RECEIVED, size="s", loss=torch.tensor(1.0)
    )


def checked(
    limits: UpdateBounds, updates: list[ClientUpdate], server: ServerState = SERVER
) -> UpdateCheck:
    return UpdateCheck(updates, bounds=limits.measure(server, updates))


def accepted_norms(check: UpdateCheck) -> dict[int, float]:
    return {one.client: float(one.delta["w"].norm()) for one in check.verdict.accepted}


def test_a_number_is_the_limit() -> None:
    updates = [update(0, 0.5), update(1, 8.0)]
    clipped = checked(bounds(2.0), updates)
    assert accepted_norms(clipped) == {0: 0.5, 1: pytest.approx(2.0)}
    assert float(clipped.metrics["bounds/clipped"]) == 1
    # Within the limit nothing changes, bit for bit, and buffers are another group.
    assert torch.equal(clipped.updates[0].delta["w"], updates[0].delta["w"])
    assert torch.equal(clipped.updates[1].delta["running_var"], updates[1].delta["running_var"])
    rejected = checked(bounds(2.0, clips=False), updates).verdict
    assert rejected.rejected == {
        1: "the norm of its delta is 8; at most 2 is accepted (server.max_norm = 2)."
    }


def test_a_hundred_times_the_limit_is_rejected_even_if_others_are_clipped() -> None:
    verdict = checked(bounds(2.0), [update(0, 0.5), update(1, 201.0)]).verdict
    assert list(verdict.rejected) == [1]


def test_the_first_round_is_bounded_by_its_own_median() -> None:
    norms = [1.0, 1.2, 0.8, 50.0]
    check = checked(bounds(), [update(client, norm) for client, norm in enumerate(norms)])
    # Three times the lower median of 0.8, 1, 1.2, 50; 50 is beyond it.
    assert accepted_norms(check)[3] == pytest.approx(3.0)
    assert accepted_norms(check)[1] == pytest.approx(1.2)


def test_an_update_of_nan_does_not_take_away_the_limits_of_others() -> None:
    updates = [update(client, 1.0, var=0.4) for client in range(4)]
    updates += [update(4, math.nan, var=math.nan), update(5, 4.0, var=30.0)]
    check = checked(bounds(), updates)
    # The received parameters would allow 15; for buffers there is no other limit.
    assert accepted_norms(check)[5] == pytest.approx(3.0)
    assert check.verdict.rejected == {4: "it holds a number that is not finite."}, "30 is clipped"
    assert float(check.updates[5].delta["running_var"]) == pytest.approx(1.2)


def test_the_first_round_of_one_client_is_bounded_by_its_weights() -> None:
    # The received parameters have norm 5.
    assert accepted_norms(checked(bounds(), [update(0, 14.0)])) == {0: 14.0}
    assert accepted_norms(checked(bounds(), [update(0, 16.0)])) == {0: pytest.approx(15.0)}


def test_later_the_median_of_accepted_norms_counts() -> None:
    limits, server = bounds(clips=False), SERVER
    for _ in range(ENOUGH):
        server = limits.remember(server, [update(0, 2.0)])
    assert accepted_norms(checked(limits, [update(0, 5.9)], server)) == {0: pytest.approx(5.9)}
    verdict = checked(limits, [update(0, 6.1)], server).verdict
    assert (
        "at most 6 is accepted (server.max_norm = 'auto': 3 times the median"
        in (verdict.rejected[0])
    )
    for _ in range(HISTORY):
        server = limits.remember(server, [update(0, 4.0)])
    assert len(server.stage_states[STAGE]["parameters/s"]) == HISTORY
    assert accepted_norms(checked(limits, [update(0, 6.1)], server)) == {0: pytest.approx(6.1)}


def test_the_norms_are_saved_with_checkpoints(tmp_path: Path) -> None:
    server = bounds().remember(SERVER, [update(0, 2.0)])
    read = read_checkpoint(save_checkpoint(tmp_path, server, keep=1))
    assert read.stage_states[STAGE]["parameters/s"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("poison", "reason"),
    [
        (update(3, 1.0, var=-2.0), "a running_var of it is negative"),
        (update(3, 1.0, count=2**40), "a counter of it changes by 1.1e+12"),
        (update(3, 1.0, var=1e30), "the norm of its change of its buffers is 1e+30"),
    ],
)
def test_buffers_are_bounded(poison: ClientUpdate, reason: str) -> None:
    honest = [update(client, 1.0) for client in range(3)]
    verdict = checked(bounds(), [*honest, poison]).verdict
    assert list(verdict.rejected) == [3]
    assert reason in verdict.rejected[3]
    # Without bounds all of these are accepted, because they are finite.
    assert not UpdateCheck([*honest, poison]).verdict.rejected


def test_payloads_are_bounded() -> None:
    updates = []
    for client, number in enumerate([1.0, 1.0, 1.1, 20.0]):
        updates.append(replace(update(client, 1.0), payload={"c": torch.tensor([number])}))
    check = checked(bounds(), updates)
    assert float(check.updates[3].payload["c"]) == pytest.approx(3.0)
    assert torch.equal(check.updates[3].delta["w"], updates[3].delta["w"])


# ---- the promise of [privacy]


def private(noise: float) -> UpdateBounds:
    settings = PrivacySettings(clip=0.5, noise=noise)
    return replace(bounds("off"), privacy=settings)


def test_a_delta_beyond_the_promised_norm_is_rejected() -> None:
    check = checked(private(0.0), [update(0, 0.4, var=0.0), update(1, 0.6, var=0.0)])
    assert check.verdict.rejected == {
        1: "the norm of its delta is 0.6; clipping and noise (privacy) explain at most 0.5."
    }


@pytest.mark.parametrize("noise", ["0", "0.5"])
def test_private_clients_keep_their_promise(noise: str) -> None:
    config = tiny_config(*MLPS, "privacy.clip=0.5", f"privacy.noise={noise}", "training.steps=2")
    record = next(iter(Federation(config).run(1)))
    assert not record.refused


def test_a_private_client_that_does_not_clip_is_named() -> None:
    config = tiny_config(*MLPS, "privacy.clip=0.5", "privacy.noise=0.5", "training.steps=2")
    federation = Federation(config)
    federation.engine = Attacked(federation, federation.sample(1)[0], 3.0)
    record = next(iter(federation.run(1)))
    assert list(record.refused) == [federation.sample(1)[0]]
    assert "clipping and noise (privacy) explain at most" in next(iter(record.refused.values()))


# ---- federations


def auto(*more: str) -> Config:
    return tiny_config(
        "federation.clients=6",
        "federation.clients_per_round=6",
        "training.steps=2",
        "training.rounds=4",
        "evaluation.every=4",
        "server.max_norm=auto",
        *more,
    )


def test_honest_clients_are_not_limited() -> None:
    limited, free = Federation(auto()), Federation(auto("server.max_norm=off"))
    for federation in (limited, free):
        for record in federation.run():
            assert not record.refused
            assert record.metrics.get("bounds/clipped", 0.0) == 0.0
    assert limited.server is not None and free.server is not None
    for name, tensor in free.server.state.items():
        assert torch.equal(limited.server.state[name], tensor)


def test_a_client_that_sends_1e30_is_rejected_in_the_first_round() -> None:
    federation = Federation(auto())
    federation.engine = Attacked(federation, 4, 1e30)
    record = next(iter(federation.run(1)))
    assert list(record.refused) == [4]
    assert "the norm of its delta is" in record.refused[4]


def test_an_update_of_nan_is_still_called_that() -> None:
    federation = Federation(auto())
    federation.engine = Attacked(federation, 4, math.nan)
    record = next(iter(federation.run(1)))
    assert record.refused == {4: "it holds a number that is not finite."}


# ---- reported numbers


def most(examples: int) -> int:
    return 2 * math.ceil(examples / 10)


@pytest.mark.parametrize(
    ("examples", "steps", "private_run", "reason"),
    [
        (100, 20, False, None),
        (100, 21, False, "it reports 21 steps; with 100 examples they are at most 20."),
        (1001, 20, False, "it reports 1001 examples; server.max_examples = 1000."),
        (2**63 - 1, 1, False, "server.max_examples = 1000"),
        (1, 1, True, None),
        (7, 1, True, "it reports 7 examples and 1 steps; with privacy both are 1."),
    ],
)
def test_reported_numbers(examples: int, steps: int, private_run: bool, reason: str | None) -> None:
    reported = replace(update(0, 1.0), num_examples=examples, num_steps=steps)
    error = report_error(reported, private=private_run, max_examples=1000, max_steps=most)
    assert error is None if reason is None else reason in str(error)


@pytest.mark.parametrize("loss", [-1e30, 1e13])
def test_an_implausible_loss_is_rejected(loss: float) -> None:
    poisoned = replace(update(1, 1.0), loss=torch.tensor(loss))
    verdict = UpdateCheck([update(0, 1.0), poisoned], max_loss=1e12).verdict
    assert list(verdict.rejected) == [1] and "server.max_loss = 1e+12" in verdict.rejected[1]
    assert verdict.train_loss == 1.0
    trusted: Callable[[], UpdateCheck] = lambda: UpdateCheck([update(0, 1.0), poisoned])  # noqa: E731
    assert not trusted().verdict.rejected
