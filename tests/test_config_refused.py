"""Configurations that are refused, and in which words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.config import ModelSettings, ServerSettings, load_config
from motley.core.errors import MotleyError
from motley.data.dataset import Dataset, Examples
from motley.data.settings import DataSettings
from motley.federation import Federation
from tests.conftest import refused, tiny_config, written

# --- what is refused: keys


def tables(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every table of a configuration, the root's first."""
    yield path
    for name, value in values.items():
        if isinstance(value, dict):
            yield from tables(value, (*path, name))


@pytest.mark.parametrize(
    "path", list(tables(load_config().model_dump())), ids=lambda path: ".".join(path) or "root"
)
def test_an_unknown_key_at_any_level_names_key_value_allowed_and_nearest(
    path: tuple[str, ...],
) -> None:
    fields: dict[str, Any] = load_config().model_dump()
    for step in path:
        fields = fields[step]
    if path == ("model",):
        fields = dict.fromkeys(ModelSettings.model_fields)  # families of no model have no table
    if path == ("server",):
        fields = dict.fromkeys(ServerSettings.model_fields)  # an empty list of stages is left out
    if path == ("data",):
        fields = dict.fromkeys(DataSettings.model_fields)  # only data.name = "files" has data.files
    near = next(iter(fields))
    wrong = near + near[-1]
    label = ".".join((*path, wrong))
    assert refused(f"{label}=7") == (
        f"{label} = 7: unknown key {wrong!r}. Did you mean {near!r}? Allowed: {', '.join(sorted(fields))}."
    )


def test_an_unknown_key_in_a_file_is_refused_too(tmp_path: Path) -> None:
    assert refused(file=written(tmp_path, "[federation]\nclient = 3\n")).startswith(
        "federation.client = 3: unknown key 'client'. Did you mean 'clients'?"
    )
    assert refused(file=written(tmp_path, "[trainnig]\nrounds = 3\n")).startswith(
        "trainnig: unknown key 'trainnig'. Did you mean 'training'?"
    )


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    message = refused("training.zzzzz=1")
    assert "Did you mean" not in message and "Allowed: batch_size, drop_last" in message


def test_every_problem_is_named_at_once() -> None:
    lines = refused(
        "training.rounds=0", "federation.clients=many", "server.avrage=0.5"
    ).splitlines()
    assert [line.partition(" ")[0] for line in lines] == [
        "federation.clients",
        "training.rounds",
        "server.avrage",
    ]


# --- what is refused: values


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.rounds=ten", "training.rounds = 'ten': should be a valid integer"),
        ("training.rounds=2.5", "training.rounds = 2.5: should be a valid integer"),
        ("training.rounds=0", "training.rounds = 0: should be greater than or equal to 1."),
        ("training.rounds=true", "training.rounds = True: should be a number."),
        ("training.rounds=[3]", "training.rounds = [3]: should be a valid integer."),
        ("training.optimizer.lr=false", "training.optimizer.lr = False: should be a number."),
        ("training.optimizer.lr=nan", "training.optimizer.lr = nan: should be a finite number."),
        ("training.optimizer.lr=inf", "training.optimizer.lr = inf: should be a finite number."),
        (
            "training.optimizer.name=adan",
            "training.optimizer.name: unknown optimizer 'adan'. Did you mean 'adam'? Allowed: adam, adamw, sgd.",
        ),
        ("data.transform.flip=maybe", "data.transform.flip = 'maybe': should be a valid boolean"),
        ("data.path=7", "data.path = 7: should be a valid string."),
        ("seed=9223372036854775808", "seed = 9223372036854775808: should be below 2^63."),
        ("engine.threads=100000", "engine.threads = 100000: should be less than or equal to 1024."),
        ("seed=-1", "seed = -1: should be greater than or equal to 0."),
        ("server.ema_decay=1", "server.ema_decay = 1: should be less than 1."),
        (
            "federation.size_fractions=[inf, 1, 1, 1, 1]",
            "federation.size_fractions.0 = inf: should be a finite number.",
        ),
        ("model.sizes=7", "model.sizes = 7: should be a list."),
        (
            "model.sizes=resnet1",
            "model.sizes = 'resnet1': unknown model 'resnet1'. Did you mean 'resnet1",
        ),
        ("model.sizes=[]", "at least one size is needed."),
        ("model.sizes=['resnet10', 'resnet10']", "a size is named twice."),
        ("model.sizes=['resnet12']", "unknown model 'resnet12'. Did you mean 'resnet1"),
        ("training=5", "training = 5: is a table; set a key of it: rounds, epochs,"),
        ("data.partition=iid", "data.partition = 'iid': is a table; set a key of it: name."),
        ("data.transform=inco", "data.transform = 'inco': is a table; set a key of it: variant,"),
        ("data=cifar10", "data = 'cifar10': is a table; set a key of it: name,"),
        ("method=fedavg", "method = 'fedavg': is a table; set a key of it: name."),
        (
            "server.inco.variant=paper2",
            "server.inco.variant = 'paper2': should be 'off', 'paper' or 'official'.",
        ),
        ("data.partition={name = 'file'}", "data.partition.path: is required and was not given."),
        ("data.partition.alpha=0", "data.partition.alpha = 0: should be greater than 0."),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused(override: str, said: str) -> None:
    message = refused(override)
    assert (
        said in message and message.startswith(override.partition("=")[0]) and "\n" not in message
    )


def test_a_table_in_place_of_a_value_is_refused() -> None:
    assert refused("seed.x=1") == "seed: should be a valid integer."


