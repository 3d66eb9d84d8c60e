"""Runs the contenders of a comparison in turns, checks that they did the same work, and reports.

Every run is a process of its own. A repeat runs all contenders once; every second repeat runs them
in the reverse order, so that a busy moment does not always hit the same one.

- ms per round: the median over the rounds of all repeats but the first round of each, with the
  evaluation of the whole test set. `repeats` are the lowest and the highest median of a repeat.
- start-up: from the start of the process to the end of the first round, less a median round. So it
  contains imports, the making of workers and whatever the first round does once.
- The comparison fails if a contender did another number of local steps, or if its accuracy after
  the last round differs from the control's by more than the workload's tolerance.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.baselines import by_hand, motley
from benchmarks.peers.federation import ROOT, WORKLOADS, Outcome, Workload
from benchmarks.report import arguments, machine, report

CORES = len(os.sched_getaffinity(0))
CONTROL = "by hand"
MOTLEY = "Motley"


@dataclass(frozen=True)
class Contender:
    """A library, or the control, in one configuration.

    setting: what distinguishes this configuration, in words.
    threads: threads of torch in the contender's process.
    processes: above 1, torchrun starts that many processes.
    workloads: names of the workloads that it runs.
    module: what `python -m` runs for it. The control and Motley do not import a peer's module, so
        that their start-up does not contain the peer's imports.
    """

    library: str
    run: Callable[[Workload, int], Outcome]
    setting: str
    threads: int = 1
    processes: int = 1
    workloads: Sequence[str] = tuple(WORKLOADS)
    module: str = "benchmarks.peers.compare"

    @property
    def name(self) -> str:
        """The name by which a child process knows it."""
        return f"{self.library}, {self.setting}"


def thread_variants(library: str, run: Callable[[Workload, int], Outcome]) -> list[Contender]:
    """Return a contender of one process with one thread of torch, and with torch's default.

    That is one thread per core. The MLP's operations are too small for torch to divide them.
    """
    variants = [Contender(library, run, "1 thread")]
    if CORES > 1:
        variants.append(Contender(library, run, f"{CORES} threads", CORES, workloads=["resnet"]))
    return variants


def standard_contenders() -> list[Contender]:
    """Return the control, and Motley in the configurations that a user may choose."""
    side_by_side = WORKLOADS["mlp"].clients_per_round
    return [
        *thread_variants(CONTROL, by_hand),
        Contender(MOTLEY, partial(motley, workers=1), "workers=1"),
        Contender(MOTLEY, motley, f"default: {CORES} workers"),
        Contender(
            MOTLEY,
            partial(motley, vmap_clients=side_by_side),
            f"vmap_clients={side_by_side}",
            workloads=["mlp"],
        ),
    ]


@dataclass(frozen=True)
class Run:
    """One run of a contender, as its process reported it. `ends` count from the process's start."""

    ends: list[float]
    steps: int
    accuracy: float

    @property
    def rounds(self) -> list[float]:
        """Seconds of all rounds but the first."""
        return [after - before for before, after in pairwise(self.ends)]


