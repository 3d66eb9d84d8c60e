"""A node counts every update that leaves it, in all runs, and refuses to spend more than its limit."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")
pytest.importorskip("dp_accounting")

from flwr.app import Message

from motley.core.errors import MotleyError
from motley.deploy.folder import DeploySettings, create
from motley.flower.ledger import MANY, NAME, NodeLedger
from motley.flower.server import serve
from motley.flower.settings import NodeSettings, read_node
from motley.runs.metrics import MetricsLog
from motley.settings import validate
from tests.cli.conftest import call
from tests.flower.grid import Grid, three_nodes

QUICK = ("split.normalization_statistics=batch", "training.steps=1", "evaluation.every=9")


def private(noise: float, rounds: int) -> tuple[str, ...]:
    return (*QUICK, "privacy.clip=0.5", f"privacy.noise={noise}", f"training.rounds={rounds}")


def limit(grid: Grid, text: str) -> Path:
    """Give the node of client 1 a [privacy] table; return the file of its ledger."""
    file = grid.nodes[999]
    file.write_text(f"{file.read_text()}\n[privacy]\n{text}\n")
    return file.parent / "client-1" / NAME


def lines_of(ledger: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]


def exact(noises: list[float], delta: float = 1e-5) -> float:
    """Return the epsilon of Gaussian mechanisms in closed form, without any accountant.

    An update with noise z has the multiplier z / 2, because replacing the data moves it by 2 clip.
    Together they are one Gaussian mechanism with mu = sqrt(sum of 1 / multiplier^2), and (Dong,
    Roth and Su, 2022) delta = Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2).
    """
    mu = math.sqrt(sum((2 / noise) ** 2 for noise in noises))

    def phi(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    low, high = 0.0, 1000.0
    for _ in range(100):
        epsilon = (low + high) / 2
        tail = phi(-epsilon / mu - mu / 2)
        reached = phi(-epsilon / mu + mu / 2) - (math.exp(epsilon) * tail if tail else 0.0)
        low, high = (low, epsilon) if reached <= delta else (epsilon, high)
    return high


# ---- counting


def test_every_update_is_counted_across_runs_and_compared_with_the_closed_form(
    grid: Grid, tmp_path: Path
) -> None:
    """Three runs with different noise, one of which is stopped and resumed."""
    ledger = limit(grid, "max_epsilon = 100.0")
    node = read_node(grid.nodes[999])
    noises: list[float] = []

    def compare() -> None:
        counted = NodeLedger(read_node(grid.nodes[999]))
        assert counted.uploads().total() == len(noises)
        epsilon = counted.epsilon(counted.uploads())
        # Rényi orders give an upper bound, which is a few percent above the exact value.
        assert exact(noises) <= epsilon <= 1.12 * exact(noises)

    serve(grid, three_nodes(*private(4.0, 2)), tmp_path / "first")
    noises += [4.0] * 2
    compare()
    serve(Grid(grid.nodes), three_nodes(*private(1.5, 3)), tmp_path / "second")
    noises += [1.5] * 3
    compare()

    def stop(message: Message) -> None:
        if message.metadata.group_id == "2" and message.metadata.dst_node_id == 998:
            raise KeyboardInterrupt

    grid.before = stop
    with pytest.raises(KeyboardInterrupt):
        serve(grid, three_nodes(*private(8.0, 2)), tmp_path / "third")
    serve(Grid(grid.nodes), None, tmp_path / "third")
    noises += [8.0] * 3  # round 2 twice: client 1 had answered before the server was stopped
    compare()
    assert [line["noise"] for line in lines_of(ledger)] == noises
    assert {line["data"] for line in lines_of(ledger)} == {"digits"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in ledger.parent.glob(f"{NAME}*"))
    # The server reports the same number for its run, which counted round 2 twice as well.
    (*_, line) = MetricsLog(tmp_path / "third" / "metrics.jsonl").read()
    alone = NodeLedger(node).epsilon({8.0: 3})
    assert line["epsilon"]["upload"] == pytest.approx(alone, rel=1e-5)


def test_an_update_is_counted_before_it_is_sent(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node dies after it has counted; the server never sees the answer."""
    ledger = limit(grid, "")

    def die(*arguments: object, **more: object) -> None:
        raise SystemError("killed")

    monkeypatch.setattr("motley.flower.client.answer", die)
    with pytest.raises(MotleyError, match="round 1 was tried"):
        settings = ("server.min_fraction=1", "server.attempts=2")
        serve(grid, three_nodes(*private(4.0, 1), *settings), tmp_path / "run")
    assert len(lines_of(ledger)) == 2


def test_data_sets_are_counted_apart(grid: Grid, tmp_path: Path) -> None:
    ledger = limit(grid, "max_epsilon = 100.0")
    serve(grid, three_nodes(*private(4.0, 2)), tmp_path / "run")
    node = read_node(grid.nodes[999])
    other = node.model_copy(update={"data": node.data.model_copy(update={"path": "/other.npz"})})
    assert NodeLedger(node).uploads() == {4.0: 2} and NodeLedger(other).uploads() == {}
    assert len(lines_of(ledger)) == 2


