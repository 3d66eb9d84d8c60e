"""Nodes give the same bits as the local engine, and a failure costs one update and is recorded."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from threading import Event, Timer

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict

from motley.cli.plan import costs_in
from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.federation import Federation
from motley.flower import nodes
from motley.flower.arrays import pack, unpack
from motley.flower.server import serve
from motley.flower.settings import NodeBudget
from motley.plan import Budget
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from tests.conftest import tiny_config
from tests.flower.grid import NEVER_S, Grid, Misdeed, in_round_1, three_nodes


def local(folder: Path, *overrides: str) -> tuple[str, str]:
    _, server = start_run(three_nodes(*overrides, "engine.name=local"), folder)
    return fingerprint(server.state), fingerprint(server.method_state)


# ---- the same numbers


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "moon", "heterofl", "fedgen", "ccvr", "spherefed"]
)
def test_nodes_end_with_the_local_engines_bits(grid: Grid, tmp_path: Path, method: str) -> None:
    settings = (f"method.name={method}", "server.inco.variant=official", "server.ema_decay=0.5")
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    assert (fingerprint(server.state), fingerprint(server.method_state)) == local(
        tmp_path / "local", *settings
    )
    assert not any(
        "refused" in line for line in MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    )


@pytest.mark.parametrize("method", ["Local", "FedProto", "FD", "FedMD"])
def test_nodes_with_models_of_their_own_agree_with_the_local_engine(
    grid: Grid, tmp_path: Path, method: str
) -> None:
    """A node keeps its model on its disk, and evaluates it on the test part of its data."""
    grid.keep_alive = False
    settings = [f"method.name={method}", "training.steps=2"]
    if method == "FedMD":
        settings += ["public.name=held-out", "public.samples=40"]
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    assert fingerprint(server.method_state) == local(tmp_path / "local", *settings)[1]
    lines, expected = (
        MetricsLog(tmp_path / run / "metrics.jsonl").read() for run in ("run", "local")
    )
    for line, local_line in zip(lines, expected, strict=True):
        assert "refused" not in line
        for key in ("accuracy", "class_accuracy", "loss", "bytes", "metrics", "train_loss"):
            assert line.get(key) == local_line.get(key), key


def test_a_node_without_a_test_part_is_told_which_key_to_set(grid: Grid, tmp_path: Path) -> None:
    digits = load_dataset("digits")
    (_, file, _) = sorted(grid.nodes.values())
    images, labels = digits.train.inputs[:60], digits.train.targets[:60]
    np.savez(file.parent / "mine.npz", x_train=images, y_train=labels)
    file.write_text(file.read_text().replace('name = "digits"\ndealt = true', 'path = "mine.npz"'))
    settings = ("method.name=Local", "training.steps=2", "training.rounds=1")
    serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"]
    assert "failed (no-test-data)" in line["refused"]["1"]
    assert "data.path or data.root in its node.toml" in line["refused"]["1"]
    assert "x_test" in line["refused"]["1"]
    assert sorted(line["accuracy"]) == ["mean", "resnet10", "resnet18"]


def test_impossible_scores_are_refused(grid: Grid, tmp_path: Path) -> None:
    grid.misdeeds_with = "train.collect"
    ten = torch.full((10,), 10.0, dtype=torch.float64)
    lie = {"correct": 2 * ten, "seen": ten, "loss": ten[:1], "metrics": ten[:2]}
    lie["examples"] = ten[:1] * 10
    grid.misdeeds[999] = lambda sent, reply: [answered(reply, payload=lie)]
    settings = ("method.name=Local", "training.steps=2", "training.rounds=1")
    serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert line["refused"] == {"1": "its scores were refused: no test set has these sums."}


def test_a_node_scores_no_model_of_its_own_if_weights_are_exchanged(
    grid: Grid, tmp_path: Path
) -> None:
    def ask_for_scores(message: Message) -> None:
        if message.metadata.message_type == "train.collect":
            message.content["job"]["collection"] = "evaluation"

    grid.before = ask_for_scores
    settings = ("server.statistics.name=recalibrate", "training.steps=2", "training.rounds=1")
    serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert sorted(line["refused"]) == ["0", "1", "2"]
    assert all("refused-by-node" in reason for reason in line["refused"].values())


def test_a_node_with_a_file_of_its_own_examples(grid: Grid, tmp_path: Path) -> None:
    """Each node has its share of the data set in a file of its own, and the bits are the same."""
    digits = load_dataset("digits")
    partition = tiny_config("federation.clients=3", "federation.clients_per_round=3").data.partition
    shares = partition.split(digits.train.targets, 3, seed=1)
    for client, file in enumerate(sorted(grid.nodes.values())):
        own = shares.of(client)
        images, labels = digits.train.inputs[own], digits.train.targets[own]
        np.savez(
            file.parent / "mine.npz",
            x_train=images,
            y_train=labels,
            x_test=images[:1],
            y_test=labels[:1],
        )
        file.write_text(
            file.read_text().replace('name = "digits"\ndealt = true', 'path = "mine.npz"')
        )
    _, server = serve(grid, three_nodes("training.rounds=1"), tmp_path / "run")
    assert fingerprint(server.state) == local(tmp_path / "local", "training.rounds=1")[0]


def test_a_nodes_size_and_budget_decide_what_it_trains(grid: Grid, tmp_path: Path) -> None:
    files = sorted(grid.nodes.values())
    set_budget(files[0], "memory_mb = 100.0")
    files[2].write_text(files[2].read_text().replace('size = "resnet18"', ""))
    federation, _ = serve(grid, three_nodes("training.rounds=1"), tmp_path / "run")
    assert federation.sizes == ("resnet18", "resnet14", "resnet18")


def test_nodes_may_choose_among_the_widths_of_a_model(grid: Grid, tmp_path: Path) -> None:
    sizes = ("resnet18-w1", "resnet18-w0.5", "resnet18-w0.25")
    for file, size in zip(sorted(grid.nodes.values()), sizes, strict=True):
        file.write_text(re.sub(r'size = "\w+"', f'size = "{size}"', file.read_text()))
    width = (
        "model.sizes=['resnet18']",
        "split.name=width",
        "split.rates=[0.25,0.5,1.0]",
        "training.rounds=1",
    )
    federation, _ = serve(grid, three_nodes(*width), tmp_path / "run")
    assert federation.sizes == sizes


def set_budget(file: Path, limits: str) -> None:
    """Give a node limits in place of its size."""
    text = re.sub(r'size = "\w+"\n', "", file.read_text())
    file.write_text(f"{text}\n[budget]\n{limits}\n")


def test_a_nodes_budget_means_what_a_line_of_budgets_csv_means(grid: Grid, tmp_path: Path) -> None:
    """Between the memory of the two smaller sizes, by the same table as `motley plan`."""
    costs = costs_in(three_nodes())
    limit = (costs["resnet14"].memory + costs["resnet18"].memory) / 2e6
    lines = f"client,memory_mb\n0,{limit}\n1,{limit}\n2,1000\n"
    (tmp_path / "budgets.csv").write_text(lines)
    budgets = (
        "federation.size_assignment=budget",
        f"federation.budgets={tmp_path / 'budgets.csv'}",
        "training.rounds=1",
    )
    expected = Federation(three_nodes(*budgets, "engine.name=local")).sizes
    for file, megabytes in zip(sorted(grid.nodes.values()), (limit, limit, 1000), strict=True):
        set_budget(file, f"memory_mb = {megabytes}")
    federation, _ = serve(grid, three_nodes("training.rounds=1"), tmp_path / "run")
    assert federation.sizes == expected == ("resnet14", "resnet14", "resnet18")


def test_the_limits_of_a_node_are_the_columns_of_budgets_csv() -> None:
    assert ["client", *NodeBudget.model_fields] == [field.name for field in fields(Budget)]


@pytest.mark.parametrize("limit", ["memory_mb = 0.001", "parameters = 5", "gflops = 1e-6"])
def test_a_budget_that_is_too_small_is_reported_at_the_node(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    file = min(grid.nodes.values())
    set_budget(file, limit)
    with pytest.raises(
        MotleyError, match="no node came for client 0; a run begins with all of its clients"
    ):
        serve(grid, three_nodes(), tmp_path / "run")
    said = capsys.readouterr()
    assert "node 1000 is left out: it failed (refused-by-node), see reference" in said.out
    assert "budget: no size of the run fits. The smallest, resnet10, takes memory_mb = " in said.err
    assert not (tmp_path / "run").exists()


def test_a_job_beyond_a_nodes_budget_is_refused(grid: Grid, tmp_path: Path) -> None:
    def shrink(message: Message) -> None:
        if message.metadata.group_id == "1" and message.metadata.dst_node_id == 998:
            set_budget(max(grid.nodes.values()), "memory_mb = 0.01")

    grid.before = shrink
    serve(grid, three_nodes("training.rounds=1"), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert re.fullmatch(
        r"its node failed \(refused-by-node\), see reference \w+ in the .*", line["refused"]["2"]
    )
    assert (
        "budget: the job is for 'resnet18', which is beyond it."
        in (max(grid.nodes.values()).parent / "node.log").read_text()
    )


def test_budgets_of_the_server_reach_nodes_as_sizes(grid: Grid, tmp_path: Path) -> None:
    """Nodes do not have the server's file, and end with the local engine's bits."""
    (tmp_path / "budgets.csv").write_text("client,memory_mb\n0,1000\n1,1000\n2,1000\n")
    budgets = (
        "federation.size_assignment=budget",
        f"federation.budgets={tmp_path / 'budgets.csv'}",
        "training.rounds=1",
    )
    for file in grid.nodes.values():
        file.write_text(re.sub(r'size = "\w+"\n', "", file.read_text()))
    sent = []
    grid.before = lambda message: sent.append(str(message.content["job"]["config"]))
    federation, server = serve(grid, three_nodes(*budgets), tmp_path / "run")
    assert federation.sizes == ("resnet18",) * 3
    assert fingerprint(server.state) == local(tmp_path / "local", *budgets)[0]
    assert not any(str(tmp_path) in text for text in sent)


def test_a_stopped_server_resumes_with_the_nodes_client_states(grid: Grid, tmp_path: Path) -> None:
    settings = ("method.name=scaffold", "training.rounds=4")

    def stop(message: Message) -> None:
        if message.metadata.group_id == "3":
            raise KeyboardInterrupt

    grid.before = stop
    with pytest.raises(KeyboardInterrupt):
        serve(grid, three_nodes(*settings), tmp_path / "run")
    again = Grid({node + 5: file for node, file in grid.nodes.items()})
    _, server = serve(again, None, tmp_path / "run")
    assert (fingerprint(server.state), fingerprint(server.method_state)) == local(
        tmp_path / "local", *settings
    )


# ---- what goes wrong


def answered(reply: Message, **arrays: dict[str, torch.Tensor]) -> Message:
    """Return a reply with other arrays in it."""
    mine = {
        name: arrays.get(name, unpack(reply.content["arrays"], name))
        for name in ("delta", "payload")
    }
    reply.content["arrays"] = pack(**mine)
    return reply


def with_delta(edit: dict[str, torch.Tensor]) -> Misdeed:
    return lambda sent, reply: [
        answered(reply, delta={**unpack(reply.content["arrays"], "delta"), **edit})
    ]


def saying(**values: object) -> Misdeed:
    def act(sent: Message, reply: Message) -> list[Message]:
        reply.content["update"] = ConfigRecord({**reply.content["update"], **values})  # type: ignore[dict-item]
        return [reply]

    return act


def garbled(sent: Message, reply: Message) -> list[Message]:
    reply.content["arrays"]["delta"].data = b"\x80\x04\x95 a pickle, say"
    return [reply]


def bare(sent: Message, reply: Message) -> list[Message]:
    return [Message(RecordDict({"update": ConfigRecord({"client": 1})}), reply_to=sent)]


def wordy(sent: Message, reply: Message) -> list[Message]:
    reply.content["arrays"] = ConfigRecord({"delta": "none"})
    return [reply]


MISDEEDS: dict[str, tuple[Misdeed, str]] = {
    "is silent": (
        lambda sent, reply: [],
        "it did not answer within 0.05 s (engine.flower.timeout_s).",
    ),
    "fails": (
        lambda sent, reply: [Message(Error(2, "a\nb: c"), reply_to=sent)],
        "its node failed: b: c",
    ),
    "sends NaN": (
        with_delta({"fc.bias": torch.full((10,), torch.nan)}),
        "it holds a number that is not finite.",
    ),
    "has no loss": (saying(loss=torch.nan), "its loss is not finite."),
    "sends another shape": (
        with_delta({"fc.bias": torch.zeros(9)}),
        "'fc.bias' has shape (9,); (10,) was sent out.",
    ),
    "sends another type": (
        with_delta({"fc.bias": torch.zeros(10).double()}),
        "'fc.bias' is torch.float64",
    ),
    "sends an unknown name": (with_delta({"fc.bios": torch.zeros(10)}), "unknown name 'fc.bios'"),
    "sends too much": (
        with_delta({"x": torch.zeros(2**19)}),
        "MiB; engine.flower.max_reply_mib = 1.",
    ),
    "answers for another round": (saying(round=7), "it is for round 7; round 1 was asked."),
    "answers for another client": (saying(client=0), "it is for client 0; client 1 was asked."),
    "lies about its steps": (saying(num_steps=0), "it claims to have trained in no steps."),
    "claims all examples of the world": (
        saying(num_examples=2**63 - 1),
        "it reports 9223372036854775807 examples; server.max_examples = ",
    ),
    "claims too many steps": (
        saying(num_steps=10**6),
        "it reports 1000000 steps; with ",
    ),
    "reports an absurd loss": (saying(loss=-1e30), "its loss is -1e+30; server.max_loss = 1e+12."),
    "sends 1e38": (
        with_delta({"fc.bias": torch.full((10,), 1e38)}),
        "the round was undone and ended without it: with its update, the global state would hold",
    ),
    "counts in words": (
        saying(num_examples="many"),
        "num_examples = 'many' should be a whole number.",
    ),
    "sends no tensors": (garbled, "delta is not in the format safetensors"),
    "sends words for arrays": (wordy, "it holds no arrays."),
    "sends half": (bare, "its answer was refused"),
}


@pytest.mark.parametrize(("misdeed", "reason"), MISDEEDS.values(), ids=MISDEEDS)
def test_a_bad_answer_costs_one_update_and_is_recorded(
    grid: Grid, tmp_path: Path, misdeed: Misdeed, reason: str
) -> None:
    grid.misdeeds[999] = misdeed
    _, server = serve(
        grid, three_nodes("training.rounds=1", "engine.flower.max_reply_mib=1"), tmp_path / "run"
    )
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"] and reason in line["refused"]["1"]
    assert sorted(server.client_state_rounds) == [0, 2]


@pytest.mark.parametrize(
    ("method", "payload", "reason"),
    [
        ("scaffold", {"fc.bias": torch.zeros(1)}, "'fc.bias' has shape (1,)"),
        ("scaffold", {"fc.bios": torch.zeros(10)}, "KeyError('fc.bios')"),
        ("fednova", {}, "KeyError('progress')"),
        ("fednova", {"progress": torch.zeros(2)}, "invalid for input of size 2"),
        ("fednova", {"progress": torch.tensor(torch.inf)}, "it holds a number that is not finite."),
    ],
)
def test_a_payload_that_the_method_cannot_use(
    grid: Grid, tmp_path: Path, method: str, payload: dict[str, torch.Tensor], reason: str
) -> None:
    grid.misdeeds[999] = lambda sent, reply: [answered(reply, payload=payload)]
    _, server = serve(
        grid, three_nodes("training.rounds=1", f"method.name={method}"), tmp_path / "run"
    )
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"] and reason in line["refused"]["1"]
    assert sorted(server.client_state_rounds) == [0, 2]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"bn1.running_mean": torch.zeros(3)}, "RuntimeError"),
        ({"fc.bios": torch.zeros(10)}, "KeyError('fc.bios')"),
        ({"bn1.running_var": torch.full((4,), torch.inf)}, "it holds a number that is not finite"),
    ],
)
def test_a_collection_that_the_method_cannot_use(
    grid: Grid, tmp_path: Path, values: dict[str, torch.Tensor], reason: str
) -> None:
    grid.misdeeds_with = "train.collect"
    grid.misdeeds[999] = lambda sent, reply: [answered(reply, payload=values)]
    _, server = serve(
        grid, three_nodes("training.rounds=1", "method.name=heterofl"), tmp_path / "run"
    )
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"] and reason in line["refused"]["1"]
    assert sorted(server.client_state_rounds) == [0, 1, 2] and all(
        t.isfinite().all() for t in server.state.values()
    )


def test_only_the_first_of_two_answers_counts(grid: Grid, tmp_path: Path) -> None:
    def twice(sent: Message, reply: Message) -> list[Message]:
        return [reply, answered(Message(RecordDict(dict(reply.content)), reply_to=sent), delta={})]

    grid.misdeeds[999] = twice
    _, server = serve(grid, three_nodes(), tmp_path / "run")
    assert fingerprint(server.state) == local(tmp_path / "local")[0]


def test_an_answer_that_flower_cannot_read_costs_no_other(grid: Grid, tmp_path: Path) -> None:
    grid.misdeeds[999] = lambda sent, reply: [ValueError("bad bytes")]  # type: ignore[list-item]
    _, server = serve(grid, three_nodes("training.rounds=1"), tmp_path / "run")
    assert sorted(server.client_state_rounds) == [0, 2]


@pytest.fixture
def rest() -> Iterator[Event]:
    """Set this to let the rest of an announced answer arrive."""
    event = Event()
    yield event
    event.set()


def test_an_incomplete_answer_counts_as_missing(grid: Grid, tmp_path: Path, rest: Event) -> None:
    """Other answers are not delayed, and it is ignored when it arrives in a later round."""
    silent = Grid(grid.nodes)
    silent.misdeeds[1000] = in_round_1(lambda sent, reply: [])
    _, expected = serve(silent, three_nodes(), tmp_path / "silent")

    grid.misdeeds[1000] = in_round_1(lambda sent, reply: [rest, reply])  # type: ignore[list-item]
    grid.before = lambda message: rest.set() if message.metadata.group_id == "3" else None
    begin = time.monotonic()
    _, server = serve(grid, three_nodes(), tmp_path / "run")
    assert time.monotonic() - begin < NEVER_S / 2
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    reason = (
        "it announced an answer that did not come whole within 0.05 s (engine.flower.timeout_s)."
    )
    assert [line.get("refused") for line in lines] == [{"0": reason}, None, None]
    assert server.client_state_rounds == {0: 3, 1: 3, 2: 3}
    assert fingerprint(server.state) == fingerprint(expected.state)


def test_an_answer_that_is_complete_in_time_counts(grid: Grid, tmp_path: Path, rest: Event) -> None:
    """It takes longer than one answer may delay the others."""
    grid.misdeeds[1000] = lambda sent, reply: [rest, reply]  # type: ignore[list-item]
    Timer(1.5, rest.set).start()
    _, server = serve(grid, three_nodes("engine.flower.timeout_s=30"), tmp_path / "run")
    assert fingerprint(server.state) == local(tmp_path / "local")[0]


def test_a_node_whose_introduction_is_incomplete_is_left_out(
    grid: Grid, tmp_path: Path, rest: Event
) -> None:
    grid.misdeeds_with, grid.misdeeds[1000] = "query", lambda sent, reply: [rest, reply]  # type: ignore[list-item]
    begin = time.monotonic()
    with pytest.raises(MotleyError, match=r"no node came for client 0; a run begins"):
        serve(grid, three_nodes(), tmp_path / "run")
    assert time.monotonic() - begin < NEVER_S / 2


def test_a_node_that_flower_could_not_ask_is_asked_again(grid: Grid, tmp_path: Path) -> None:
    """A node is not left out because a busy machine is slow to start the app."""
    failures = [
        Error(6, "ClientApp stopped responding."),
        Error(6, "ClientApp stopped responding."),
    ]

    def fail_twice(sent: Message, reply: Message) -> list[Message]:
        return [Message(failures.pop(), reply_to=sent)] if failures else [reply]

    grid.misdeeds_with, grid.misdeeds[1000] = "query", fail_twice
    _, server = serve(
        grid, three_nodes("training.rounds=1", "engine.flower.wait_s=5"), tmp_path / "run"
    )
    assert server.client_state_rounds == {0: 1, 1: 1, 2: 1} and not failures


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "worker-died"])
def test_a_node_whose_answer_failed_is_asked_again_after_a_while(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """A worker that is killed while it says which client it is must not exclude its node for good."""
    monkeypatch.setattr(nodes, "ASK_AGAIN_S", 0.2)
    questions: list[Message] = []

    def fail_once(sent: Message, reply: Message) -> list[Message]:
        questions.append(sent)
        if len(questions) > 1:
            return [reply]
        return [] if lost else [Message(Error(0, "worker-died 0123abcd"), reply_to=sent)]

    grid.misdeeds_with, grid.misdeeds[1000] = "query", fail_once
    _, server = serve(
        grid, three_nodes("training.rounds=1", "engine.flower.wait_s=10"), tmp_path / "run"
    )
    assert server.client_state_rounds == {0: 1, 1: 1, 2: 1}
    assert len(questions) == 2


def test_a_late_error_does_not_exclude_a_node_that_has_answered(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first question is lost, and its error arrives after the answer to the second one."""
    monkeypatch.setattr(nodes, "ASK_AGAIN_S", 0.2)
    first: list[Message] = []

    def lose_first(sent: Message, reply: Message) -> list[Message]:
        if not first:
            first.append(sent)
            return []
        return [reply]

    def expire(message: Message) -> None:
        if message.metadata.group_id == "1":
            number = first[0].metadata.message_id
            grid.replies[number] = [Message(Error(3, "too old"), reply_to=first[0])]

    grid.misdeeds_with, grid.misdeeds[1000], grid.before = "query", lose_first, expire
    _, server = serve(
        grid, three_nodes("training.rounds=2", "engine.flower.wait_s=10"), tmp_path / "run"
    )
    assert server.client_state_rounds == {0: 2, 1: 2, 2: 2}
    assert "asked again" not in capsys.readouterr().out


