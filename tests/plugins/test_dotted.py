"""Users' own things by dotted path: what is found, what is refused, and how a run uses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from motley.config import Config, load_config
from motley.core.dotted import path_of
from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.methods import METHODS
from motley.methods.fedprox import FedProx
from motley.runs.checkpoint import fingerprint


def config_of(project: Path, *overrides: str) -> Config:
    return load_config(project / "run.toml", overrides=overrides)


def trained(config: Config, rounds: int = 2) -> str:
    federation = Federation(config)
    server = federation.initial_state()
    for _ in range(rounds):
        server, record = federation.run_round(server)
        assert not record.refused
    return fingerprint(server.state)


def test_debug_and_local_engines_agree_on_users_things(importable: Path) -> None:
    local = trained(config_of(importable))
    assert local == trained(config_of(importable, "engine.name=debug"))
    # Each of them has an effect.
    for change in (
        "method.strength=0",
        "training.optimizer.slower=0.1",
        "data.partition.skip=1",
        "split.name=mine:Halves",
        "server.optimizer.beta=0.9",
        "model.options.hidden=8",
    ):
        assert trained(config_of(importable, change)) != local, change


def test_a_users_stage_reports_and_limits(importable: Path) -> None:
    stages = "server.stages=[{name='mine:Clip', max_norm=0.5}]"
    config = config_of(importable, "server.optimizer.name=none", stages)
    federation = Federation(config)
    names = [stage.name for stage in federation.pipeline]
    assert names.index("clip") == names.index("apply") - 1
    before = federation.initial_state()
    after, record = federation.run_round(before)
    assert record.metrics["clip/norm"] > 0
    changes = [
        (after.state[name] - before.state[name]).flatten() for name in federation.split.parameters
    ]
    assert torch.cat(changes).norm() <= 0.5 + 1e-5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "method.name=yours:Pull",
            "method.name = 'yours:Pull': there is no module 'yours'. Looked in ",
        ),
        (
            "method.name=mine.deeper:Pull",
            "method.name = 'mine.deeper:Pull': there is no module 'mine.deeper' in ",
        ),
        (
            "method.name=mine:Pul",
            "Did you mean 'Pull'? Defined there: Clip, ClipSettings, Halves, Net, Plain, Pull,",
        ),
        (
            "method.name=mine:small",
            "method.name = 'mine:small': is a function; a subclass of motley.Method is expected.",
        ),
        (
            "method.name=mine:Net",
            "is the class Net; a subclass of motley.Method is expected.",
        ),
        ("method.name=mine:", "method.name = 'mine:': should be written package.module:Name."),
        ("method.strengt=1", "method.strengt = 1: unknown key 'strengt'. Did you mean 'strength'?"),
        ("method.strength=x", "method.strength = 'x': should be a valid number"),
        ("method.mu=1", "has no effect with method.name = 'mine:Pull'; it is for 'fedprox'"),
        ("split.name=mine:Pull", "split.name = 'mine:Pull': is the class Pull; a subclass of "),
        (
            "model.sizes=mine:Small",
            "model.sizes = 'mine:Small': model 'mine:Small': there is no 'Small' in ",
        ),
        ("model.sizes=mine:Pull.Settings", "'Pull.Settings'"),
        (
            "model.options.hiden=3",
            "model.options.hiden = 3: unknown option 'hiden'. Did you mean 'hidden'?",
        ),
        ("data.name=mine:few_digit", "Did you mean 'few_digits'?"),
        ("data.name=mine:Net", "a function that returns a motley.data.Dataset is expected."),
        ("data.partition.name=mine:Net", "a subclass of motley.PartitionSettings is expected."),
        ("training.optimizer.name=mine:Net", "a subclass of torch.optim.Optimizer is expected."),
        (
            "training.optimizer.name=torch.optim:LBFGS",
            "its step needs closure; clients call step()",
        ),
        ("training.optimizer.slowr=1", "unknown key 'slowr'. Did you mean 'slower'?"),
        ("training.optimizer.weight_decay=1", "mine:Plain takes no weight_decay."),
        ("server.optimizer.name=mine:Net", "a subclass of motley.ServerOptimizerSettings is"),
        ("server.stages=[{name='mine:Net'}]", "server.stages.0.name = 'mine:Net': is the class"),
        (
            "server.stages=[{name='mine:Clip', max=1}]",
            "server.stages.0.max = 1: unknown key 'max'. Did you mean 'max_norm'?",
        ),
    ],
)
def test_a_wrong_path_or_key_says_what_is_expected(
    importable: Path, override: str, said: str
) -> None:
    if override == "model.sizes=mine:Pull.Settings":
        # It can be called, so it could be a factory. What it builds is looked at before training.
        with pytest.raises(MotleyError, match=r"not as a torch\.nn\.Module"):
            Federation(config_of(importable, override, "federation.clients_per_round=4"))
        return
    with pytest.raises(MotleyError) as raised:
        config_of(importable, override)
    assert said in str(raised.value)


def test_a_stage_must_have_a_place(importable: Path) -> None:
    with pytest.raises(MotleyError) as raised:
        Federation(config_of(importable, "server.optimizer.name=none"))
    assert "server.stages.0.before: unknown stage 'optimizer'. Allowed: apply, " in str(
        raised.value
    )


def test_a_users_partition_is_checked(importable: Path) -> None:
    (importable / "loose.py").write_text(
        "import numpy as np, motley\nfrom motley.data import Partition\n"
        "class Beyond(motley.PartitionSettings):\n"
        "    def split(self, labels, clients, seed):\n"
        "        return Partition.from_owners(np.arange(len(labels) + 9) % clients, clients)\n"
        "class Lists(motley.PartitionSettings):\n"
        "    def split(self, labels, clients, seed):\n"
        "        return [[0], [1], [2], [3]]\n"
    )
    with pytest.raises(MotleyError, match=r"names samples that are not in 0\.\.299"):
        Federation(config_of(importable, "data.partition.name=loose:Beyond"))
    with pytest.raises(MotleyError, match=r"motley\.data\.Partition is expected, not a list"):
        Federation(config_of(importable, "data.partition.name=loose:Lists"))


def test_a_missing_module_is_named_with_the_folders_that_were_searched(importable: Path) -> None:
    with pytest.raises(MotleyError) as raised:
        config_of(importable, "method.name=yours:Pull")
    assert str(importable) in str(raised.value)
    assert str(raised.value).endswith("and among the installed packages.")


def test_an_error_inside_a_module_names_its_file_and_line(importable: Path) -> None:
    (importable / "broken.py").write_text("x = 1\nraise ValueError('no luck')\n")
    (importable / "typo.py").write_text("def f(:\n    pass\n")
    (importable / "needs.py").write_text("import surely_not_installed\n")
    with pytest.raises(MotleyError, match=r"ValueError: no luck \(.*broken.py, line 2\)"):
        config_of(importable, "method.name=broken:Pull")
    with pytest.raises(MotleyError, match=r"SyntaxError: .* \(.*typo.py, line 1\)"):
        config_of(importable, "method.name=typo:Pull")
    with pytest.raises(MotleyError, match=r"failed: .*'surely_not_installed' \(.*needs.py, line 1"):
        config_of(importable, "method.name=needs:Pull")


def test_a_method_whose_declaration_is_wrong_is_refused(importable: Path) -> None:
    (importable / "hasty.py").write_text(
        "import motley, mine\nclass Hasty(motley.Method):\n    Client = mine.PullClient\n"
    )
    with pytest.raises(MotleyError) as raised:
        config_of(importable, "method.name=hasty:Hasty")
    assert "overrides after_backward, and declares own_training = False" in str(raised.value)


def test_torchs_own_optimizers_are_a_dotted_path_away(importable: Path) -> None:
    changes = ["training.optimizer.name=torch.optim:RMSprop", "training.optimizer.alpha=0.9"]
    config = config_of(importable, *changes)
    optimizer = config.training.optimizer
    assert optimizer.lr == 0.01 and optimizer.model_dump()["alpha"] == 0.9
    assert trained(config) == trained(config_of(importable, *changes, "engine.name=debug"))


def test_names_and_options_of_models(importable: Path) -> None:
    config = config_of(
        importable,
        "model={factories = {little = 'mine:small', big = 'mine:small'}, sizes = ['little', 'big'],"
        " options = {hidden = 4, big = {hidden = 8}}}",
        "split.name=grouped",
    )
    federation = Federation(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in federation.split.meta_state.items()}
    assert shapes["little/head.weight"] == (10, 4) and shapes["big/head.weight"] == (10, 8)
    values = config.model_dump(mode="json")
    assert values["model"]["factories"] == {"little": "mine:small", "big": "mine:small"}
    assert Config.model_validate(values) == config


def test_the_path_of_an_object() -> None:
    assert path_of(FedProx) == "motley.methods.fedprox:FedProx"
    assert path_of(lambda: None) is None
    assert path_of(test_the_path_of_an_object) == f"{__name__}:test_the_path_of_an_object"
    assert METHODS[path_of(FedProx)] is FedProx
    assert path_of(3) is None
