"""The papers' names: what they stand for, what they override, and what they do not go with."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from motley.config import Config, load_config, presets, read_resolved
from motley.config.paper_names import ABLATIONS, NAMES, STEMS, SYSTEMS, VARIANTS
from motley.federation import Federation
from motley.methods import METHODS
from motley.methods.fedin import FedInSettings
from motley.server.inco import IncoSettings
from tests.conftest import refused, tiny_config, written


def chosen(name: str, *overrides: str, **start: Any) -> tuple[str, str, str]:
    config = load_config(overrides=[f"method.name={name}", *overrides], **start)
    return config.method.name, config.split.name, config.server.inco.variant


@pytest.mark.parametrize("preset", presets())
def test_a_name_is_a_method_a_split_and_inco_whatever_a_preset_says(preset: str) -> None:
    assert chosen("FedAvg", preset=preset) == ("fedavg", "grouped", "off")
    assert chosen("HeteroProx", preset=preset) == ("fedprox", "depth", "off")
    assert chosen("InCoNova", preset=preset) == ("fednova", "depth", "official")
    assert chosen("FedScaffold", preset=preset) == ("scaffold", "grouped", "off")
    assert chosen("HeteroMoon", preset=preset) == ("moon", "depth", "off")
    assert chosen("FedDyn", preset=preset) == ("feddyn", "grouped", "off")
    assert chosen("InCoSpeed", preset=preset) == ("fedspeed", "depth", "official")


def test_plain_names_leave_split_and_inco_free() -> None:
    assert chosen("fedprox", preset="inco-cifar10") == ("fedprox", "depth", "official")
    assert chosen("fedprox", "split.name=grouped", preset="inco-cifar10") == (
        "fedprox",
        "grouped",
        "official",
    )


@pytest.mark.parametrize(
    ("stem", "optimizer"), {"AvgM": "momentum", "Adam": "adam", "Yogi": "yogi"}.items()
)
def test_server_optimisers_have_names(stem: str, optimizer: str) -> None:
    config = load_config(overrides=[f"method.name=InCo{stem}", "server.optimizer.lr=0.5"])
    assert (config.method.name, config.server.optimizer.name, config.server.optimizer.lr) == (
        "fedavg",
        optimizer,
        0.5,
    )
    message = refused(f"method.name=InCo{stem}", "server.optimizer.name=adagrad")
    assert "server.optimizer.name = 'adagrad'" in message and repr(optimizer) in message


@pytest.mark.parametrize("stem", ["Avg", "Prox", "Nova", "Scaffold"])
def test_ablations_have_names(stem: str) -> None:
    for ablation, (normalize, optimize) in {
        "w/o N": (False, True),
        "w/o O": (True, False),
        "w/o N & O": (False, False),
    }.items():
        config = load_config(overrides=[f"method.name=InCo{stem} {ablation}"])
        assert config.server.inco == IncoSettings(
            variant="official", normalize=normalize, optimize=optimize
        )
        assert config.method.name == STEMS[stem]["method.name"] and config.split.name == "depth"


@pytest.mark.parametrize(
    ("name", "settings"),
    {
        "FedIN": {},
        "FedIN (+Noise)": {"noise": 0.8},
        "FedIN w/o IN": {"samples": 0},
        "FedIN w/o Prox": {"mu": 0.0},
        "FedIN w/o Opt": {"combine": "sum"},
    }.items(),
)
def test_fedins_ablations_have_names(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    assert chosen(name, preset="inco-cifar10") == ("fedin", "depth", "off")
    assert load_config(overrides=[f"method.name={name}"]).method == FedInSettings(**settings)
    below = written(tmp_path, '[method]\nname = "FedIN w/o IN"\n')
    assert load_config(below, overrides=[f"method.name={name}"]).method == FedInSettings(**settings)
    assert "stands for method.mu" in refused(f"method.name={name}", "method.mu=3")


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_systems_name_does_not_inherit_inco_and_may_turn_it_on(name: str, tmp_path: Path) -> None:
    preset = load_config(preset="inco-cifar10")
    assert preset.server.inco.active, "so that there is something to inherit"
    one_size = [] if name == "InclusiveFL" else ["model.sizes=['resnet26']"]
    plain = load_config(preset="inco-cifar10", overrides=[f"method.name={name}", *one_size])
    assert not plain.server.inco.active
    file = written(tmp_path, '[server.inco]\nvariant = "paper"\n')
    assert not load_config(file, overrides=[f"method.name={name}", *one_size]).server.inco.active
    with_inco = [f"method.name={name}", "server.inco.variant=paper", *one_size]
    assert load_config(preset="inco-cifar10", overrides=with_inco).server.inco.variant == "paper"


def test_every_name_runs_a_round() -> None:
    """A federation that takes no time; an InCo name needs layers that help each other."""
    for name in NAMES:
        sizes = (
            ("model.sizes=resnet18",)
            if name in (*SYSTEMS, "FedBN")
            else ("model.sizes=mlp2,mlp3", "model.mlp.hidden=10")
        )
        if METHODS[NAMES[name]["method.name"]].requirements.public_data:
            sizes += ("public.name=noise",)
        settings = [*sizes, "training.steps=1", "evaluation.every=3", f"method.name={name}"]
        if METHODS[NAMES[name]["method.name"]].requirements.public_data:
            settings += ["public.name=noise", "public.samples=8"]
        federation = Federation(tiny_config(*settings))
        _, record = federation.run_round(federation.initial_state())
        has_inco = any(metric.startswith("inco/") for metric in record.metrics)
        assert not record.refused and has_inco == name.startswith("InCo"), name
    assert len(NAMES) == len(STEMS) * (3 + len(ABLATIONS)) + len(VARIANTS) + len(SYSTEMS)


def test_a_run_saves_plain_settings(tmp_path: Path) -> None:
    config = load_config(overrides=["method.name=InCoProx w/o O", "method.mu=0.3"])
    values = tomllib.loads(config.to_toml())
    assert values["method"]["name"] == "fedprox" and values["method"]["mu"] == 0.3
    assert values["split"]["name"] == "depth" and values["server"]["inco"]["optimize"] is False
    assert read_resolved(written(tmp_path, config.to_toml())) == config


def test_a_name_in_a_file_and_in_python(tmp_path: Path) -> None:
    file = written(
        tmp_path, 'preset = "inco-cifar10"\n[method]\nname = "HeteroNova"\nscale_buffers = true\n'
    )
    config = load_config(file)
    assert (config.method.name, config.server.inco.variant) == ("fednova", "off")
    assert Config.model_validate({"method": {"name": "InCoMoon"}}).server.inco.active


def test_a_higher_layer_overrides_what_a_name_stood_for(tmp_path: Path) -> None:
    file = written(tmp_path, '[method]\nname = "InCoAvg"\n')
    assert load_config(file, overrides=["split.name=grouped"]).split.name == "grouped"
    assert not load_config(file, overrides=["server.inco.variant=off"]).server.inco.active
    again = load_config(file, overrides=["method.name=FedProx"])
    assert (again.method.name, again.split.name, again.server.inco.active) == (
        "fedprox",
        "grouped",
        False,
    )


def test_inco_keeps_the_variant_below_it_and_undoes_an_ablation(tmp_path: Path) -> None:
    file = written(tmp_path, '[server.inco]\nvariant = "paper"\nepsilon = 0.5\nnormalize = false\n')
    inco = load_config(file, overrides=["method.name=InCoProx"]).server.inco
    assert inco == IncoSettings(variant="paper", epsilon=0.5)
    assert chosen("InCoAvg", "server.inco.variant=paper") == ("fedavg", "depth", "paper")
    assert chosen("InCoAvg", "split.name=layer-wise") == ("fedavg", "depth", "official")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method.name=InCoAvg", "split.name=grouped"], "split.name = 'grouped'"),
        (["split.name=grouped", "method.name=InCoAvg"], "stands for split.name = 'depth'"),
        (["method.name=FedAvg", "split.name=depth"], "stands for split.name = 'grouped'"),
        (
            ["method.name=FedProx", "split.name=homogeneous"],
            "or set method.name = 'fedprox', which leaves it free",
        ),
        (["method.name=InCoProx", "server.inco.variant=off"], "server.inco.variant = 'off'"),
        (
            ["method.name=HeteroAvg", "server.inco.variant=paper"],
            "stands for server.inco.variant = 'off'",
        ),
        (
            ["method.name=InCoAvg w/o N", "server.inco.normalize=true"],
            "server.inco.normalize = True",
        ),
    ],
)
def test_a_contradiction_is_refused_with_both_sides(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("InCoProxx", "InCoProx"),
        ("heteroAvg", "HeteroAvg"),
        ("InCoAvg w/o N and O", "InCoAvg w/o N & O"),
    ],
)
def test_a_wrong_name_gets_the_nearest(name: str, near: str) -> None:
    message = refused(f"method.name={name}")
    assert (
        f"unknown method {name!r}. Did you mean {near!r}? Allowed: " in message
        and "fedavg, " in message
    )


def test_a_name_beside_what_is_no_table_is_refused_like_any_other() -> None:
    assert refused("method.name=InCoAvg", "split=depth").startswith("split = 'depth': is a table")
    assert refused("method.name=InCoAvg", "server.inco=paper").startswith(
        "server.inco = 'paper': is a table"
    )
    assert "unknown split 'dept'" in refused("method.name=InCoAvg", "split.name=dept")
