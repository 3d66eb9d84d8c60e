"""Accuracy of tables of counts on the CPU study of Shakespeare, for comparison with networks.

    MOTLEY_DATA=/path/to/data python campaign/baselines.py

A table has one row per context (the last 0, 1 or 2 characters) and predicts the character that followed most often in
all training windows of the study together. An unseen context predicts 0, an unknown character.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from motley.config import Config
from motley.studies.declaration import load_study
from motley.studies.sweep import plan_cells

ROOT = Path(__file__).resolve().parent.parent
STUDY = "natural-shakespeare-cpu"
RESULT = ROOT / "results" / STUDY / "baselines.json"
#: Length of the context -> what the table is called.
TABLES = {0: "most frequent character", 1: "table of bigrams", 2: "table of trigrams"}


def study_config() -> Config:
    """Return the configuration of a line of the study that uses all of its roles."""
    study = load_study(str(ROOT / "campaign" / f"{STUDY}.toml"))
    (cell,) = plan_cells(study, "full", cases=["LSTM"], methods=["InCo"])
    return cell.runs[0].config


def contexts(windows: np.ndarray, length: int, tokens: int) -> np.ndarray:
    """Return the number of the context before each position, from `length` on, and after the last one."""
    count = windows.shape[1] - max(length, 1) + 1
    numbers = np.zeros((len(windows), count), dtype=np.int64)
    for offset in range(length):
        numbers = tokens * numbers + windows[:, offset : offset + count]
    return numbers


def main() -> None:
    """Count in the training part, and predict in the test part."""
    dataset = study_config().data.load()
    train, test, tokens = dataset.train, dataset.test, dataset.classes
    accuracies = {}
    for length, name in TABLES.items():
        before = contexts(train.inputs, length, tokens)
        after = train.targets[:, -before.shape[1] :]
        counts = np.zeros((tokens**length, tokens), dtype=np.int64)
        np.add.at(counts, (before.ravel(), after.ravel()), 1)
        predicted = counts.argmax(1)[contexts(test.inputs, length, tokens)[:, -1]]
        accuracies[name] = round(float((predicted == test.targets).mean()), 4)
    result = {"train": len(train), "test": len(test), "accuracy": accuracies}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(result)


if __name__ == "__main__":
    main()
