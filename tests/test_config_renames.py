"""Settings that have another name now: rejected in what users write, read in what runs saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w

from motley.config import Config, load_config, read_resolved
from motley.config.renames import RENAMED, with_new_names
from motley.reference import sections
from motley.settings import validate
from tests.conftest import refused, written

KEYS = {setting.key for section in sections() for setting in section.settings}

#: The values of a saved run, under the names of then.
OLD_INCO = {
    "preset": "paper",
    "granularity": "tensor",
    "sign": "theorem",
    "products": "normalized",
    "normalize": False,
    "optimize": False,
    "theta_max": 4.0,
    "element_max": 0.5,
    "epsilon": 0.25,
}
OLD: dict[str, Any] = {
    "server": {
        "average": 0.9,
        "step": 0.5,
        "weights": "samples",
        "min_share": 0.25,
        "statistics": "recalibrate",
        "statistics_every": 2,
        "statistics_clients": "round",
    },
    "training": {"clip": 1.0, "lr_drops": [3, 5], "lr_drop": 0.5},
    "engine": {
        "stack": 2,
        "fused": False,
        "memory_share": 0.25,
        "memory_gib": 2.0,
        "flower": {"most_mib": 8.0},
    },
    "transit": {"upload": "fp16", "noise": 0.5},
    "federation": {"assign": "alternate", "shares": [2.0, 1.0, 1.0, 1.0], "sampling": "round"},
    "model": {"sizes": ["resnet18"], "resnet": {"taps": "effective"}},
    "split": {"name": "grid", "answer": "mean"},
    "method": {"name": "fedimpro", "preset": "official", "inco": OLD_INCO},
    "data": {"transform": {"preset": "plain"}},
    "run": {"keep": 4},
}
NEW = (
    "server.ema_decay=0.9",
    "server.lr=0.5",
    "server.weighting=samples",
    "server.min_fraction=0.25",
    "server.statistics.name=recalibrate",
    "server.statistics.every=2",
    "server.statistics.clients=round",
    "training.max_grad_norm=1.0",
    "training.lr_milestones=[3,5]",
    "training.lr_gamma=0.5",
    "engine.vmap_clients=2",
    "engine.kernels=false",
    "engine.client_state_gpu_fraction=0.25",
    "engine.client_state_host_gib=2.0",
    "engine.flower.max_reply_mib=8.0",
    "uplink.dtype=fp16",
    "uplink.noise=0.5",
    "federation.size_assignment=alternate",
    "federation.size_fractions=[2,1,1,1]",
    "federation.sampler=fedml",
    "model.resnet.trim_dead_taps=true",
    "split.output=mean",
    "method.variant=official",
    "server.inco.variant=paper",
    "server.inco.granularity=tensor",
    "server.inco.sign=theorem",
    "server.inco.products=normalized",
    "server.inco.normalize=false",
    "server.inco.optimize=false",
    "server.inco.theta_max=4.0",
    "server.inco.element_max=0.5",
    "server.inco.epsilon=0.25",
    "data.transform.variant=plain",
    "run.keep_checkpoints=4",
)


def test_new_names_exist_and_old_ones_do_not() -> None:
    assert {rename.key for rename in RENAMED.values()} <= KEYS
    assert not RENAMED.keys() & KEYS


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_rejected_with_the_new_one(old: str, tmp_path: Path) -> None:
    said = f"{old} was renamed to {RENAMED[old].key}."
    assert refused(f"{old}=3") == said
    assert refused(file=written(tmp_path, f"{old} = 3\n")) == said


def test_an_old_value_is_rejected_with_the_new_one() -> None:
    assert refused("model.resnet.taps=effective", "federation.sampling=round").splitlines() == [
        "federation.sampling was renamed to federation.sampler; the value 'round' is now \"fedml\".",
        "model.resnet.taps was renamed to model.resnet.trim_dead_taps; the value 'effective' is now true.",
    ]


def test_a_saved_configuration_is_read_with_its_old_names(tmp_path: Path) -> None:
    assert {override.partition("=")[0] for override in NEW} == {
        rename.key for rename in RENAMED.values()
    }
    saved = tmp_path / "config.toml"
    saved.write_text(tomli_w.dumps(OLD), encoding="utf-8")
    other = ["model.sizes=resnet18", "split.name=grid", "method.name=fedimpro"]
    assert read_resolved(saved) == load_config(file=written(tmp_path, ""), overrides=[*NEW, *other])


def test_new_names_stay_as_they_are() -> None:
    values = load_config().model_dump(mode="json")
    assert with_new_names(values) == values
    assert validate(Config, with_new_names(values)) == load_config()


def test_settings_that_a_run_saved_although_they_had_no_effect_are_left_out(tmp_path: Path) -> None:
    """Earlier versions saved `betas` with SGD, the tables of all model families, and so on."""
    values = load_config(overrides=["training.optimizer.name=sgd"]).model_dump(mode="json")
    expected = validate(Config, values)
    values["training"]["optimizer"]["betas"] = [0.9, 0.999]
    values["server"]["optimizer"] |= {"lr": 1.0, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    values["model"]["vit"] = {"patch": 16, "heads": 6}
    values["server"]["inco"]["epsilon"] = 1e-7
    saved = tmp_path / "config.toml"
    saved.write_text(tomli_w.dumps(values), encoding="utf-8")
    assert read_resolved(saved) == expected
