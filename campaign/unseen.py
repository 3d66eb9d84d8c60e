"""Score writers who did not train, and keep the scores in results/natural-writers/unseen.json.

    MOTLEY_DATA=/path/to/data python campaign/unseen.py --work /path/for/runs     # a minute or two per run on one core

The models of a campaign's runs are not kept, so the runs of campaign/natural-unseen.txt are repeated in `--work`; those
that are there already are continued or left as they are. A repeated run must have the accuracies that are kept under
results/, digit by digit. Its models are then scored as `motley analyze test-clients` does it, for every size: the mean
over the test set's clients, each counted once, and the mean over the worst tenth of them.

What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from run import Task, compact, read_queue

from motley.analysis import ANALYSES
from motley.files import write_atomically
from motley.runs.folder import RunFolder
from motley.runs.run import resume_run, start_run
from motley.server.client_scores import spread

ROOT = Path(__file__).resolve().parent.parent
QUEUE = ROOT / "campaign" / "natural-unseen.txt"


def repeat(task: Task, work: Path) -> RunFolder:
    """Run a task that has a result again, and raise if its accuracies are others this time."""
    folder = task.folder(work)
    if folder.config.exists():
        resume_run(folder.path)
    else:
        start_run(task.run.config, folder.path)
    kept = json.loads(task.result.read_text(encoding="utf-8"))["accuracy"]
    repeated = compact(task, folder, None)["accuracy"]
    if repeated != kept:
        ends = f"{repeated['mean'][-1]} instead of {kept['mean'][-1]} after the last round"
        raise SystemExit(
            f"{folder.path} has other accuracies than {task.result}: {ends}. Its models are not "
            "those of the results. Repeat it with the same version of torch and OMP_NUM_THREADS=1."
        )
    return folder


def unseen_scores(run: Path) -> dict[str, dict[str, float]]:
    """Return the scores of the test set's clients per size: their number, mean and worst tenth."""
    findings = ANALYSES["test-clients"]([run])
    by_size: dict[str, tuple[list[float], list[int]]] = {}
    for _, _, size, _, examples, accuracy in findings.rows:
        accuracies, counts = by_size.setdefault(size, ([], []))
        accuracies.append(accuracy)
        counts.append(examples)
    scores = {}
    for size, (accuracies, counts) in by_size.items():
        over = spread(accuracies, counts, higher_is_better=True)
        scores[size] = {
            "clients": over.clients,
            "mean": round(over.mean, 4),
            "worst_tenth": round(over.worst_tenth, 4),
        }
    return scores


def main() -> None:
    """Score the runs that are not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs themselves")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = ROOT / "results"
    file = results / "natural-writers" / "unseen.json"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for task in read_queue(QUEUE, results):
        scores = kept.setdefault(task.method, {})
        seed = str(task.run.seed)
        if seed in scores:
            continue
        folder = repeat(task, arguments.work)
        scores[seed] = unseen_scores(folder.path)
        write_atomically(file, (json.dumps(kept, indent=1) + "\n").encode())
        print(task.name, scores[seed], flush=True)


if __name__ == "__main__":
    main()
