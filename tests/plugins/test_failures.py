"""A user's own code that raises, or returns something else than is expected, is named."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.core import registry
from motley.core.dotted import import_dotted
from motley.core.own_code import place_in_own_code
from motley.engine.device import choose_devices
from motley.engine.workers import why_no_workers
from motley.models.inputs import ImageShape
from motley.models.mlp import MLP, MLPSettings
from motley.studies.declaration import load_study
from motley.studies.runner import run_study, unfinished_runs
from motley.studies.side_by_side import run_side_by_side
from motley.studies.sweep import Cell, PlannedRun, plan_cells
from tests.cli.conftest import Answer, call, overrides
from tests.conftest import tiny_config
from tests.studies.test_runner import Recorder

CODE = """
import torch
from torch import nn

import motley
from motley.data import load_dataset


def method(client=motley.ClientAlgorithm, server=motley.ServerAlgorithm, **needs):
    body = {"Client": client, "Server": server, "requirements": motley.Requirements(**needs)}
    return type("Mine", (motley.Method,), body)


class Raising(motley.ClientAlgorithm):
    def after_backward(self, step):
        raise ValueError("no idea")


class Number(motley.ClientAlgorithm):
    def loss(self, step):
        return 3


class PerRow(motley.ClientAlgorithm):
    def loss(self, step):
        outputs = step.model(step.inputs)
        return nn.functional.cross_entropy(outputs, step.targets, reduction="none")


class Detached(motley.ClientAlgorithm):
    def loss(self, step):
        return super().loss(step).detach()


class NoPayload(motley.ClientAlgorithm):
    def finish(self, step):
        pass


class WrongPayload(motley.ClientAlgorithm):
    def finish(self, step):
        return {"a": 3}, {}


class WrongState(motley.ClientAlgorithm):
    def initial_client_state(self, size, received):
        return [1]

    def finish(self, step):
        return {}, {1: step.lr}


class WrongServer(motley.ServerAlgorithm):
    def init(self):
        return {"a": 1.0}

    def broadcast(self, own, state, round_number, client):
        return None

    def collection_clients(self, round_number):
        return 3

    def metrics(self, own, updates):
        return {"a": torch.ones(3)}

    def adjust_aggregate(self, own, merged):
        return merged.with_delta({name: delta.double() for name, delta in merged.delta.items()})

    def post_process(self, own, state, updates):
        return {name: tensor for name, tensor in list(state.items())[1:]}, {}

    def update(self, own, state, updates):
        return {"a": 1.0}


def wrong_server(hook, **needs):
    body = {hook: vars(WrongServer)[hook]}
    return method(server=type("WrongServer", (motley.ServerAlgorithm,), body), **needs)


class NoAggregate(motley.ServerAlgorithm):
    def aggregate(self, own, state, updates):
        pass


class NoUpdate(motley.ServerAlgorithm):
    def update(self, own, state, updates):
        pass


class OldAggregate(motley.ServerAlgorithm):
    def aggregate(self, own, updates):
        return own


raising = method(Raising, own_training=True)
number = method(Number, own_training=True)
per_row = method(PerRow, own_training=True)
detached = method(Detached, own_training=True)
no_payload = method(NoPayload, payload=True)
wrong_payload = method(WrongPayload, payload=True)
wrong_state = method(WrongState, client_state=True)
wrong_init = wrong_server("init")
wrong_broadcast = wrong_server("broadcast")
wrong_metrics = wrong_server("metrics")
wrong_adjust = wrong_server("adjust_aggregate", own_aggregation=True)
wrong_post = wrong_server("post_process", own_aggregation=True)
wrong_update = wrong_server("update", own_aggregation=True)
misspelt = method(type("Misspelt", (motley.ClientAlgorithm,), {"after_backwards": lambda *_: 0}))
wrong_collection = wrong_server("collection_clients", collection=True)
wrong_client = method(dict)
no_aggregate = method(server=NoAggregate, own_aggregation=True)
no_update = method(server=NoUpdate, own_aggregation=True)
old_aggregate = method(server=OldAggregate, own_aggregation=True)


class NoResult(motley.ServerStage):
    def __call__(self, server, aggregate, updates):
        return server


