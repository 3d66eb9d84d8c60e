"""Trained models leave a run: as modules, and as files that are measured after they were written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import motley
from motley.assembly import load_dataset_of
from motley.config import load_config
from motley.core.errors import MotleyError
from motley.data.device import device_data
from motley.export.card import read_card
from motley.export.export import export_model
from motley.export.formats import FORMATS, Runner
from motley.export.loading import LoadedExport, LoadedRun
from motley.federation import Federation
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from motley.splits.ordered_dropout import OrderedBatchNorm
from tests.cli.conftest import call
from tests.conftest import tiny_config
from tests.export.conftest import FAST, Export

# ---- modules


@pytest.mark.parametrize(
    "overrides",
    [
        ("split.normalization_statistics=per-size", "server.ema_decay=0.5"),
        ("split.name=width", "model.sizes=['resnet10']", "split.channels=rolling"),
        ("split.name=ordered", "model.sizes=['resnet10']", "split.rates=[1,0.5]"),
    ],
    ids=["depth, EMA, statistics per size", "rolling window", "ordered"],
)
def test_a_federations_model_is_the_one_that_is_evaluated(overrides: tuple[str, ...]) -> None:
    federation = Federation(tiny_config(*FAST, *overrides))
    server = federation.initial_state()
    for _ in range(2):
        server, record = federation.run_round(server)
    transform = federation.config.data.transform
    data = device_data(federation.dataset.test, transform, torch.device("cpu"), augment=False)
    inputs, labels = data.batch(torch.arange(len(data)))
    for size, score in record.scores.items():
        model = federation.model(size, server)
        assert not model.training
        assert not any(isinstance(module, OrderedBatchNorm) for module in model.modules())
        with torch.no_grad():
            accuracy = (model(inputs).argmax(1) == labels).double().mean()
        assert float(accuracy) == pytest.approx(score.accuracy)


def test_a_model_is_a_copy() -> None:
    federation = Federation(tiny_config(*FAST, "model.sizes=['mlp1']"))
    server = federation.initial_state()
    model = federation.model("mlp1", server)
    before = {name: tensor.clone() for name, tensor in server.model.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(before[name], tensor) for name, tensor in server.model.items())
    with pytest.raises(MotleyError, match=r"unknown size 'mlp'\. Did you mean 'mlp1'\?"):
        federation.model("mlp", server)


def test_a_run_is_loaded_with_its_moving_average(run: Path) -> None:
    loaded = motley.load(run)
    assert isinstance(loaded, LoadedRun) and loaded.sizes == ("mlp1", "mlp2")
    federation = Federation(loaded.config)
    expected = federation.model("mlp2", loaded.server).state_dict()
    found = loaded.model("mlp2").state_dict()
    assert loaded.server.ema is not None
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(found["head.weight"], loaded.server.state["head.weight"])


# ---- files


@pytest.mark.parametrize("name", FORMATS)
def test_the_written_file_has_the_recorded_accuracy(
    run: Path, exports: dict[str, Export], name: str
) -> None:
    folder, out = exports[name]
    recorded = MetricsLog(run / "metrics.jsonl").read()[-1]["accuracy"]["mlp2"]
    card = read_card(folder)
    assert card.score == pytest.approx(recorded, abs=1e-6)
    assert card.recorded_score == recorded
    assert f"accuracy of the file: {recorded:.2%} on 359 test examples" in out
    assert f"recorded by the run: {recorded:.2%}" in out
    assert (card.task, card.outputs, card.round) == ("classification", 10, 2)
    assert card.parameters == 144 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10


@pytest.mark.parametrize("name", FORMATS)
def test_an_exported_file_predicts_what_the_run_does(
    run: Path, exports: dict[str, Export], name: str
) -> None:
    images = LoadedRun(run).dataset.test.inputs[:5]
    expected = LoadedRun(run).predict(images, "mlp2", top=3)
    found = motley.load(exports[name].folder).predict(images, top=3)
    for mine, theirs in zip(found, expected, strict=True):
        assert [label for label, _ in mine.classes] == [label for label, _ in theirs.classes]
        assert mine.outputs == pytest.approx(theirs.outputs, abs=1e-4)


def test_safetensors_have_the_modules_names(run: Path, exports: dict[str, Export]) -> None:
    folder = exports["safetensors"].folder
    expected = LoadedRun(run).model("mlp2").state_dict()
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    model = LoadedExport(folder).model().state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.items())


def test_a_file_can_normalize_its_images(run: Path, tmp_path: Path) -> None:
    """The images are resized from 8x8 to 12x12, so nothing but the data set's bytes goes in."""
    exported = export_model(
        LoadedRun(run), "mlp1", "torch", tmp_path / "out", with_normalization=True
    )
    assert exported.card.score == pytest.approx(exported.card.recorded_score, abs=1e-6)
    assert exported.difference < 1e-6
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    images = LoadedRun(run).dataset.test.inputs[:3]
    assert images.dtype == np.uint8 and images.shape == (3, 8, 8, 1)
    outputs = program(torch.from_numpy(images))
    expected = LoadedRun(run).predictor("mlp1").outputs(images)
    torch.testing.assert_close(outputs, expected)


