"""The cost of methods for clients: FedIN's Table 2."""

from __future__ import annotations

import math

import numpy as np
import pytest

from motley.analysis.overhead import Overhead, measure_overhead, one_step_on_cpu
from motley.cli.plan import costs_in
from motley.config import load_config
from motley.data import Dataset
from motley.data.dataset import Examples
from motley.federation import Federation
from tests.conftest import tiny_config


def in_millions(values: float) -> float:
    """Round down to two decimals, as the paper does: 12.28 for 12,288,023."""
    return math.floor(values / 1e4) / 100


def images(count: int) -> Examples:
    numbers = np.random.default_rng(0)
    return Examples(
        numbers.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8), np.arange(count) % 10
    )


def cost_of(*overrides: str) -> Overhead:
    return measure_overhead(Federation(one_step_on_cpu(tiny_config(*overrides))))


def test_the_papers_table_for_five_resnets_at_batch_16() -> None:
    """FedAvg 12.28 M and 235.0 MB; FedIN 12.35 M and 0.3 MB more. We count 234.6 MiB for FedAvg."""
    config = load_config(
        preset="fedin-cifar10",
        overrides=[
            "federation.clients=5",
            "federation.clients_per_round=5",
            "training.steps=1",
            "engine.device=cpu",
        ],
    )
    cost = measure_overhead(
        Federation(one_step_on_cpu(config), dataset=Dataset("toy", images(500), images(10), 10))
    )
    assert cost.payload == 16 * (64 * 8 * 8 + 512)
    assert in_millions(cost.parameters) == 12.28
    assert round(in_millions(cost.parameters) + in_millions(cost.payload), 2) == 12.35
    assert round(cost.model_bytes / 2**20, 1) == 234.6
    assert round(cost.method_bytes / 2**20, 1) == 0.3


def test_payload_and_memory_of_other_methods() -> None:
    tiny = ("model.sizes=['mlp2','mlp3']", "model.mlp.hidden=4")
    names = ("fedavg", "fedprox", "scaffold", "moon", "fedimpro")
    costs = {name: cost_of(*tiny, f"method.name={name}") for name in names}
    model = costs["fedavg"].model_bytes / 2
    payload = {name: cost.payload for name, cost in costs.items()}
    method_bytes = {name: cost.method_bytes for name, cost in costs.items()}
    parameters = {cost.parameters for cost in costs.values()}
    assert parameters == {model / 4}
    assert payload == {
        "fedavg": 0,
        "fedprox": 0,
        "scaffold": model / 4,
        "moon": 0,
        "fedimpro": 2 * 10 * 4 + 2,
    }
    assert method_bytes == {
        "fedavg": 0,
        "fedprox": 0,
        "scaffold": 2 * model,
        "moon": model,
        "fedimpro": 4 * 2 * 10 * 4,
    }


RESNET = (
    "model.sizes=['resnet10','resnet14']",
    "model.resnet.width=0.25",
    "training.batch_size=16",
)


def test_a_fedavg_step_costs_as_much_as_planned() -> None:
    config = tiny_config(*RESNET, "method.name=fedavg")
    cost, planned = measure_overhead(Federation(one_step_on_cpu(config))), costs_in(config).values()
    assert cost.flops == sum(size.flops for size in planned) / 2
    assert cost.peak_bytes == pytest.approx(sum(size.memory for size in planned) / 2, rel=0.02)
    assert cost.kept_bytes == cost.model_bytes / 2 and cost.sizes == 2


def test_additional_passes_and_models_are_counted() -> None:
    """MOON also runs two frozen models; FedIN passes features through all but the outer layers."""
    names = ("fedavg", "moon", "scaffold", "fedin", "fedspeed", "fedsam")
    costs = {name: cost_of(*RESNET, f"method.name={name}") for name in names}
    plain, model = costs["fedavg"], costs["fedavg"].model_bytes / 2
    # A backward pass costs two forward passes, less the first layer.
    assert 1.6 < costs["moon"].flops / plain.flops < 1.7
    assert costs["scaffold"].flops == plain.flops
    assert costs["fedspeed"].flops == 2 * plain.flops
    assert costs["fedsam"].flops == 2 * plain.flops
    assert 1.7 < costs["fedin"].flops / plain.flops < 2
    assert costs["scaffold"].peak_bytes > plain.peak_bytes + 1.9 * model
    assert costs["moon"].peak_bytes == plain.peak_bytes + model
    assert costs["scaffold"].kept_bytes == pytest.approx(2 * model, rel=0.02)


def test_a_size_without_clients_is_left_out() -> None:
    three = "model.sizes=['mlp1','mlp2','mlp3']"
    assert cost_of(three, "federation.size_fractions=[1,0,1]").sizes == 2
    assert cost_of(three, "federation.size_assignment=dynamic").sizes == 3
