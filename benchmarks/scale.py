"""Cost of a federation against its number of clients, up to a million. Run from the repository:

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--json FILE] [--plot FILE]

There are three parts, which `--parts` chooses from:

dealt     A million 8x8 images are dealt to 100, 1,000, 10,000 and 100,000 clients by a Dirichlet
          distribution. The data set is the same for all, so only the clients differ.
natural   A million natural clients with unequal numbers of examples: most have one or two, some
          have sixty. The model is tiny.
growth    Natural clients again. One factor is varied at a time (clients, sizes, parameters, clients
          per round) and the others stay the same; the result is one exponent per factor and cost.

Up to 1,000 clients are sampled per round and a checkpoint is saved after every round. FedAvg's
clients keep no state. SCAFFOLD's keep a control variate as large as their part; 64 MiB of these
stay in memory and the others are on disk.

Every federation has a process of its own, which may use 8 GiB of address space. Seconds are CPU
seconds of that process, which trains all clients itself (engine.workers = 1). Peak memory is that
of the partition, the federation and all rounds; "base MB" is what the process had before: Python,
torch and the data set. "Late" costs of FedAvg are those of a run in which every client has taken
part.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from report import arguments, machine, report, table

from motley.config import Config, load_config
from motley.core.client_numbers import ClientNumbers
from motley.data import Dataset, Examples
from motley.federation import Federation
from motley.runs.callbacks import SaveCheckpoints
from motley.runs.checkpoint import checkpoints, read_checkpoint
from motley.runs.metrics import to_line
from motley.server.state import ServerState

#: Bytes of address space that a federation may use.
LIMIT = 8 * 2**30
#: A number of rounds that no run here reaches.
NEVER = 10**9
METHODS = ("fedavg", "scaffold")
PARTS = ("dealt", "natural", "growth")
#: Images of the data set that is dealt, and the numbers of clients they are dealt to.
DEALT_EXAMPLES = 1_000_000
DEALT_CLIENTS = (100, 1_000, 10_000, 100_000)
NATURAL_CLIENTS = 1_000_000
#: Examples of the largest natural client. The others follow Zipf's law with this exponent.
MOST_EXAMPLES, ZIPF = 60, 1.8


@dataclass(frozen=True)
class Case:
    """One federation that is measured.

    natural: natural clients with 4x4 images, instead of dealt ones with 8x8 images.
    equal_sizes: this many sizes of the same model; 0: MLPs with one, two and three hidden layers.
    hidden: units per hidden layer.
    """

    method: str
    clients: int
    natural: bool
    rounds: int
    equal_sizes: int = 0
    hidden: int = 64
    clients_per_round: int = 1_000


#: What the growth part varies. Every factor has this value in the cases of the others.
GROWTH_BASE = Case(
    "scaffold", 100_000, natural=True, rounds=5, equal_sizes=3, hidden=16, clients_per_round=1_000
)
#: Name of the factor -> the field that is varied, and its values.
FACTORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "clients": ("clients", (10_000, 100_000, 1_000_000)),
    "sizes": ("equal_sizes", (1, 3, 9)),
    "parameters": ("hidden", (16, 64, 256)),
    "clients per round": ("clients_per_round", (100, 1_000, 3_000)),
}
#: The costs whose growth is measured, and the factor that turns them into the unit per client,
#: size, parameter and client per round.
COSTS: dict[str, tuple[float, str]] = {
    "peak above base MB": (1e6, "B"),
    "partition s": (1e6, "us"),
    "sampling ms": (1e3, "us"),
    "round s": (1e6, "us"),
    "checkpoint kB": (1e3, "B"),
    "resume s": (1e6, "us"),
}


# ---- one federation, in a process of its own


def configure(case: Case) -> Config:
    """Return the configuration of a case."""
    sizes = ["mlp1", "mlp2", "mlp3"]
    overrides = []
    if case.equal_sizes:
        sizes = [f"size{number}" for number in range(case.equal_sizes)]
        overrides = [f"model.factories.{size}=mlp2" for size in sizes]
    partition = ["data.partition.alpha=0.5", "data.partition.min_size=1"]
    if case.natural:
        partition = ["data.partition.name=natural"]
    return load_config(
        overrides=[
            f"method.name={case.method}",
            f"federation.clients={case.clients}",
            f"federation.clients_per_round={min(case.clients_per_round, case.clients)}",
            "federation.size_assignment=random",
            *overrides,
            f"model.sizes={sizes}",
            f"model.mlp.hidden={case.hidden}",
            "data.transform.resize=0",
            *partition,
            f"training.rounds={NEVER}",
            "training.steps=1",
            "training.batch_size=10",
            "training.optimizer.name=sgd",
            "training.optimizer.lr=0.1",
            f"evaluation.every={NEVER}",
            "server.ema_decay=0",
            "engine.device=cpu",
            "engine.workers=1",
            "engine.client_state_host_gib=0.0625",
        ]
    )


def make_data(case: Case) -> Dataset:
    """Return images that are the pattern of their class with noise."""
    rng = np.random.default_rng(0)
    side = 4 if case.natural else 8
    patterns = rng.integers(0, 128, (10, side, side, 1), dtype=np.uint8)

    def examples(count: int, clients: np.ndarray | None = None) -> Examples:
        labels = rng.integers(0, 10, count)
        noise = rng.integers(0, 128, (count, side, side, 1), dtype=np.uint8)
        return Examples(patterns[labels] + noise, labels, clients)

    if not case.natural:
        return Dataset("patterns", examples(DEALT_EXAMPLES), examples(1_000), 10)
    counts = np.minimum(rng.zipf(ZIPF, case.clients), MOST_EXAMPLES)
    owners = rng.permutation(np.repeat(np.arange(case.clients), counts))
    test_owners = rng.integers(0, case.clients, 1_000)
    return Dataset(
        "natural patterns", examples(len(owners), owners), examples(1_000, test_owners), 10
    )


class Stopwatch:
    """Measures CPU seconds of this process since it was made."""

    def __init__(self) -> None:
        self._begin = time.process_time()

    def read(self) -> float:
        """Return the seconds so far."""
        return time.process_time() - self._begin


def measure(case: Case) -> dict[str, Any]:
    """Run a few rounds of a federation in this process, which does nothing else."""
    data = make_data(case)
    config = configure(case)
    base = start_peak()
    watch = Stopwatch()
    train = data.train
    partition = config.data.partition.split_by_clients(
        train.targets, train.clients, case.clients, config.seed
    )
    partition_seconds = watch.read()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        federation = Federation(
            config, dataset=data, partition=partition, client_state_folder=folder / "clients"
        )
        watch = Stopwatch()
        for number in range(100):
            federation.sample(number)
        sampling_seconds = watch.read() / 100
        saver = SaveCheckpoints(folder / "checkpoints", every=1, keep=2)
        server = federation.initial_state()
        saver.on_start(federation, server)
        round_seconds, save_seconds = [], []
        for _ in range(case.rounds):
            watch = Stopwatch()
            server, record = federation.run_round(server)
            round_seconds.append(watch.read())
            watch = Stopwatch()
            saver.on_round(server, record)
            save_seconds.append(watch.read())
        peak = peak_megabytes()
        participants = len(server.client_state_rounds)
        parameters = sum(tensor.numel() for tensor in server.state.values())
        newest = checkpoints(folder / "checkpoints")[-1]
        late = {} if case.method == "scaffold" else measure_late(federation, server, folder)
        del federation, server, saver, partition
        watch = Stopwatch()
        resume(config, data, folder, newest)
        resume_seconds = watch.read()
        return {
            "method": case.method,
            "clients": case.clients,
            "examples": len(train),
            "sizes": len(config.model.sizes),
            "parameters": parameters,
            "clients per round": config.federation.clients_per_round,
            "partition s": partition_seconds,
            "sampling ms": 1000 * sampling_seconds,
            "round s": statistics.median(round_seconds),
            "save s": statistics.median(save_seconds),
            "resume s": resume_seconds,
            "base MB": base,
            "peak MB": peak,
            "peak above base MB": peak - base,
            "checkpoint kB": size_of(newest) / 1e3,
            "metrics kB per round": len(json.dumps(to_line(record))) / 1e3,
            "client states on disk MB": size_of(folder / "clients") / 1e6,
            "clients that took part": participants,
            "train loss": record.train_loss,
            **late,
        }


def measure_late(federation: Federation, server: ServerState, folder: Path) -> dict[str, float]:
    """Measure a round and its checkpoint in a run so long that every client has taken part."""
    everyone = np.arange(federation.config.federation.clients, dtype=np.int32)
    rounds = ClientNumbers.from_arrays(everyone, np.ones_like(everyone))
    saver = SaveCheckpoints(folder / "late", every=1, keep=2)
    saver.on_start(federation, server)
    watch = Stopwatch()
    server, record = federation.run_round(replace(server, client_state_rounds=rounds))
    round_seconds = watch.read()
    watch = Stopwatch()
    saver.on_round(server, record)
    save_seconds = watch.read()
    watch = Stopwatch()
    newest = checkpoints(folder / "late")[-1]
    read_checkpoint(newest)
    return {
        "late round s": round_seconds,
        "late save s": save_seconds,
        "late read s": watch.read(),
        "late checkpoint kB": size_of(newest) / 1e3,
    }


def resume(config: Config, data: Dataset, folder: Path, checkpoint: Path) -> None:
    """Do what a resumed run does before its first round, except reading the data set."""
    federation = Federation(config, dataset=data, client_state_folder=folder / "clients")
    server = federation.to_device(read_checkpoint(checkpoint))
    federation.engine.clients.states.check(server.client_state_rounds)  # type: ignore[attr-defined]


def start_peak() -> float:
    """Return this process's memory in MB, and measure its peak from now on where Linux allows it.

    Otherwise the peak includes what was needed to make the data set.
    """
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_megabytes()


def peak_megabytes() -> float:
    """Return the largest resident memory of this process, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM")