@pytest.mark.slow
def test_the_readmes_lines_work_without_motley(exports: dict[str, Export]) -> None:
    lines = ["import sys, os", "sys.modules['motley'] = None"]
    for folder, _ in exports.values():
        text = (folder / "README.md").read_text()
        assert "[data.transform]" in text and "mean [0.3] and divide by std [0.4]" in text
        code = text.partition("```python\n")[2].partition("```")[0]
        assert len(code.strip().splitlines()) == 5
        lines += [f"os.chdir({str(folder)!r})", code]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    weights, program, onnx = done.stdout.splitlines()
    assert "'head.weight': (10, 64)" in weights
    assert (program, onnx) == ("torch.Size([1, 10])", "(1, 10)")


def test_an_earlier_checkpoint_can_be_exported(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("export", run, "--size", "mlp1", "--checkpoint", "1", "-o", out).code == 0
    assert read_card(out).round == 1
    recorded = MetricsLog(run / "metrics.jsonl").read()[0]["accuracy"]["mlp1"]
    assert read_card(out).score == pytest.approx(recorded, abs=1e-6)
    # An earlier export is replaced.
    assert call("export", run, "--size", "mlp1", "-o", out).code == 0
    assert read_card(out).round == 2


def test_an_early_exit_can_be_exported(exits_run: Path, tmp_path: Path) -> None:
    loaded = LoadedRun(exits_run)
    size = loaded.sizes[-1]
    images = loaded.dataset.test.inputs[:4]
    inputs = loaded.inputs.prepare(images)
    answers = loaded.model(size).exit_logits(inputs)
    exported = export_model(loaded, size, "torch", tmp_path / "2", exit_number=2, test_examples=40)
    assert exported.card.exit == 2 and exported.card.recorded_score is None
    assert exported.card.test_examples == 40
    whole = sum(parameter.numel() for parameter in loaded.model(size).parameters())
    assert 0 < exported.card.parameters < whole
    outputs = motley.load(tmp_path / "2").predictor().outputs(images)
    torch.testing.assert_close(outputs, answers[1].detach())
    with pytest.raises(MotleyError, match=r"--exit 4: size 'resnet10-e3' has 3 exits"):
        export_model(loaded, size, "torch", tmp_path / "x", exit_number=4)


def test_a_program_needs_nothing_of_the_users_code(
    exports: dict[str, Export], tmp_path: Path
) -> None:
    """The configuration may name modules that are not installed where the program is used."""
    for name in ("torch", "onnx"):
        folder = tmp_path / name
        shutil.copytree(exports[name].folder, folder)
        content = json.loads((folder / "card.json").read_text())
        content["config"]["model"]["sizes"] = ["nobody_has_this:small"]
        (folder / "card.json").write_text(json.dumps(content))
        assert len(motley.load(folder).predict(np.zeros((8, 8, 1), np.uint8))) == 1


def test_passwords_of_a_tracking_server_stay_at_home(run: Path, tmp_path: Path) -> None:
    loaded = LoadedRun(run)
    settings = loaded.config.run.model_copy(update={"mlflow": "https://me:secret@example.org"})
    loaded.config = loaded.config.model_copy(update={"run": settings})
    export_model(loaded, "mlp1", "safetensors", tmp_path / "out", test_examples=0)
    for file in (tmp_path / "out").iterdir():
        assert b"secret" not in file.read_bytes()


# ---- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--size: is needed; the run has mlp1, mlp2."),
        (("--size", "mlp3"), "--size: unknown size 'mlp3'. Did you mean 'mlp2'?"),
        (("--size", "mlp1", "--format", "onx"), "--format: unknown format 'onx'. Did you mean"),
        (("--size", "mlp1", "--checkpoint", "7"), "has checkpoints of the rounds 1, 2."),
        (("--size", "mlp1", "--exit", "2"), "--exit 2: size 'mlp1' has 1 exit."),
        (
            ("--size", "mlp1", "--with-normalization"),
            "--with-normalization: --format safetensors writes weights only.",
        ),
    ],
)
def test_wrong_exports_are_refused(
    run: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    answer = call("export", run, *options, "-o", tmp_path / "out")
    assert answer.code == 2 and words in answer.err
    assert not (tmp_path / "out").exists()


def test_other_peoples_folders_are_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    answer = call("export", run, "--size", "mlp1", "-o", tmp_path)
    assert answer.code == 2 and "is not empty, and holds no earlier export" in answer.err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("method.name=local", "method.name = 'local' exchanges no weights, so there is no global"),
        ("split.private=head", "split.private = ['head']: clients keep a part of their models"),
    ],
)
def test_clients_own_models_are_exported_by_client(
    tmp_path: Path, setting: str, words: str
) -> None:
    path = tmp_path / "run"
    settings = (setting, "server.ema_decay=0", "model.sizes=['mlp1','mlp2']", "training.rounds=1")
    federation, server = start_run(tiny_config(*FAST, *settings), path)
    answer = call("export", path, "--size", "mlp1")
    assert answer.code == 2 and words in answer.err and "--client" in answer.err
    client = min(server.client_state_rounds)
    assert call("export", path, "--client", client, "-o", tmp_path / "out").code == 0
    expected = federation.client_model(server, client).state_dict()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    card = read_card(tmp_path / "out")
    assert card.client == client and card.size == federation.sizes[client]
    images = federation.dataset.test.inputs[:3]
    mine = motley.load(tmp_path / "out").predict(images)
    assert mine == LoadedRun(path).predict(images, client=client)
    asleep = next(number for number in range(6) if number not in server.client_state_rounds)
    answer = call("export", path, "--client", asleep, "-o", tmp_path / "none")
    assert answer.code == 2 and f"client {asleep} has no model yet" in answer.err
    answer = call("export", path, "--client", 6, "-o", tmp_path / "none")
    assert answer.code == 2 and "--client 6: the clients have the numbers 0 to 5." in answer.err