def test_nothing_is_counted_in_runs_without_privacy_and_by_repeatable_nodes(
    grid: Grid, tmp_path: Path
) -> None:
    serve(grid, three_nodes(*QUICK, "training.rounds=1"), tmp_path / "run")
    for file in grid.nodes.values():
        file.write_text(f"repeatable = true\n{file.read_text()}")
    serve(Grid(grid.nodes), three_nodes(*private(4.0, 1)), tmp_path / "repeatable")
    assert not list(tmp_path.glob(f"nodes/**/{NAME}"))


# ---- the limit


def test_a_node_stops_at_its_limit_and_the_run_goes_on(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit allows three updates with noise 4, in two runs together."""
    three, four = (NodeLedger(read_node(grid.nodes[999])).epsilon({4.0: n}) for n in (3, 4))
    ledger = limit(grid, f"max_epsilon = {(three + four) / 2}")
    serve(grid, three_nodes(*private(4.0, 2)), tmp_path / "first")
    capsys.readouterr()
    serve(Grid(grid.nodes), three_nodes(*private(4.0, 3)), tmp_path / "second")
    lines = MetricsLog(tmp_path / "second" / "metrics.jsonl").read()
    assert [list(line.get("refused", {})) for line in lines] == [[], ["1"], ["1"]]
    assert "its node failed (privacy-limit), see reference" in lines[1]["refused"]["1"]
    assert "privacy.max_epsilon in its node.toml" in lines[1]["refused"]["1"]
    assert len(lines_of(ledger)) == 3
    said = capsys.readouterr().err
    assert f"this node has sent 3 updates of digits, which is epsilon {three:.2f} at delta" in said
    assert f"One more with privacy.noise = 4 would make it {four:.2f}." in said
    # A new run cannot begin, but one with more noise can.
    with pytest.raises(MotleyError, match="no node came for client 1"):
        serve(Grid(grid.nodes), three_nodes(*private(4.0, 1)), tmp_path / "third")
    serve(Grid(grid.nodes), three_nodes(*private(40.0, 1)), tmp_path / "fourth")
    assert len(lines_of(ledger)) == 4


def test_a_limit_refuses_runs_without_noise(
    grid: Grid, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit(grid, "max_epsilon = 100.0")
    for number, settings in enumerate([(), ("privacy.clip=0.5",)]):
        config = three_nodes(*QUICK, "training.rounds=1", *settings)
        with pytest.raises(MotleyError, match="no node came for client 1"):
            serve(Grid(grid.nodes), config, tmp_path / str(number))
        said = capsys.readouterr()
        assert "it failed (privacy-limit)" in said.out
        assert "privacy.max_epsilon = 100: the run has privacy.noise = 0, and without" in said.err


def test_a_limit_refuses_collections_of_runs_without_noise(grid: Grid, tmp_path: Path) -> None:
    """A server could ask for one without having introduced itself."""

    def limit_before_the_collection(message: Message) -> None:
        if message.metadata.message_type == "train.collect":
            grid.before = lambda message: None
            limit(grid, "max_epsilon = 100.0")

    grid.before = limit_before_the_collection
    settings = ("method.name=heterofl", "training.rounds=1", "training.steps=1")
    serve(grid, three_nodes(*settings), tmp_path / "run")
    (line,) = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert list(line["refused"]) == ["1"]
    log = (grid.nodes[999].parent / "node.log").read_text()
    assert "privacy.max_epsilon = 100: the run has privacy.noise = 0, and without" in log


@pytest.mark.parametrize("noise", [0.1, 4.0, 300.0])
def test_the_updates_that_are_left_are_those_that_fit(tmp_path: Path, noise: float) -> None:
    settings = {"client": 0, "memory": str(tmp_path), "privacy": {"max_epsilon": 20.0}}
    ledger = NodeLedger(validate(NodeSettings, settings))
    left = ledger.updates_left(noise)
    assert ledger.epsilon({noise: left}) <= 20.0
    assert left < MANY and ledger.epsilon({noise: left + 1}) > 20.0
    assert exact([noise] * (left + 1)) > 18.0, "by the closed form, not many more would fit"


def test_a_limit_and_noise_from_the_seed_contradict_each_other() -> None:
    with pytest.raises(MotleyError, match=r"max_epsilon = 3 and repeatable = true: noise that"):
        validate(NodeSettings, {"client": 0, "repeatable": True, "privacy": {"max_epsilon": 3.0}})


# ---- damage, and the start of a node


def delete(ledger: Path) -> None:
    ledger.unlink()


def edit(ledger: Path) -> None:
    ledger.write_text(ledger.read_text().replace('"noise": 4.0', '"noise": 400.0', 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (delete, "has 0 complete lines, but 1 were written"),
        (edit, "line 1: is damaged, or a line before it is missing"),
    ],
    ids=["deleted", "edited"],
)
def test_a_damaged_ledger_is_refused(
    grid: Grid,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    message: str,
) -> None:
    """By the node's app, and by `motley deploy node`, which says what to do."""
    ledger = limit(grid, "")
    serve(grid, three_nodes(*private(4.0, 1)), tmp_path / "run")
    damage(ledger)
    with pytest.raises(MotleyError, match="no node came for client 1"):
        serve(Grid(grid.nodes), three_nodes(*private(4.0, 1)), tmp_path / "other")
    said = capsys.readouterr()
    assert message in said.err and message not in said.out and "(privacy-limit)" in said.out
    place = create(tmp_path / "fed", three_nodes(), DeploySettings(port=9000)).nodes / "node-1"
    shutil.copytree(ledger.parent, place / "memory")
    code, _, err = call("deploy", "node", place)
    assert code == 2 and message in err and "Traceback" not in err
    assert "Restore the file from a backup." in err and f"remove {NAME} and {NAME}.head" in err


def test_a_node_says_what_is_spent_and_left_when_it_starts(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = limit(grid, "max_epsilon = 8.0\nclip = 0.5\nnoise = 4.0")
    serve(grid, three_nodes(*private(4.0, 2)), tmp_path / "run")
    config = three_nodes(*private(4.0, 2))
    place = create(tmp_path / "fed", config, DeploySettings(port=9000)).nodes / "node-1"
    text = (place / "node.toml").read_text()
    assert "[privacy]\nclip = 0.5\nnoise = 4.0\n" in text and "max_epsilon" not in text
    shutil.copytree(ledger.parent, place / "memory")

    def stop(*arguments: object) -> tuple[int, str]:
        raise MotleyError("stopped.")

    monkeypatch.setattr("motley.deploy.node.run_supernode", stop)
    _, out, _ = call("deploy", "node", place)
    counted = NodeLedger(read_node(grid.nodes[999]))
    epsilon = counted.epsilon({4.0: 2})
    sent = f"privacy: 2 updates of digits have left this node, epsilon {epsilon:.2f}"
    assert f"{sent} at delta 1e-05; there is no limit (privacy.max_epsilon)\n" in out
    (place / "node.toml").write_text(text.replace("noise = 4.0", "noise = 4.0\nmax_epsilon = 8.0"))
    _, out, _ = call("deploy", "node", place)
    left = counted.updates_left(4.0)
    assert 5 < left < 50
    assert (
        f"{sent} of 8 at delta 1e-05; with privacy.noise = 4, {left} more are within the limit\n"
        in out
    )


@pytest.mark.slow
def test_real_processes_count_what_a_killed_server_asked(tmp_path: Path) -> None:
    """The server is killed with no checkpoint; client 1 may send three updates in all."""
    from tests.flower.processes import PATIENCE, Deployment

    waiting = (f"engine.flower.wait_s={PATIENCE}", f"engine.flower.timeout_s={PATIENCE}")
    settings = (*private(4.0, 4), *waiting, "run.checkpoint_every=4", "server.min_fraction=0.5")
    config = three_nodes(*settings)
    with Deployment(tmp_path / "federation", config, insecure=True) as deployment:
        file = deployment.folder.nodes / "node-1" / "node.toml"
        node = read_node(file)
        three, four = (NodeLedger(node).epsilon({4.0: count}) for count in (3, 4))
        allowed = f"noise = 4.0\nmax_epsilon = {(three + four) / 2}"
        file.write_text(file.read_text().replace("noise = 4.0", allowed))
        deployment.serve()
        deployment.join(0, 1, 2)
        deployment.play()
        deployment.wait(lambda: len(deployment.lines()) >= 2)
        deployment.kill("server")
        deployment.kill("run")
        deployment.serve()
        deployment.finish(deployment.play())
        lines = deployment.lines()
        assert [line["round"] for line in lines] == [1, 2, 3, 4]
        # Rounds 1 and 2 were asked twice, by the file that the killed server left.
        asked = [
            entry["round"]
            for entry in lines_of(deployment.folder.run / NAME)
            if "asked" in entry and 1 in entry["asked"]  # type: ignore[operator]
        ]
        assert sorted(asked)[:4] == [1, 1, 2, 2] and len(asked) >= 6
        counted = NodeLedger(node).epsilon({4.0: len(asked)})
        assert lines[-1]["epsilon"]["upload"] == pytest.approx(counted, rel=1e-5)  # type: ignore[index]
        # Client 1 answered three times and then no more; the others answered every time.
        assert len(lines_of(Path(node.memory) / NAME)) == 3
        assert [list(line.get("refused", {})) for line in lines[-2:]] == [["1"], ["1"]]  # type: ignore[call-overload, attr-defined]
        assert "(privacy-limit)" in lines[-1]["refused"]["1"]  # type: ignore[index]
        assert "privacy.max_epsilon = " in deployment.said("node-1")
        others = read_node(deployment.folder.nodes / "node-0" / "node.toml")
        assert len(lines_of(Path(others.memory) / NAME)) in (len(asked) - 1, len(asked))
