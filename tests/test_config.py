"""Configuration: what lies over what, what a new choice takes with it, and what is refused in which words."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from motley.config import Config, load_config, presets, read_resolved
from motley.data.transforms import TransformSettings
from motley.methods import MethodSettings
from motley.server.inco import IncoOff, IncoSettings
from tests.conftest import LogitsSettings, refused, written


@pytest.fixture
def resolved(tmp_path: Path) -> Any:
    """Return a function that saves a configuration as a run does and returns the file."""

    def save(config: Config) -> Path:
        file = tmp_path / "config.toml"
        file.write_bytes(config.to_toml().encode())
        return file

    return save


# --- layers


def test_without_a_file_the_quickstart_preset_is_the_start() -> None:
    assert load_config() == load_config(preset="quickstart")
    assert load_config().preset == "quickstart"
    assert load_config().server.ema_decay == 0.6


def test_a_file_without_a_preset_starts_from_the_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "[training]\nrounds = 7\n"))
    assert config == Config.model_validate({"training": {"rounds": 7}})
    assert config.preset == "" and config.server.ema_decay == 0.0


def test_an_override_lies_over_the_file_and_the_file_over_its_preset(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        'preset = "inco-cifar10"\nseed = 5\n[training]\nrounds = 7\n[training.optimizer]\nlr = 0.5\n',
    )
    config = load_config(file, overrides=["training.rounds=9"])
    assert config.training.rounds == 9
    assert (config.seed, config.training.optimizer.lr) == (5, 0.5)
    assert (config.data.name, config.training.epochs, config.training.optimizer.name) == (
        "cifar10",
        5,
        "adam",
    )
    assert config.preset == "inco-cifar10"


def test_the_preset_of_the_command_line_replaces_that_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'preset = "quickstart"\n[training]\nrounds = 7\n')
    config = load_config(file, preset="motley-cifar10")
    assert (config.preset, config.data.name, config.training.rounds) == (
        "motley-cifar10",
        "cifar10",
        7,
    )


def test_a_preset_can_be_chosen_by_an_override() -> None:
    assert load_config(overrides=["preset=inco-cifar10"]) == load_config(preset="inco-cifar10")


def test_the_last_of_several_overrides_holds() -> None:
    assert load_config(overrides=["seed=2", "training.rounds=4", "seed=3"]).seed == 3


def test_an_override_of_one_key_leaves_its_neighbours() -> None:
    config = load_config(overrides=["training.optimizer.lr=0.25"])
    assert config.training.optimizer.lr == 0.25
    assert config == load_config(overrides=["training.optimizer={lr = 0.25}"])
    assert config.training.epochs == 5


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.path=a b.npz", "a b.npz"),
        ('data.path="quoted.npz"', "quoted.npz"),
        ("data.path='it is \"quoted\"'", 'it is "quoted"'),
        ("data.path=a=b.npz", "a=b.npz"),
        ("data.path =  spaced.npz ", "spaced.npz"),
        ("data.path=C:\\new\\[1].npz", "C:\\new\\[1].npz"),
        ("data.path=", ""),
        ("data.transform.flip=true", True),
        ("data.transform.flip=True", True),
        ("run.tensorboard=false", False),
        ("training.optimizer.lr=1e-2", 0.01),
        ("training.optimizer.lr=1", 1.0),
        ("training.epochs=0.5", 0.5),
        ("federation.size_fractions=[1, 2, 3, 4, 5]", (1.0, 2.0, 3.0, 4.0, 5.0)),
        ("model.sizes=['resnet10', \"resnet18\"]", ("resnet10", "resnet18")),
        ("evaluation.targets=[]", ()),
        ("uplink.dtype=fp16", "fp16"),
    ],
)
def test_overrides_read_as_toml_and_else_as_text(override: str, value: object) -> None:
    config: Any = load_config(overrides=[override])
    for step in override.partition("=")[0].strip().split("."):
        config = getattr(config, step)
    if override.startswith("data.path") and value:
        value = str(Path.cwd() / str(value))
    assert config == value and type(config) is type(value)


@pytest.mark.parametrize(
    "text", ["training.rounds", "=3", "training..rounds=3", ".seed=3", "seed.=3", " =3", ""]
)
def test_an_override_that_is_no_assignment_is_refused(text: str) -> None:
    message = refused(text)
    assert repr(text) in message and "table.key=value" in message


# --- presets


def test_every_packaged_file_is_a_preset_with_a_line_about_it() -> None:
    assert set(presets()) == {
        "digits-small",
        "fedimpro-cifar10",
        "fedin-cifar10",
        "fedrolex-cifar10",
        "fjord-cifar10",
        "har",
        "heart",
        "heterofl-cifar10",
        "inco-cifar10",
        "inco-fashion-mnist",
        "inco-heterofl-cifar10",
        "inco-scalefl-cifar10",
        "inco-vit-cifar10",
        "mnist-writers",
        "motley-cifar10",
        "pfl-cifar10",
        "quickstart",
        "shakespeare-lstm",
        "shakespeare-transformer",
    }
    assert all(len(line) > 20 and not line.startswith(("#", "[")) for line in presets().values())


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_valid_and_survives_being_saved(name: str, resolved: Any) -> None:
    config = load_config(preset=name)
    file = resolved(config)
    assert read_resolved(file) == config
    assert load_config(file) == config
    assert config.preset == name


@pytest.mark.parametrize("name", presets())
def test_a_resolved_configuration_has_every_key_written_out(name: str) -> None:
    config = load_config(preset=name)

    def keys(values: Any) -> Any:
        return (
            {key: keys(value) for key, value in values.items()}
            if isinstance(values, dict)
            else None
        )

    assert keys(tomllib.loads(config.to_toml())) == keys(config.model_dump())


def test_odd_values_survive_being_saved(resolved: Any) -> None:
    config = load_config(
        overrides=[
            "data.path='''a \"b\" \\ 'c' é 漢 [x]'''",
            "data.partition={name = 'file', path = 'ä b.json'}",
            "server.inco={variant = 'paper', epsilon = 1e-30, theta_max = 5}",
            "training.optimizer.lr=1.2345678901234567e-300",
            "seed=9007199254740993",
        ]
    )
    assert config.data.path == str(Path.cwd() / "a \"b\" \\ 'c' é 漢 [x]")
    assert read_resolved(resolved(config)) == config


def test_the_inco_presets_are_the_papers_setting() -> None:
    config = load_config(preset="inco-cifar10")
    assert (config.federation.clients, config.federation.clients_per_round) == (100, 10)
    assert (config.training.rounds, config.training.epochs, config.training.batch_size) == (
        500,
        5,
        64,
    )
    assert (config.training.optimizer.name, config.training.optimizer.lr) == ("adam", 1e-3)
    assert config.data.partition.model_dump() == {
        "name": "dirichlet",
        "alpha": 0.5,
        "min_size": 10,
        "numpy_seed": -1,
    }
    assert config.model.sizes == ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
    assert (config.model.resnet.stem, config.model.resnet.width) == ("imagenet", 1.0)
    assert config.server.inco == IncoSettings(variant="official")
    assert (config.server.ema_decay, config.split.normalization_statistics) == (0.0, "shared")


def test_the_fedin_and_fedimpro_presets_are_the_papers_settings() -> None:
    config = load_config(preset="fedin-cifar10")
    assert (config.training.rounds, config.training.epochs, config.training.batch_size) == (
        500,
        5,
        16,
    )
    assert (config.method.name, config.split.name, config.training.drop_last) == (
        "fedin",
        "depth",
        True,
    )
    assert (config.federation.clients, config.model.resnet.stem) == (100, "imagenet")
    config = load_config(preset="fedimpro-cifar10")
    assert (config.training.rounds, config.training.epochs, config.training.batch_size) == (
        1000,
        1,
        128,
    )
    optimizer = config.training.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (
        "sgd",
        0.1,
        0,
        1e-4,
    )
    assert (config.federation.clients, config.federation.clients_per_round) == (10, 5)
    assert (config.model.resnet.stem, config.server.weighting) == ("cifar", "samples")
    assert config.data.transform.cutout == 0 and config.data.partition.model_dump()["alpha"] == 0.1


# --- a new choice takes with it what belonged to the old one


def test_another_partition_drops_the_settings_of_the_old_one(resolved: Any) -> None:
    file = resolved(
        load_config(overrides=["data.partition.alpha=0.2", "data.partition.min_size=3"])
    )
    for start in ({}, {"file": file}):
        iid = load_config(overrides=["data.partition.name=iid"], **start)
        assert iid.data.partition.model_dump() == {"name": "iid"}
        shards = load_config(
            overrides=["data.partition.name=shards", "data.partition.shards_per_client=3"],
            **start,
        )
        assert shards.data.partition.model_dump() == {"name": "shards", "shards_per_client": 3}
        quantity = load_config(overrides=["data.partition.name=quantity"], **start)
        assert quantity.data.partition.model_dump() == {
            "name": "quantity",
            "alpha": 0.5,
            "min_size": 10,
        }


def test_the_same_choice_again_drops_nothing(resolved: Any) -> None:
    file = resolved(load_config(overrides=["data.partition.alpha=0.2", "data.transform.resize=9"]))
    again = load_config(
        file,
        overrides=[
            "data.partition.name=dirichlet",
            "data.name=digits",
            "data.transform.variant=plain",
        ],
    )
    assert again == load_config(file)
    assert again.data.partition.model_dump()["alpha"] == 0.2 and again.data.transform.resize == 9


def test_naming_what_is_chosen_by_default_drops_nothing(tmp_path: Path) -> None:
    text = "[data.transform]\nresize = 9\n[data.partition]\nalpha = 0.2\n[server.statistics]\n"
    overrides = [
        "data.name=digits",
        "data.transform.variant=plain",
        "data.partition.name=dirichlet",
    ]
    overrides += ["method.name=fedavg", "server.inco.variant=off"]
    file = written(tmp_path, text)
    assert load_config(file, overrides=overrides) == load_config(file)


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_of_a_choice_and_its_settings_is_free(backwards: bool) -> None:
    overrides = ["data.partition.name=dirichlet-equal", "data.partition.alpha=0.1"]
    overrides += ["server.inco.variant=paper", "server.inco.epsilon=0.5"]
    config = load_config(overrides=overrides[::-1] if backwards else overrides)
    assert config.data.partition.model_dump() == {"name": "dirichlet-equal", "alpha": 0.1}
    assert config.server.inco == IncoSettings(variant="paper", epsilon=0.5)


def test_an_override_that_the_chosen_partition_does_not_know_is_refused_in_any_order() -> None:
    for overrides in (["name=iid", "alpha=0.1"], ["alpha=0.1", "name=iid"]):
        message = refused(*(f"data.partition.{override}" for override in overrides))
        assert message == (
            "data.partition.alpha = 0.1: has no effect with data.partition.name = 'iid'; it is for 'dirichlet', "
            "'dirichlet-equal' and 'quantity'."
        )


def test_another_method_drops_the_settings_of_the_old_one_but_keeps_inco(
    logits: str, resolved: Any
) -> None:
    own = load_config(
        overrides=["method.name=logits", "method.temperature=3", "server.ema_decay=0"]
    )
    assert own.method == LogitsSettings(name="logits", temperature=3)
    text = own.to_toml().replace('variant = "off"', 'variant = "official"')
    file = resolved(own)
    assert read_resolved(file) == own
    file.write_text(text)
    changed = load_config(file, overrides=["method.name=fedavg"])
    assert changed.method == MethodSettings()
    assert changed.server.inco == IncoSettings(variant="official")


def test_another_inco_variant_drops_the_settings_of_the_old_one(resolved: Any) -> None:
    file = resolved(load_config(preset="inco-cifar10", overrides=["server.inco.epsilon=0.5"]))
    assert load_config(file, overrides=["server.inco.variant=official"]).server.inco.epsilon == 0.5
    paper = load_config(file, overrides=["server.inco.variant=paper"]).server.inco
    assert (
        paper == IncoSettings(variant="paper") and paper.epsilon == 1e-30 and paper.sign == "minus"
    )
    off = load_config(file, overrides=["server.inco.variant=off"]).server.inco
    assert off == IncoOff() and not off.active


def test_another_transform_variant_drops_the_settings_of_the_old_one(resolved: Any) -> None:
    for start in (
        {"preset": "inco-cifar10"},
        {"file": resolved(load_config(preset="inco-cifar10"))},
    ):
        assert load_config(**start).data.transform.cutout == 16
        other = load_config(overrides=["data.transform.variant=fedimpro"], **start)
        assert (other.data.transform.cutout, other.data.transform.crop_padding) == (0, 4)
        plain = load_config(overrides=["data.transform.variant=plain"], **start)
        assert plain.data.transform == TransformSettings()


def test_another_data_set_keeps_only_the_transforms_variant(resolved: Any) -> None:
    file = resolved(
        load_config(preset="inco-cifar10", overrides=["data.root=/d", "data.partition.alpha=0.1"])
    )
    for start in ({"file": file}, {"preset": "inco-cifar10"}):
        data = load_config(overrides=["data.name=fashion-mnist"], **start).data
        assert data.transform == TransformSettings(variant="inco", resize=32)
    moved = load_config(file, overrides=["data.name=fashion-mnist", "data.transform.flip=true"])
    assert moved.data.transform == TransformSettings(variant="inco", resize=32, flip=True)
    assert moved.data.root == "/d" and moved.data.partition.model_dump()["alpha"] == 0.1


def test_another_data_set_drops_the_users_own_file(resolved: Any) -> None:
    file = resolved(load_config(overrides=["data.name=npz", "data.path=mine.npz"]))
    assert read_resolved(file).data.path == str(Path.cwd() / "mine.npz")
    assert load_config(file, overrides=["data.name=digits"]).data == load_config().data
    assert load_config(overrides=["data.path=mine.npz", "data.name=npz"]).data.path == str(
        Path.cwd() / "mine.npz"
    )


# --- transforms


@pytest.mark.parametrize(
    ("variant", "data", "expected"),
    [
        ("plain", "digits", {"resize": 16}),
        ("plain", "cifar10", {}),
        ("plain", "npz", {}),
        ("inco", "fashion-mnist", {"resize": 32}),
        ("fedimpro", "fashion-mnist", {"resize": 32}),
        ("inco-vit", "fashion-mnist", {"channels": 3, "resize": 224}),
        (
            "inco",
            "cifar10",
            {
                "mean": (0.4914, 0.4822, 0.4465),
                "std": (0.2470, 0.2435, 0.2616),
                "crop_padding": 4,
                "flip": True,
                "cutout": 16,
            },
        ),
        (
            "fedimpro",
            "cifar10",
            {
                "mean": (0.4914, 0.4822, 0.4465),
                "std": (0.2470, 0.2435, 0.2616),
                "crop_padding": 4,
                "flip": True,
            },
        ),
        (
            "inco-vit",
            "cifar10",
            {
                "mean": (0.5,) * 3,
                "std": (0.5,) * 3,
                "resize": 224,
                "resized_crop": True,
                "flip": True,
            },
        ),
    ],
)
def test_a_transform_variant_fills_what_it_means_for_the_data_set(
    variant: str, data: str, expected: dict[str, Any]
) -> None:
    config = load_config(overrides=[f"data.name={data}", f"data.transform.variant={variant}"])
    changed = config.data.transform.model_dump(exclude_defaults=True)
    assert {key: value for key, value in changed.items() if key != "variant"} == expected
    assert config.data.transform.variant == variant


def test_what_the_user_gives_lies_over_the_transform_variant() -> None:
    transform = load_config(
        preset="inco-cifar10", overrides=["data.transform.cutout=8"]
    ).data.transform
    assert (transform.cutout, transform.crop_padding, transform.variant) == (8, 4, "inco")


def test_a_transform_variant_of_other_data_sets_is_refused() -> None:
    message = refused("data.transform.variant=inco")
    assert message == (
        "data.transform.variant = 'inco': is defined for cifar10, cinic10, fashion-mnist, svhn, not for "
        "'digits'. "
        "Use data.transform.variant = 'plain', which is defined for every data set."
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mean=[0.5, 0.5]", "std=[0.5]"], "mean has 2 values and std 1"),
        (["mean=[0.5]", "std=[0.0]"], "std = [0.0] must be positive"),
        (["resize=0", "resized_crop=true"], "resized_crop needs resize"),
        (["resized_crop=true", "crop_padding=4"], "exclude each other"),
        (["cutout=-1"], "data.transform.cutout = -1: should be greater than or equal to 0."),
    ],
)
def test_transforms_that_cannot_work_are_refused(overrides: list[str], said: str) -> None:
    message = refused(*(f"data.transform.{override}" for override in overrides))
    assert message.startswith("data.transform") and said in message


# --- paths, and lists on a command line


def test_paths_in_a_file_start_from_its_folder_and_overrides_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.toml").write_text(
        '[data]\nname = "npz"\npath = "mine.npz"\nroot = "/data"\n[model]\nweights = "../w.safetensors"\n'
    )
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("sub/c.toml"))
    assert config.data.path == str(tmp_path / "sub" / "mine.npz")
    assert config.data.root == "/data"
    assert Path(config.model.weights).resolve() == tmp_path / "w.safetensors"
    assert load_config(Path("sub/c.toml"), overrides=["data.path=mine.npz"]).data.path == str(
        tmp_path / "mine.npz"
    )


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("['resnet10']", ("resnet10",)),
        ("[resnet10]", ("resnet10",)),
        ("[resnet10, resnet14]", ("resnet10", "resnet14")),
        ("[resnet10,'resnet14',]", ("resnet10", "resnet14")),
        ("resnet10", ("resnet10",)),
        ("resnet10,resnet14", ("resnet10", "resnet14")),
    ],
)
def test_a_list_may_be_given_as_a_shell_leaves_it(text: str, sizes: tuple[str, ...]) -> None:
    assert load_config(overrides=[f"model.sizes={text}"]).model.sizes == sizes


def test_one_number_is_a_list_of_one() -> None:
    assert load_config(overrides=["evaluation.targets=0.5"]).evaluation.targets == (0.5,)


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 7\n", encoding="utf-8-sig")
    assert load_config(file).seed == 7
