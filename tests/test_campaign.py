"""The campaign's queue runs what is not finished and keeps it as compact files; pages are drawn from these files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "campaign" / script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_pages_agree_with_the_results() -> None:
    done = call("pages.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_queue_runs_and_is_not_run_again(tmp_path: Path) -> None:
    queue = tmp_path / "queue.txt"
    queue.write_text(
        "# a comment\n\n"
        'inco-table2 --data digits --case "alpha 0.5" --method InCoAvg --seed 1 --set training.rounds=10\n'
    )
    options = [
        "--work",
        str(tmp_path / "work"),
        "--results",
        str(tmp_path / "results"),
        "--jobs",
        "1",
    ]
    first = call("run.py", str(queue), *options)
    assert "1 runs, 1 of them to do" in first.stdout, first.stdout + first.stderr
    (file,) = (tmp_path / "results").rglob("*.json")
    assert file.relative_to(tmp_path / "results") == Path(
        "inco-table2/digits/alpha-0.5/InCoAvg/seed-1.json"
    )
    result = json.loads(file.read_text())
    assert result["rounds"] == list(range(1, 11))
    assert len(result["train_loss"]) == 10
    layers = result["inco"]["10"]
    assert all({"theta", "beta"} <= set(coefficients) for coefficients in layers.values())
    assert set(result["accuracy"]) == {"mlp1", "mlp2", "mlp3", "mean"}
    assert "1 runs, 0 of them to do" in call("run.py", str(queue), *options).stdout
