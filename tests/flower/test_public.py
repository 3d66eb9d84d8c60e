"""Nodes load the run's public images from their own files, and rows mean the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.flower.server import serve
from motley.methods import METHODS, ClientAlgorithm, Method, Requirements, ServerAlgorithm
from motley.methods.step import Step
from motley.runs.checkpoint import fingerprint
from motley.runs.run import start_run
from tests.flower.grid import Grid, three_nodes

ROUND = ("training.rounds=1", "method.name=public-logits")


class PublicLogitsClient(ClientAlgorithm):
    """Send the logits of some public rows, and the rows' mean pixel."""

    def finish(self, step: Step) -> tuple[State, State]:
        assert self.info.public is not None
        rows = torch.arange(0, len(self.info.public), 3, device=step.inputs.device)
        images = self.info.public.images(rows)
        return {"logits": step.frozen(step.state, images), "pixels": images.mean((1, 2, 3))}, {}


class PublicLogitsServer(ServerAlgorithm):
    """Keep what clients sent, and compare their images with the server's own."""

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        assert self.info.public is not None
        pixels = self.info.public.images(torch.arange(0, len(self.info.public), 3)).mean((1, 2, 3))
        for update in updates:
            assert torch.equal(update.payload["pixels"], pixels)
        return {str(update.client): update.payload["logits"] for update in updates}


class PublicLogits(Method):
    """A toy in which clients use public images, as FedMD's do."""

    Client, Server = PublicLogitsClient, PublicLogitsServer
    requirements = Requirements(
        payload=True, own_aggregation=True, public_data=True, client_public_data=True
    )


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    """Register the method for one test."""
    METHODS.register("public-logits", "a toy")(PublicLogits)
    yield
    del METHODS._entries["public-logits"]


def local(folder: Path, *overrides: str) -> tuple[str, str]:
    _, server = start_run(three_nodes(*ROUND, *overrides, "engine.name=local"), folder)
    return fingerprint(server.state), fingerprint(server.method_state)


@pytest.mark.parametrize("source", ["held-out", "noise"])
def test_nodes_have_the_servers_public_images(grid: Grid, tmp_path: Path, source: str) -> None:
    public = (f"public.name={source}", "public.samples=64")
    _, server = serve(grid, three_nodes(*ROUND, *public), tmp_path / "run")
    assert len(server.method_state) == 3
    assert (fingerprint(server.state), fingerprint(server.method_state)) == local(
        tmp_path / "local", *public
    )


@pytest.mark.parametrize("method", ["feddf", "fedet"])
def test_servers_that_distill_end_with_the_local_engines_bits(
    grid: Grid, tmp_path: Path, method: str
) -> None:
    """The nodes train plainly, and do not load the public images."""
    settings = (
        f"method.name={method}",
        "split.name=grouped",
        "public.name=held-out",
        "public.samples=64",
        "method.steps=3",
        "method.batch_size=16",
        "training.rounds=2",
    )
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    assert (fingerprint(server.state), fingerprint(server.method_state)) == local(
        tmp_path / "local", *settings
    )


def test_a_nodes_copy_of_a_public_file_is_named_in_its_node_toml(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(1).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    files = sorted(grid.nodes.values())
    for folder in (tmp_path, *[file.parent for file in files]):
        np.savez(folder / "public.npz", x_train=images, y_train=np.zeros(40, dtype=np.int64))
    for file in files:
        file.write_text(file.read_text() + 'public = "public.npz"\n')
    public = ("public.name=npz", f"public.path={tmp_path / 'public.npz'}")
    _, server = serve(grid, three_nodes(*ROUND, *public), tmp_path / "run")
    expected = local(tmp_path / "local", *public)
    assert (fingerprint(server.state), fingerprint(server.method_state)) == expected


def test_a_node_with_examples_of_its_own_has_no_held_out_ones(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = min(grid.nodes.values())
    file.write_text(file.read_text().replace("dealt = true", "dealt = false"))
    public = ("public.name=held-out", "public.samples=64")
    with pytest.raises(Exception, match="no node came for client 0"):
        serve(grid, three_nodes(*ROUND, *public), tmp_path / "run")
    assert "this node has examples of its own (data.dealt = false)" in capsys.readouterr().err
