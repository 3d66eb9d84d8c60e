"""Likely reasons why published numbers differ from ours can each be tried by settings alone.

The letters are those of the list of candidates: the readings of the three papers, and the recipes of
the code that their baselines were probably run with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from motley.config import load_config
from motley.settings import flat

#: Candidate -> preset, overrides, and values that must reach the configuration beside them.
CANDIDATES: dict[str, tuple[str, tuple[str, ...], Mapping[str, Any]]] = {
    "C, FedImpro's start and client schedule": (
        "fedimpro-cifar10",
        (),
        {"model.init": "torch", "federation.sampler": "fedml", "data.partition.numpy_seed": 0},
    ),
    "D, FedIN's pull": (
        "fedin-cifar10",
        ("method.proximal=norms", "training.batch_size=64", "method.mu=0.01"),
        {"method.name": "fedin"},
    ),
    "D, FedProx's norm of squares": (
        "inco-cifar10",
        ("method.name=HeteroProx", "method.proximal=norm-of-squares"),
        {"method.name": "fedprox", "server.inco.variant": "off"},
    ),
    "E, the recipe of HeteroFL and FedRolex": (
        "inco-heterofl-cifar10",
        (
            "training.optimizer={name='sgd', lr=0.1, momentum=0.9, weight_decay=5e-4}",
            "training.lr_milestones=[250,375]",
            "training.max_grad_norm=1.0",
            "model.resnet.stem=cifar",
            "server.inco.variant=official",
        ),
        {"split.name": "width", "model.sizes": ["resnet26"], "training.lr_gamma": 0.1},
    ),
    "E, the recipe of ScaleFL": (
        "inco-scalefl-cifar10",
        ("training.optimizer={name='sgd', lr=0.1, momentum=0.9}", "training.lr_milestones=[250]"),
        {"split.name": "grid"},
    ),
    "F, InclusiveFL's sharing without distillation": (
        "inco-cifar10",
        ("method.name=InclusiveFL", "method.beta=0"),
        {"split.name": "inclusive", "server.inco.variant": "off"},
    ),
    "F, InclusiveFL with all layers shared": (
        "fedin-cifar10",
        ("method.name=inclusivefl", "split.name=depth"),
        {"method.beta": 0.2},
    ),
    "G, FedIN's noise per coordinate": (
        "fedin-cifar10",
        ("method.name=FedIN (+Noise)", "method.noise_deviation=coordinate"),
        {"method.noise": 0.8},
    ),
    "H, MOON's mu of NIID-Bench": (
        "inco-cifar10",
        ("method.name=HeteroMoon", "method.mu=0.001"),
        {"method.name": "moon"},
    ),
    "I, the plain SGD of NIID-Bench": (
        "inco-cifar10",
        ("method.name=FedNova", "training.optimizer={name='sgd', lr=0.001}"),
        {"split.name": "grouped", "training.optimizer.momentum": 0.0},
    ),
    "InCo over all layers of one shape": (
        "inco-cifar10",
        ("server.inco={variant='paper', layers='same-shape'}",),
        {"server.inco.granularity": "tensor"},
    ),
    "SCAFFOLD's c over the sampled clients": (
        "fedimpro-cifar10",
        ("method.name=scaffold", "method.divide_by=sampled"),
        {"model.init": "torch"},
    ),
}


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_a_candidate_is_a_matter_of_settings(candidate: str) -> None:
    preset, overrides, values = CANDIDATES[candidate]
    config = flat(load_config(preset=preset, overrides=overrides).model_dump(mode="json"))
    for key, value in values.items():
        assert config[key] == value, key
