"""A node keeps its client between messages: with the same results, and never an outdated one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from flwr.app import Message

from motley.core.update import ClientUpdate
from motley.data import load_dataset
from motley.engine import Job
from motley.flower.server import serve
from motley.node import Client
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.splits import Split
from tests.conftest import tiny_config
from tests.flower.grid import Grid, three_nodes, write_nodes


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sizes of the models that were built, in order."""
    sizes: list[str] = []
    build = Split.build

    def noted(split: Split, size: str) -> nn.Module:
        sizes.append(size)
        return build(split, size)

    monkeypatch.setattr(Split, "build", noted)
    return sizes


@pytest.mark.parametrize(
    "settings",
    [
        ("method.name=scaffold",),
        ("method.name=moon", "training.optimizer.name=sgd", "training.optimizer.momentum=0.9"),
        ("method.name=heterofl", "evaluation.every=1"),
        ("privacy.clip=0.5", "privacy.noise=0.2", "split.normalization_statistics=batch"),
    ],
    ids=["scaffold", "momentum", "collections", "privacy"],
)
@pytest.mark.usefixtures("grid")
def test_a_kept_client_trains_as_a_new_one_does(tmp_path: Path, settings: tuple[str, ...]) -> None:
    ends = []
    for keep_alive in (True, False):
        place = tmp_path / str(keep_alive)
        grid = Grid(write_nodes(place / "nodes", "repeatable = true"))
        grid.keep_alive = keep_alive
        config = three_nodes("training.rounds=3", "training.steps=2", *settings)
        _, server = serve(grid, config, place / "run")
        ends.append(fingerprint(server.state))
        lines = MetricsLog(place / "run" / "metrics.jsonl").read()
        assert not any("refused" in line for line in lines)
    assert ends[0] == ends[1]


def test_a_client_is_built_once_per_run(grid: Grid, tmp_path: Path, built: list[str]) -> None:
    by_message: list[list[str]] = []

    def before(message: object) -> None:
        by_message.append(list(built))
        built.clear()

    grid.before = before
    config = three_nodes("training.rounds=2", "method.name=moon", "evaluation.every=2")
    serve(grid, config, tmp_path / "run")
    by_message.append(list(built))
    # Before the first message nothing is built, then there are three queries and three jobs per round.
    first_round, second_round = by_message[4:7], by_message[7:]
    assert first_round == [["resnet10"], ["resnet14"], ["resnet18"]]
    assert second_round == [[], [], ["resnet10", "resnet14", "resnet18"]], (
        "the server evaluates every size"
    )


def test_new_data_and_new_settings_are_noticed(grid: Grid, tmp_path: Path) -> None:
    """The file is replaced in mid-run, then removed, and then node.toml asks for another size."""
    digits = load_dataset("digits").train
    file = grid.nodes[999]
    data = file.parent / "mine.npz"

    def write(count: int) -> None:
        np.savez(data, x_train=digits.inputs[:count], y_train=digits.targets[:count])

    write(20)
    file.write_text('client = 1\n[data]\npath = "mine.npz"\n')
    answers: list[object] = []

    def change_files(sent: Message, reply: Message) -> list[Message]:
        number = int(sent.metadata.group_id)
        if not reply.has_error():
            answers.append(reply.content["update"]["num_examples"])  # type: ignore[index]
        if number == 1:
            write(30)
        elif number == 2:
            data.unlink()
        elif number == 3:
            write(40)
            file.write_text('client = 1\nsize = "resnet10"\n[data]\npath = "mine.npz"\n')
        return [reply]

    grid.misdeeds[999] = change_files
    serve(grid, three_nodes("training.rounds=4", "training.steps=1"), tmp_path / "run")
    assert answers == [20, 30]
    refusals = [
        line.get("refused", {}).get("1", "")
        for line in MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    ]
    assert [reason.partition(")")[0] for reason in refusals] == [
        "",
        "",
        "its node failed (data",
        "its node failed (refused-by-node",
    ]


def test_a_client_that_failed_is_not_used_again(
    grid: Grid, tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Client.train

    def fail_once(client: Client, job: Job, forget: int) -> ClientUpdate | None:
        update = train(client, job, forget)
        if job.client == 0 and job.round_number == 1:
            raise RuntimeError("in the middle of something")
        return update

    monkeypatch.setattr(Client, "train", fail_once)
    settings = (
        "training.rounds=3",
        "training.steps=1",
        "evaluation.every=3",
        "server.min_fraction=0.5",
    )
    serve(grid, three_nodes(*settings), tmp_path / "run")
    in_training = built[:-3]  # the last three are the server's, for the evaluation
    assert in_training.count("resnet10") == 2
    assert in_training.count("resnet14") == 1


def test_building_a_client_changes_nothing_of_torch(tmp_path: Path) -> None:
    """Threads and precision belong to the process. A node's process sets them, the class does not."""
    config = tiny_config("engine.threads=2", "engine.precision=fp32")
    digits = load_dataset("digits").train
    partition = config.data.partition.split(digits.targets, config.federation.clients, 1)
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = True
        Client(
            config,
            "resnet10",
            digits,
            partition,
            10,
            folder=tmp_path,
            read_test_examples=lambda: digits,
            read_client_tests=lambda: (digits, partition),
        )
        assert torch.get_num_threads() == 1
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