def test_a_node_that_leaves_and_comes_back_under_another_id(grid: Grid, tmp_path: Path) -> None:
    def leave_and_return(message: Message) -> None:
        if message.metadata.group_id == "2" and 999 in grid.nodes:
            grid.nodes[5] = grid.nodes.pop(999)

    grid.before = leave_and_return
    _, server = serve(grid, three_nodes("training.rounds=3"), tmp_path / "run")
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert [list(line.get("refused", {})) for line in lines] == [[], ["1"], []]
    assert server.client_state_rounds == {0: 3, 1: 3, 2: 3}


def test_a_round_with_too_few_updates_is_repeated(grid: Grid, tmp_path: Path) -> None:
    silent = {999, 998}
    tries = [0]

    def sulk(message: Message) -> None:
        if message.metadata.group_id == "2" and message.metadata.dst_node_id == 1000:
            tries[0] += 1
            grid.misdeeds = (
                {node: (lambda sent, reply: []) for node in silent} if tries[0] < 3 else {}
            )

    grid.before = sulk
    _, server = serve(grid, three_nodes("server.min_fraction=0.5"), tmp_path / "run")
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert [len(line.get("repeated", [])) for line in lines] == [0, 2, 0]
    assert lines[1]["repeated"][0] == {"1": MISDEEDS["is silent"][1], "2": MISDEEDS["is silent"][1]}
    assert "refused" not in lines[1]
    assert fingerprint(server.state) == local(tmp_path / "local")[0]