def main(
    description: str | None, module: str, peers: Sequence[Contender], packages: Sequence[str]
) -> None:
    """Compare peers with Motley and the control, or run one contender in this process.

    `module` is the peers' script as `python -m` knows it, `packages` are their distributions.
    """
    parser = arguments(description)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds of each run")
    parser.add_argument("--repeats", type=int, default=0, help="runs of each contender")
    parser.add_argument("--contender", help="run this one only, in this process")
    parser.add_argument("--output", type=Path, help="with --contender: where its result goes")
    options = parser.parse_args()
    peers = [replace(peer, module=module) for peer in peers]
    contenders = [*standard_contenders(), *peers]
    if options.contender:
        (contender,) = [one for one in contenders if one.name == options.contender]
        (name,) = options.workloads
        run_here(contender, WORKLOADS[name], options.rounds, options.output)
        return
    about = machine("torch", "numpy", *packages, "motleyfl")
    about["threads"] = "as each row says"
    about["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "default")
    rows: list[dict[str, Any]] = []
    for name in options.workloads:
        workload = WORKLOADS[name]
        chosen = [one for one in contenders if workload.name in one.workloads]
        rounds = options.rounds or workload.rounds
        runs = measure(chosen, workload, rounds, options.repeats or workload.repeats)
        rows += summarize(chosen, workload, rounds, runs)
    report(rows, about, options.json, peer=contenders[-1].library)


def run_here(contender: Contender, workload: Workload, rounds: int, output: Path) -> None:
    """Run a contender in this process, and write what it did."""
    import torch

    torch.set_num_threads(contender.threads)
    outcome = contender.run(workload, rounds)
    if int(os.environ.get("RANK", "0")) == 0:
        fields = {"ends": outcome.ends, "steps": outcome.steps, "accuracy": outcome.accuracy}
        output.write_text(json.dumps(fields), encoding="utf-8")


def measure(
    contenders: Sequence[Contender], workload: Workload, rounds: int, repeats: int
) -> dict[str, list[Run]]:
    """Run all contenders in turns; return their runs by name."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders if repeat % 2 == 0 else reversed(contenders):
            run = run_apart(contender, workload, rounds + 1)
            runs[contender.name].append(run)
            milliseconds = 1000 * statistics.median(run.rounds)
            print(
                f"{workload.name}, repeat {repeat + 1}: {contender.name}: "
                f"{milliseconds:.1f} ms per round, accuracy {run.accuracy:.3f}",
                file=sys.stderr,
            )
    return runs


def run_apart(contender: Contender, workload: Workload, rounds: int) -> Run:
    """Run a contender in a process of its own, or in several that torchrun starts."""
    launcher = [sys.executable]
    if contender.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(contender.processes)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(contender.threads),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcome.json"
        command = [
            *launcher,
            *["-m", contender.module],
            *["--contender", contender.name],
            *["--workloads", workload.name],
            *["--rounds", str(rounds)],
            *["--output", str(output)],
        ]
        begin = time.monotonic()  # one clock for all processes of the machine
        process = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if process.returncode != 0 or not output.exists():
            sys.exit(
                f"{contender.name} failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
            )
        outcome = json.loads(output.read_text(encoding="utf-8"))
    ends = [end - begin for end in outcome["ends"]]
    return Run(ends, outcome["steps"], outcome["accuracy"])


def summarize(
    contenders: Sequence[Contender], workload: Workload, rounds: int, runs: dict[str, list[Run]]
) -> list[dict[str, Any]]:
    """Check that all contenders did the same work, and return one row for each."""
    (control, *_) = [one for one in contenders if one.library == CONTROL]
    reference = statistics.median(run.accuracy for run in runs[control.name])
    rows = []
    for contender in contenders:
        its_runs = runs[contender.name]
        check(contender.name, its_runs, workload, rounds, reference)
        medians = [1000 * statistics.median(run.rounds) for run in its_runs]
        median = statistics.median(seconds for run in its_runs for seconds in run.rounds)
        rows.append(
            {
                "workload": workload.name,
                "library": contender.library,
                "setting": contender.setting,
                "ms per round": 1000 * median,
                "runs": len(its_runs),
                "rounds": rounds,
                "repeats": f"{min(medians):,.1f} to {max(medians):,.1f}",
                "start-up, s": statistics.median(run.ends[0] for run in its_runs) - median,
                "steps per round": workload.steps_per_round,
                "accuracy": statistics.median(run.accuracy for run in its_runs),
            }
        )
    return rows


def check(
    name: str, runs: Sequence[Run], workload: Workload, rounds: int, reference: float
) -> None:
    """Stop if a contender did other work than it should have."""
    expected = (rounds + 1) * workload.steps_per_round
    for run in runs:
        if len(run.ends) != rounds + 1:
            sys.exit(f"{workload.name}: {name} noted {len(run.ends)} rounds, not {rounds + 1}")
        if run.steps != expected:
            sys.exit(f"{workload.name}: {name} did {run.steps} local steps, not {expected}")
        if abs(run.accuracy - reference) > workload.tolerance:
            sys.exit(
                f"{workload.name}: the accuracy of {name} is {run.accuracy:.3f}, the control's "
                f"{reference:.3f}; they may differ by {workload.tolerance}"
            )


if __name__ == "__main__":
    main(__doc__, __spec__.name, [], [])
