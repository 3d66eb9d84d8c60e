"""One rule for scores under [privacy]: clients report none, unless privacy.reveal_scores allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flwr.app import Message

from motley.core.errors import MotleyError
from motley.flower.server import serve
from motley.flower.settings import NodeSettings
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from motley.settings import validate
from motley.studies.measures import Measure
from tests.cli.conftest import call
from tests.flower.grid import Grid, three_nodes

DP = ("privacy.clip=0.5", "privacy.noise=0.1", "server.ema_decay=0")
QUICK = ("training.rounds=1", "training.steps=2")
NORMS = (*DP, *QUICK, "split.private=normalization")
DITTO = (*DP, *QUICK, "method.name=ditto", "split.normalization_statistics=batch")
REVEALED = "privacy.reveal_scores=true"
REASON = "no noise protects these (privacy.reveal_scores = false)"


def run(grid: Grid, folder: Path, engine: str, *settings: str) -> dict[str, Any]:
    """Run one round and return its line of the metrics."""
    if engine == "flower":
        serve(grid, three_nodes(*settings), folder)
    else:
        start_run(three_nodes(*settings, f"engine.name={engine}"), folder)
    (line,) = MetricsLog(folder / "metrics.jsonl").read()
    assert "refused" not in line and line["epsilon"]
    return line


@pytest.mark.parametrize("engine", ["flower", "local", "debug"])
@pytest.mark.parametrize("settings", [NORMS, DITTO], ids=["private norms", "ditto"])
def test_no_scores_are_collected_and_the_reason_is_said(
    grid: Grid, tmp_path: Path, engine: str, settings: tuple[str, ...]
) -> None:
    asked: list[str] = []
    grid.before = lambda message: asked.append(message.metadata.message_type)
    line = run(grid, tmp_path / "run", engine, *settings)
    assert "accuracy" not in line and line["why_no_scores"].endswith(REASON)
    assert set(asked) <= {"query", "train"}
    shown = call("show", tmp_path / "run").out
    assert f"no scores: {line['why_no_scores']}\n" in shown and "not been evaluated" not in shown


@pytest.mark.parametrize("settings", [NORMS, DITTO], ids=["private norms", "ditto"])
def test_scores_that_are_allowed_are_the_same_on_both_engines(
    grid: Grid, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    for file in grid.nodes.values():
        file.write_text(f"repeatable = true\n{file.read_text()}")
    told: list[int] = []

    def note(sent: Message, reply: Message) -> list[Message]:
        told.append(reply.content["update"]["num_examples"])  # type: ignore[index, arg-type]
        return [reply]

    grid.misdeeds_with = "train.collect"
    grid.misdeeds = dict.fromkeys(grid.nodes, note)
    lines = [
        run(grid, tmp_path / engine, engine, *settings, REVEALED) for engine in ("flower", "local")
    ]
    assert lines[0]["accuracy"] == lines[1]["accuracy"]
    assert all("why_no_scores" not in line for line in lines)
    assert told == [1, 1, 1], "the number of training examples is withheld"
    shown = call("show", tmp_path / "local").out
    assert "epsilon does not cover the scores that clients report (privacy.reveal_scores)" in shown


def test_scores_of_clients_follow_the_same_rule(grid: Grid, tmp_path: Path) -> None:
    batch = "split.normalization_statistics=batch"
    settings = (
        *DP,
        *QUICK,
        batch,
        "evaluation.per_client=all",
        "evaluation.client_test_fraction=0.2",
    )
    for engine in ("flower", "local"):
        with pytest.raises(MotleyError, match=r"'all': .* or privacy\.reveal_scores = true if"):
            run(grid, tmp_path / "refused", engine, *settings)
    for file in grid.nodes.values():
        file.write_text(f"repeatable = true\n{file.read_text()}")
    lines = [
        run(Grid(grid.nodes), tmp_path / engine, engine, *settings, REVEALED)
        for engine in ("flower", "local")
    ]
    assert lines[0]["client_scores"] == lines[1]["client_scores"]
    assert lines[0]["client_scores"]["clients"] == 3
    assert lines[0]["accuracy"], "the global model is scored by the server in any case"


def test_a_node_with_privacy_must_allow_scores_itself(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = grid.nodes[999]
    text = file.read_text()
    for number, privacy in enumerate(("clip = 0.5", "max_epsilon = 1e6")):
        file.write_text(f"{text}\n[privacy]\n{privacy}\n")
        with pytest.raises(MotleyError, match="no node came for client 1"):
            serve(Grid(grid.nodes), three_nodes(*NORMS, REVEALED), tmp_path / str(number))
        said = capsys.readouterr()
        assert "it failed (refused-by-node)" in said.out
        assert "the run has privacy.reveal_scores = true; this node reports no scores" in said.err
    file.write_text(f"{text}\n[privacy]\nclip = 0.5\nreveal_scores = true\n")
    assert run(Grid(grid.nodes), tmp_path / "run", "flower", *NORMS, REVEALED)["accuracy"]


def test_a_node_does_not_believe_that_it_may_answer(grid: Grid, tmp_path: Path) -> None:
    """The server asks for a score, although the run's configuration reveals none."""

    def hide(message: Message) -> None:
        if message.metadata.message_type == "train.collect":
            job: Any = message.content["job"]
            job["config"] = job["config"].replace("reveal_scores = true", "reveal_scores = false")

    grid.before = hide
    serve(grid, three_nodes(*NORMS, REVEALED), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert sorted(line["refused"]) == ["0", "1", "2"] and "accuracy" not in line
    log = (grid.nodes[999].parent / "node.log").read_text()
    assert "the job asks for a score, but the run has privacy.reveal_scores = false." in log


def test_a_study_of_scores_needs_scores() -> None:
    config = three_nodes(*NORMS, "engine.name=local")
    for measure in ("last", "rounds-to"):
        with pytest.raises(MotleyError, match=r"measure = '.*': its runs have no scores: clients"):
            Measure(measure).check_config(config, "measure")
    Measure("last").check_config(three_nodes(*NORMS, REVEALED), "measure")


def test_scores_and_a_limit_contradict_each_other() -> None:
    privacy = {"max_epsilon": 3.0, "reveal_scores": True}
    with pytest.raises(MotleyError, match=r"max_epsilon = 3 and reveal_scores = true: scores have"):
        validate(NodeSettings, {"client": 0, "privacy": privacy})
