"""Nodes run users' own code if their node.toml lists it, and no other code that a server names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import tomli_w
from flwr.app import ConfigRecord, RecordDict

from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.deploy.folder import DeploySettings, create
from motley.deploy.node import check_size, worker_environment
from motley.flower.failures import NodeError
from motley.flower.request import read_request
from motley.flower.run_config import from_text, to_text
from motley.flower.server import serve
from motley.flower.settings import NodeSettings, read_node
from motley.models.inputs import ImageShape, shape_to_json
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.plugins import recorded_folders
from motley.runs.run import start_run
from tests.flower.grid import Grid
from tests.flower.processes import Deployment


def config_of(project: Path, *overrides: str) -> Config:
    quick = (
        "engine.flower.wait_s=0.01",
        "engine.flower.timeout_s=0.05",
        "federation.clients_per_round=4",
    )
    return load_config(project / "run.toml", overrides=[*quick, *overrides])


def write_nodes(folder: Path, modules: list[str]) -> dict[int, Path]:
    files = {}
    for client in range(4):
        file = folder / f"node-{client}" / "node.toml"
        file.parent.mkdir(parents=True)
        data = {"name": "mine:few_digits", "dealt": True}
        file.write_text(tomli_w.dumps({"client": client, "modules": modules, "data": data}))
        files[1000 - client] = file
    return files


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.flower.engine.POLL_S", 0.01)
    monkeypatch.setattr("motley.flower.nodes.POLL_S", 0.01)
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(f"flwr.supercore.task_identity.TaskIdentity.{name}", 1)


def test_nodes_give_the_bits_of_the_local_engine(importable: Path, tmp_path: Path) -> None:
    grid = Grid(write_nodes(tmp_path / "nodes", ["mine"]))
    config = config_of(importable, "engine.name=flower")
    _, on_nodes = serve(grid, config, tmp_path / "nodes-run")
    _, here = start_run(config_of(importable), tmp_path / "local-run")
    assert fingerprint(on_nodes.state) == fingerprint(here.state)


def test_a_node_refuses_code_that_its_owner_did_not_list(importable: Path, tmp_path: Path) -> None:
    text = to_text(config_of(importable, "engine.name=flower"))
    with pytest.raises(NodeError, match=r"node\.toml does not allow this module; modules = \[\]"):
        from_text(text, NodeSettings(client=0))
    assert from_text(text, NodeSettings(client=0, modules=("mine",))).method.name == "mine:Pull"
    assert str(importable) not in text

    (importable / "wicked.py").write_text("raise SystemExit('imported')\n")
    for key, value in (("method", "wicked:Method"), ("split", "minefield:Split")):
        wicked = text.replace(f'[{key}]\nname = "mine:Pull"', f'[{key}]\nname = "{value}"')
        wicked = wicked.replace(f'[{key}]\nname = "depth"', f'[{key}]\nname = "{value}"')
        assert value in wicked
        with pytest.raises(NodeError, match=f"{key}.name = '{value}': node.toml does not allow"):
            from_text(wicked, NodeSettings(client=0, modules=("mine",)))
    sizes = text.replace('"mine:small"', '"wicked:small"')
    with pytest.raises(NodeError, match=r"model\.sizes = 'wicked:small'"):
        from_text(sizes, NodeSettings(client=0, modules=("mine",)))
    job = {"config": text, "inputs": shape_to_json(ImageShape(1, 8, 8)), "classes": 10}
    message = RecordDict({"job": ConfigRecord({**job, "task": "wicked:task"})})
    with pytest.raises(NodeError, match=r"task = 'wicked:task': node\.toml does not allow"):
        read_request(NodeSettings(client=0, modules=("mine",)), message, 1)
    assert "wicked" not in sys.modules


def test_a_deployment_lists_the_modules_of_its_nodes(importable: Path, tmp_path: Path) -> None:
    folder = create(tmp_path / "fed", config_of(importable), DeploySettings(insecure=True))
    file = folder.nodes / "node-1" / "node.toml"
    node = read_node(file)
    assert node.modules == ("mine",) and node.code == str(importable)
    assert node.data.name == "mine:few_digits" and node.size == "mine:small"
    check_size(node, file)
    assert worker_environment(node, file)["PYTHONPATH"].startswith(str(importable))
    assert recorded_folders(folder.path) == [importable.resolve()]
    with pytest.raises(MotleyError, match="unknown model 'mine:small'"):
        check_size(node.model_copy(update={"modules": ()}), file)


@pytest.mark.slow
def test_real_nodes_import_from_their_folder(importable: Path, tmp_path: Path) -> None:
    three = ("federation.clients=3", "federation.clients_per_round=3", "training.rounds=2")
    slow = ("engine.flower.wait_s=300", "engine.flower.timeout_s=300", "engine.name=flower")
    config = load_config(importable / "run.toml", overrides=[*three, *slow])
    with Deployment(tmp_path / "fed", config, insecure=True) as deployment:
        deployment.run()
        server = load_checkpoint(deployment.folder.run / "checkpoints")
    local = load_config(importable / "run.toml", overrides=three)
    _, here = start_run(local, tmp_path / "local-run")
    assert server is not None
    assert fingerprint(server.state) == fingerprint(here.state)
