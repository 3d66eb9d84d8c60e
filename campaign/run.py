"""Run the campaign's queue: the runs of several studies, some at a time, each kept as one compact file.

    python campaign/run.py campaign/queue.txt --work /tmp/campaign --seconds 560 --jobs 3

One line of the queue names a study (a file, or one of the library's) with options that narrow it:

    campaign/inco-table2.toml --seed 1 --method HeteroAvg --set training.rounds=500

Lines run in order. A run that already has its file under `results/` is not run again, and a run that was cut off
continues from its last checkpoint in `--work`, so the same command continues a queue. GPU time comes in limited
stretches, and what is in `--work` may be lost with its machine: no run is started that would probably not finish within
`--seconds`, and runs that take longer than expected are ended with a checkpoint.

A run that fails does not stop the others. It is named at the end, the exit status is then 1, and the next time it is
tried again. If this process is stopped, its runs save a checkpoint and end.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.config import parse_overrides
from motley.core.errors import MotleyError
from motley.files import write_atomically
from motley.runs.folder import RunFolder
from motley.runs.interrupt import one_interrupt
from motley.runs.metrics import layer_metrics
from motley.runs.run import resume_run, start_run
from motley.studies.declaration import load_study
from motley.studies.side_by_side import end_with_parent
from motley.studies.sweep import PlannedRun, plan_cells

#: Rounds between two sets of InCo coefficients that are kept: every round of every layer would be megabytes.
COEFFICIENTS_EVERY = 10
#: Seconds between two starts. Processes that start at the same moment under MPS fail now and then.
STAGGER = 4.0
#: Seconds that runs have for their checkpoints when their time is up.
ENDING = 60.0
#: Lines of a failed run's log that are shown.
SHOWN_LINES = 15


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
        parts = [_slug(part) for part in (self.study, self.data, self.case, self.method) if part]
        return "-".join([*parts, f"seed{self.run.seed}"])

    @property
    def is_done(self) -> bool:
        """Whether its result is kept. The result of a run of another length is not its result."""
        if not self.result.exists():
            return False
        try:
            config = json.loads(self.result.read_text(encoding="utf-8"))["config"]
        except ValueError:
            raise SystemExit(f"{self.result} is damaged. Remove it to run it again.") from None
        kept = config["training"]["rounds"]
        wanted = self.run.config.training.rounds
        if kept != wanted:
            raise SystemExit(
                f"{self.result} is of {kept} rounds, and the queue asks for {wanted}. Keep runs of "
                "another length in a folder of their own (--results)."
            )
        return True

    def folder(self, work: Path) -> RunFolder:
        """Return the folder of its run, and raise if another run is there."""
        folder = RunFolder(work / self.name)
        if folder.config.exists():
            there = PlannedRun(self.run.seed, folder.read_config())
            if there.key != self.run.key:
                raise SystemExit(
                    f"{folder.path} has a run with other settings than the queue asks for. Remove "
                    "it, or give another folder (--work)."
                )
        return folder


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def read_queue(queue: Path, results: Path) -> Iterator[Task]:
    """Yield the runs of a queue in order, finished ones too.

    A run that several lines name is yielded once, at the place of the first of them.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("study")
    for option in ("--data", "--case", "--method", "--set"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("--seed", type=int, action="append", default=[])
    named: set[Path] = set()
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
                if result in named:
                    continue
                named.add(result)
                yield Task(study.name, cell.method, cell.data, cell.case, run, result)


def compact(task: Task, folder: RunFolder, seconds: float | None) -> dict[str, Any]:
    """Return a finished run as columns: small enough to keep hundreds of them.

    `seconds` is None for a run that was cut off once: how long it took in all is not known.
    """
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
        "seconds": None if seconds is None else round(seconds, 1),
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
        self.folder = task.folder(work)
        self.resumed = self.folder.config.exists()
        self.log = work / f"{task.name}.log"
        command = [sys.executable, "-m", "motley"]
        if self.resumed:
            command += ["resume", str(self.folder.path)]
        else:
            config = work / f"{task.name}.toml"
            config.parent.mkdir(parents=True, exist_ok=True)
            config.write_text(task.run.config.to_toml(), encoding="utf-8")
            command += ["run", str(config), "--out", str(self.folder.path)]
        self.began = time.monotonic()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the run has finished, failed or been ended."""
        return self.process.poll() is not None

    def finish(self) -> float | None:
        """Keep the result of a process that has ended; return the seconds of the run.

        None for a continued run, whose earlier seconds are not known. Raises if it failed.
        """
        seconds = time.monotonic() - self.began
        if self.process.returncode != 0:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
            end = "\n".join(lines[-SHOWN_LINES:])
            raise MotleyError(f"its process ended with status {self.process.returncode}:\n{end}")
        whole = None if self.resumed else seconds
        keep(self.task, self.folder, whole)
        return whole


def keep(task: Task, folder: RunFolder, seconds: float | None) -> None:
    """Write the compact result of a finished run, and say its accuracy."""
    result = compact(task, folder, seconds)
    task.result.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, separators=(",", ":")) + "\n"
    # A part of a file would be taken for a result, or stop the whole queue.
    write_atomically(task.result, text.encode())
    tail = result["accuracy"]["mean"][-20:]
    mean = 100 * sum(tail) / len(tail)
    took = "continued" if seconds is None else f"{seconds:.0f} s"
    print(f"{task.name}: {mean:.1f} % (mean of the last {len(tail)}), {took}", flush=True)


def report_failure(task: Task, error: Exception) -> None:
    """Say why a run has no result."""
    reason = str(error)
    if not isinstance(error, MotleyError):
        reason = traceback.format_exc().strip()
    print(f"{task.name} failed: {reason}", flush=True)


def todo(tasks: Sequence[Task], work: Path) -> list[Task]:
    """Return the tasks that are not done. Raise before any of them is run if a folder is taken."""
    waiting = [task for task in tasks if not task.is_done]
    for task in waiting:
        task.folder(work)
    print(f"{len(tasks)} runs, {len(waiting)} of them to do", flush=True)
    return waiting


def run_here(tasks: list[Task], work: Path, seconds: float) -> list[Task]:
    """Run tasks one after another in this process, which saves starting Python for short runs.

    Return those that failed. A run that has begun is not ended when the time is up.
    """
    deadline = time.monotonic() + seconds
    waiting = todo(tasks, work)
    failed: list[Task] = []
    longest = 0.0
    while waiting and time.monotonic() + longest < deadline:
        task = waiting.pop(0)
        folder = task.folder(work)
        began = time.monotonic()
        try:
            if folder.config.exists():
                resume_run(folder.path)
                keep(task, folder, None)
            else:
                start_run(task.run.config, folder.path)
                took = time.monotonic() - began
                longest = max(longest, took)
                keep(task, folder, took)
        except Exception as error:
            report_failure(task, error)
            failed.append(task)
    print(f"{len(waiting)} runs left for the next time", flush=True)
    return failed


def run_queue(
    tasks: list[Task], work: Path, jobs: int, seconds: float, expected: float
) -> list[Task]:
    """Run tasks, `jobs` at a time; return those that failed.

    `expected` is how many seconds a run takes, until the first whole one has shown it.
    """
    deadline = time.monotonic() + seconds
    waiting = todo(tasks, work)
    busy: list[Process] = []
    failed: list[Task] = []
    longest = 0.0
    with one_interrupt():
        try:
            while waiting or busy:
                for process in list(busy):
                    if process.has_ended:
                        busy.remove(process)
                        longest = max(longest, finish(process, failed) or 0.0)
                fits = time.monotonic() + (longest or expected) < deadline
                if waiting and len(busy) < jobs and fits:
                    busy.append(Process(waiting.pop(0), work))
                    time.sleep(STAGGER)
                elif not busy or time.monotonic() > deadline:
                    break
                else:
                    time.sleep(0.5)
        finally:
            end(busy)
    for process in busy:
        if process.process.returncode == 0:
            # It was done before it was told to end.
            finish(process, failed)
        else:
            print(f"{process.task.name}: out of time, kept in {work}", flush=True)
            waiting.append(process.task)
    print(f"{len(waiting)} runs left for the next time", flush=True)
    return failed


def finish(process: Process, failed: list[Task]) -> float | None:
    """Keep the result of a process that has ended, or note that it failed; return its seconds."""
    try:
        return process.finish()
    except Exception as error:
        report_failure(process.task, error)
        failed.append(process.task)
        return None


def end(processes: Sequence[Process]) -> None:
    """End processes, after they have written their checkpoints."""
    for process in processes:
        process.process.terminate()
    deadline = time.monotonic() + ENDING
    for process in processes:
        try:
            process.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.process.kill()
            process.process.wait()


def main() -> int:
    """Read the arguments and run what is left of the queue. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("queue", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the runs themselves")
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
            print("done" if task.is_done else "    ", task.result)
        return 0
    if arguments.work is None:
        parser.error("--work is needed: the folder for the runs themselves")
    try:
        if arguments.here:
            failed = run_here(tasks, arguments.work, arguments.seconds)
        else:
            failed = run_queue(
                tasks, arguments.work, arguments.jobs, arguments.seconds, arguments.expected
            )
    except KeyboardInterrupt:
        print("stopped", flush=True)
        return 130
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(task.name for task in failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