def test_a_text_in_place_of_a_table_below_a_new_choice_is_refused() -> None:
    assert refused("data.transform=inco", "data.name=cifar10").startswith(
        "data.transform = 'inco': is a table"
    )


@pytest.mark.parametrize(
    ("setting", "given", "near"),
    [
        ("method.name", "fedavgg", "fedavg"),
        ("data.name", "cifar-10", "cifar10"),
        ("data.partition.name", "dirichlett", "dirichlet"),
        ("data.transform.variant", "incoo", "inco"),
        ("split.name", "dept", "depth"),
        ("preset", "inco-cifar", "inco-cifar10"),
    ],
)
def test_an_unknown_name_is_refused_with_its_setting_and_the_nearest(
    setting: str, given: str, near: str
) -> None:
    message = refused(f"{setting}={given}")
    assert (
        setting in message
        and repr(given) in message
        and f"Did you mean {near!r}? Allowed: " in message
    )


@pytest.mark.parametrize(
    "setting", ["method.name", "data.name", "data.partition.name", "data.transform.variant"]
)
@pytest.mark.parametrize("value", ["[1]", "3", "{a = 1}", "true"])
def test_a_name_that_is_no_text_is_refused(setting: str, value: str) -> None:
    message = refused(f"{setting}={value}")
    assert message.startswith(f"{setting}: unknown ") and "Allowed: " in message


def test_an_alias_of_a_split_is_recorded_under_its_own_name() -> None:
    assert load_config(overrides=["split.name=layer-wise"]).split.name == "depth"


# --- what is refused: combinations


def test_more_clients_a_round_than_clients_are_refused() -> None:
    assert refused("federation.clients=9", "federation.clients_per_round=10") == (
        "federation.clients_per_round = 10: there are only federation.clients = 9 clients."
    )
    assert load_config(overrides=["federation.clients=10", "federation.clients_per_round=10"])


def test_fewer_clients_than_sizes_are_refused() -> None:
    few = ["federation.clients_per_round=1"]
    assert "federation.clients = 4: fewer than the 5 sizes" in refused("federation.clients=4", *few)
    assert load_config(overrides=["federation.clients=5", *few])


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ("[1, 1]", "federation.size_fractions = [1.0, 1.0]: 5 fractions are needed, one per size."),
        ("[1, 1, 1, 1, 1, 1]", "5 fractions are needed"),
        ("[1, 1, -1, 1, 1]", "must not be negative"),
        (
            "[0, 0, 0, 0, 0]",
            "federation.size_fractions = [0.0, 0.0, 0.0, 0.0, 0.0]: at least one fraction must be above 0.",
        ),
    ],
)
def test_shares_that_do_not_fit_the_sizes_are_refused(shares: str, said: str) -> None:
    assert said in refused(f"federation.size_fractions={shares}")


def test_inco_with_a_method_that_exchanges_no_weights_is_refused(logits: str) -> None:
    plain = ["method.name=logits", "server.ema_decay=0"]
    assert load_config(overrides=plain).method.name == "logits"
    message = refused("method.name=logits", "server.inco.variant=official")
    assert message.startswith("server.inco.variant = 'official': 'logits' exchanges no weights")
    assert "server.inco.variant = 'off'" in message


def dataset() -> Dataset:
    """Return a data set of random images."""
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (120, 8, 8, 1), dtype=np.uint8)
    examples = Examples(images, np.arange(120, dtype=np.int64) % 10)
    return Dataset("toy", examples, examples, classes=10)


def test_one_size_for_everybody_refuses_several() -> None:
    with pytest.raises(
        MotleyError, match=r"model\.sizes = .*split\.name = 'homogeneous' takes exactly one size"
    ):
        Federation(tiny_config("split.name=homogeneous"), dataset=dataset())


def test_inco_on_sizes_without_a_pair_of_layers_is_refused() -> None:
    shallow = tiny_config("model.sizes=['resnet10']", "server.inco.variant=official")
    with pytest.raises(
        MotleyError,
        match=r"server\.inco\.variant = 'official': the models .* have no layers of one shape",
    ):
        Federation(shallow, dataset=dataset())


# --- files that are none


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "none.toml"
    assert refused(file=file) == f"{file}: there is no such configuration file."


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert refused(file=tmp_path).startswith(f"{tmp_path}: cannot be read: ")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00binary\x80", b"\x89PNG\r\n\x1a\n\x00\x00"])
def test_a_binary_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "image.toml"
    file.write_bytes(content)
    assert refused(file=file).startswith(f"{file}: cannot be read: ")


@pytest.mark.parametrize(
    "text", ["[training\nrounds = 3", "rounds = ", "seed = 1\nseed = 2\n", "\x00"]
)
def test_malformed_toml_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    message = refused(file=written(tmp_path, text))
    assert message.startswith(f"{tmp_path / 'mine.toml'}: is not valid TOML: ")
    assert "(at line " in message or "(at end of document)" in message


def test_a_file_is_read_as_utf_8_whatever_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, '[data]\nname = "npz"\npath = "größe.npz"\n')
    monkeypatch.setattr("io.text_encoding", lambda encoding, stacklevel=2: encoding or "latin-1")
    assert load_config(file).data.path == str(tmp_path / "größe.npz")


def test_a_run_can_be_resumed_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(
        overrides=["data.name=npz", "data.path=mine.npz", "model.weights=sub/w.safetensors"]
    )
    monkeypatch.chdir("/")
    assert config.data.path == str(tmp_path / "mine.npz")
    assert config.model.weights == str(tmp_path / "sub" / "w.safetensors")
    assert load_config(overrides=["data.root=/data"]).data.root == "/data"
