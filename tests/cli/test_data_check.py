"""`motley data check` and `motley data plot`, and runs on the user's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.cli.conftest import Command


def write_patients(path: Path, rows: int = 120) -> Path:
    """Write a table whose outcome depends on two of its columns."""
    rng = np.random.default_rng(0)
    lines = ["age,sex,pressure,hospital,outcome"]
    for row in range(rows):
        age, pressure = rng.integers(20, 90), rng.normal()
        sex = "mf"[row % 2]
        outcome = "ill" if age + 30 * pressure > 55 else "well"
        lines.append(f"{age},{sex},{pressure:.3f},h{row % 4},{outcome}")
    path.write_text("\n".join(lines) + "\n")
    return path


def write_images(folder: Path) -> Path:
    """Write an image folder with a folder per client: bright and dark images."""
    rng = np.random.default_rng(0)
    for client in ("ann", "bob", "eve"):
        for label, level in (("dark", 40), ("light", 200)):
            (folder / client / label).mkdir(parents=True)
            for i in range(10):
                pixels = rng.integers(level - 30, level + 30, (8, 8)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / client / label / f"{i}.png")
    return folder


def test_check_prints_what_a_run_would_see(motley: Command, tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    answer = motley("data", "check", "patients.csv", "--target", "outcome", "--client", "hospital")
    assert answer.code == 0 and not answer.err
    out = answer.out
    assert "patients.csv: a table (CSV)" in out
    assert "96 for training, 24 for testing (20% of every client are held out)" in out
    assert "rows of a table, 2 numbers and 1 category" in out
    assert "4, with 24 to 24 training examples (median 24)" in out
    for words in (("sex", "category", "2 different"), ("hospital", "client"), ("ill",)):
        assert any(all(word in line for word in words) for line in out.splitlines())
    assert "data.files.client=hospital --set data.partition.name=natural" in out
    assert "--set federation.clients=4 --set model.sizes=table1,table2,table3" in out


def test_check_notes_and_refusals(motley: Command, tmp_path: Path) -> None:
    path = write_patients(tmp_path / "patients.csv")
    path.write_text(path.read_text() + "33,,0.5,h9,ill\n")
    bad = motley("data", "check", path, "--target", "outcome")
    assert bad.code == 1
    assert "cannot be used:" in bad.out and "line 122: column 'sex' has no value" in bad.out
    good = motley(
        *("data", "check", path, "--target", "outcome", "--client", "hospital"),
        *("--set", "missing=mean", "--set", "features=[age,sex]"),
    )
    assert good.code == 0
    assert "clients with one training example: h9" in good.out
    assert "clients without test examples: h9" in good.out
    wrong = motley("data", "check", path, "--set", "mising=mean")
    assert wrong.code == 2 and "Did you mean 'missing'?" in wrong.err
    assert motley("data", "check", tmp_path / "absent.csv").code == 1


def test_check_of_images_and_texts(motley: Command, tmp_path: Path) -> None:
    write_images(tmp_path / "photos")
    answer = motley("data", "check", "photos")
    assert answer.code == 0
    assert "images, 8 x 8, grey" in answer.out and "3, with 16 to 16" in answer.out
    (tmp_path / "book.txt").write_text("abc" * 400)
    answer = motley("data", "check", "book.txt", "--set", "sequence_length=10")
    assert answer.code == 0 and "task      next-token" in answer.out
    assert "token sequences of length 10, vocabulary 4" in answer.out


def test_plot_draws_clients_and_classes(motley: Command, tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    answer = motley(
        *("data", "plot", "patients.csv", "--target", "outcome", "--client", "hospital"),
        *("-o", "picture.png"),
    )
    assert answer.code == 0 and answer.out == "picture.png: 4 clients, 2 classes\n"
    with Image.open(tmp_path / "picture.png") as image:
        assert image.format == "PNG" and image.size[0] > 500
    answer = motley("data", "plot", "--set", "federation.clients=200", "-o", "many.png")
    assert answer.code == 0 and "200 clients, 10 classes" in answer.out
    assert motley("data", "plot", "-o", "absent/x.png").code == 2


def run(motley: Command, *settings: str) -> list[dict[str, Any]]:
    """Run a small federation and return its rounds."""
    arguments = []
    for setting in (
        "data.name=files",
        "data.partition.name=natural",
        "federation.clients_per_round=2",
        "training.rounds=6",
        "training.epochs=3",
        "training.batch_size=8",
        "training.optimizer.lr=0.1",
        "run.tensorboard=false",
        *settings,
    ):
        arguments += ["--set", setting]
    answer = motley("run", *arguments, "--out", "mine")
    assert answer.code == 0, answer.err
    lines = Path("mine/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_on_a_csv_with_a_client_column(motley: Command, tmp_path: Path) -> None:
    write_patients(tmp_path / "patients.csv")
    rounds = run(
        motley,
        "data.path=patients.csv",
        "data.files.target=outcome",
        "data.files.client=hospital",
        "federation.clients=4",
        "model.sizes=[table1,table2]",
    )
    assert rounds[-1]["accuracy"]["mean"] > 0.7


def test_a_run_on_a_folder_of_images(motley: Command, tmp_path: Path) -> None:
    write_images(tmp_path / "photos")
    sizes = ("model.sizes=[mlp1,mlp2]", "model.mlp.hidden=16")
    rounds = run(motley, "data.path=photos", "federation.clients=3", *sizes)
    assert rounds[-1]["accuracy"]["mean"] > 0.9
    # The run can be read again: its settings are in its folder.
    assert motley("show", "mine").code == 0
    assert motley("resume", "mine", "--rounds", "7").code == 0
