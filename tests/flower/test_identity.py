"""A client number is accepted from the node with its key alone; without keys, from the first node."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Message

from motley.core.errors import MotleyError
from motley.flower.server import serve
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from tests.flower.grid import Grid, three_nodes

REFUSED = "its node is refused: it states that it is client 0."
PRINTED = "node 999 is refused: it states that it is client 0, but its key is bound to client 1.\n"


class Keys:
    """A registrar of three nodes, whose keys a test may rebind or revoke."""

    def __init__(self) -> None:
        self.bound: dict[int, int | None] = {1000: 0, 999: 1, 998: 2}
        self.out: set[int] = set()

    def clients_of(self, nodes: Collection[int]) -> dict[int, int | None]:
        return {node: self.bound[node] for node in nodes if node in self.bound}

    def revoked(self) -> set[int]:
        return self.out


def in_rounds(events: dict[int, Callable[[], None]]) -> Callable[[Message], None]:
    """Return a hook of the grid that does something when the messages of a round are sent."""
    waiting = dict(events)

    def act(message: Message) -> None:
        group = message.metadata.group_id
        if group.isdecimal() and int(group) in waiting:
            waiting.pop(int(group))()

    return act


def claim(file: Path, client: int, size: str) -> None:
    """Let a node.toml state a client number and its size."""
    lines = file.read_text().splitlines()
    file.write_text("\n".join([f"client = {client}", f'size = "{size}"', *lines[2:], ""]))


def leave(grid: Grid) -> None:
    """Disconnect node 999."""
    del grid.nodes[999]


def refusals(folder: Path) -> list[dict[str, str]]:
    return [line.get("refused", {}) for line in MetricsLog(folder / "metrics.jsonl").read()]


def rounds(number: int) -> str:
    return f"training.rounds={number}"


# ---- with keys


def test_a_node_that_claims_another_client_is_refused_and_changes_nothing(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Node 1 leaves, comes back as client 0, and is corrected without being seen to leave."""
    file = grid.nodes[999]

    def come_back_as_client_0() -> None:
        claim(file, 0, "resnet10")
        grid.nodes[999] = file

    grid.before = in_rounds(
        {
            1: lambda: leave(grid),
            2: come_back_as_client_0,
            4: lambda: claim(file, 1, "resnet14"),
        }
    )
    _, server = serve(grid, three_nodes(rounds(5)), tmp_path / "run", registrar=Keys())
    found = refusals(tmp_path / "run")
    assert [list(reasons) for reasons in found] == [["1"], ["1"], ["1"], ["1"], []]
    assert [reasons["1"] for reasons in found[2:4]] == [REFUSED, REFUSED]
    assert capsys.readouterr().out.count(PRINTED) == 1

    # The same run, with node 1 away in rounds 1 to 4.
    again = Grid({**grid.nodes, 999: file})
    again.before = in_rounds({1: lambda: leave(again), 4: lambda: again.nodes.update({999: file})})
    _, expected = serve(again, three_nodes(rounds(5)), tmp_path / "away", registrar=Keys())
    assert fingerprint(server.state) == fingerprint(expected.state)


def test_a_refused_node_has_one_unanswered_question_at_most(grid: Grid, tmp_path: Path) -> None:
    """It states another client once, and is silent from then on."""
    keys = Keys()
    keys.bound[5] = None
    grid.nodes = {5: grid.nodes[1000], **grid.nodes}
    questions: list[Message] = []

    def answer_once(sent: Message, reply: Message) -> list[Message]:
        questions.append(sent)
        return [reply] if len(questions) == 1 else []

    grid.misdeeds_with, grid.misdeeds[5] = "query", answer_once
    serve(grid, three_nodes(rounds(4)), tmp_path / "run", registrar=keys)
    assert len(questions) == 2
    assert refusals(tmp_path / "run") == [{}] * 4


