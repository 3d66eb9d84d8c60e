"""Runs the contenders of a comparison in turns, checks that they did the same work, and reports.

Every run is a process of its own. A repeat runs all contenders once; every second repeat runs them
in the reverse order, so that a busy moment does not always hit the same one.

- ms per round: the median over the rounds of all repeats but the first round of each, with the
  evaluation of the whole test set. `repeats` are the lowest and the highest median of a repeat.
- start-up: from the start of the process to the end of the first round, less a median round. So it
  contains imports, the making of workers and whatever the first round does once.
- others: how many cores other programs used while the control ran, on average. The control runs in
  every repeat, and all its processor time is known, so the rest is that of others.
- The comparison fails if a contender did another number of local steps, or if its accuracy after
  the last round differs from the control's by more than the workload's tolerance.
"""

from __future__ import annotations

import json
import os
import resource
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
#: The load (the mean of a minute) below which a comparison begins. It fades slowly after the end of
#: another comparison, so it does not tell whether other programs run.
IDLE_LOAD = 0.5
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
    """One run of a contender, as its process reported it. `ends` count from the process's start.

    others: how many cores other processes used meanwhile; None if the system does not tell.
    """

    ends: list[float]
    steps: int
    accuracy: float
    others: float | None

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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--contender", help="run this one only, in this process")
    parser.add_argument("--output", type=Path, help="with --contender: where its result goes")
    options = parser.parse_args()
    peers = [replace(peer, module=module) for peer in peers]
    contenders = [*standard_contenders(), *peers]
    if options.contender:
        (name,) = options.workloads
        contenders += for_gpu(contenders, WORKLOADS[name])
        contender = next(one for one in contenders if one.name == options.contender)
        run_here(contender, WORKLOADS[name], options.rounds, options.output)
        return
    if options.device == "cpu":
        wait_until_idle()
    about = machine("torch", "numpy", *packages, "motleyfl")
    about["threads"] = "as each row says"
    about["device"] = device_name(options.device)
    about["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "default")
    rows: list[dict[str, Any]] = []
    others: list[float | None] = []
    for name in options.workloads:
        workload = WORKLOADS[name]
        chosen = [one for one in contenders if workload.name in one.workloads]
        if options.device == "cuda":
            chosen = for_gpu(chosen, workload)
        rounds = options.rounds or workload.rounds
        repeats = options.repeats or workload.repeats
        runs = measure(chosen, workload, rounds, repeats, options.device)
        rows += summarize(chosen, workload, rounds, runs)
        for contender in chosen:
            if contender.library == CONTROL:
                others += [run.others for run in runs[contender.name]]
    about["others, cores"] = mean_of_known(others)
    report(rows, about, options.json, peer=contenders[-1].library)


def for_gpu(contenders: Sequence[Contender], workload: Workload) -> list[Contender]:
    """Return the contenders of a comparison on one GPU.

    More processes or threads of the host do not help there, so each library runs once. Motley runs
    with its default and with all clients of a round in one batched model.
    """
    chosen = []
    for contender in contenders:
        of_one_thread = contender.processes == 1 and contender.threads == 1
        if of_one_thread and contender.library != MOTLEY:
            chosen.append(contender)
    count = workload.clients_per_round
    stacked = partial(motley, vmap_clients=count)
    chosen.append(Contender(MOTLEY, motley, "default"))
    chosen.append(Contender(MOTLEY, stacked, f"vmap_clients={count}"))
    return chosen


def wait_until_idle() -> None:
    """Wait for the load of an earlier comparison to fade, at most three minutes."""
    end = time.monotonic() + 180
    while os.getloadavg()[0] > IDLE_LOAD and time.monotonic() < end:
        time.sleep(5)


def busy_seconds() -> float | None:
    """Return how long all cores have been busy since the machine started.

    None if the system does not tell. Time that a virtual machine wanted and did not get counts.
    """
    try:
        first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, stolen, *_ = map(int, first.split()[1:])
    ticks = user + nice + system + irq + softirq + stolen
    return ticks / float(os.sysconf("SC_CLK_TCK"))


def seconds_of_children() -> float:
    """Return the processor time of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known, rounded; None if none is."""
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 2) if known else None


def device_name(device: str) -> str:
    """Return the name of the GPU, or "cpu"."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


def run_here(contender: Contender, workload: Workload, rounds: int, output: Path) -> None:
    """Run a contender in this process, and write what it did."""
    import torch

    torch.set_num_threads(contender.threads)
    outcome = contender.run(workload, rounds)
    if int(os.environ.get("RANK", "0")) == 0:
        fields = {"ends": outcome.ends, "steps": outcome.steps, "accuracy": outcome.accuracy}
        output.write_text(json.dumps(fields), encoding="utf-8")
    if contender.processes > 1:
        # A normal end fails now and then: "terminate called", because a thread of gloo still runs.
        sys.stdout.flush()
        os._exit(0)


def measure(
    contenders: Sequence[Contender],
    workload: Workload,
    rounds: int,
    repeats: int,
    device: str = "cpu",
) -> dict[str, list[Run]]:
    """Run all contenders in turns; return their runs by name."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for contender in contenders if repeat % 2 == 0 else reversed(contenders):
            run = run_apart(contender, workload, rounds + 1, device)
            runs[contender.name].append(run)
            milliseconds = 1000 * statistics.median(run.rounds)
            print(
                f"{workload.name}, repeat {repeat + 1}: {contender.name}: "
                f"{milliseconds:.1f} ms per round, accuracy {run.accuracy:.3f}",
                file=sys.stderr,
            )
    return runs


def run_apart(contender: Contender, workload: Workload, rounds: int, device: str = "cpu") -> Run:
    """Run a contender in a process of its own, or in several that torchrun starts."""
    launcher = [sys.executable]
    if contender.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(contender.processes)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(contender.threads),
        "PEERS_DEVICE": device,
        # With this process's path, because on a GPU machine packages may be in a folder of their own.
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)]),
    }
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
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
        busy_before, own_before = busy_seconds(), seconds_of_children()
        begin = time.monotonic()  # one clock for all processes of the machine
        process = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if process.returncode != 0 or not output.exists():
            sys.exit(
                f"{contender.name} failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
            )
        outcome = json.loads(output.read_text(encoding="utf-8"))
    others = None
    busy_after = busy_seconds()
    if busy_before is not None and busy_after is not None:
        own = seconds_of_children() - own_before
        others = max(0.0, busy_after - busy_before - own) / (time.monotonic() - begin)
    ends = [end - begin for end in outcome["ends"]]
    return Run(ends, outcome["steps"], outcome["accuracy"], others)


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
