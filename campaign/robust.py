"""Run the studies of attacks and defences, and keep all their numbers in one file, results/robust.json.

    python campaign/robust.py                # about a quarter of an hour on one core; continues where it stopped

The runs are those of `motley study robust-equal` and `motley study robust-parts`. They are short, and one process runs
all of them. The number of a run is its accuracy after the last round in percent, the mean over sizes. A run that stops
with an error has none.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.studies.declaration import load_study
from motley.studies.sweep import plan_cells

FILE = Path(__file__).resolve().parent.parent / "results" / "robust.json"
STUDIES = ("robust-equal", "robust-parts")


def accuracy(federation: Federation) -> float | None:
    """Return the accuracy after the last round in percent; None if the run stopped."""
    scored = None
    try:
        for record in federation.run():
            scored = record.accuracy
    except MotleyError as error:
        print(error, flush=True)
        return None
    return None if scored is None else round(100 * scored, 2)


def main() -> None:
    """Run what is not in the file yet."""
    torch.set_num_threads(1)
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    planned = []
    for name in STUDIES:
        for cell in plan_cells(load_study(name), "full"):
            planned.extend((run.seed, name, cell, run) for run in cell.runs)
    # All lines with the first seed come first, so that a campaign that is cut off has whole columns.
    for seed, name, cell, run in sorted(planned, key=lambda entry: entry[0]):
        runs = kept.setdefault(name, {}).setdefault(cell.case, {}).setdefault(cell.method, {})
        if str(seed) in runs:
            continue
        began = time.monotonic()
        runs[str(seed)] = accuracy(Federation(run.config))
        FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        seconds = time.monotonic() - began
        print(name, cell.case, cell.method, seed, runs[str(seed)], f"{seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