def test_a_run_whose_rounds_keep_failing_stops_and_can_go_on(grid: Grid, tmp_path: Path) -> None:
    def die(message: Message) -> None:
        if message.metadata.group_id == "2":
            grid.misdeeds = dict.fromkeys((999, 998), lambda sent, reply: [])

    grid.before = die
    settings = three_nodes("server.min_fraction=0.5", "server.attempts=2")
    with pytest.raises(
        MotleyError, match=r"round 2 was tried 2 times .* client 1: it did not answer"
    ):
        serve(grid, settings, tmp_path / "run")
    _, server = serve(Grid(grid.nodes), None, tmp_path / "run")
    assert fingerprint(server.state) == local(tmp_path / "local")[0]


def test_the_engine_needs_a_grid() -> None:
    with pytest.raises(
        MotleyError, match=r"engine.name = 'flower': needs Flower; see docs/deploy.md"
    ):
        Federation(three_nodes())


def test_the_part_of_a_size_is_pushed_to_flower_once(grid: Grid, tmp_path: Path) -> None:
    """Flower pushes an object once, whoever it is for, and knows it by its content."""
    pushed: dict[int, str] = {}
    grid.before = lambda message: pushed.update(arrays_of(message))
    for file in grid.nodes.values():
        file.write_text(re.sub(r'size = "\w+"', "", file.read_text()))
    sizes = "federation.sizes=['resnet10','resnet10','resnet18']"
    serve(grid, three_nodes("training.rounds=1", sizes), tmp_path / "run")
    assert pushed[1000] == pushed[999] != pushed[998]


