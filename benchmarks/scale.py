"""What a federation costs as its clients become more: memory, seconds and bytes. Run it from the repository:

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--json FILE] [--plot FILE] [--rounds N] [--clients N ...]

A million images of 8x8 are dealt to 100, 1,000, 10,000 and 100,000 clients of three sizes of perceptron. In a round
1,000 of them (all, where there are fewer) take one step each on a batch of ten, and a checkpoint follows. The data set
is the same for all, so what differs is the clients. Each federation has a process of its own, which may use 8 GiB of
address space and no more; its peak is the most memory that it ever had.

FedAvg's clients keep nothing. `control` is a method whose clients keep a control variate each, as SCAFFOLD's do, as
large as their part; 64 MiB of these stay in memory and the others lie on disk.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from report import arguments, machine, report

from motley.config import Config, load_config
from motley.core.part import State, take
from motley.core.tensors import add_, difference, subtract_
from motley.core.update import ClientUpdate
from motley.data import Dataset, Examples
from motley.federation import Federation
from motley.methods import METHODS, ClientAlgorithm, Method, Requirements, ServerAlgorithm, Step
from motley.runs.callbacks import SaveCheckpoints

LIMIT = 8 * 2**30
"""Bytes of address space a federation may use."""
SAMPLES = 1_000_000
CLIENTS = (100, 1_000, 10_000, 100_000)
A_ROUND = 1_000
NEVER = 10**9


class ControlClient(ClientAlgorithm):
    """Gradients are corrected by c - c_i, where c_i is the client's mean gradient (SCAFFOLD, option II)."""

    def initial_client_state(self, size: str, received: State) -> State:
        return {name: torch.zeros_like(tensor) for name, tensor in received.items()}

    def after_backward(self, step: Step) -> None:
        add_(step.grads, step.broadcast)
        subtract_(step.grads, step.client_state)

    def finish(self, step: Step) -> tuple[State, State]:
        control = difference(step.client_state, step.broadcast)
        add_(control, difference(step.received, step.params), 1 / (step.num_steps * float(step.lr)))
        return difference(control, step.client_state), control


class ControlServer(ServerAlgorithm):
    """The mean of the clients' control variates."""

    def init(self) -> State:
        state = self.info.split.initial(self.info.seed)
        return {name: torch.zeros_like(state[name]) for name in sorted(self.info.split.parameters)}

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        return take(own, self.info.split.part(self.info.sizes[client]))

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        sums = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        for update in updates:
            for name, change in update.payload.items():
                sums[update.part[name].name] += change
        return {
            name: control + sums[name] / self.info.owners(name) for name, control in own.items()
        }


@METHODS.register(
    "control", "control variates at every client: made up for this benchmark, after SCAFFOLD"
)
class Control(Method):
    """FedAvg with control variates."""

    Client = ControlClient
    Server = ControlServer
    requirements = Requirements(
        client_state=True, payload=True, own_training=True, own_aggregation=True
    )


# ---- one federation


def configure(clients: int, method: str) -> Config:
    """Return a federation of so many clients."""
    return load_config(
        overrides=[
            f"method.name={method}",
            f"federation.clients={clients}",
            f"federation.clients_per_round={min(A_ROUND, clients)}",
            "federation.size_assignment=random",
            "model.sizes=['mlp1','mlp2','mlp3']",
            "data.transform.resize=0",
            "data.partition.alpha=0.5",
            "data.partition.min_size=1",
            f"training.rounds={NEVER}",
            "training.steps=1",
            "training.batch_size=10",
            "training.optimizer.name=sgd",
            "training.optimizer.lr=0.1",
            f"evaluation.every={NEVER}",
            "server.ema_decay=0",
            "engine.device=cpu",
            "engine.client_state_host_gib=0.0625",
        ]
    )


def make_data() -> Dataset:
    """Return images that are their class's own pattern and noise."""
    numbers = np.random.default_rng(0)
    patterns = numbers.integers(0, 128, (10, 8, 8, 1), dtype=np.uint8)

    def examples(count: int) -> Examples:
        labels = numbers.integers(0, 10, count)
        return Examples(
            patterns[labels] + numbers.integers(0, 128, (count, 8, 8, 1), dtype=np.uint8), labels
        )

    return Dataset("patterns", examples(SAMPLES), examples(1_000), 10)


