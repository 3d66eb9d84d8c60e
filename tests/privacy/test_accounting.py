"""Epsilon equals the accountant library's number for the mechanisms that a run applies."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("dp_accounting")

import dp_accounting

from motley.federation import Federation
from motley.privacy import Accountant, PrivacyLedger
from motley.privacy.accounting import ORDERS
from motley.privacy.releases import ReleaseCounter
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from tests.cli.conftest import call
from tests.conftest import tiny_config

PRIVATE = (
    "split.normalization_statistics=batch",
    "privacy.clip=0.5",
    "privacy.noise=2",
    "run.tensorboard=false",
)
ONE_SIZE = ("model.sizes=['resnet10']", "split.name=homogeneous")


def directly(
    multiplier: float, rounds: int, *, asked: int = 1, clients: int = 1, orders: object = ORDERS
) -> float:
    """Return the library's own epsilon."""
    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(orders, neighboring_relation=replaced)
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(
        dp_accounting.SampledWithoutReplacementDpEvent(clients, asked, gaussian), rounds
    )
    return float(accountant.get_epsilon(1e-5))


def test_clients_of_one_size(tmp_path: Path) -> None:
    """4 of 6 clients, whose noise adds up to twice a client's own; replacing a client moves the sum by 2 clip."""
    start_run(tiny_config(*PRIVATE, *ONE_SIZE), tmp_path / "run")
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    spent = [line["epsilon"] for line in lines]
    assert [line["model"] for line in spent] == pytest.approx(
        [directly(math.sqrt(4) * 2 / 2, rounds, asked=4, clients=6) for rounds in (1, 2, 3)],
        rel=1e-5,
    )
    often = [
        max(sum(c in line["clients"] for line in lines[:n]) for c in range(6)) for n in (1, 2, 3)
    ]
    assert [line["upload"] for line in spent] == pytest.approx(
        [directly(2 / 2, count) for count in often], rel=1e-5
    )
    assert all(line["train_loss"] is None for line in lines)
    shown = call("show", tmp_path / "run").out
    assert (
        f"client-level epsilon: {spent[-1]['model']:.2f} (adversary sees the global models)"
        in shown
    )


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 5.0, 30.0])
@pytest.mark.parametrize("asked", [2, 20])
def test_fewer_orders_than_the_library_tries_are_enough(multiplier: float, asked: int) -> None:
    quick, whole = (
        directly(multiplier, 100, asked=asked, clients=20, orders=orders)
        for orders in (ORDERS, None)
    )
    assert whole <= quick <= 1.03 * whole


def test_it_grows_with_rounds_and_shrinks_with_noise() -> None:
    def epsilons(noise: float) -> list[float]:
        federation = Federation(tiny_config(*PRIVATE, f"privacy.noise={noise}"))
        assert federation.accountant is not None
        counter, answers = ReleaseCounter(federation.accountant), []
        for number in range(3):
            spent = counter.add_mean(number, 0, [0, 2, 4, 5], [0, 2, 4, 5])
            answers.append(federation.accountant.epsilon(spent)["model"])
        return answers

    little, much = epsilons(1.0), epsilons(4.0)
    assert little == sorted(set(little)) and much == sorted(set(much))
    assert all(a > b for a, b in zip(little, much, strict=True))


def accountant_of(*overrides: str) -> Accountant:
    federation = Federation(tiny_config(*PRIVATE, *overrides))
    assert federation.accountant is not None
    return federation.accountant


def test_the_largest_epsilon_of_all_sizes_counts() -> None:
    """The deepest layers of resnet18 have one owner, the layers that all share have four."""
    accountant = accountant_of()
    assert accountant.fewest_owners({"resnet10": 2, "resnet14": 1, "resnet18": 1}) == {
        "resnet10": 4,
        "resnet14": 2,
        "resnet18": 1,
    }
    spent = ReleaseCounter(accountant).add_mean(1, 0, [0, 1, 2, 4], [0, 1, 2, 4])
    assert spent.rounds == {
        "resnet10": {(2, 2, 4): 1},
        "resnet14": {(2, 1, 2): 1},
        "resnet18": {(2, 1, 1): 1},
    }
    sizes = [
        directly(math.sqrt(4) * 2 / 2, 1, asked=2, clients=2),
        directly(math.sqrt(2) * 2 / 2, 1, asked=1, clients=2),
        directly(math.sqrt(1) * 2 / 2, 1, asked=1, clients=2),
    ]
    assert accountant.epsilon(spent)["model"] == pytest.approx(max(sizes), rel=1e-9)


def test_owners_of_a_part_in_width_are_counted_by_coordinate() -> None:
    width = (
        "split.name=width",
        "model.sizes=['resnet10']",
        "split.rates=[0.5,1.0]",
        "model.resnet.width=0.125",
    )
    accountant = accountant_of(*width)
    small, large = accountant.split.sizes
    assert accountant.fewest_owners({small: 3, large: 2}) == {small: 5, large: 2}


def test_noise_that_did_not_arrive_is_not_counted() -> None:
    accountant = accountant_of(*ONE_SIZE)
    counter = ReleaseCounter(accountant)
    counter.add_request(1, 0, [1, 2, 3, 4])
    counter.add_request(1, 1, [0, 1, 2, 3])
    spent = counter.add_mean(1, 1, [0, 1, 2, 3], [0, 3])
    assert spent.rounds == {"resnet10": {(6, 4, 2): 1}}
    assert spent.uploads == {0: 1, 1: 2, 2: 2, 3: 2, 4: 1}
    assert counter.add_mean(2, 0, [0, 1], []) == spent
    assert PrivacyLedger.from_json(spent.to_json()) == spent  # type: ignore[arg-type]


def test_without_noise_epsilon_is_infinite(tmp_path: Path) -> None:
    start_run(tiny_config(*PRIVATE, "privacy.noise=0", "training.rounds=1"), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert line["epsilon"] == {"model": None, "upload": None}
    assert (
        "client-level epsilon: infinite (adversary sees the global models)"
        in call("show", tmp_path / "run").out
    )
