"""Settings that have another name now: rejected in what users write, read in what runs saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from motley.config import Config, load_config, read_resolved
from motley.reference import sections
from motley.renames import RENAMED, with_new_names
from motley.settings import validate
from tests.conftest import refused, written

KEYS = {setting.key for section in sections() for setting in section.settings}

#: The values of a saved run that were not the defaults, under the names of then.
OLD = {
    "server": {"average": 0.9, "step": 0.5, "weights": "samples", "min_share": 0.25},
    "training": {"clip": 1.0, "lr_drops": [3, 5], "lr_drop": 0.5},
    "engine": {"stack": 2, "fused": False, "memory_share": 0.25, "memory_gib": 2.0, "flower": {"most_mib": 8.0}},
    "transit": {"upload": "fp16", "noise": 0.5},
    "federation": {"assign": "alternate", "shares": [1.0, 2.0, 1.0, 1.0, 1.0], "sampling": "round"},
    "model": {"resnet": {"taps": "effective"}},
    "run": {"keep": 4},
}


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
    new = [
        "server.ema_decay=0.9",
        "server.lr=0.5",
        "server.weighting=samples",
        "server.min_fraction=0.25",
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
        "federation.size_fractions=[1,2,1,1,1]",
        "federation.sampler=fedml",
        "model.resnet.trim_dead_taps=true",
        "run.keep_checkpoints=4",
    ]
    assert len(new) == len(RENAMED) - 1  # split.answer belongs to one split only
    saved = tmp_path / "config.toml"
    saved.write_text(tomli_w.dumps(OLD), encoding="utf-8")
    assert read_resolved(saved) == load_config(file=written(tmp_path, ""), overrides=new)


def test_new_names_stay_as_they_are() -> None:
    values = load_config().model_dump(mode="json")
    assert with_new_names(values) == values
    assert with_new_names({"split": {"name": "grid", "answer": "mean"}}) == {
        "split": {"name": "grid", "output": "mean"}
    }
    assert validate(Config, with_new_names(values)) == load_config()