def size_of(folder: Path) -> int:
    """Return the number of bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# ---- all of them


def measure_apart(case: Case) -> dict[str, Any]:
    """Measure a case in a process of its own, with a limit on its memory."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case))]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, text=True, preexec_fn=limit_memory
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    shown = {}
    for name, value in result.items():
        shown[name] = round(value, 3) if isinstance(value, float) else value
    print(shown, file=sys.stderr)
    return result


def limit_memory() -> None:
    """Limit this process's address space."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))


def measure_growth() -> dict[str, list[dict[str, Any]]]:
    """Vary one factor at a time; return the results by factor, in the order of its values."""
    results: dict[Case, dict[str, Any]] = {}
    growth: dict[str, list[dict[str, Any]]] = {}
    for factor, (field, values) in FACTORS.items():
        growth[factor] = []
        for value in values:
            case = replace(GROWTH_BASE, **{field: value})
            if case not in results:
                results[case] = measure_apart(case)
            growth[factor].append(results[case])
    return growth


def growth_table(growth: dict[str, list[dict[str, Any]]]) -> list[dict[str, str]]:
    """Return one row per cost: its exponent in each factor, and the cost per unit if it grows."""
    rows = []
    for cost, (scale, unit) in COSTS.items():
        row = {"cost": cost.rsplit(" ", 1)[0]}
        for factor, results in growth.items():
            units = np.array([result[factor] for result in results], dtype=float)
            values = np.array([result[cost] for result in results])
            exponent = np.polyfit(np.log(units), np.log(values), 1)[0]
            per_unit = scale * np.polyfit(units, values, 1)[0]
            row[factor] = f"{exponent:.2f}"
            if exponent >= 0.05:
                row[factor] += f" ({_short(per_unit)} {unit})"
        rows.append(row)
    return rows


def _short(value: float) -> str:
    """Return a number with two significant digits, without an exponent."""
    digits = max(0, 1 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"


def plot(dealt: Sequence[dict[str, Any]], natural: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw memory, training and the rest against the number of clients."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    memory, training, others = axes
    for method, color in zip(METHODS, ("tab:blue", "tab:orange"), strict=True):
        for rows, style, kind in ((dealt, "o-", "dealt"), (natural, "*", "natural")):
            own = [row for row in rows if row["method"] == method]
            clients = [row["clients"] for row in own]
            marks = {"color": color, "markersize": 11 if style == "*" else 5}
            label = f"{method}, {kind}"
            peaks = [row["peak above base MB"] for row in own]
            memory.plot(clients, peaks, style, label=label, **marks)
            milliseconds = [1000 * row["round s"] / row["clients per round"] for row in own]
            training.plot(clients, milliseconds, style, label=label, **marks)
            others.plot(clients, [row["resume s"] for row in own], style, label=label, **marks)
    memory.set(title="Peak memory above data set and torch", ylabel="MB", ylim=(0, None))
    training.set(title="Round, per sampled client", ylabel="CPU ms", ylim=(0, None))
    others.set(title="Resume, with the partition", ylabel="CPU s", ylim=(0, None))
    for each in axes:
        each.set(xscale="log", xlabel="clients in the federation")
        each.grid(alpha=0.3)
    training.legend(fontsize="small", loc="lower left")
    figure.savefig(file, dpi=120)


COLUMNS = (
    "method",
    "clients",
    "clients per round",
    "partition s",
    "sampling ms",
    "round s",
    "save s",
    "resume s",
    "base MB",
    "peak MB",
    "checkpoint kB",
    "metrics kB per round",
    "client states on disk MB",
)


def main() -> None:
    """Measure the chosen parts, print their tables and write them."""
    parser = arguments(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw dealt and natural clients")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="rounds of dealt and natural clients"
    )
    parser.add_argument("--one", metavar="CASE", help="measure one case (JSON) in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)))))
        return
    here = machine("torch", "numpy", "motleyfl")
    dealt, natural, growth = [], [], {}
    for method in METHODS:
        if "dealt" in options.parts:
            for clients in DEALT_CLIENTS:
                case = Case(method, clients, natural=False, rounds=options.rounds)
                dealt.append(measure_apart(case))
        if "natural" in options.parts:
            case = Case(method, NATURAL_CLIENTS, natural=True, rounds=options.rounds, hidden=8)
            natural.append(measure_apart(case))
    if "growth" in options.parts:
        growth = measure_growth()
    slopes = growth_table(growth) if growth else []
    rows = [{name: row[name] for name in COLUMNS} for row in (*dealt, *natural)]
    details = {"dealt": dealt, "natural": natural, "growth": growth, "slopes": slopes}
    report(rows or slopes, here, options.json, rounds=options.rounds, **details)
    if rows and slopes:
        print()
        print("\n".join(table(slopes)))
    if options.plot:
        plot(dealt, natural, options.plot)


if __name__ == "__main__":
    main()
