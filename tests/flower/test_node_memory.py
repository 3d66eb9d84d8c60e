"""A node builds only its own size, needs no test set, and takes as much memory as planned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn

pytest.importorskip("flwr")

from motley.assembly import build_split
from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.deploy.node import check, worker_environment
from motley.federation import Federation
from motley.flower.server import serve
from motley.flower.settings import read_node
from motley.models import ImageShape
from motley.plan import NODE_RUNTIME, cost_of
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from motley.splits import Split
from tests.conftest import tiny_config
from tests.flower.grid import Grid, three_nodes, write_nodes
from tests.flower.processes import Deployment


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sizes whose models were built, in order."""
    sizes: list[str] = []
    build = Split.build

    def noted(split: Split, size: str) -> nn.Module:
        sizes.append(size)
        return build(split, size)

    monkeypatch.setattr(Split, "build", noted)
    return sizes


def test_a_federation_builds_no_model_before_it_needs_one(built: list[str]) -> None:
    federation = Federation(tiny_config())
    server = federation.initial_state()
    assert built == []
    federation.evaluate(server.state)
    assert built == ["resnet10", "resnet14", "resnet18"]
    federation.evaluate(server.state)
    assert len(built) == 3


def test_a_split_keeps_no_model_and_builds_equal_ones() -> None:
    """Also if a model has tensors that are not in its state (the masks of ordered widths)."""
    for overrides in (
        (),
        ("split.name=ordered", "model.sizes=['resnet10']", "split.rates=[1.0,0.5]"),
    ):
        split = Federation(tiny_config(*overrides)).split
        for size in split.sizes:
            first, second = split.build(size), split.build(size)
            own = dict(first.named_buffers()) | dict(first.named_parameters())
            other = dict(second.named_buffers()) | dict(second.named_parameters())
            assert own.keys() == other.keys()
            for name, tensor in own.items():
                assert tensor.device.type == "cpu" and tensor.data_ptr() != other[name].data_ptr()
                assert tensor.equal(other[name])


# ---- without a test set


def own_files(grid: Grid) -> None:
    """Give every node its share of the digits in a file of its own, without a test part."""
    digits = load_dataset("digits").train
    shares = three_nodes().data.partition.split(digits.targets, 3, seed=1)
    for client, file in enumerate(sorted(grid.nodes.values())):
        rows = shares.of(client)
        np.savez(
            file.parent / "mine.npz", x_train=digits.inputs[rows], y_train=digits.targets[rows]
        )
        file.write_text(
            file.read_text().replace('name = "digits"\ndealt = true', 'path = "mine.npz"')
        )


def test_a_node_needs_no_test_set(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_files(grid)
    _, server = serve(grid, three_nodes("training.rounds=1"), tmp_path / "run")
    assert not any(
        "refused" in line for line in MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    )
    _, local = start_run(three_nodes("training.rounds=1", "engine.name=local"), tmp_path / "local")
    assert fingerprint(server.state) == fingerprint(local.state)
    file = min(grid.nodes.values())
    file.write_text('superlink = "127.0.0.1:9000"\ninsecure = true\n' + file.read_text())
    check(read_node(file), file)
    assert "training examples of 8x8x1" in capsys.readouterr().out


def test_a_run_still_needs_a_test_set(grid: Grid) -> None:
    own_files(grid)
    file = min(grid.nodes.values()).parent / "mine.npz"
    with pytest.raises(MotleyError, match="lacks x_test, y_test"):
        load_dataset("npz", path=file)
    assert len(load_dataset("npz", path=file, tested=False).test) == 0


def test_labels_beyond_the_runs_classes_are_reported_at_the_node(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_files(grid)
    images = np.zeros((20, 8, 8), np.uint8)
    np.savez(min(grid.nodes.values()).parent / "mine.npz", x_train=images, y_train=np.arange(20))
    with pytest.raises(MotleyError, match="no node came for client 0"):
        serve(grid, three_nodes(), tmp_path / "run")
    assert (
        "train labels go from 0 to 19; the federation's 10 classes are 0..9."
        in capsys.readouterr().err
    )


# ---- memory


@pytest.mark.parametrize(
    ("limits", "gives_back"), [("", False), ("memory_mb = 200.0", True), ("gflops = 5", False)]
)
def test_a_node_with_little_memory_gives_freed_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, gives_back: bool
) -> None:
    for variable in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(variable, raising=False)
    file = min(write_nodes(tmp_path).values())
    text = file.read_text().replace('size = "resnet10"', "")
    file.write_text(f"{text}[budget]\n{limits}\n")
    environment = worker_environment(read_node(file), file)
    assert ("MALLOC_MMAP_THRESHOLD_" in environment) == gives_back
    assert environment["MALLOC_ARENA_MAX"] == "1"


def full_width(folder: Path, size: str, rounds: int) -> Config:
    """Return a run of one client with three steps per round, on 48 random images of 32x32 pixels."""
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (48, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(48) % 10
    np.savez(
        folder / "data.npz", x_train=images, y_train=labels, x_test=images[:16], y_test=labels[:16]
    )
    settings = (
        "data.name=npz",
        f"data.path={folder / 'data.npz'}",
        "data.partition.name=iid",
        "data.transform.resize=0",
        f"model.sizes=['{size}']",
        "model.resnet.width=1.0",
        "federation.clients=1",
        "federation.clients_per_round=1",
        f"training.rounds={rounds}",
        "training.steps=3",
        "training.batch_size=16",
        f"evaluation.every={rounds}",
        "engine.device=cpu",
        "engine.name=flower",
        "run.tensorboard=false",
    )
    return load_config(overrides=settings)


def peak_of(process: int) -> int:
    """Return the highest resident memory that a process has had."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux tells no VmHWM")


def peak_of_importing_torch() -> int:
    """Return the highest resident memory of a process that imports torch."""
    program = "import torch; print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.parametrize("size", ["resnet10", "resnet26"])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_real_node_takes_the_memory_that_was_planned(tmp_path: Path, size: str) -> None:
    """Its peak above that of importing torch, after one message and after several ones.

    The node has a limit of its memory, so its allocator gives freed memory back to the system.
    """
    config = full_width(tmp_path, size, rounds=4)
    shape = ImageShape(3, 32, 32)
    cost = cost_of(build_split(config, shape, 10), size, shape, config.training)
    with Deployment(tmp_path / "federation", config, insecure=True) as deployment:
        file = deployment.folder.nodes / "node-0" / "node.toml"
        text = file.read_text().replace(f'size = "{size}"', 'size = ""')
        file.write_text(
            text.replace("[budget]\n", f"[budget]\nmemory_mb = {cost.memory / 1e6 + 1}\n")
        )
        deployment.serve()
        deployment.join(0)
        run = deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 1 or run.poll() is not None)
        assert deployment.lines(), deployment.said("run") + deployment.said("node-0")
        (worker,) = deployment.workers("node-0")
        first = peak_of(worker)
        deployment.finish(run)
        assert deployment.workers("node-0") == [worker], "one process answers all messages"
        peaks = first, peak_of(worker)
    assert not any("refused" in line for line in deployment.lines())
    planned = cost.memory + NODE_RUNTIME
    for peak in peaks:
        measured = peak - peak_of_importing_torch()
        assert abs(measured / planned - 1) < 0.15, (measured, planned)
