"""Run the campaign's queue: the runs of several studies, some at a time, each kept as one compact file.

    python campaign/run.py campaign/queue.txt --work /tmp/campaign --seconds 560 --jobs 3

One line of the queue names a study (a file, or one of the library's) with options that narrow it:

    campaign/inco-table2.toml --seed 1 --method HeteroAvg --set training.rounds=500

Lines run in order. A run that already has its file under `results/` is not run again, so the same command continues a
queue that was cut off. GPU time comes in limited stretches, and an unfinished run is lost with its machine: no run is
started that would probably not finish within `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.config import parse_overrides
from motley.runs.folder import RunFolder
from motley.runs.metrics import layer_metrics
from motley.runs.run import start_run
from motley.studies.declaration import load_study
from motley.studies.sweep import PlannedRun, plan_cells

#: Rounds between two sets of InCo coefficients that are kept: every round of every layer would be megabytes.
COEFFICIENTS_EVERY = 10
#: Seconds between two starts. Processes that start at the same moment under MPS fail now and then.
STAGGER = 4.0


@dataclass(frozen=True)
class Task:
    """One run of the queue: where it belongs in its study, and where its result is kept."""

    study: str
    method: str
    data: str
    case: str
    run: PlannedRun
    result: Path

    @property
    def name(self) -> str:
        """A short name for messages and folders."""
        return "-".join(
            _slug(part) for part in (self.study, self.data, self.case, self.method) if part
        )


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def read_queue(queue: Path, results: Path) -> Iterator[Task]:
    """Yield the runs of a queue in order, finished ones too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("study")
    for option in ("--data", "--case", "--method", "--set"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--seed", type=int, action="append", default=[])
    for line in queue.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        asked = parser.parse_args(shlex.split(line))
        study = load_study(asked.study)
        overrides = parse_overrides(asked.set)
        cells = plan_cells(
            study,
            "full",
            data=asked.data,
            cases=asked.case,
            methods=asked.method,
            overrides=overrides,
        )
        for cell in cells:
            if cell.missing:
                reasons = " ".join(entry.reason for entry in cell.missing)
                raise SystemExit(f"{line}: {cell.method} cannot run here: {reasons}")
            for run in cell.runs:
                if asked.seed and run.seed not in asked.seed:
                    continue
                folder = (
                    results / study.name / _slug(cell.data) / _slug(cell.case) / _slug(cell.method)
                )
                result = folder / f"seed-{run.seed}.json"
                yield Task(study.name, cell.method, cell.data, cell.case, run, result)


def compact(task: Task, folder: RunFolder, seconds: float) -> dict[str, Any]:
    """Return a finished run as columns: small enough to keep hundreds of them."""
    lines = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    evaluated = [line for line in lines if "accuracy" in line]
    accuracy: dict[str, list[float]] = {}
    for size in evaluated[-1]["accuracy"]:
        accuracy[size] = [round(line["accuracy"][size], 4) for line in evaluated]
    losses = [line["train_loss"] for line in lines]
    result: dict[str, Any] = {
        "study": task.study,
        "method": task.method,
        "data": task.data,
        "case": task.case,
        "seed": task.run.seed,
        "seconds": round(seconds, 1),
        "environment": json.loads(folder.environment.read_text(encoding="utf-8")),
        "config": task.run.config.model_dump(mode="json"),
        "rounds": [line["round"] for line in evaluated],
        "accuracy": accuracy,
        "train_loss": [None if loss is None else round(loss, 4) for loss in losses],
        "bytes": {way: sum(line["bytes"][way] for line in lines) for way in ("down", "up")},
        "refused": sum(len(line.get("refused", {})) for line in lines),
    }
    scored = [line for line in lines if "client_scores" in line]
    if scored:
        # Rounds are the curve's; the spread over clients is that of the last scored round.
        result["client_rounds"] = [line["round"] for line in scored]
        result["client_mean"] = [_four_digits(line["client_scores"].get("mean")) for line in scored]
        result["client_scores"] = scored[-1]["client_scores"]
    coefficients = {}
    for line in lines:
        by_layer = layer_metrics(line, "inco")
        if by_layer and line["round"] % COEFFICIENTS_EVERY == 0:
            coefficients[line["round"]] = _rounded(by_layer)
    if coefficients:
        result["inco"] = coefficients
    return result


def _four_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _rounded(table: dict[str, dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Round InCo's coefficients to four digits, which is more than a figure shows."""
    rounded: dict[str, dict[str, float | None]] = {}
    for layer, row in table.items():
        rounded[layer] = {}
        for name, value in row.items():
            rounded[layer][name] = _four_digits(value)
    return rounded


class Process:
    """One run in a process of its own."""

    def __init__(self, task: Task, work: Path) -> None:
        self.task = task
        self.folder = RunFolder(work / f"{task.name}-seed{task.run.seed}")
        config = work / f"{task.name}-seed{task.run.seed}.toml"
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(task.run.config.to_toml(), encoding="utf-8")
        self.log = config.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "motley",
            "run",
            str(config),
            "--out",
            str(self.folder.path),
        ]
        self.began = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def finish(self) -> float | None:
        """Keep the result of a process that has ended; return its seconds, or None if it failed."""
        seconds = time.monotonic() - self.began
        if self.process.returncode != 0:
            end = "\n".join(
                self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            )
            print(
                f"{self.folder.path.name} failed with status {self.process.returncode}:\n{end}",
                flush=True,
            )
            return None
        keep(self.task, self.folder, seconds)
        return seconds


def keep(task: Task, folder: RunFolder, seconds: float) -> None:
    """Write the compact result of a finished run, and say its accuracy."""
    result = compact(task, folder, seconds)
    task.result.parent.mkdir(parents=True, exist_ok=True)
    task.result.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    tail = result["accuracy"]["mean"][-20:]
    mean = 100 * sum(tail) / len(tail)
    print(
        f"{folder.path.name}: {mean:.1f} % (mean of the last {len(tail)}), {seconds:.0f} s",
        flush=True,
    )


def run_here(tasks: list[Task], work: Path, seconds: float) -> None:
    """Run tasks one after another in this process, which saves starting Python for short runs."""
    deadline = time.monotonic() + seconds
    for task in tasks:
        if task.result.exists():
            continue
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return
        folder = RunFolder(work / f"{task.name}-seed{task.run.seed}")
        began = time.monotonic()
        start_run(task.run.config, folder.path)
        keep(task, folder, time.monotonic() - began)


def run_queue(tasks: list[Task], work: Path, jobs: int, seconds: float, expected: float) -> None:
    """Run tasks, `jobs` at a time; `expected` is how long one takes until the first one has shown it."""
    deadline = time.monotonic() + seconds
    waiting = [task for task in tasks if not task.result.exists()]
    print(f"{len(tasks)} runs, {len(waiting)} of them to do", flush=True)
    busy: list[Process] = []
    longest = 0.0
    while waiting or busy:
        for process in list(busy):
            if process.process.poll() is not None:
                busy.remove(process)
                longest = max(longest, process.finish() or 0.0)
        estimate = longest or expected
        fits = time.monotonic() + estimate < deadline
        if waiting and len(busy) < jobs and fits:
            busy.append(Process(waiting.pop(0), work))
            time.sleep(STAGGER)
        elif not busy:
            break
        elif time.monotonic() > deadline:
            for process in busy:
                print(f"{process.folder.path.name}: out of time", flush=True)
                process.process.kill()
                process.process.wait()
            break
        else:
            time.sleep(0.5)
    print(f"{len(waiting)} runs left for the next time", flush=True)


def main() -> None:
    """Read the arguments and run what is left of the queue."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("queue", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the runs themselves")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder for compact results"
    )
    parser.add_argument("--jobs", type=int, default=3, help="processes at once")
    parser.add_argument("--seconds", type=float, default=86400.0, help="time limit")
    parser.add_argument(
        "--expected",
        type=float,
        default=180.0,
        help="how long a run takes, before one has finished",
    )
    parser.add_argument(
        "--here", action="store_true", help="one after another in this process: for short runs"
    )
    parser.add_argument("--list", action="store_true", help="say what would run, and leave")
    arguments = parser.parse_args()
    tasks = list(read_queue(arguments.queue, arguments.results))
    if arguments.list:
        for task in tasks:
            print("done" if task.result.exists() else "    ", task.result)
        return
    if arguments.here:
        run_here(tasks, arguments.work, arguments.seconds)
        return
    run_queue(tasks, arguments.work, arguments.jobs, arguments.seconds, arguments.expected)


if __name__ == "__main__":
    main()
