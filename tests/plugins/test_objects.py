"""`motley.Federation` from Python objects."""

from __future__ import annotations

import gc
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import motley
from motley.config import load_config
from motley.core.errors import MotleyError
from motley.core.part import take
from motley.data import Dataset, Examples, Partition, load_dataset
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.run import start_run


@pytest.fixture
def mine(importable: Path) -> Any:
    """Return the user's module."""
    return importlib.import_module("mine")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    whole = load_dataset("digits")
    return Dataset("few", whole.train.rows(slice(300)), whole.test.rows(slice(100)), 10)


def small_net(hidden: int = 8) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def large_net() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 10)
    )


QUICK = {"batch_size": 32}


def test_objects_give_the_bits_of_the_same_configuration(mine: Any, importable: Path) -> None:
    config = load_config(importable / "run.toml")
    federation = motley.Federation(
        models={"mine:small": mine.small, "mine:large": mine.large},
        data=mine.few_digits,
        partition=mine.Stripes(),
        clients=4,
        clients_per_round=2,
        method=mine.Pull.configure(strength=0.2),
        server=[
            mine.Clip.configure(before="optimizer", max_norm=0.5),
            motley.ServerOptimizer(mine.SignStep),
        ],
        training={"rounds": 3, "batch_size": 16, "optimizer": mine.Plain},
        seed=3,
        settings={"run": {"checkpoint_every": 1, "tensorboard": False}},
    )
    values = federation.config.model_dump(mode="json")
    assert values["model"].pop("factories") == {name: name for name in ("mine:small", "mine:large")}
    assert values == config.model_dump(mode="json")

    plain = Federation(config)
    server = plain.initial_state()
    for record in federation.run():
        server, expected = plain.run_round(server)
        assert record.scores == expected.scores and record.round == expected.round_number
        assert record.accuracy == pytest.approx(
            np.mean([score.value for score in expected.scores.values()])
        )
    assert record.round == 3
    assert federation.server is not None
    assert fingerprint(federation.server.state) == fingerprint(server.state)
    assert federation.evaluate() == record.scores


def test_a_notebooks_things_train_and_leave(digits: Dataset) -> None:
    class MySettings(motley.MethodSettings):
        strength: float = 0.5

    class MyClient(motley.ClientAlgorithm):
        def after_backward(self, step: motley.Step) -> None:
            step.proximal(self.settings.strength)

    class Mine(motley.Method):
        Settings = MySettings
        Client = MyClient
        requirements = motley.Requirements(own_training=True)

    federation = motley.Federation(
        models={"small": small_net, "large": lambda: large_net()},
        data=digits,
        partition=motley.Dirichlet(alpha=1.0),
        clients=4,
        method=Mine.configure(strength=0.1),
        server=[motley.EMA(0.5)],
        training=QUICK,
    )
    config = federation.config
    assert config.method.name.startswith("<Mine>") and config.method.strength == 0.1
    assert config.data.name.startswith("<few>") and config.data.partition.alpha == 1.0
    assert config.model.factories["small"] == f"{__name__}:small_net"
    assert config.model.factories["large"].startswith("<lambda>")
    first = list(federation.run(rounds=2))
    second = list(federation.run(rounds=1))
    assert [record.round for record in (*first, *second)] == [1, 2, 3]

    model = federation.model("small")
    assert isinstance(model, nn.Sequential) and not model.training
    assert federation.server is not None
    state = take(federation.server.model, federation.split.part("small"))
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert federation.evaluate()["small"] == second[0].scores["small"]

    # The shared layers are one tensor, and the head of another shape is each size's own.
    names = set(federation.split.meta_state)
    assert {"1.weight", "3.weight", "5.weight"} <= names


def test_a_run_folder_needs_things_that_can_be_imported(digits: Dataset, tmp_path: Path) -> None:
    gc.collect()  # federations have circular references, and those of other tests keep names
    federation = motley.Federation(models={"small": lambda: small_net()}, data=digits, clients=4)
    with pytest.raises(MotleyError) as raised:
        start_run(federation.config, tmp_path / "run")
    assert "data.name = <few>, model.sizes = <lambda>: cannot be imported by other" in str(
        raised.value
    )
    assert not (tmp_path / "run").exists()
    name = federation.config.data.name
    del federation
    gc.collect()
    with pytest.raises(MotleyError, match="unknown data set"):
        load_dataset(name)