def test_a_node_with_an_unbound_key_gets_no_client(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = Keys()
    keys.bound[5] = None
    grid.nodes = {5: grid.nodes[1000], **grid.nodes}
    asked: list[int] = []
    grid.before = lambda message: asked.append(message.metadata.dst_node_id)
    serve(grid, three_nodes(rounds(2)), tmp_path / "run", registrar=keys)
    assert refusals(tmp_path / "run") == [{}, {}]
    assert asked.count(1000) == 3, "its query and two jobs"
    text = "node 5 is refused: it states that it is client 0, but its key is bound to no client.\n"
    assert capsys.readouterr().out.count(text) == 1


def test_a_node_is_taken_once_its_key_is_known(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's list of keys may be out of reach for a moment."""
    keys = Keys()
    del keys.bound[999]
    grid.before = lambda message: keys.bound.update({999: 1})
    serve(grid, three_nodes(rounds(1)), tmp_path / "run", registrar=keys)
    assert refusals(tmp_path / "run") == [{}]
    assert "refused" not in capsys.readouterr().out


def test_a_revoked_client_is_left_out_until_it_is_admitted_again(
    grid: Grid, tmp_path: Path
) -> None:
    """Its answer is on the way when its key is revoked; later it is back under another id."""
    keys = Keys()
    file = grid.nodes[999]

    def admit() -> None:
        keys.out = set()
        keys.bound[5] = 1
        grid.nodes[5] = file

    grid.before = in_rounds({2: lambda: keys.out.add(1), 3: lambda: leave(grid), 4: admit})
    _, server = serve(grid, three_nodes(rounds(5)), tmp_path / "run", registrar=keys)
    revoked = {"1": "its key was revoked."}
    assert refusals(tmp_path / "run") == [{}, revoked, revoked, revoked, {}]
    assert server.client_state_rounds == {0: 5, 1: 5, 2: 5}


def test_nobody_waits_for_a_revoked_client_but_a_run_begins_with_all(
    grid: Grid, tmp_path: Path
) -> None:
    keys = Keys()

    def revoke() -> None:
        keys.out.add(1)
        del grid.nodes[999]

    grid.before = in_rounds({1: revoke})
    began = time.monotonic()
    settings = three_nodes(rounds(3), "engine.flower.wait_s=300")
    serve(grid, settings, tmp_path / "run", registrar=keys)
    assert [list(found) for found in refusals(tmp_path / "run")] == [["1"]] * 3
    assert time.monotonic() - began < 150  # half of wait_s, also on a busy machine
    with pytest.raises(MotleyError) as raised:
        serve(grid, three_nodes(), tmp_path / "other", registrar=keys)
    assert str(raised.value) == (
        "engine.flower.wait_s = 0.01: no node came for client 1; a run begins with all of its "
        "clients. Client 1: its key was revoked."
    )


def test_an_answer_that_comes_from_another_node_is_refused(grid: Grid, tmp_path: Path) -> None:
    def from_another(sent: Message, reply: Message) -> list[Message]:
        reply.metadata.__dict__["_src_node_id"] = 998
        return [reply]

    grid.misdeeds[999] = from_another
    serve(grid, three_nodes(rounds(1)), tmp_path / "run", registrar=Keys())
    reason = "its answer was refused: it comes from another node."
    assert refusals(tmp_path / "run") == [{"1": reason}]


# ---- without keys


def test_without_keys_the_first_node_keeps_a_number_and_then_the_second_is_taken(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second node has other examples, so that its turn would change the result."""
    file = grid.nodes[999]
    second = tmp_path / "second" / "node.toml"
    second.parent.mkdir()
    second.write_text(file.read_text())
    jobs: list[tuple[str, int]] = []
    events = in_rounds(
        {
            1: lambda: grid.nodes.update({5: second}),
            2: lambda: None,
            3: lambda: leave(grid),
        }
    )

    def note(message: Message) -> None:
        events(message)
        if message.metadata.message_type == "train":
            jobs.append((message.metadata.group_id, message.metadata.dst_node_id))

    grid.before = note
    serve(grid, three_nodes(rounds(4)), tmp_path / "run")
    of_client_1 = [node for _, node in jobs if node in (999, 5)]
    assert of_client_1 == [999, 999, 999, 5]
    assert [list(found) for found in refusals(tmp_path / "run")] == [[], [], ["1"], []]
    said = capsys.readouterr().out
    text = "node 5 is left out: it states that it is client 1, and so does node 999, which came"
    assert said.count(text) == 1