def stage(returned):
    call = lambda self, server, aggregate, updates: returned(server, aggregate)
    return type("Stage", (motley.ServerStage,), {"__call__": call})


swapped = stage(lambda server, aggregate: motley.StageResult(aggregate, server))
wide = stage(
    lambda server, aggregate: motley.StageResult(
        server, aggregate.with_delta({name: torch.ones(3) for name in aggregate.delta})
    )
)
strange = stage(
    lambda server, aggregate: motley.StageResult(server, aggregate.with_delta({"a": torch.ones(3)}))
)
worded = stage(lambda server, aggregate: motley.StageResult(server, aggregate, {"a": "b"}))


class OldStage(motley.ServerStage):
    def __call__(self, server):
        return server


class Unfinished(motley.ServerStage):
    pass


class NoName(motley.Split):
    def global_name(self, size, name):
        return None


class OldSplit(motley.Split):
    def global_name(self, name):
        return name


class OldPartition(motley.PartitionSettings):
    def split(self, labels):
        return labels


def scalar(input_shape, num_classes):
    class Mean(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs.flatten(1)).mean()

    return Mean(64, num_classes)


class Partition(motley.PartitionSettings):
    def split(self, labels, clients, seed):
        raise FileNotFoundError("clients.csv")


def data():
    return {}["digits"]


def loss(outputs, targets):
    return "low"


def frozen(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)).requires_grad_(False)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_modules: None) -> Path:
    """Return the working folder, which holds the user's module."""
    (tmp_path / "faulty.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("faulty", None)
    return tmp_path


def run(*more: str) -> Answer:
    return call("run", *overrides("training.steps=1", "training.rounds=1", *more), "--out", "run")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method.name=faulty:raising", "ValueError: no idea. {place}, in after_backward."),
        ("data.partition.name=faulty:Partition", "FileNotFoundError: clients.csv. {place}, in sp"),
        ("data.name=faulty:data", "KeyError: 'digits'. {place}, in data."),
    ],
)
def test_an_exception_in_a_users_code_names_its_line(
    folder: Path, override: str, said: str
) -> None:
    answer = run(override)
    assert answer.code == 2
    place = rf"This was raised in your own code: {folder}/faulty.py, line \d+"
    assert re.search(re.escape(said).replace(r"\{place\}", place), answer.err), answer.err
    assert "bug in Motley" not in answer.err
    saved = re.search(r"The traceback is in (\S+\.txt)\.", answer.err)
    assert saved
    Path(saved[1]).unlink()


