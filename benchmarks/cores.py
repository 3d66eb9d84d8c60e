"""Seconds per round on a CPU with 1, 2, 4, ... worker processes, in one run.

    python benchmarks/cores.py [--preset quickstart] [--workers 1 2] [--rounds 4] [--repeats 3]

Every number of workers runs the same rounds in a process of its own, in turns, so that a busy
machine slows all of them. The first round of each run is left out: it builds the models. All runs
must end with the same bits. `memory` is the largest sum over the processes of their proportional
share of memory (PSS), in which a page that n processes share counts as 1/n for each. Processor time
and page faults are those of all processes; unlike seconds, other work changes them little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHILD = """
import json, multiprocessing, resource, sys, time
from pathlib import Path
from motley.config import load_config
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint

def usage():
    # The processor time and the page faults of this process and its workers so far.
    seconds = faults = 0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):  # the latter: those that have ended
        used = resource.getrusage(who)
        seconds += used.ru_utime + used.ru_stime
        faults += used.ru_minflt
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        seconds += (int(fields[11]) + int(fields[12])) / 100
        faults += int(fields[7])
    return seconds, faults

preset, workers, rounds, overrides = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
federation = Federation(load_config(preset=preset, overrides=[*overrides, f"engine.workers={workers}"]))
server, record = federation.queue_round(federation.initial_state())
record.read()
used, faults = usage()
begin = time.perf_counter()
for _ in range(rounds):
    server, later = federation.queue_round(server)
    record.read()  # as in `motley run`: at the latest when the next round has ended
    record = later
record.read()
seconds = (time.perf_counter() - begin) / rounds
used_after, faults_after = usage()
print(json.dumps({
    "seconds": seconds,
    "processor": (used_after - used) / rounds,
    "faults": (faults_after - faults) / rounds,
    "fingerprint": fingerprint(server.state),
}))
"""


def tree(root: int) -> list[int]:
    """Return a process and all processes below it."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(status.parent.name))
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        found.append(process)
        waiting.extend(parents.get(process, []))
    return found


def memory_of(processes: list[int]) -> float:
    """Return the sum of the processes' proportional shares of memory, in MiB."""
    total = 0
    for process in processes:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def measure(preset: str, workers: int, rounds: int, overrides: list[str]) -> dict[str, Any]:
    """Run a preset with a number of workers, and watch its memory."""
    command = [sys.executable, "-c", CHILD, preset, str(workers), str(rounds), *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    peak = 0.0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.is_set():
            peak = max(peak, memory_of(tree(process.pid)))
            time.sleep(0.25)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{workers} workers: ended with code {process.returncode}")
    return {**json.loads(output), "memory": peak}


def main() -> None:
    """Measure all numbers of workers in turns, and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in chosen.workers}
    for _ in range(chosen.repeats):
        for count in chosen.workers:
            run = measure(chosen.preset, count, chosen.rounds, chosen.overrides)
            print(f"{count:3d} workers  {run['seconds']:8.3f} s per round", flush=True)
            runs[count].append(run)
    fingerprints = {run["fingerprint"] for some in runs.values() for run in some}
    if len(fingerprints) > 1:
        sys.exit("the results differ between numbers of workers")
    rows = []
    for count, some in runs.items():
        per_round = [float(run["seconds"]) for run in some]
        pairs = zip(runs[chosen.workers[0]], some, strict=True)
        speedups = [first["seconds"] / own["seconds"] for first, own in pairs]
        rows.append(
            {
                "workers": count,
                "s_per_round": statistics.median(per_round),
                "speedup": statistics.median(speedups),
                "processor_s_per_round": statistics.median(run["processor"] for run in some),
                "faults_per_round": statistics.median(run["faults"] for run in some),
                "memory_mib": max(run["memory"] for run in some),
            }
        )
    print(f"{chosen.preset}, {os.cpu_count()} cores, {chosen.repeats} x {chosen.rounds} rounds")
    for row in rows:
        print(
            f"{row['workers']:3d} workers  {row['s_per_round']:8.3f} s per round  "
            f"{row['speedup']:5.2f} times  {row['processor_s_per_round']:8.3f} s of processor time  "
            f"{row['faults_per_round']:8.0f} page faults  {row['memory_mib']:7.0f} MiB"
        )
    if chosen.out:
        chosen.out.write_text(json.dumps({"preset": chosen.preset, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
