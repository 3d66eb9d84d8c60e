"""Every method against its paper's algorithm, written out with autograd and torch.optim in `reference`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from motley.federation import Federation
from tests.conftest import tiny_config
from tests.methods import reference
from tests.methods.reference import Batch, Reference

SGD = {"name": "sgd", "lr": 0.05}
MOMENTUM = {"name": "sgd", "lr": 0.05, "momentum": 0.8}
ADAM = {"name": "adam", "lr": 0.002}
CASES: dict[str, tuple[Callable[..., None], str, dict[str, Any]]] = {
    "fedprox, sgd": (partial(reference.fedprox, mu=0.7), "fedprox, mu=0.7", SGD),
    "fedprox, adam": (partial(reference.fedprox, mu=0.7), "fedprox, mu=0.7", ADAM),
    "fedprox, norms": (
        partial(reference.fedprox, mu=0.7, term="norms"),
        "fedprox, mu=0.7, proximal=norms",
        SGD,
    ),
    "fedprox, norm of squares": (
        partial(reference.fedprox, mu=7, term="norm-of-squares"),
        "fedprox, mu=7, proximal=norm-of-squares",
        SGD,
    ),
    "scaffold, sgd, in the gradient": (partial(reference.scaffold, gradient=True), "scaffold", SGD),
    "scaffold, momentum": (partial(reference.scaffold, gradient=False), "scaffold", MOMENTUM),
    "scaffold, over sampled clients": (
        partial(reference.scaffold, gradient=False, sampled=True),
        "scaffold, divide_by=sampled",
        SGD,
    ),
    "scaffold, adam": (partial(reference.scaffold, gradient=False), "scaffold", ADAM),
    "fednova, sgd": (partial(reference.fednova, momentum=0.0), "fednova", SGD),
    "fednova, momentum": (partial(reference.fednova, momentum=0.8), "fednova", MOMENTUM),
    "fednova, adam": (partial(reference.fednova, momentum=0.0), "fednova", ADAM),
    "feddyn, sgd": (partial(reference.feddyn, alpha=0.3), "feddyn, alpha=0.3", SGD),
    "feddyn, momentum": (partial(reference.feddyn, alpha=0.3), "feddyn, alpha=0.3", MOMENTUM),
    "fedspeed, sgd": (
        partial(reference.fedspeed, alpha=0.3, rho=0.2, ascent=1.0),
        "fedspeed, alpha=0.3, rho=0.2",
        SGD,
    ),
    "fedspeed, mixed": (
        partial(reference.fedspeed, alpha=0.3, rho=0.2, ascent=0.6),
        "fedspeed, alpha=0.3, rho=0.2, ascent=0.6",
        MOMENTUM,
    ),
    "fedsam, sgd": (partial(reference.fedsam, rho=0.2), "fedsam, rho=0.2", SGD),
    "fedsam, momentum": (partial(reference.fedsam, rho=0.05), "fedsam", MOMENTUM),
    "moon, sgd": (partial(reference.moon, mu=2.0, temperature=0.5), "moon, mu=2", SGD),
    "moon, warm": (
        partial(reference.moon, mu=2.0, temperature=3.0),
        "moon, mu=2, temperature=3",
        MOMENTUM,
    ),
}
ROUNDS = 4


def batches_of(federation: Federation, job: Any) -> list[Batch]:
    images = torch.from_numpy(federation.dataset.train.inputs).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(federation.dataset.train.targets)
    plan = federation.engine.clients.plan(job)  # type: ignore[attr-defined]
    rows = [plan.rows[step, :length] for step, length in enumerate(plan.lengths)]
    return [(images[row], labels[row]) for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_a_federation_of_equal_models_is_the_papers_algorithm(case: str) -> None:
    """Partial participation, clients with unlike numbers of steps, four rounds: memories are made and used again."""
    play, method, optimizer = CASES[case]
    name, *settings = method.split(", ")
    federation = Federation(
        tiny_config(
            "model.sizes=['mlp2']",
            "split.name=homogeneous",
            "model.mlp.hidden=12",
            "training.epochs=0.5",
            "training.batch_size=16",
            "server.ema_decay=0",
            "evaluation.every=9",
            "training.rounds=9",
            f"method.name={name}",
            *(f"method.{setting}" for setting in settings),
            *(f"training.optimizer.{key}={value}" for key, value in optimizer.items()),
        )
    )
    server = federation.initial_state()
    model = federation.split.build("mlp2")
    model.load_state_dict(server.state)

    def build(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        options = {key: value for key, value in optimizer.items() if key != "name"}
        return (torch.optim.Adam if optimizer["name"] == "adam" else torch.optim.SGD)(
            parameters, **options
        )

    expected = Reference(model, len(federation.sizes), build, optimizer["lr"])
    counts = set()
    for number in range(1, ROUNDS + 1):
        jobs = {
            client: federation.job(server, number, client) for client in federation.sample(number)
        }
        turns = {client: batches_of(federation, job) for client, job in jobs.items()}
        counts |= {len(batches) for batches in turns.values()}
        play(expected, turns)
        server, _ = federation.run_round(server)
        for key, tensor in expected.model.state_dict().items():
            torch.testing.assert_close(server.state[key], tensor, rtol=1e-4, atol=2e-6)
    assert len(counts) > 1
