"""The same federation on Flower's simulation engine and on Motley. Run it from the repository:

    pip install -c constraints.txt ".[bench]"
    OMP_NUM_THREADS=1 python benchmarks/flower_simulation.py [--json FILE] [--work N] [--epochs E ...] [--stack S ...]

Plain FedAvg of a small MLP on digits: 50 of 100 clients per round, batches of 10, SGD. Flower runs its own FedAvg
strategy and a lean client (`flower_client.py`) with one worker a core; Motley runs on one thread, with as many clients
side by side as `engine.vmap_clients` says. Seconds a round are
medians of all rounds but the first, without evaluation. Start-up is what is left of the time until the end of the first
round: making the federation, the workers and the data, but not this process's imports. Accuracy is that of the last
round's model on the test set; the run fails where one of the two learns less than the other.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

os.environ["FLWR_TELEMETRY_ENABLED"] = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"

import ray
from flower_client import A_ROUND, CLIENTS, federation_config
from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result
from flwr.simulation import run_simulation
from report import arguments, machine, report

from motley.data import load_dataset
from motley.federation import Federation

ACCURACY_GAP = 0.05
"""Largest difference of the two accuracies: they sample other clients and draw other batches. Over eight seeds Motley's
own differ by 0.023; after less work than the default, by far more.
"""


@dataclass(frozen=True)
class Measured:
    """One simulator's run."""

    start_up: float
    a_round: float
    accuracy: float

    @classmethod
    def of(cls, begin: float, ends: list[float], accuracy: float) -> Measured:
        """Return the figures of a run that began at `begin` and whose rounds ended at `ends`."""
        a_round = statistics.median(after - before for before, after in pairwise(ends))
        return cls(ends[0] - begin - a_round, a_round, accuracy)


class TimedFedAvg(FedAvg):
    """Flower's FedAvg, noting when each round is over."""

    def __init__(self) -> None:
        super().__init__(
            fraction_train=A_ROUND / CLIENTS,
            fraction_evaluate=0.0,
            min_train_nodes=A_ROUND,
            min_available_nodes=CLIENTS,
        )
        self.ends: list[float] = []

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        answer = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return answer


def on_flower(epochs: int, rounds: int) -> Measured:
    """Play the federation on Flower's simulation engine."""
    federation = Federation(federation_config(epochs, rounds))
    start = federation.initial_state().state
    strategy, app, results = TimedFedAvg(), ServerApp(), list[Result]()
    training = federation.config.training
    work = {"epochs": epochs, "batch-size": training.batch_size, "lr": training.optimizer.lr}

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(
            strategy.start(grid, ArrayRecord(start), rounds, train_config=ConfigRecord(work))
        )

    backend = {
        "init_args": {"num_cpus": os.cpu_count(), "log_to_driver": False, "logging_level": "ERROR"},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    begin = time.perf_counter()
    try:
        run_simulation(app, client_app, num_supernodes=CLIENTS, backend_config=backend)
    finally:
        ray.shutdown()
    (score,) = federation.evaluate(dict(results[0].arrays.to_torch_state_dict())).values()
    return Measured.of(begin, strategy.ends, score.accuracy)


def on_motley(epochs: int, rounds: int, stack: int) -> Measured:
    """Play the federation on Motley."""
    begin, ends = time.perf_counter(), []
    federation = Federation(federation_config(epochs, rounds, stack))
    server = federation.initial_state()
    for _ in range(rounds):
        server, record = federation.run_round(server)
        ends.append(time.perf_counter() - record.seconds.get("evaluate", 0.0))
    (score,) = record.scores.values()
    return Measured.of(begin, ends, score.accuracy)


def compare(flower: Measured, epochs: int, rounds: int, stack: int) -> dict[str, str | int | float]:
    """Measure Motley and set it beside what was measured of Flower."""
    motley = on_motley(epochs, rounds, stack)
    gap = abs(motley.accuracy - flower.accuracy)
    assert gap <= ACCURACY_GAP, f"accuracy {flower.accuracy} on Flower, {motley.accuracy} on Motley"
    return {
        "local epochs": epochs,
        "clients side by side": stack,
        "rounds": rounds,
        "Flower, s per round": flower.a_round,
        "Motley, s per round": motley.a_round,
        "ratio": flower.a_round / motley.a_round,
        "start-up, s": f"{flower.start_up:.2f} / {motley.start_up:.2f}",
        "accuracy": f"{flower.accuracy:.3f} / {motley.accuracy:.3f}",
    }


def main() -> None:
    """Compare the two at every amount of local work."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=int, default=250, help="rounds times local epochs")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 5])
    parser.add_argument(
        "--stack", type=int, nargs="+", default=[1, 50], help="clients side by side on Motley"
    )
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    load_dataset("digits")  # its reader imports scikit-learn
    about = machine("torch", "numpy", "flwr", "ray", "motleyfl")
    rows = []
    for epochs in options.epochs:
        rounds = options.work // epochs
        flower = on_flower(epochs, rounds)
        rows += [compare(flower, epochs, rounds, stack) for stack in options.stack]
    report(rows, about, options.json)


if __name__ == "__main__":
    sys.exit(main())