def arrays_of(message: Message) -> dict[int, str]:
    """Return the id of the state in a message, by the node that it is for."""
    if message.metadata.message_type != "train":
        return {}
    return {message.metadata.dst_node_id: message.content["arrays"]["state"].object_id}  # type: ignore[index, union-attr]


def test_states_travel_whole() -> None:
    state = {
        "a": torch.randn(2, 3).t(),
        "b": torch.tensor(7),
        "c": torch.zeros(0, 4),
        "d": torch.randn(3).bfloat16(),
    }
    record = pack(state=state, broadcast={})
    assert isinstance(record, ArrayRecord) and list(record) == ["state"]
    assert fingerprint(unpack(record, "state")) == fingerprint(state)
    assert unpack(record, "broadcast") == {}


# ---- privacy and encoding


GUARDED = (
    "split.normalization_statistics=batch",
    "privacy.clip=0.5",
    "privacy.noise=0.2",
    "training.rounds=2",
)


def edit(grid: Grid, more: str) -> None:
    """Add to the files of all nodes."""
    for file in grid.nodes.values():
        file.write_text(f"{more}\n{file.read_text()}")


def test_uploads_in_16_bits_end_with_the_local_engines_bits(grid: Grid, tmp_path: Path) -> None:
    """Rounding errors are kept on the nodes' disks, and survive a restart of everything."""
    settings = ("uplink.dtype=fp16", "method.name=scaffold")
    grid.before = lambda message: stop_in_round(message, 3)
    with pytest.raises(KeyboardInterrupt):
        serve(grid, three_nodes(*settings), tmp_path / "run")
    _, server = serve(Grid(grid.nodes), None, tmp_path / "run")
    assert (fingerprint(server.state), fingerprint(server.method_state)) == local(
        tmp_path / "local", *settings
    )
    traffic = [
        [line["bytes"] for line in MetricsLog(tmp_path / name / "metrics.jsonl").read()]
        for name in ("run", "local")
    ]
    assert traffic[0] == traffic[1]