def test_a_cell_that_is_run_again_gives_the_same_partition(digits: Dataset) -> None:
    from motley.data.partition import DisjointPartition

    def again() -> Federation:
        class Random(DisjointPartition):
            def _owners(
                self, labels: np.ndarray, clients: int, rng: np.random.Generator
            ) -> np.ndarray:
                return rng.integers(clients, size=len(labels))

        return motley.Federation(models=["mlp1"], data=digits, partition=Random, clients=3)

    first, second = again(), again()
    assert first.config.data.partition.name != second.config.data.partition.name
    assert np.array_equal(first.partition.indices, second.partition.indices)


def test_natural_clients_and_finished_partitions(digits: Dataset) -> None:
    people = np.arange(len(digits.train)) % 3
    train = Examples(digits.train.inputs, digits.train.targets, people.astype(np.int64))
    natural = Dataset("people", train, digits.test, 10)
    federation = motley.Federation(models={"one": small_net}, data=natural, training=QUICK)
    assert federation.config.data.partition.name == "natural"
    assert federation.config.federation.clients == 3
    assert federation.config.federation.clients_per_round == 3

    partition = Partition.from_owners(people.astype(np.int64), 3)
    given = motley.Federation(
        models={"one": small_net}, data=digits, partition=partition, training=QUICK
    )
    assert given.config.data.partition.name.startswith("<partition>")
    assert [given.partition.of(client).tolist() for client in range(3)] == [
        federation.partition.of(client).tolist() for client in range(3)
    ]
    assert next(given.run()).scores == next(federation.run()).scores


