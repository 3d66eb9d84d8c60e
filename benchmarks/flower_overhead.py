"""What it costs to leave the process: one federation on the local engine, on Flower's simulation and on real nodes.

    pip install -c constraints.txt ".[simulation]"
    OMP_NUM_THREADS=1 python benchmarks/flower_overhead.py [--json FILE] [--rounds N] [--epochs E ...]

Three clients, one per size (ResNet-10, -14 and -18, an eighth as wide), on digits, with InCo. The local engine trains
them one after the other on one thread; the simulation (Ray) has one worker per core; the deployment is a SuperLink and
three SuperNodes on loopback with TLS and keys, started by `motley deploy` and ended afterwards. Seconds per round are
medians of all rounds but the first, training and merging, without evaluation, from the runs' own metrics. The run fails
if the three do not end with the same bits.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from report import arguments, machine, report

from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.deploy.commands import free_port
from motley.deploy.folder import DeploySettings, create
from motley.flower.simulation import simulate
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run

STOP_S = 30.0


def federation(epochs: int, rounds: int, engine: str) -> Config:
    """Return the run that all three play."""
    settings = (
        "model.sizes=['resnet10','resnet14','resnet18']",
        "model.resnet.width=0.125",
        "method.name=InCoAvg",
        "federation.clients=3",
        "federation.clients_per_round=3",
        f"training.rounds={rounds}",
        f"training.epochs={epochs}",
        "training.batch_size=32",
        f"evaluation.every={rounds}",
        "engine.device=cpu",
        "run.tensorboard=false",
        f"engine.name={engine}",
    )
    return load_config(overrides=settings)


def in_process(folder: Path, epochs: int, rounds: int) -> Path:
    """Play on the local engine."""
    start_run(federation(epochs, rounds, "local"), folder / "run")
    return folder / "run"


def simulated(folder: Path, epochs: int, rounds: int) -> Path:
    """Play on Flower's simulation."""
    try:
        simulate(federation(epochs, rounds, "flower-simulation"), folder / "run")
    finally:
        ray.shutdown()
    return folder / "run"


def deployed(folder: Path, epochs: int, rounds: int) -> Path:
    """Play on a SuperLink and three SuperNodes."""
    made = create(
        folder / "federation",
        federation(epochs, rounds, "flower"),
        DeploySettings(port=free_port()),
    )
    with ExitStack() as processes:
        log = processes.enter_context((folder / "log").open("w+"))
        processes.enter_context(process(log, "server", made.path))
        while "serving at" not in (folder / "log").read_text():
            time.sleep(0.1)
        for node in sorted(made.nodes.iterdir()):
            processes.enter_context(process(log, "node", node))
        played = subprocess.run(deploy("run", made.path), stdout=log, stderr=log, check=False)
        if played.returncode:
            raise MotleyError((folder / "log").read_text())
    return made.run


def deploy(*arguments: object) -> list[str]:
    """Return one of Motley's commands."""
    return [sys.executable, "-m", "motley", "deploy", *map(str, arguments)]


@contextmanager
def process(log: object, *arguments: object) -> Iterator[None]:
    """Run a command until the block ends."""
    running = subprocess.Popen(deploy(*arguments), stdout=log, stderr=log)  # type: ignore[call-overload]
    try:
        yield
    finally:
        running.terminate()
        running.wait(STOP_S)


PLACES: dict[str, Callable[[Path, int, int], Path]] = {
    "local engine": in_process,
    "Flower simulation": simulated,
    "Flower deployment": deployed,
}


def compare(epochs: int, rounds: int) -> Iterator[dict[str, str | int | float]]:
    """Play one amount of work everywhere."""
    local, bits = 0.0, ""
    for name, play in PLACES.items():
        with tempfile.TemporaryDirectory() as place:
            begun = time.perf_counter()
            path = play(Path(place), epochs, rounds)
            whole = time.perf_counter() - begun
            lines = MetricsLog(path / "metrics.jsonl").read()
            server = load_checkpoint(path / "checkpoints")
        assert (
            server is not None
            and len(lines) == rounds
            and not any("refused" in line for line in lines)
        )
        a_round = statistics.median(
            line["seconds"]["train"] + line["seconds"]["merge"] for line in lines[1:]
        )
        local, bits = local or a_round, bits or fingerprint(server.state)
        assert fingerprint(server.state) == bits, (
            f"{name} ends with other bits than the local engine"
        )
        yield {
            "local epochs": epochs,
            "where": name,
            "s per round": a_round,
            "ratio": a_round / local,
            "seconds more per round": a_round - local,
            "whole run, s": whole,
        }


def main() -> None:
    """Compare the three at every amount of local work."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 20])
    options = parser.parse_args()
    about = machine("torch", "numpy", "flwr", "ray", "motleyfl")
    report(
        [row for epochs in options.epochs for row in compare(epochs, options.rounds)],
        about,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
