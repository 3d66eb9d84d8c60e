"""Robust rules in whole federations: every kind of split, methods and stages around them, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Failure, Job
from motley.federation import Federation
from motley.methods.base import Collection
from tests.conftest import tiny_config

NINE = (
    "federation.clients=9",
    "federation.clients_per_round=9",
    "federation.size_assignment=alternate",
    "training.steps=2",
    "training.rounds=2",
    "evaluation.every=2",
)
MLPS = ("model.sizes=['mlp1','mlp2','mlp3']",)
SPLITS = {
    "depth": MLPS,
    "statistics": ("split.normalization_statistics=per-size",),
    "shared-statistics": ("split.normalization_statistics=shared",),
    "width": ("split.name=width", "split.rates=[1,0.5,0.25]", "model.sizes=['resnet10']"),
    "rolling": (
        "split.name=width",
        "split.rates=[1,0.5,0.25]",
        "split.channels=rolling",
        "model.sizes=['mlp2']",
    ),
    "grid": (
        "split.name=grid",
        "split.cuts=[2,3,6]",
        "split.rates=[0.5,0.75,1]",
        "model.sizes=['resnet14']",
        "split.normalization_statistics=batch",
    ),
    "grouped": ("split.name=grouped", *MLPS),
}
RULES = {
    "trimmed-mean": ("server.merge.name=trimmed-mean",),
    "median": ("server.merge.name=median",),
    "krum": ("server.merge.name=krum", "server.merge.attackers=0"),
    "centered-clipping": ("server.merge.name=centered-clipping",),
}


class Attacked:
    """An engine one of whose clients sends the same number everywhere."""

    trusted = True

    def __init__(self, federation: Federation, client: int, value: float) -> None:
        self.engine, self.client, self.value = federation.engine, client, value

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[ClientUpdate | Failure]:
        answers = []
        for answer in self.engine.train(jobs, done):
            if isinstance(answer, ClientUpdate) and answer.client == self.client:
                delta = {}
                for name, tensor in answer.delta.items():
                    floating = tensor.is_floating_point()
                    delta[name] = torch.full_like(tensor, self.value) if floating else tensor
                answer = replace(answer, delta=delta)
            answers.append(answer)
        return answers

    def collect(self, jobs: Sequence[Job]) -> Sequence[Collection | Failure]:
        return self.engine.collect(jobs)

    def save_client_states(self, rounds: dict[int, int]) -> None:
        self.engine.save_client_states(rounds)

    def forget_client_states(self, rounds: dict[int, int]) -> None:
        self.engine.forget_client_states(rounds)


def attacked(config: Config, value: float) -> Federation:
    """Return a federation whose client 4 sends `value` everywhere."""
    federation = Federation(config)
    federation.engine = Attacked(federation, 4, value)
    return federation


#: The others take half a minute together.
FAST = {
    ("depth", "krum"),
    ("width", "median"),
    ("rolling", "trimmed-mean"),
    ("grouped", "centered-clipping"),
}
CASES = [
    pytest.param(split, rule, marks=() if (split, rule) in FAST else (pytest.mark.slow,))
    for split in SPLITS
    for rule in RULES
]


@pytest.mark.parametrize(("split", "rule"), CASES)
def test_every_split_trains_with_every_rule(split: str, rule: str) -> None:
    federation = Federation(tiny_config(*NINE, *SPLITS[split], *RULES[rule]))
    before = federation.initial_state()
    records = list(federation.run())
    after = federation.server
    assert after is not None
    assert all(tensor.isfinite().all() for tensor in after.state.values())
    # Nobody holds too few coordinates: three clients of each size take part in every round.
    shares = [record.metrics["method/merge_too_few"] for record in records]
    if split == "rolling":
        assert all(0 <= share < 1 for share in shares)
    else:
        assert shares == [0.0, 0.0]
    moved = [
        n for n in federation.split.parameters if not torch.equal(before.state[n], after.state[n])
    ]
    # With a grid, a client trains its last exit only: the median of the other exits' deltas is zero.
    assert len(moved) > 0.8 * len(federation.split.parameters)


@pytest.mark.parametrize("rule", ["trimmed-mean", "median", "centered-clipping"])
@pytest.mark.parametrize("split", ["depth", pytest.param("width", marks=pytest.mark.slow)])
def test_an_attacker_moves_nothing_far(split: str, rule: str) -> None:
    config = tiny_config(*NINE, *SPLITS[split], *RULES[rule], "training.rounds=1")
    honest, poisoned = Federation(config), attacked(config, 1e30)
    before = honest.initial_state()
    for federation in (honest, poisoned):
        assert not next(iter(federation.run(1))).refused
    assert honest.server is not None and poisoned.server is not None
    for name in honest.split.parameters:
        step = (honest.server.state[name] - before.state[name]).abs().max()
        moved = (poisoned.server.state[name] - before.state[name]).abs().max()
        assert moved <= 10 * step + 0.1


@pytest.mark.parametrize(
    "around",
    [
        ("method.name=scaffold",),
        ("method.name=fedprox",),
        ("method.name=moon", "model.projection=8"),
        ("server.inco.variant=official",),
        ("server.optimizer.name=adam", "server.ema_decay=0.9"),
    ],
)
def test_methods_and_stages_around_a_rule(around: tuple[str, ...]) -> None:
    config = tiny_config(*NINE, *MLPS, "server.merge.name=median", *around)
    federation = Federation(config)
    for record in federation.run():
        assert not record.refused
    assert federation.server is not None
    for state in (federation.server.state, federation.server.method_state):
        assert all(tensor.isfinite().all() for tensor in state.values())


def test_control_variates_are_merged_by_the_rule_too() -> None:
    config = tiny_config(*NINE, *MLPS, "method.name=scaffold", "training.rounds=1")
    by_mean = Federation(config)
    trimmed = config.server.model_validate({"merge": {"name": "trimmed-mean", "trim": 0.0}})
    by_rule = Federation(config.model_copy(update={"server": trimmed}))
    controls = []
    for federation in (by_mean, by_rule):
        next(iter(federation.run(1)))
        assert federation.server is not None
        controls.append(federation.server.method_state)
    # Without trimming, the rule is the mean, and so is the sum over sampled clients divided by all.
    for name, control in controls[0].items():
        torch.testing.assert_close(control, controls[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("server.merge.name=median",), "needs 3 clients that hold a coordinate, and"),
        (
            ("server.merge.name=median", "federation.clients_per_round=2"),
            "federation.clients_per_round = 2",
        ),
        (("server.merge.name=krum",), "needs 5 clients, and federation.clients_per_round = 4"),
        (
            ("server.merge.name=krum", "federation.clients=12", "federation.clients_per_round=12"),
            "needs 5 clients of each size (server.merge.attackers = 1), and 'resnet10' has 4",
        ),
        (("server.merge.name=median", "server.weighting=samples"), "counts every client once"),
        (("server.merge.name=median", "method.name=fednova"), "method.name = 'fednova' combines"),
        (("server.merge.name=median", "method.name=feddyn"), "method.name = 'feddyn' combines"),
        (("server.merge.name=median", *MLPS, "privacy.clip=1"), "epsilon for privacy.clip = 1"),
        (("server.merge.name=median", "method.name=fedproto"), "Use server.merge.name = 'mean'"),
        (
            ("server.merge.name=best",),
            "server.merge.name = 'best': should be 'mean', 'trimmed-mean'",
        ),
        (("server.merge.name=median", "server.merge.trim=0.1"), "it is for 'trimmed-mean'"),
        (
            ("server.merge.name=centered-clipping", "server.merge.radius=0"),
            'a number above 0, or "auto"',
        ),
        (
            (
                "server.merge.name=krum",
                "split.name=width",
                "split.rates=[1,0.5]",
                "split.channels=random",
                "model.sizes=['mlp2']",
            ),
            "gives every client another one",
        ),
    ],
)
def test_what_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(MotleyError) as error:
        Federation(tiny_config(*overrides))
    assert message in str(error.value)


def test_too_few_may_be_averaged() -> None:
    config = tiny_config(
        "server.merge.name=median", "server.merge.too_few=mean", "training.steps=1"
    )
    record = next(iter(Federation(config).run(1)))
    assert 0 < record.metrics["method/merge_too_few"] < 1
