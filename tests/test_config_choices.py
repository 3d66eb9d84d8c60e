"""Tables with a choice: which keys each choice has, and what a new choice in a higher layer drops."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
from pydantic import SerializeAsAny

from motley.client.training import OPTIMIZERS, AdamSettings, SGDSettings, TrainingSettings
from motley.config import Config, load_config, path_settings
from motley.core.errors import MotleyError
from motley.core.registry import Registry
from motley.methods import METHODS, Method, MethodSettings
from motley.server.inco import IncoSettings
from motley.settings import Choice, FilePath, RegistryChoice, Settings, validate
from tests.conftest import refused, written

# ---- a key without an effect


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["training.optimizer.name=sgd", "training.optimizer.betas=[0.9,0.99]"],
            "training.optimizer.betas = [0.9, 0.99]: has no effect with training.optimizer.name = 'sgd'; it is for "
            "'adam' and 'adamw'.",
        ),
        (
            ["training.optimizer.momentum=0.9"],
            "training.optimizer.momentum = 0.9: has no effect with training.optimizer.name = 'adam'; it is for 'sgd'.",
        ),
        (
            ["server.optimizer.name=momentum", "server.optimizer.beta2=0.9"],
            "server.optimizer.beta2 = 0.9: has no effect with server.optimizer.name = 'momentum'; it is for 'adam' and "
            "'yogi'.",
        ),
        (
            ["server.optimizer.lr=0.1"],
            "server.optimizer.lr = 0.1: has no effect with server.optimizer.name = 'none'; it is for 'momentum', "
            "'adam', 'yogi' and 'adagrad'.",
        ),
        (
            ["server.statistics.every=2"],
            "server.statistics.every = 2: has no effect with server.statistics.name = 'averaged'; it is for "
            "'recalibrate'.",
        ),
        (
            ["server.inco.epsilon=0.1"],
            "server.inco.epsilon = 0.1: has no effect with server.inco.variant = 'off'; it is for 'paper' and "
            "'official'.",
        ),
        (
            ["split.rates=[1,0.5]"],
            "split.rates = [1, 0.5]: has no effect with split.name = 'depth'; it is for 'width', 'grid' and 'ordered'.",
        ),
        (
            ["model.sizes=[resnet10]", "model.vit.heads=4"],
            "model.vit.heads = 4: has no effect with model.sizes = ['resnet10']; it is for vit1, vit2, vit3, vit4, "
            "vit6, vit8, vit9, vit10, vit11, vit12.",
        ),
    ],
)
def test_a_key_without_an_effect_is_an_error_that_names_the_choice(
    overrides: list[str], said: str
) -> None:
    assert refused(*overrides) == said


def test_problems_in_tables_with_a_choice_are_reported_with_all_others() -> None:
    lines = refused(
        "training.rounds=0", "training.optimizer.lr=-1", "split.name=dept", "server.attempts=0"
    ).splitlines()
    assert [line.split(" ")[0].rstrip(":") for line in lines] == [
        "split.name",
        "training.rounds",
        "training.optimizer.lr",
        "server.attempts",
    ]


def test_an_unknown_choice_is_an_error_that_names_the_allowed_ones() -> None:
    said = refused("training.optimizer.name=adan")
    allowed = "unknown optimizer 'adan'. Did you mean 'adam'? Allowed: adam, adamw, sgd."
    assert said == f"training.optimizer.name: {allowed}"
    with pytest.raises(MotleyError, match=re.escape(allowed)):
        OPTIMIZERS.validate({"name": "adan"})


def test_a_choice_has_the_class_of_its_name() -> None:
    assert TrainingSettings.model_validate({}).optimizer == AdamSettings()
    adamw = TrainingSettings.model_validate({"optimizer": {"name": "adamw"}}).optimizer
    assert adamw == AdamSettings(name="adamw") and adamw.model_dump()["betas"] == (0.9, 0.999)
    assert OPTIMIZERS.validate({"name": "sgd", "momentum": 0.5}) == SGDSettings(momentum=0.5)


def test_only_used_families_have_a_table() -> None:
    model = load_config(overrides=["model.sizes=[mlp1,vit8]", "split.name=grouped"]).model
    assert model.mlp is not None and model.vit is not None and model.resnet is None
    assert "resnet" not in model.model_dump() and {"mlp", "vit"} <= model.model_dump().keys()


# ---- layers


def test_a_new_optimizer_drops_the_settings_of_the_old_one(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[training.optimizer]\nname = "sgd"\nlr = 0.1\nmomentum = 0.9\nweight_decay = 0.1\n',
    )
    assert (
        load_config(file, overrides=["training.optimizer.name=adam"]).training.optimizer
        == AdamSettings()
    )
    same = load_config(file, overrides=["training.optimizer.name=sgd", "training.optimizer.lr=0.2"])
    assert same.training.optimizer == SGDSettings(lr=0.2, momentum=0.9, weight_decay=0.1)


def test_an_alias_is_no_new_choice(tmp_path: Path) -> None:
    file = written(tmp_path, '[split]\nname = "exits"\ncuts = [1, 2]\nrates = [1.0, 0.5]\n')
    split = load_config(file, overrides=["split.name=grid"]).split
    assert split.model_dump()["cuts"] == (1, 2)


def test_keys_of_every_choice_stay(tmp_path: Path) -> None:
    text = '[split]\nnormalization_statistics = "per-size"\n[server.inco]\nvariant = "paper"\nepsilon = 0.5\n'
    config = load_config(
        written(tmp_path, text), overrides=["split.name=width", "method.name=fedprox"]
    )
    assert config.split.normalization_statistics == "per-size"
    assert config.server.inco == IncoSettings(variant="paper", epsilon=0.5)


def test_another_engine_keeps_all_settings(tmp_path: Path) -> None:
    file = written(tmp_path, '[engine]\ndevice = "cpu"\nthreads = 2\n')
    engine = load_config(file, overrides=["engine.name=debug"]).engine
    assert (engine.name, engine.device, engine.threads) == ("debug", "cpu", 2)


def test_other_models_drop_the_tables_of_families_that_are_not_used(tmp_path: Path) -> None:
    file = written(
        tmp_path, '[model]\nsizes = ["resnet10"]\nprojection = 8\n[model.resnet]\nwidth = 0.5\n'
    )
    model = load_config(file, overrides=["model.sizes=mlp1,mlp2"]).model
    assert model.resnet is None and model.projection == 8
    again = load_config(file, overrides=["model.sizes=[resnet14]"]).model
    assert again.resnet is not None and again.resnet.width == 0.5


# ---- a choice that the library does not have


class Base(Settings):
    """A table."""

    lasting = ("common",)

    name: str = "plain"
    common: int = 0


class Special(Base):
    """A table with more keys."""

    variants: ClassVar[dict[str, dict[str, int]]] = {"weak": {}, "strong": {"power": 9}}

    name: str = "special"
    variant: str = "weak"
    power: int = 1
    range: int = 1


class Outer(Settings):
    """A table with a choice."""

    inner: Annotated[SerializeAsAny[Base], Choice("plain", {"plain": Base, "special": Special})] = (
        Base()
    )


def test_a_choice_of_ones_own() -> None:
    assert validate(Outer, {"inner": {"common": 3}}).inner == Base(common=3)
    strong = validate(Outer, {"inner": {"name": "special", "variant": "strong", "range": 2}}).inner
    assert strong.model_dump() == {
        "name": "special",
        "common": 0,
        "variant": "strong",
        "power": 9,
        "range": 2,
    }
    with pytest.raises(
        MotleyError, match=r"^inner.power = 2: has no effect with inner.name = 'plain'; it is for"
    ):
        validate(Outer, {"inner": {"power": 2}})


def test_a_new_variant_keeps_name_and_lasting_keys() -> None:
    choice = Choice("plain", {"plain": Base, "special": Special})
    below = {"name": "special", "variant": "strong", "common": 5, "power": 7}
    assert choice.kept_below(below, {"range": 3}) == below
    assert choice.kept_below(below, {"variant": "strong"}) == below
    assert choice.kept_below(below, {"variant": "weak"}) == {"name": "special", "common": 5}
    assert choice.kept_below(below, {"name": "plain"}) == {"common": 5}


def test_a_registry_can_grow_after_the_choice_was_declared() -> None:
    registry: Registry[type[Base]] = Registry("thing")
    choice = RegistryChoice("plain", registry, lambda item: item)
    registry.register("plain", "")(Base)
    registry.register("special", "", aliases=("extra",))(Special)
    assert choice.class_of({"name": "extra"}) is Special
    assert choice.unknown_name("inner", "plan").startswith(
        "inner.name: unknown thing 'plan'. Did you mean 'plain'?"
    )


# ---- paths


class WithFileSettings(MethodSettings):
    """A method with a file."""

    table: FilePath = ""
    """A file."""


class WithFile(Method):
    """A method that reads a file."""

    Settings = WithFileSettings


def test_a_path_is_declared_by_its_type(tmp_path: Path) -> None:
    assert set(path_settings()) == {
        ("data", "path"),
        ("data", "files", "test"),
        ("data", "root"),
        ("data", "partition", "path"),
        ("public", "path"),
        ("model", "weights"),
        ("federation", "budgets"),
    }
    METHODS.register("with-file", "a toy")(WithFile)
    try:
        assert ("method", "table") in path_settings()
        config = load_config(written(tmp_path, '[method]\nname = "with-file"\ntable = "a.csv"\n'))
        assert config.method.model_dump()["table"] == str(tmp_path / "a.csv")
    finally:
        del METHODS._entries["with-file"]


def test_a_configuration_needs_no_layers() -> None:
    config = Config.model_validate(
        {"training": {"optimizer": {"name": "sgd"}}, "method": {"name": "InCoAvg"}}
    )
    assert config.training.optimizer == SGDSettings() and config.server.inco.active
