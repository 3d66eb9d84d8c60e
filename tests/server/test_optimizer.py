"""Server optimisers against Flower's strategies (recorded), torch.optim, and numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.config import load_config
from motley.core.merge import Aggregate
from motley.core.part import State
from motley.server.optimizer import (
    SERVER_OPTIMIZERS,
    AdagradSettings,
    AdamSettings,
    MomentumSettings,
    ServerOptimizerSettings,
    optimize,
)
from tests.conftest import refused

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "flower_strategies.json").read_text())[
    "cases"
]
FLOWERS_NAMES = {
    "eta": "lr",
    "server_learning_rate": "lr",
    "server_momentum": "beta1",
    "beta_1": "beta1",
    "beta_2": "beta2",
    "tau": "tau",
}


def tensors(values: list[Any]) -> State:
    return {f"w{place}": torch.tensor(value) for place, value in enumerate(values)}


def stepped(
    moments: State,
    change: State,
    settings: ServerOptimizerSettings,
    covered: dict[str, Any] | None = None,
) -> tuple[State, State]:
    """Return moments and step for a change whose names are all parameters but `buffer`."""
    merged = Aggregate(change, {**dict.fromkeys(change), **(covered or {})})
    moments, merged = optimize(
        moments, merged, {name for name in change if name != "buffer"}, settings
    )
    return moments, merged.delta


@pytest.mark.parametrize("name", RECORDED)
def test_steps_are_flowers(name: str) -> None:
    """Flower starts the second moment from zero, and its FedAdam corrects a bias with the exponent of a round more."""
    case = RECORDED[name]
    given = {FLOWERS_NAMES[key]: value for key, value in case["options"].items()}
    weights, moments = tensors(case["start"]), {}
    for number, played in enumerate(case["rounds"], 1):
        options = dict(given)
        if name == "adam":
            b1, b2 = (given[key] ** (number + 1) for key in ("beta1", "beta2"))
            options["lr"] *= (1 - b2) ** 0.5 / (1 - b1)
        if name != "momentum":
            options["initial"] = "zero"
        settings = SERVER_OPTIMIZERS.validate({"name": name, **options})
        sent = tensors(played["sent"])
        moments, step = stepped(moments, {n: sent[n] - weights[n] for n in weights}, settings)
        weights = {n: weights[n] + step[n] for n in weights}
        for n, expected in tensors(played["weights"]).items():
            torch.testing.assert_close(weights[n], expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_torchs_sgd(nesterov: bool) -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.3, momentum=0.8, nesterov=nesterov)
    settings = MomentumSettings(lr=0.3, beta1=0.8, nesterov=nesterov)
    numbers = torch.Generator().manual_seed(0)
    moments: State = {}
    mine = torch.zeros(3)
    for _ in range(5):
        change = torch.randn(3, generator=numbers)
        weight.grad = -change
        optimizer.step()
        moments, step = stepped(moments, {"w": change}, settings)
        mine = mine + step["w"]
        torch.testing.assert_close(mine, weight.detach())


def test_adagrad_is_torchs() -> None:
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adagrad([weight], lr=0.1, eps=0.01, initial_accumulator_value=0.01**2)
    moments: State = {}
    mine = torch.zeros(3)
    for change in torch.randn(5, 3, generator=torch.Generator().manual_seed(0)):
        weight.grad = -change
        optimizer.step()
        moments, step = stepped(moments, {"w": change}, AdagradSettings())
        mine = mine + step["w"]
        torch.testing.assert_close(mine, weight.detach())


def test_adam_and_yogi_by_hand() -> None:
    """V starts from tau squared = 0.25; D = 2, then 1."""
    options = {"lr": 1.0, "beta1": 0.5, "beta2": 0.5, "tau": 0.5}
    for name, seconds in (("adam", (2.125, 1.5625)), ("yogi", (2.25, 1.75))):
        moments: State = {}
        for change, first, second in zip((2.0, 1.0), (1.0, 1.0), seconds, strict=True):
            settings = SERVER_OPTIMIZERS.validate({"name": name, **options})
            moments, step = stepped(moments, {"w": torch.tensor([change])}, settings)
            assert moments["first/w"].item() == pytest.approx(first)
            assert moments["second/w"].item() == pytest.approx(second)
            assert step["w"].item() == pytest.approx(first / (second**0.5 + 0.5))


@pytest.mark.parametrize("name", ["momentum", "adam", "yogi", "adagrad"])
def test_moments_rest_where_nobody_held_a_coordinate(name: str) -> None:
    settings = SERVER_OPTIMIZERS.validate({"name": name})
    before, _ = stepped({}, {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)}, settings)
    held = torch.tensor([True, False, True])
    after, _ = stepped(
        before, {"a": torch.full((3,), 2.0), "b": torch.full((2,), 2.0)}, settings, {"a": held}
    )
    for kind in {key.partition("/")[0] for key in before}:
        assert (after[f"{kind}/a"] != before[f"{kind}/a"]).tolist() == held.tolist()
        assert (after[f"{kind}/b"] != before[f"{kind}/b"]).all()
        assert torch.equal(after[f"{kind}/c"], before[f"{kind}/c"])


def test_buffers_have_no_moments_and_keep_their_mean() -> None:
    change = {"w": torch.ones(2), "buffer": torch.ones(2), "count": torch.tensor(3)}
    merged = Aggregate(change, dict.fromkeys(change))
    moments, after = optimize({}, merged, {"w"}, AdamSettings())
    assert moments.keys() == {"first/w", "second/w"}
    assert torch.equal(after.delta["buffer"], change["buffer"]) and torch.equal(
        after.delta["count"], change["count"]
    )


def test_none_is_the_mean_itself() -> None:
    merged = Aggregate({"w": torch.ones(2)}, {"w": None})
    assert optimize({}, merged, {"w"}, ServerOptimizerSettings()) == ({}, merged)


def test_defaults_are_an_optimisers_own_and_another_choice_takes_them_along() -> None:
    def chosen(*overrides: str) -> tuple[Any, ...]:
        settings = load_config(
            overrides=[f"server.optimizer.{o}" for o in overrides]
        ).server.optimizer
        values = settings.model_dump()
        return tuple(values.get(key) for key in ("name", "lr", "beta1", "tau"))

    assert chosen() == ("none", None, None, None)
    assert chosen("name=momentum") == ("momentum", 1.0, 0.9, None)
    assert chosen("name=adam") == ("adam", 0.01, 0.9, 1e-3)
    assert chosen("name=adagrad") == ("adagrad", 0.1, 0.0, 0.01)
    assert chosen("name=adagrad", "lr=0.5") == ("adagrad", 0.5, 0.0, 0.01)


def test_a_saved_choice_gives_way_to_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        load_config(
            overrides=["server.optimizer={name='momentum', nesterov=true, lr=0.3}"]
        ).to_toml()
    )
    assert load_config(file).server.optimizer == MomentumSettings(lr=0.3, nesterov=True)
    assert load_config(
        file, overrides=["server.optimizer.name=yogi"]
    ).server.optimizer == AdamSettings(name="yogi")
    kept = load_config(file, overrides=["training.optimizer.name=sgd"])
    assert kept.server.optimizer == MomentumSettings(lr=0.3, nesterov=True), (
        "the clients' optimiser is another table"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "name=adan",
            "unknown server optimizer 'adan'. Did you mean 'adam'? Allowed: adagrad, adam, momentum, none, yogi.",
        ),
        (
            "nesterov=true",
            "has no effect with server.optimizer.name = 'none'; it is for 'momentum'.",
        ),
        ("beta1=1 name=adam", "server.optimizer.beta1 = 1: should be less than 1."),
        ("tau=0 name=adam", "server.optimizer.tau = 0: should be greater than 0."),
    ],
)
def test_what_cannot_work_is_refused(override: str, said: str) -> None:
    assert said in refused(*(f"server.optimizer.{one}" for one in override.split()))
