"""Nodes score themselves on their own test examples, and report counts only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from motley.data import load_dataset
from motley.flower.arrays import pack, unpack
from motley.flower.server import serve
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from tests.flower.grid import Grid, three_nodes

SCORED = (
    "evaluation.per_client=all",
    "evaluation.client_test_fraction=0.2",
    "training.steps=2",
    "training.rounds=2",
)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return MetricsLog(folder / "metrics.jsonl").read()


@pytest.mark.parametrize(
    "settings",
    [
        ("evaluation.personalize_epochs=1", "method.name=scaffold"),
        ("method.name=local", "server.ema_decay=0", "training.rounds=1"),
    ],
)
def test_nodes_report_the_scores_of_the_local_engine(
    grid: Grid, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    reported: list[dict[str, torch.Tensor]] = []

    def note(sent: Message, reply: Message) -> list[Message]:
        if str(sent.content["job"]["collection"]).endswith("score"):
            assert not unpack(reply.content["arrays"], "delta")
            reported.append(unpack(reply.content["arrays"], "payload"))
        return [reply]

    grid.misdeeds_with = "train.collect"
    grid.misdeeds = dict.fromkeys(grid.nodes, note)
    _, server = serve(grid, three_nodes(*SCORED, *settings), tmp_path / "run")
    config = three_nodes(*SCORED, *settings, "engine.name=local")
    _, expected = start_run(config, tmp_path / "local")
    assert fingerprint(server.state) == fingerprint(expected.state)
    scores = [line["client_scores"] for line in lines_of(tmp_path / "run")]
    assert scores == [line["client_scores"] for line in lines_of(tmp_path / "local")]
    assert scores[-1]["mean"] > 0
    # Two numbers per score are all that leaves a node.
    assert len(reported) == 3 * len(scores)
    names = {"score", "personalized"} if "method.name=scaffold" in settings else {"score"}
    for answer in reported:
        assert answer.keys() == names
        assert all(tensor.shape == (2,) for tensor in answer.values())


def test_nodes_with_files_of_their_own_are_scored_on_their_test_parts(
    grid: Grid, tmp_path: Path
) -> None:
    """Two nodes have a test part; the third has none and says so."""
    digits = load_dataset("digits")
    for number, file in enumerate(sorted(grid.nodes.values())):
        rows = slice(100 * number, 100 * number + 60)
        arrays = {"x_train": digits.train.inputs[rows], "y_train": digits.train.targets[rows]}
        if number < 2:
            arrays["x_test"] = digits.test.inputs[: 10 + number]
            arrays["y_test"] = digits.test.targets[: 10 + number]
        np.savez(file.parent / "mine.npz", **arrays)
        text = file.read_text().replace('name = "digits"\ndealt = true', 'path = "mine.npz"')
        file.write_text(text)
    settings = ("evaluation.per_client=round", "training.steps=1", "training.rounds=1")
    serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert line["client_scores"]["clients"] == 2
    assert line["client_scores"]["unscored"] == 1
    assert "no-test-data" in line["refused"]["2"]


def test_impossible_scores_are_refused_and_unwanted_questions_too(
    grid: Grid, tmp_path: Path
) -> None:
    def lie(sent: Message, reply: Message) -> list[Message]:
        payload = {"score": torch.tensor([11.0, 10.0], dtype=torch.float64)}
        reply.content["arrays"] = pack(delta={}, payload=payload)
        return [reply]

    grid.misdeeds_with = "train.collect"
    grid.misdeeds[999] = lie
    serve(grid, three_nodes(*SCORED, "training.rounds=1"), tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert line["refused"] == {
        "1": "its scores were refused: no test set has the sums 11, 10 of accuracy."
    }
    assert line["client_scores"]["unscored"] == 1

    def ask_for_scores(message: Message) -> None:
        if message.metadata.message_type == "train.collect":
            message.content["job"]["collection"] = "client-score"

    grid.misdeeds, grid.before = {}, ask_for_scores
    settings = ("server.statistics.name=recalibrate", "training.steps=2", "training.rounds=1")
    serve(grid, three_nodes(*settings), tmp_path / "other")
    (line,) = lines_of(tmp_path / "other")
    assert sorted(line["refused"]) == ["0", "1", "2"]
    assert all("refused-by-node" in reason for reason in line["refused"].values())