def stop_in_round(message: Message, number: int) -> None:
    if message.metadata.group_id == str(number):
        raise KeyboardInterrupt


def test_repeatable_nodes_draw_the_local_engines_noise(grid: Grid, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    edit(grid, "repeatable = true")
    _, server = serve(grid, three_nodes(*GUARDED), tmp_path / "run")
    assert fingerprint(server.state) == local(tmp_path / "local", *GUARDED)[0]
    epsilons = [
        [line["epsilon"] for line in MetricsLog(tmp_path / name / "metrics.jsonl").read()]
        for name in ("run", "local")
    ]
    assert epsilons[0] == epsilons[1]


def test_nodes_draw_noise_that_nobody_can_repeat(grid: Grid, tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    sent: dict[str, list[dict[str, torch.Tensor]]] = {"first": [], "second": []}
    for name, changes in sent.items():
        grid.misdeeds[999] = lambda sent, reply, changes=changes: (  # type: ignore[misc]
            changes.append(unpack(reply.content["arrays"], "delta")) or [reply]
        )
        serve(grid, three_nodes(*GUARDED, "training.rounds=1"), tmp_path / name)
    federation = Federation(three_nodes(*GUARDED, "engine.name=local"))
    jobs = [federation.job(federation.initial_state(), 1, 1)]
    (known,) = federation.engine.train(jobs, lambda client: None)
    first, second = sent["first"][0], sent["second"][0]
    # Neither from the run's seed, nor from an earlier answer to the same message.
    for other in (known.delta, second):  # type: ignore[union-attr]
        differences = torch.cat(
            [(first[name] - tensor).flatten() for name, tensor in other.items()]
        )
        assert abs(float(differences.std()) - 2**0.5 * 0.1) < 0.002


def test_a_node_that_wants_more_privacy_than_the_run_gives(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = grid.nodes[999]
    file.write_text(f"{file.read_text()}\n[privacy]\nclip = 1.0\nnoise = 1.5\n")
    for run, reason in (
        (GUARDED, "privacy.noise = 0.2; this node requires at least 1.5."),
        ((), "privacy.clip = 0 "),
    ):
        with pytest.raises(MotleyError, match="no node came for client 1"):
            serve(Grid(grid.nodes), three_nodes(*run), tmp_path / "run")
        said = capsys.readouterr()
        assert "it failed (refused-by-node), see reference" in said.out and reason not in said.out
        assert reason in said.err


# ---- recalibrated statistics


@pytest.mark.parametrize("average", [0.0, 0.5], ids=["raw", "ema"])
def test_recalibrated_nodes_end_with_the_local_engines_bits(
    grid: Grid, tmp_path: Path, average: float
) -> None:
    settings = (
        "server.statistics.name=recalibrate",
        f"server.ema_decay={average}",
        "training.steps=2",
        "method.name=scaffold",
    )
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    _, expected = start_run(three_nodes(*settings, "engine.name=local"), tmp_path / "local")
    assert fingerprint(server.state) == fingerprint(expected.state)
    assert fingerprint(server.model) == fingerprint(expected.model)
    assert not any(
        "refused" in line for line in MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    )


def test_impossible_statistics_are_refused(grid: Grid, tmp_path: Path) -> None:
    grid.misdeeds_with = "train.collect"
    lie = {"bn1.count": torch.ones(4, dtype=torch.float64)}
    grid.misdeeds[999] = lambda sent, reply: [answered(reply, payload=lie)]
    settings = ("training.rounds=1", "training.steps=2", "server.statistics.name=recalibrate")
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"]
    assert line["refused"]["1"].startswith("its statistics were refused: ")
    assert sorted(server.client_state_rounds) == [0, 1, 2]


def test_statistics_that_spoil_the_model_are_left_out(grid: Grid, tmp_path: Path) -> None:
    """Inputs with a mean of 1e16 are possible, and no model works with them."""

    def huge(sent: Message, reply: Message) -> list[Message]:
        moments = unpack(reply.content["arrays"], "payload")
        for name in moments:
            if name.endswith("sum"):
                moments[name] = torch.full_like(moments[name], 1e19)
            elif name.endswith("squares"):
                moments[name] = torch.full_like(moments[name], 1e38)
        return [answered(reply, payload=moments)]

    grid.misdeeds_with = "train.collect"
    grid.misdeeds[999] = huge
    settings = ("training.rounds=1", "training.steps=2", "server.statistics.name=recalibrate")
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"]
    assert "its collection was left out: with it, its moving average would" in line["refused"]["1"]
    assert all(tensor.abs().max() < 1e15 for tensor in server.model.values())


@pytest.mark.parametrize("settings", ["server.statistics.name=recalibrate", "method.name=heterofl"])
def test_a_node_that_fails_in_a_collection_is_reported(
    grid: Grid, tmp_path: Path, settings: str
) -> None:
    grid.misdeeds_with = "train.collect"
    grid.misdeeds[999] = lambda sent, reply: [Message(Error(0, "training 0123abcd"), reply_to=sent)]
    _, server = serve(
        grid, three_nodes("training.rounds=1", "training.steps=2", settings), tmp_path / "run"
    )
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert line["refused"] == {
        "1": "its collection failed: its node failed (training), see reference 0123abcd in the node's log."
    }
    assert sorted(server.client_state_rounds) == [0, 1, 2], "its update counts"


def test_a_node_reports_statistics_only_if_the_run_recalibrates(grid: Grid, tmp_path: Path) -> None:
    """Otherwise a server could get statistics from a node with privacy."""

    def ask_for_statistics(message: Message) -> None:
        if message.metadata.message_type == "train.collect":
            message.content["job"]["collection"] = "statistics"

    grid.before = ask_for_statistics
    serve(
        grid,
        three_nodes("training.rounds=1", "training.steps=2", "method.name=heterofl"),
        tmp_path / "run",
    )
    log = (max(grid.nodes.values()).parent / "node.log").read_text()
    assert (
        "the job asks for BatchNorm statistics; the run has server.statistics.name = 'averaged'."
        in log
    )


def test_a_guarded_node_answers_no_collection(grid: Grid, tmp_path: Path) -> None:
    """It does not even tell its number of examples in a run with [privacy]."""
    refusals = []

    def ask_for_a_collection(message: Message) -> None:
        if message.metadata.message_type == "train":
            node = message.metadata.dst_node_id
            request = Message(RecordDict(dict(message.content.items())), node, "train.collect")
            request.metadata.__dict__["_message_id"] = "collection"
            kind, _ = grid.answer(request).error.reason.split()
            refusals.append(kind)
            assert "asks for a collection" in (grid.nodes[node].parent / "node.log").read_text()

    grid.before = ask_for_a_collection
    serve(grid, three_nodes(*GUARDED, "training.rounds=1", "training.steps=1"), tmp_path / "run")
    assert refusals == ["refused-by-node"] * 3
