"""The server's commands print nodes and runs by client and size, and name missing nodes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.run_pb2 import Run, RunStatus
from rich.console import Console

from motley.cli.server_app import app
from motley.core.errors import MotleyError
from motley.deploy.commands import describe_missing, wait_for_nodes
from motley.deploy.control import EXCLUDED, Control
from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.deploy.identity import register_nodes
from motley.deploy.keys import read_public_key, write_node_key
from motley.deploy.status import node_table, run_lines
from tests.flower.grid import Grid, three_nodes

MOMENT = "2026-11-15T17:14:31+00:00"


class Registry:
    """The nodes that a server would list; takes the calls that register and unregister them."""

    def __init__(self, *nodes: NodeInfo) -> None:
        self.listed = list(nodes)

    def nodes(self) -> list[NodeInfo]:
        return [node for node in self.all_nodes() if node.status != EXCLUDED]

    def all_nodes(self) -> list[NodeInfo]:
        return list(ListNodesResponse(nodes_info=self.listed).nodes_info)

    def register(self, key: bytes, name: str) -> None:
        self.listed.append(
            NodeInfo(node_id=len(self.listed) + 1, public_key=key, name=name, status="registered")
        )

    def unregister(self, number: int) -> None:
        for node in self.listed:
            if node.node_id == number:
                node.status = EXCLUDED


def control(*nodes: NodeInfo) -> Control:
    return cast(Control, Registry(*nodes))


@pytest.fixture
def folder(tmp_path: Path) -> DeployFolder:
    return create(tmp_path / "fed", three_nodes(), DeploySettings())


def node(folder: DeployFolder, client: int, status: str) -> NodeInfo:
    key = read_public_key(folder.nodes / f"node-{client}" / "key.pub")
    online = MOMENT if status != "registered" else ""
    number = 10**19 + client
    return NodeInfo(
        node_id=number,
        public_key=key,
        name=f"node-{client}",
        status=status,
        last_activated_at=online,
    )


def shown(table: Any) -> list[list[str]]:
    """Return the cells of a table as it is printed, without its head."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    rows = [line for line in capture.get().splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]


def test_status_names_clients_sizes_and_devices(folder: DeployFolder) -> None:
    nodes = [node(folder, 2, "registered"), node(folder, 0, "online")]
    assert shown(node_table(folder, nodes)) == [
        ["0", "node-0", "resnet10", "cpu", "online", "2026-11-15 17:14:31", "10000000000000000000"],
        ["2", "node-2", "resnet18", "cpu", "never connected", "", "10000000000000000002"],
    ]


def test_status_without_keys_has_flowers_ids_only(tmp_path: Path) -> None:
    plain = create(tmp_path / "plain", three_nodes(), DeploySettings(insecure=True))
    (row,) = shown(
        node_table(plain, [NodeInfo(node_id=7, status="online", last_activated_at=MOMENT)])
    )
    assert row == ["?", "", "", "", "online", "2026-11-15 17:14:31", "7"]


def test_status_of_runs(folder: DeployFolder) -> None:
    assert run_lines(folder, []) == ["no run yet"]
    failed = RunStatus(
        status="finished",
        sub_status="failed",
        details="ServerApp failed with exception: no node came",
    )
    runs = [
        Run(run_id=2, status=RunStatus(status="running"), pending_at=MOMENT, running_at=MOMENT),
        Run(run_id=1, status=failed, pending_at=MOMENT, finished_at=MOMENT),
    ]
    folder.run.mkdir()
    (folder.run / "metrics.jsonl").write_text(
        '{"round": 1, "clients": [0], "seconds": {}, "bytes": {"down": 0, "up": 0}}\n'
    )
    assert run_lines(folder, runs) == [
        "run 2: running since 2026-11-15 17:14:31",
        "run 1: failed since 2026-11-15 17:14:31: no node came",
        "round 1 of 3 is done",
    ]


def test_a_run_names_the_nodes_it_waits_for(
    folder: DeployFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.deploy.commands.LOOK_S", 0.0)
    online = [node(folder, client, "online") for client in range(3)]
    wait_for_nodes(folder, control(*online), three_nodes())
    assert capsys.readouterr().out == ""
    with pytest.raises(MotleyError) as raised:
        wait_for_nodes(folder, control(node(folder, 0, "offline")), three_nodes())
    assert capsys.readouterr().out == "waiting for 3 of 3 nodes: 0, 1, 2\n"
    assert str(raised.value) == (
        "engine.flower.wait_s = 0.01: still waiting for 3 of 3 nodes: 0, 1, 2; a run begins with all of its clients."
    )
    assert describe_missing(folder, control(*online[1:]), 3) == "1 of 3 nodes: 0"
    assert "21, 22, ...; no key was admitted for 3" in describe_missing(
        folder, control(*online), 40
    )


def test_a_run_that_has_begun_goes_on_without_absent_nodes(
    folder: DeployFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.run.mkdir()
    (folder.run / "config.toml").write_text(three_nodes().to_toml())
    wait_for_nodes(folder, control(), three_nodes())
    assert capsys.readouterr().out == "waiting for 3 of 3 nodes: 0, 1, 2\n"


def test_without_keys_nodes_are_counted(tmp_path: Path) -> None:
    plain = create(tmp_path / "plain", three_nodes(), DeploySettings(insecure=True))
    assert (
        describe_missing(plain, control(NodeInfo(status="online"), NodeInfo(status="offline")), 3)
        == "2 of 3 nodes"
    )
    assert describe_missing(plain, control(*[NodeInfo(status="online")] * 3), 3) == ""


def test_exactly_the_keys_in_the_folder_are_admitted(folder: DeployFolder, tmp_path: Path) -> None:
    """A key that somebody else registered on an older server is removed."""
    write_node_key(tmp_path)
    stranger = NodeInfo(
        node_id=99, public_key=read_public_key(tmp_path / "key.pub"), status="registered"
    )
    registry = control(stranger, node(folder, 0, "offline"))
    register_nodes(folder, registry)
    assert [info.name for info in registry.nodes()] == ["node-0", "node-1", "node-2"]
    shutil.move(folder.nodes / "node-1", tmp_path / "elsewhere")
    register_nodes(folder, registry)
    assert [info.name for info in registry.nodes()] == ["node-0", "node-2"]


@pytest.fixture
def flowers_log() -> Iterator[logging.Logger]:
    log = logging.getLogger("flwr")
    before = log.level
    yield log
    log.setLevel(before)


def test_a_failed_run_keeps_its_message_without_flowers_traceback(
    grid: Grid, tmp_path: Path, flowers_log: logging.Logger
) -> None:
    del grid.nodes[999]
    values = {"config": three_nodes().to_toml(), "out": str(tmp_path / "run")}
    with pytest.raises(
        MotleyError, match="no node came for client 1; a run begins with all of its clients"
    ):
        app(cast(Any, grid), Context(1, 1, {}, RecordDict(), cast(Any, values)))
    assert not flowers_log.isEnabledFor(logging.ERROR)