def test_an_exception_in_a_worker_process_names_the_line_too(folder: Path) -> None:
    reason = why_no_workers(tiny_config().engine, choose_devices("cpu"))
    if reason:
        pytest.skip(reason)
    answer = run("method.name=faulty:raising", "engine.workers=2", "federation.clients_per_round=4")
    assert answer.code == 2
    assert f"your own code: {folder}/faulty.py, line " in answer.err
    Path(re.findall(r"The traceback is in (\S+\.txt)\.", answer.err)[0]).unlink()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method.name=faulty:number", "the loss of Number is an int; a tensor with the mean loss"),
        ("method.name=faulty:per_row", "the loss of PerRow has the shape ("),
        ("method.name=faulty:detached", "the loss of Detached does not depend on any parameter"),
        ("method.name=faulty:no_payload", "finish of NoPayload returned a NoneType; a pair of"),
        (
            "method.name=faulty:wrong_payload",
            "finish of WrongPayload returned an int as 'a' in its payload; a tensor is expected.",
        ),
        (
            "method.name=faulty:misspelt",
            "Misspelt overrides no hook of motley.ClientAlgorithm: unknown hook 'after_backwards'. "
            "Did you mean 'after_backward'?",
        ),
        ("method.name=faulty:wrong_state", "initial_client_state of WrongState returned a list; a"),
        ("method.name=faulty:wrong_init", "init of WrongServer returned a float as 'a'; a tensor"),
        ("method.name=faulty:wrong_broadcast", "broadcast of WrongServer returned a NoneType; a"),
        ("method.name=faulty:wrong_metrics", "returned a tensor of shape (3,) as the metric 'a'"),
        ("method.name=faulty:wrong_adjust", "adjust_aggregate of WrongServer returned 'conv1.wei"),
        ("method.name=faulty:wrong_post", "post_process of WrongServer returned no 'conv1.weight'"),
        ("method.name=faulty:wrong_update", "update of WrongServer returned a float as 'a'; a te"),
        ("method.name=faulty:wrong_client", "its Client is the class dict; a subclass of motley.C"),
        ("server.stages=[{name='faulty:swapped'}]", "returned StageResult(an Aggregate, a Server"),
        ("server.stages=[{name='faulty:wide'}]", "in its delta with shape (3,) and type torch.flo"),
        ("server.stages=[{name='faulty:strange'}]", "returned 'a' in its delta, which is not in"),
        ("server.stages=[{name='faulty:worded'}]", "returned a str as the metric 'a'; a number"),
        ("server.stages=[{name='faulty:OldStage'}]", "OldStage.__call__(self, server) is called"),
        ("server.stages=[{name='faulty:Unfinished'}]", "Unfinished, which lacks __call__."),
        ("split.name=faulty:NoName", "global_name of NoName returned a NoneType for 'conv1.weig"),
        ("split.name=faulty:OldSplit", "OldSplit.global_name(self, name) is called as global_nam"),
        ("data.partition.name=faulty:OldPartition", "OldPartition.split(self, labels) is called"),
        ("method.name=faulty:no_aggregate", "aggregate of NoAggregate returned a NoneType; a"),
        ("method.name=faulty:no_update", "update of NoUpdate returned a NoneType; a mapping"),
        (
            "method.name=faulty:old_aggregate",
            "OldAggregate.aggregate(self, own, updates) is called as "
            "aggregate(self, own, state, updates) and cannot take these arguments.",
        ),
        ("server.stages=[{name='faulty:NoResult'}]", "stage 'noresult' returned a ServerState; a"),
        ("task.loss=faulty:loss", "task.loss: returned a str; a tensor with one value per row"),
        ("task.metrics=['faulty:loss']", "task.metrics: 'loss' returned a str; a tensor with one"),
    ],
)
def test_a_wrong_result_of_a_users_code_is_named(folder: Path, override: str, said: str) -> None:
    answer = run(override)
    assert answer.code == 2 and said in answer.err, answer.err