def test_damaged_cards_are_refused(run: Path, tmp_path: Path) -> None:
    export_model(LoadedRun(run), "mlp1", "safetensors", tmp_path / "out", test_examples=0)
    file = tmp_path / "out" / "card.json"
    content = json.loads(file.read_text())
    for damage in ({"format": "pickle"}, {"input_shape": "[]"}, {"config": 3}):
        file.write_text(json.dumps({**content, **damage}))
        with pytest.raises(MotleyError, match=r"card.json"):
            motley.load(tmp_path / "out")
    file.write_text("{")
    with pytest.raises(MotleyError, match=r"card.json cannot be read"):
        motley.load(tmp_path / "out")


def test_a_file_is_measured_on_the_test_examples_of_a_run_with_fewer_clients(
    tmp_path: Path,
) -> None:
    """Clients that data.max_clients leaves out are not tested in the run, nor by the export."""
    lines = ["age,person,label"]
    for number in range(120):
        lines.append(f"{number % 17},p{number % 6},{'yes' if number % 17 > 8 else 'no'}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    settings = (
        "data.name=files",
        f"data.path={tmp_path / 'table.csv'}",
        "data.files.client=person",
        "data.max_clients=3",
        "data.max_per_client=10",
        "data.partition.name=natural",
        "federation.clients=3",
        "federation.clients_per_round=3",
        "model.sizes=['table1']",
        "training.rounds=1",
    )
    config = load_config(preset="digits-small", overrides=(*FAST, *settings))
    start_run(config, tmp_path / "run")
    loaded = LoadedRun(tmp_path / "run")
    tests = load_dataset_of(config).test
    np.testing.assert_array_equal(loaded.dataset.test.inputs, tests.inputs)
    exported = export_model(loaded, "table1", "safetensors", tmp_path / "out")
    assert exported.card.test_examples == len(tests) == 12
    assert exported.card.score == pytest.approx(exported.card.recorded_score)


def test_a_file_whose_outputs_are_not_numbers_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_broken(name: str, file: Path) -> Runner:
        return lambda inputs: torch.full((len(inputs), 10), torch.nan)

    monkeypatch.setattr("motley.export.export.open_runner", open_broken)
    with pytest.raises(MotleyError, match="outputs differ from those of the trained model by nan"):
        export_model(LoadedRun(run), "mlp1", "torch", tmp_path / "out")
    assert not (tmp_path / "out" / "card.json").exists()