def test_names_tables_and_settings_objects(digits: Dataset) -> None:
    from motley.methods.fedprox import FedProx, FedProxSettings

    common: dict[str, Any] = {"models": ["mlp1", "mlp2"], "data": "digits", "clients": 4}
    expected = motley.Federation(method={"name": "fedprox", "mu": 0.3}, **common).config
    assert motley.Federation(method=FedProxSettings(mu=0.3), **common).config == expected
    assert motley.Federation(method=FedProx.configure(mu=0.3), **common).config == expected
    config = motley.Federation(
        server=[motley.InCo("paper"), motley.EMA(0.9), motley.ServerOptimizer("adam", lr=0.1)],
        split="grouped",
        engine="debug",
        training={"optimizer": torch.optim.RMSprop, "epochs": 2},
        settings={"evaluation": {"every": 2}},
        **{**common, "models": {"little": "resnet10", "resnet14": "resnet14"}},
    ).config
    assert config.server.inco.variant == "paper" and config.server.ema_decay == 0.9
    assert config.server.optimizer.name == "adam" and config.server.optimizer.lr == 0.1
    assert config.training.optimizer.name == "torch.optim.rmsprop:RMSprop"
    assert config.engine.name == "debug" and config.evaluation.every == 2
    assert config.model.factories == {"little": "resnet10"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"models": None}, "Federation: models: should be given."),
        ({"models": 3}, "models: is an int; a mapping from names to functions"),
        ({"models": {"one": small_net()}}, "models['one']: is a Sequential, one module; every"),
        ({"models": {"one": partial(small_net, hide=3)}}, "hide"),
        ({"data": 3}, "data: is an int; the name of a data set is expected, or a motley.data.Da"),
        ({"data": np.zeros(3)}, "data: is a ndarray; the name of a data set is expected"),
        ({"method": small_net}, "is a function; a subclass of motley.Method is expected."),
        ({"method": "fedprx"}, "method.name: unknown method 'fedprx'. Did you mean 'fedprox'?"),
        ({"server": ["inco"]}, "server: a str is not a part of the server. Allowed are "),
        ({"server": [motley.InCo("papr")]}, "server.inco.variant = 'papr'"),
        ({"training": {"epoch": 1}}, "training.epoch = 1: unknown key 'epoch'. Did you mean"),
        ({"clients": 0}, "federation.clients = 0"),
        ({"clients": "four"}, "federation.clients = 'four': should be a valid integer"),
        ({"server": "ema"}, "server: a str is not a part of the server. Allowed are "),
        ({"engine": "fast"}, "engine.name = 'fast': should be"),
        ({"engine": 3}, "Federation: engine: is an int; 'auto', 'local', 'debug' or a"),
        ({"training": ["epochs"]}, "training: is a list; a dictionary is expected, such as {"),
        ({"settings": "seed=1"}, "settings: is a str; a dictionary is expected, such as {"),
        ({"task": 3}, "task: is an int; a dictionary is expected, such as {"),
        ({"settings": {"preset": "digits-small"}}, "settings: preset = 'digits-small': cannot"),
        ({"settings": {"data": {"name": "mnist"}}}, "settings: data.name = 'mnist': the data set"),
        ({"settings": {"data": {"max_clients": 2}}}, "data.max_clients = 2: has no effect on a"),
        ({"settings": {"data": {"path": "x"}}}, "has no effect on a data set that is given as an"),
        ({"dataset": load_dataset("digits")}, "dataset: is for a configuration"),
        ({"server": [motley.EMA(0.9), motley.EMA(0.5)]}, "server: motley.EMA is given twice."),
        ({"server": [motley.InCo("paper"), motley.InCo()]}, "server: motley.InCo is given twice."),
        ({"server": [motley.ServerOptimizer("adam")] * 2}, "motley.ServerOptimizer is given twice"),
        ({"partition": [[0], [1]]}, "partition: is a list; a name, an object such as motley.Diri"),
        ({"split": motley.Split}, "is the class Split, which lacks global_name."),
        ({"method": {"name": small_net}}, "is a function; a subclass of motley.Method is"),
        ({"settings": {"method": {"name": motley.Method}}}, "unknown method <class 'motley."),
        ({"client_state_folder": 3}, "client_state_folder: is an int; a path is expected"),
    ],
)
def test_wrong_arguments_are_named(digits: Dataset, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(MotleyError) as raised:
        motley.Federation(**{"models": {"one": small_net}, "data": digits, **arguments})
    assert said in str(raised.value)


@pytest.mark.parametrize("config", ["quickstart", {"seed": 1}, Path("run.toml")])
def test_a_configuration_of_another_type_is_named(config: Any) -> None:
    with pytest.raises(MotleyError, match=r"Federation: config: is .*; a motley.Config is expect"):
        motley.Federation(config)


def test_the_name_in_a_table_may_be_an_object(digits: Dataset) -> None:
    common: dict[str, Any] = {"models": ["mlp1"], "data": digits, "clients": 4}
    method = {"name": motley.Method}
    federation = motley.Federation(
        method=method,
        partition={"name": motley.Iid},
        training={"optimizer": {"name": torch.optim.RMSprop, "lr": 0.3}},
        **common,
    )
    assert federation.config.training.optimizer.lr == 0.3
    assert federation.config.data.partition.name == "iid"
    assert type(federation.method) is motley.Method
    assert method == {"name": motley.Method}


def test_a_number_of_clients_may_be_numpys(digits: Dataset) -> None:
    clients: Any = np.int64(3)
    federation = motley.Federation(models=["mlp1"], data=digits, clients=clients)
    assert federation.config.federation.clients_per_round == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"alpha": -1}, r"Dirichlet\.alpha = -1: should be greater than 0\."),
        ({"alfa": 1}, r"Dirichlet\.alfa = 1: unknown key 'alfa'\. Did you mean 'alpha'\?"),
        ({"alpha": -1, "min_size": "a"}, r"(?s)Dirichlet\.alpha.*Dirichlet\.min_size = 'a'"),
    ],
)
def test_wrong_settings_of_an_object_are_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(MotleyError, match=said):
        motley.Dirichlet(**arguments)


