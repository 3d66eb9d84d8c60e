"""Every analysis on a real run: it writes a table and two figures and does not change the run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from motley.analysis import ANALYSES
from motley.analysis.divergence import HIGH, LOW, WHOLE, layer_divergence, weight_divergence
from motley.analysis.features import S_OUT, cut, extractor, features, features_at
from motley.analysis.gradient_variance import gradient_variance
from motley.analysis.gradients import quantiles
from motley.analysis.replay import client_examples, global_model, open_run, train_next_round
from motley.analysis.wasserstein import stage_distances
from motley.core.errors import MotleyError
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings
from motley.models.spec import ModelSpec, Stage, declare
from motley.runs.checkpoint import checkpoints, read_checkpoint
from motley.splits.exits import add_exits
from tests.cli.conftest import call
from tests.report.conftest import small_run

NAMES = {
    "cka",
    "coefficients",
    "contribution",
    "divergence",
    "embedding",
    "gradients",
    "margin",
    "overhead",
    "privacy",
    "sizes",
    "variance",
    "wasserstein",
}
#: Analyses of runs whose models have early exits.
WITH_EXITS = {"exits"}
#: They need a data set that records whose test examples they are (test_clients.py).
OF_NATURAL_CLIENTS = {"test-clients"}


#: Settings that make an analysis quick.
QUICK = {
    "contribution": ("examples=30",),
    "embedding": ("images=80",),
    "margin": ("examples=50",),
    "privacy": ("steps=20", "images=3"),
}


def modification_times(run: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}


def test_all_analyses_are_registered() -> None:
    assert {entry.name for entry in ANALYSES} == NAMES | WITH_EXITS | OF_NATURAL_CLIENTS


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_writes_a_table_and_figures(run: Path, tmp_path: Path, name: str) -> None:
    before = modification_times(run)
    options = [word for setting in QUICK.get(name, ()) for word in ("--set", setting)]
    answer = call("analyze", name, run, *options, "-o", tmp_path)
    assert answer.code == 0, answer.err
    assert modification_times(run) == before
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").open()))
    assert rows
    assert {row["run"] for row in rows} == {"run"}
    numbers = json.loads((tmp_path / f"{name}.json").read_text())
    assert numbers["analysis"] == name and len(numbers["rows"]) == len(rows)
    assert list(numbers["rows"][0]) == list(rows[0])
    assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    if name in ("cka", "divergence", "gradients", "variance", "wasserstein"):
        assert {row["round"] for row in rows} == {"1", "2", "3"}


def test_a_repeated_round_is_bit_identical_to_the_runs_own(run: Path) -> None:
    """On a CPU, round 2 repeated from checkpoint 1 gives checkpoint 2."""
    with open_run(run) as (federation, servers):
        again, _ = federation.run_round(servers[0])
        trained = train_next_round(federation, servers[0])
    second = read_checkpoint(checkpoints(run / "checkpoints")[1])
    assert all(torch.equal(again.state[name], tensor) for name, tensor in second.state.items())
    assert [one.client for one in trained] == federation.sample(2)


def test_deltas_of_two_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = small_run(
        tmp_path / "other",
        "data.partition.alpha=5.0",
        "run.keep_checkpoints=5",
        "run.checkpoint_every=1",
    )
    rows = ANALYSES["gradients"]([run, other]).rows
    similarities = [row[-1] for row in rows if row[0] == "other"]
    assert all(0 < value <= 1 for value in similarities)
    assert all(row[-1] is None for row in rows if row[0] == "run")


def test_layers_with_the_same_color_are_told_apart(run: Path, tmp_path: Path) -> None:
    """A deep model has more layers than the figure has colors."""
    (tmp_path / "deep").mkdir()
    lines = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        line["metrics"] = {
            f"inco/layer{number}.weight/{name}": 0.5
            for number in range(32)
            for name in ("theta", "beta", "positive")
        }
        lines.append(json.dumps(line))
    (tmp_path / "deep" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    figure = ANALYSES["coefficients"]([tmp_path / "deep"]).figure
    for axis in figure.axes:
        looks = {(str(line.get_color()), str(line.get_linestyle())) for line in axis.get_lines()}
        assert len(looks) == len(axis.get_lines()) == 32


def test_runs_that_cannot_be_analyzed_are_rejected(run: Path, tmp_path: Path) -> None:
    plain = small_run(tmp_path / "plain", "method.name=HeteroAvg")
    with pytest.raises(MotleyError, match="ran without InCo"):
        ANALYSES["coefficients"]([plain])
    assert "unknown analysis 'ckaa'. Did you mean 'cka'?" in call("analyze", "ckaa", run).err
    assert "is not a run" in call("analyze", "cka", tmp_path).err
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.toml").write_text((run / "config.toml").read_text())
    assert "has no checkpoint yet" in call("analyze", "cka", tmp_path / "new").err


def test_deleted_client_states_start_from_their_initial_values(tmp_path: Path) -> None:
    path = small_run(tmp_path / "scaffold", "method.name=HeteroScaffold")
    assert (path / "clients").exists()
    with open_run(path) as (federation, servers):
        with_client_states = train_next_round(federation, servers[-1])
    for file in (path / "clients").iterdir():
        file.unlink()
    (path / "clients").rmdir()
    with open_run(path) as (federation, servers):
        assert not servers[-1].client_state_rounds
        assert len(train_next_round(federation, servers[-1])) == len(with_client_states)


def test_divergence_is_that_of_the_clients_of_the_next_round(run: Path) -> None:
    rows = ANALYSES["divergence"]([run]).rows
    with open_run(run) as (federation, servers):
        trained = train_next_round(federation, servers[0])
    models, weights = [], []
    for client in trained:
        weights.append(len(federation.partition.of(client.client)))
        names = sorted(federation.split.parameters_of(client.size))
        models.append({name: client.state[name] for name in names})
    values = {row[2]: row[3] for row in rows if row[1] == 1}
    assert len(set(weights)) > 1
    layers = layer_divergence(models, weights)
    assert values == pytest.approx({WHOLE: weight_divergence(models, weights), **layers})


def test_divergence_per_stage_is_over_the_parameters_of_the_stage(
    run: Path, tmp_path: Path
) -> None:
    """In perceptrons a stage is a layer, under another name (FedImpro, Figure 3b)."""
    layers = {row[2]: row[3] for row in ANALYSES["divergence"]([run]).rows if row[1] == 3}
    options = ("--set", "per=stage", "--set", "normalize=true", "-o", tmp_path)
    answer = call("analyze", "divergence", run, *options)
    assert answer.code == 0, answer.err
    rows = json.loads((tmp_path / "divergence.json").read_text())["rows"]
    stages = {row["stage"]: row["divergence"] for row in rows if row["round"] == 3}
    names = {WHOLE: WHOLE, "layers.0": "layer0", "layers.1": "layer1", "layers.2": "layer2"}
    expected = {names.get(layer, layer): value for layer, value in layers.items()}
    assert stages == pytest.approx(expected)
    assert list(stages) == list(expected)
    wrong = call("analyze", "divergence", run, "--set", "curves=layers.7", "-o", tmp_path)
    assert "divergence.curves = 'layers.7': unknown layer 'layers.7'. Did you mean" in wrong.err


@pytest.mark.parametrize("rule", ["leading", "random"])
def test_divergence_of_parts_in_width_is_over_the_holders_of_every_channel(
    tmp_path: Path, rule: str
) -> None:
    width = (
        "model.sizes=['mlp2']",
        "split.name=width",
        "split.rates=[1,0.5]",
        f"split.channels={rule}",
    )
    path = small_run(tmp_path / "width", "method.name=fedavg", "server.inco.variant=off", *width)
    rows = ANALYSES["divergence"]([path]).rows
    assert {row[2] for row in rows} == {WHOLE, "layers.0", "layers.1", "head"}
    assert all(0 < row[3] < 10 for row in rows)


def test_variance_is_that_of_the_gradients_of_the_clients_own_examples(tmp_path: Path) -> None:
    """With one size for all clients, compared with autograd on all examples of a client at once."""
    same = (
        "model.sizes=['mlp2']",
        "split.name=homogeneous",
        "method.name=fedavg",
        "server.inco.variant=off",
    )
    path = small_run(tmp_path / "same", *same)
    rows = ANALYSES["variance"]([path]).rows
    with open_run(path) as (federation, servers):
        gradients, weights = [], []
        for client in federation.sample(servers[-1].round_number + 1):
            model = global_model(federation, servers[-1], "mlp2").train()
            images, labels = client_examples(federation, client)
            weights.append(len(labels))
            assert (
                labels.tolist()
                == federation.dataset.train.targets[federation.partition.of(client)].tolist()
            )
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            gradients.append(
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            )
    newest = {row[2]: row[3] for row in rows if row[1] == servers[-1].round_number}
    expected = gradient_variance(gradients, weights)
    assert {layer: newest[layer] for layer in expected} == pytest.approx(expected, rel=1e-4)
    assert newest[WHOLE] == pytest.approx(sum(expected.values()), rel=1e-4)
    assert newest[LOW] == pytest.approx(expected["layers.0"], rel=1e-4)  # mlp2 is cut in the middle
    assert newest[HIGH] == pytest.approx(expected["layers.1"] + expected["head"], rel=1e-4)


def test_distances_are_over_pairs_with_a_class_and_a_shape_in_common() -> None:
    def client(
        value: float, label: int, width: int = 2
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return {"one": torch.full((3, 1), value), "two": torch.full((3, width), value)}, torch.full(
            (3,), label
        )

    clients = [client(0, 1), client(2, 1), client(7, 0), client(4, 1, width=5)]
    distances = stage_distances(clients)
    assert distances["one"] == (pytest.approx((2 + 4 + 2) / 3), 3)
    assert distances["two"][1] == 1


def test_quantiles_by_hand() -> None:
    assert quantiles(torch.arange(101).float().flip(0)) == [1.0, 25.0, 50.0, 75.0, 99.0]


def test_stages_of_every_family() -> None:
    model = MODELS["resnet14"].make(ResNetSettings(width=0.0625), ImageShape(1, 32, 32), 10).eval()
    outputs = features(model, torch.zeros(2, 1, 32, 32))
    assert list(outputs) == ["stem", "layer1", "layer2", "layer3", "layer4"]
    assert outputs["layer4"].shape == (2, 32)
    undeclared = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())
    assert list(features(undeclared, torch.zeros(2, 1))) == ["0"]


def test_features_follow_the_declaration_and_not_the_names_of_attributes() -> None:
    """`blocks` exists and is no chain of stages; the declared stages have other names."""
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)])
    model.head = torch.nn.Linear(2, 4)
    stages = (Stage("first", "blocks.0"), Stage("second", "blocks.1"), Stage("head"))
    declare(model, ModelSpec(torch.nn.Module, stages=stages))
    images = torch.randn(5, 3)
    outputs = features(model, images)
    assert list(outputs) == ["first", "second"]
    assert torch.equal(outputs["first"], model.blocks[0](images))
    assert torch.equal(features_at(model, images, S_OUT, "stage"), outputs["second"])
    low, high = cut(model, "first", "stage")
    assert torch.equal(low(images), outputs["first"])
    assert torch.equal(high(low(images)), model.head(model.blocks[1](model.blocks[0](images))))
    assert torch.equal(extractor(model)(images), outputs["first"])
    with pytest.raises(
        MotleyError, match=r"^layers = 'frist': unknown stage 'frist'. Did you mean 'first'\?"
    ):
        cut(model, "frist", "layers")


def test_networks_with_exits_are_read_at_their_declared_blocks() -> None:
    spec = MODELS["resnet10"]
    plain = spec.make(ResNetSettings(width=0.0625), ImageShape(1, 32, 32), 10)
    model = add_exits(plain, [2, 4], 1, "pool", ensemble=False).eval()
    assert list(features(model, torch.zeros(2, 1, 32, 32))) == list(spec.blocks)
    with pytest.raises(MotleyError, match=r"layers = 'layer1': .* declares no stages .*: input\."):
        cut(model, "layer1", "layers")


# ---- early exits


def test_exits_trade_accuracy_for_cost(tmp_path: Path) -> None:
    path = small_run(
        tmp_path / "run",
        "method.name=scalefl",
        "split.name=grid",
        "split.cuts=[1,2,4]",
        "split.rates=[0.5,0.75,1]",
        "split.head=linear",
        "model.sizes=['resnet10']",
        "model.resnet.width=0.0625",
        "data.transform.resize=8",
        "training.rounds=1",
    )
    rows = ANALYSES["exits"]([path]).rows
    assert {row[2] for row in rows} == {"resnet10-e2", "resnet10-e3"}, "e1 has a single exit"
    with open_run(path) as (federation, servers):
        recorded = federation.evaluate(servers[-1].model)
    for size in ("resnet10-e2", "resnet10-e3"):
        mine = [row for row in rows if row[2] == size]
        assert mine[0][3] == 0 and mine[0][4] == pytest.approx(recorded[size].accuracy)
        costs, mean_exits = [row[5] for row in mine[1:]], [row[6] for row in mine[1:]]
        assert costs == sorted(costs) and mean_exits == sorted(mean_exits)
        for row in mine:
            assert sum(map(float, row[7].split(";"))) == pytest.approx(1, abs=1e-3)


def test_exits_need_early_exits(run: Path) -> None:
    with pytest.raises(
        MotleyError, match=r"the analysis exits: the models of .* have no early exits"
    ):
        ANALYSES["exits"]([run])