PACKAGE = """
import motley

from failing.arithmetic import subtract


class Client(motley.ClientAlgorithm):
    def after_backward(self, step):
        subtract(step)


class Failing(motley.Method):
    Client = Client
    requirements = motley.Requirements(own_training=True)


class WrongServer(motley.ServerAlgorithm):
    def collection_clients(self, round_number):
        return 3


class WrongCollection(motley.Method):
    Server = WrongServer
    requirements = motley.Requirements(collection=True)
"""


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package with entry points, and return the folder that it is installed in."""
    folder = tmp_path / "site-packages"
    (folder / "failing").mkdir(parents=True)
    (folder / "failing" / "__init__.py").write_text("")
    (folder / "failing" / "methods.py").write_text(PACKAGE)
    (folder / "failing" / "arithmetic.py").write_text(
        "def subtract(step):\n    raise ArithmeticError('no difference')\n"
    )
    info = folder / "failing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[motley.methods]\nfailing = failing.methods:Failing\n"
        "wrong = failing.methods:WrongCollection\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    registry._points_of.cache_clear()
    yield folder
    registry._points_of.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "failing"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["failing", "failing.methods:Failing"])
def test_an_exception_in_an_installed_plugin_names_its_line(site_packages: Path, name: str) -> None:
    answer = run(f"method.name={name}")
    assert answer.code == 2
    file = site_packages / "failing" / "arithmetic.py"
    assert (
        "ArithmeticError: no difference. This was raised in the plug-in 'failing': "
        f"{file}, line 2, in subtract." in answer.err
    )
    assert "bug in Motley" not in answer.err
    Path(re.findall(r"The traceback is in (\S+\.txt)\.", answer.err)[0]).unlink()


def test_an_error_in_motleys_code_names_the_plugins_files(site_packages: Path) -> None:
    answer = run("method.name=wrong")
    assert answer.code == 1
    files = re.findall(r"code that the configuration names \((.*)\) returns", answer.err)[0]
    assert f"{site_packages}/failing/methods.py" in files.split(", ")
    Path(re.findall(r"The traceback is in (\S+\.txt)\.", answer.err)[0]).unlink()


def test_torch_is_no_plugin() -> None:
    """A configuration may name torch's optimizers, but Motley's own code calls torch, too."""
    import_dotted("torch.optim:RMSprop")
    with pytest.raises(RuntimeError) as raised:
        MLP(1, MLPSettings(), ImageShape(1, 8, 8), classes=-1)
    files = [frame.filename for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert any("/torch/" in file for file in files)
    assert place_in_own_code(raised.value) is None


def test_a_model_with_nothing_to_train_is_refused(folder: Path) -> None:
    answer = call("run", "--preset", "digits-small", "--set", "model.sizes=faulty:frozen")
    said = "model.sizes: 'faulty:frozen' has no parameter that can be trained: it has none, or all"
    assert answer.code == 2 and said in answer.err, answer.err


def test_a_model_that_returns_a_scalar_is_refused(folder: Path) -> None:
    answer = call("run", "--preset", "digits-small", "--set", "model.sizes=faulty:scalar")
    said = "model.sizes: 'faulty:scalar' returns shape () for 2 examples; a model returns one row"
    assert answer.code == 2 and said in answer.err, answer.err


def test_an_error_in_motleys_code_names_the_users_files(folder: Path) -> None:
    answer = run("method.name=faulty:wrong_collection")
    assert answer.code == 1
    # Other tests in this process may have imported files of their own.
    said = r"This is a bug in Motley, or code that the configuration names \((.*)\) returns"
    files = re.findall(said, answer.err)[0]
    assert f"{folder}/faulty.py" in files.split(", ")
    Path(re.findall(r"The traceback is in (\S+\.txt)\.", answer.err)[0]).unlink()


STUDY = """
summary = "a line fails"
preset = "digits-small"
seeds = [1]
set.training = { rounds = 1, steps = 1 }
[[data]]
name = "digits"
[[methods]]
name = "raising"
set.method.name = "faulty:raising"
[[methods]]
name = "FedAvg"
"""


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_study_goes_on_without_a_run_that_fails_in_a_users_code(folder: Path, jobs: int) -> None:
    (folder / "mine.toml").write_text(STUDY)
    sys.path.append(str(folder))
    cells = plan_cells(load_study("mine.toml"), "full")
    todo, watcher = unfinished_runs(cells, folder / "out"), Recorder()
    if jobs == 1:
        run_study(todo, folder / "out", watcher)
    else:
        run_side_by_side(todo, folder / "out", watcher, jobs)
    (reason,) = watcher.failures
    assert reason.startswith("ValueError: no idea. This was raised in your own code: ")
    assert len(watcher.finished) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_code_may_be_edited_while_a_study_is_running(folder: Path, jobs: int) -> None:
    """Runs in this process use the code that it has imported; other processes import anew."""
    (folder / "mine.toml").write_text(STUDY.replace("faulty:raising", "faulty:Unchanged"))
    code = folder / "faulty.py"
    code.write_text(CODE + "\nUnchanged = method()\n")
    sys.path.append(str(folder))

    class Editor(Recorder):
        def on_run(self, cell: Cell, run: PlannedRun) -> tuple[()]:
            code.write_text(code.read_text() + "# edited\n")
            return super().on_run(cell, run)

    cells = plan_cells(load_study("mine.toml"), "full")
    todo, watcher = unfinished_runs(cells, folder / "out"), Editor()
    if jobs == 1:
        run_study(todo, folder / "out", watcher)
        assert len(watcher.finished) == 2
        return
    run_side_by_side(todo, folder / "out", watcher, jobs)
    (reason,) = watcher.failures
    assert reason.startswith("your own code was edited while the study was running.")
    assert len(watcher.finished) == 1


def test_the_script_that_calls_motley_is_not_meant() -> None:
    with pytest.raises(AttributeError) as raised:
        place_in_own_code(3)  # type: ignore[arg-type]
    assert place_in_own_code(raised.value) is None