def test_settings_are_given_by_name() -> None:
    dirichlet: Any = motley.Dirichlet
    with pytest.raises(MotleyError, match=r"Dirichlet\(0.5\): settings are given by name. Allowed"):
        dirichlet(0.5)


def test_states_and_sizes_of_other_types_are_named(digits: Dataset) -> None:
    federation: Any = motley.Federation(models=["mlp1"], data=digits, clients=4)
    with pytest.raises(MotleyError, match="run_round: server: is a NoneType; a server state is"):
        federation.run_round(None)
    with pytest.raises(MotleyError, match="evaluate: state: is a ServerState; a global state is"):
        federation.evaluate(federation.initial_state())
    with pytest.raises(MotleyError, match="unknown size 3"):
        federation.model(3)
    with pytest.raises(MotleyError, match="model: server: is a dict; a server state is expected"):
        federation.model("mlp1", {})


def test_paths_may_be_text(digits: Dataset, tmp_path: Path) -> None:
    common: dict[str, Any] = {"models": ["mlp1"], "data": "digits", "clients": 4}
    training = {"rounds": 1, "epochs": 1, **QUICK}
    config = motley.Federation(training=training, **common).config
    run = str(tmp_path / "run")
    motley.start_run(config, run)
    assert motley.load(run).model("mlp1")
    assert motley.resume_run(run)[1].round_number == 1
    assert motley.load_config(f"{run}/config.toml", overrides="seed=3").seed == 3
    states = str(tmp_path / "states")
    federation = motley.Federation(method="scaffold", client_state_folder=states, **common)
    list(federation.run(1))
    function: Any
    for function in (motley.load, motley.load_config, motley.resume_run):
        with pytest.raises(MotleyError, match="is an int; a path is expected, as text or a Path"):
            function(3)
    with pytest.raises(
        MotleyError, match=r"start_run: config: is a Federation; a motley\.Config is"
    ):
        motley.start_run(federation, run)  # type: ignore[arg-type]


def test_one_part_of_the_server_needs_no_list(digits: Dataset) -> None:
    federation = motley.Federation(models=["mlp1"], data=digits, server=motley.EMA(0.5))
    assert federation.config.server.ema_decay == 0.5


@pytest.mark.parametrize("rounds", [-1, 1.5, "3", True])
def test_a_wrong_number_of_rounds_is_named(digits: Dataset, rounds: Any) -> None:
    federation = motley.Federation(models=["mlp1"], data=digits, clients=4)
    with pytest.raises(
        MotleyError, match=r"^run\(rounds=.*\): should be a whole number, 0 or more"
    ):
        list(federation.run(rounds))
    assert not list(federation.run(np.int64(0)))  # type: ignore[arg-type]


def test_a_data_set_describes_itself_in_a_line(digits: Dataset) -> None:
    assert repr(digits) == (
        "Dataset('few', classification, 10 classes, train=Examples(300: images, 8 x 8, grey), "
        "test=Examples(100: images, 8 x 8, grey))"
    )


def test_a_configuration_and_objects_exclude_each_other(digits: Dataset) -> None:
    config = load_config(preset="digits-small")
    with pytest.raises(MotleyError, match="Federation: method, seed: cannot be given beside a"):
        motley.Federation(config, method="fedprox", seed=0)
    with pytest.raises(MotleyError, match=r"engine = 'debug': the configuration has engine.name"):
        motley.Federation(config, engine="debug")


def test_methods_that_need_the_total_number_of_rounds(digits: Dataset) -> None:
    federation = motley.Federation(
        models=["mlp1"], data=digits, clients=4, method="ccvr", training={"rounds": 2, **QUICK}
    )
    with pytest.raises(MotleyError, match=r"training=\{'rounds': 3\}"):
        next(federation.run(rounds=3))
    assert len(list(federation.run(rounds=1))) == 1 and len(list(federation.run())) == 1


def test_public_names_can_all_be_imported() -> None:
    for name in motley.__all__:
        assert getattr(motley, name) is not None
    assert motley.data.load_dataset is load_dataset
