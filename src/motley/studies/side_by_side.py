"""Run several runs of a study at once, each in a process of its own.

    python -m motley.studies.side_by_side RUN CONFIG

is one of these processes: it starts or resumes the run in the folder RUN. Every run writes its own
folder, as it does alone, so a study that is stopped continues with any number of jobs.

One small run leaves most of a GPU idle. Three at once took 0.7 of the time of three in a row on an
H200, with NVIDIA's MPS running (`nvidia-cuda-mps-control -d`); more than three at once failed to
start. With several GPUs, each process sees one of them, in turns.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from motley.config import Config, read_resolved
from motley.core.errors import MotleyError
from motley.core.own_code import failure_in_own_code
from motley.engine.device import choose_devices
from motley.engine.workers import available_cores, why_no_workers
from motley.runs.folder import RunFolder
from motley.runs.interrupt import one_interrupt
from motley.studies.runner import StudyWatcher, run_path, start_or_resume
from motley.studies.sweep import Cell, PlannedRun

#: Seconds between two starts on a GPU: processes that start at the same moment under MPS may fail.
STAGGER = 4.0
#: Seconds between two looks at the processes.
POLL = 0.2
#: The exit status of a run that was rejected or failed in a user's own code. The reason is on its
#: standard error.
REJECTED = 2
#: Linux's number of the option that sends a process a signal when its parent dies.
_PR_SET_PDEATHSIG = 1


@dataclass
class _Process:
    """A run that is running."""

    cell: Cell
    run: PlannedRun
    folder: RunFolder
    process: subprocess.Popen[bytes]
    log: Path
    gpu: int | None
    rounds: int = -1


def run_side_by_side(
    todo: Sequence[tuple[Cell, PlannedRun]], out: Path, watcher: StudyWatcher, jobs: int
) -> None:
    """Run everything, `jobs` runs at a time. A run that is rejected is reported and skipped.

    If this process is interrupted, so are the runs, which then save a checkpoint each.
    """
    waiting = list(todo)
    running: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="motley-study-") as scratch, one_interrupt():
        try:
            while waiting or running:
                if waiting and len(running) < jobs:
                    cell, run = waiting.pop(0)
                    watcher.on_run(cell, run)
                    running.append(_start(cell, run, out, Path(scratch), jobs, running))
                    if running[-1].gpu is not None:
                        time.sleep(STAGGER)
                    continue
                time.sleep(POLL)
                for started in list(running):
                    _report_progress(started, watcher)
                    if started.process.poll() is not None:
                        running.remove(started)
                        _report_end(started, watcher)
        finally:
            _stop(running)


def _start(
    cell: Cell,
    run: PlannedRun,
    out: Path,
    scratch: Path,
    jobs: int,
    running: Sequence[_Process],
) -> _Process:
    path = run_path(out, run)
    config_file = scratch / f"{run.key}.toml"
    config_file.write_text(_shared_out(run.config, jobs).to_toml(), encoding="utf-8")
    log = scratch / f"{run.key}.log"
    gpu = _free_gpu(run.config, running)
    environment = dict(os.environ)
    # Users' own modules may be beside the study's file, which is on this process's path only.
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    if gpu is not None and torch.cuda.device_count() > 1:
        environment["CUDA_VISIBLE_DEVICES"] = _visible_gpus()[gpu]
    command = [sys.executable, "-m", __name__, str(path), str(config_file)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            # A terminal sends Ctrl-C to all processes of its group. This process passes it on.
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    return _Process(cell, run, RunFolder(path), process, log, gpu)


def end_with_parent() -> None:
    """Have this process receive SIGTERM when its parent is killed: it then saves a checkpoint."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _shared_out(config: Config, jobs: int) -> Config:
    """Return a configuration that uses its share of the cores, which changes no result."""
    engine = config.engine
    if engine.workers or why_no_workers(engine, _devices(config)):
        return config
    workers = max(1, available_cores() // jobs)
    return config.model_copy(update={"engine": engine.model_copy(update={"workers": workers})})


def _devices(config: Config) -> list[torch.device]:
    try:
        return choose_devices(config.engine.device)
    except MotleyError:
        return [torch.device("cpu")]  # the run will say what is wrong with its setting


def _free_gpu(config: Config, running: Sequence[_Process]) -> int | None:
    """Return the GPU that the fewest runs use; None for a run on a CPU."""
    if _devices(config)[0].type == "cpu":
        return None
    users = [0] * torch.cuda.device_count()
    for started in running:
        if started.gpu is not None:
            users[started.gpu] += 1
    return users.index(min(users))


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process sees, by the names that CUDA_VISIBLE_DEVICES takes."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if setting:
        return [name.strip() for name in setting.split(",")]
    return [str(number) for number in range(torch.cuda.device_count())]


def _report_progress(started: _Process, watcher: StudyWatcher) -> None:
    """Tell the watcher how many rounds a run has written."""
    try:
        with started.folder.metrics.open("rb") as file:
            rounds = sum(1 for _ in file)
    except OSError:
        return  # it has not begun
    if rounds != started.rounds:
        started.rounds = rounds
        watcher.on_progress(started.cell, started.run, rounds)


def _report_end(started: _Process, watcher: StudyWatcher) -> None:
    if started.process.returncode == 0:
        watcher.on_finished(started.cell, started.run)
        return
    lines = started.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if started.process.returncode == REJECTED:
        watcher.on_failure(started.cell, started.run, lines[-1] if lines else "it gave no reason")
        return
    end = "\n".join(lines[-15:])
    watcher.on_failure(
        started.cell,
        started.run,
        f"its process ended with status {started.process.returncode}:\n{end}",
    )


def _stop(running: Sequence[_Process]) -> None:
    """Interrupt runs and wait until each has saved its checkpoint."""
    for started in running:
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGINT)
    for started in running:
        started.process.wait()


def main(path: str, config: str) -> int:
    """Run one run. Return the exit status."""
    try:
        settings = read_resolved(Path(config))
        # This process has imported the user's own modules anew.
        if PlannedRun(settings.seed, settings).key != Path(path).name:
            raise MotleyError(
                "your own code was edited while the study was running. The same command runs what "
                "was left out with the code as it is now."
            )
        start_or_resume(Path(path), settings)
    except MotleyError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return REJECTED
    except Exception as error:
        reason = failure_in_own_code(error)
        if reason is None:
            raise
        print(" ".join(reason.split()), file=sys.stderr)
        return REJECTED
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