def measure(clients: int, method: str, rounds: int) -> dict[str, Any]:
    """Play a few rounds of a federation in this process, which does nothing else, and return what they cost."""
    data = make_data()
    before = peak()
    config = configure(clients, method)
    begin = time.perf_counter()
    partition = config.data.partition.split(data.train.targets, clients, config.seed)
    dealing = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            config, dataset=data, partition=partition, memory_folder=Path(folder) / "clients"
        )
        begin = time.perf_counter()
        for number in range(100):
            federation.sample(number)
        sampling = (time.perf_counter() - begin) / 100
        keeper = SaveCheckpoints(Path(folder) / "checkpoints", every=1, keep=2)
        server = federation.initial_state()
        keeper.on_start(federation, server)
        playing, saving, peaks = [], [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            server, record = federation.run_round(server)
            middle = time.perf_counter()
            keeper.on_round(server, record)
            playing.append(middle - begin)
            saving.append(time.perf_counter() - middle)
            peaks.append(peak())
        return {
            "method": method,
            "clients": clients,
            "clients per round": config.federation.clients_per_round,
            "partition s": dealing,
            "sampling ms": 1000 * sampling,
            "round s": statistics.median(playing),
            "saving s": statistics.median(saving),
            "peak MB": peaks[-1],
            "of it data and torch MB": before,
            "peaks MB": peaks,
            "checkpoint kB": size_of(max((Path(folder) / "checkpoints").iterdir())) / 1e3,
            "client memory on disk MB": size_of(Path(folder) / "clients") / 1e6,
            "sampled so far": len(server.client_state_rounds),
            "train loss": record.train_loss,
        }


def peak() -> float:
    """Return the most memory that this process ever had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def size_of(folder: Path) -> int:
    """Return how many bytes the files of a folder have."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- all of them


def measure_apart(clients: int, method: str, rounds: int) -> dict[str, Any]:
    """Measure in a process of its own, with a limit on its memory."""
    command = [
        sys.executable,
        __file__,
        "--rounds",
        str(rounds),
        "--clients",
        str(clients),
        "--one",
        method,
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=limit_memory
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(
        {name: round(v, 3) if isinstance(v, float) else v for name, v in result.items()},
        file=sys.stderr,
    )
    return result


def limit_memory() -> None:
    """Let this process have no more than the limit."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw memory and seconds over the number of clients."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        clients = [row["clients"] for row in own]
        left.plot(clients, [row["peak MB"] for row in own], "o-", label=f"{method}: peak")
        right.plot(
            clients,
            [1000 * row["round s"] / row["clients per round"] for row in own],
            "o-",
            label=method,
        )
    left.plot(
        clients,
        [row["of it data and torch MB"] for row in own],
        "--",
        color="grey",
        label="data set and torch",
    )
    left.set(title="Memory", ylabel="MB", ylim=(0, None))
    right.set(title="Milliseconds a sampled client", ylabel="ms", ylim=(0, None))
    for axes in (left, right):
        axes.set(xscale="log", xlabel="clients in the federation")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)


COLUMNS = ("method", "clients", "clients per round", "partition s", "sampling ms", "round s", "saving s", "peak MB",
           "checkpoint kB", "client memory on disk MB")  # fmt: skip


def main() -> None:
    """Measure every number of clients with both methods."""
    parser = arguments(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves")
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="rounds of each federation"
    )
    parser.add_argument(
        "--clients", type=int, nargs="+", default=CLIENTS, metavar="N", help="numbers of clients"
    )
    parser.add_argument("--one", metavar="METHOD", help="measure one federation in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.clients[0], options.one, options.rounds)))
        return
    here = machine("torch", "numpy", "motleyfl")
    rows = [
        measure_apart(n, method, options.rounds)
        for method in ("fedavg", "control")
        for n in options.clients
    ]
    report(
        [{name: row[name] for name in COLUMNS} for row in rows],
        here,
        options.json,
        rounds=options.rounds,
        all=rows,
    )
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
