"""What clients need of a machine's memory. Two measurements; run them so:

    OMP_NUM_THREADS=1 python benchmarks/client_memory.py store [--json FILE]
    OMP_NUM_THREADS=1 python benchmarks/client_memory.py node [--size resnet10] [--batch-size 16] [--json FILE]

`store`: host memory with SCAFFOLD on the InCo setting: 100 clients, five ResNets, one control variate per client. Every
client stores a control variate as large as its own part in each of three rounds, as in a run, but nothing is trained.
Printed are the bytes stored and the process's peak.

`node`: the resident memory of a Flower node that answers one training message, beside the memory that `motley plan`
prints for its size. The run has the five ResNets of the InCo setting at full width, and the node a file with a few
random images of 32x32 pixels. The node is the client app in a process of its own, without Flower's network. Counted is
the highest resident memory while it answers, the message's arrays included, less the resident memory after it has
imported what it needs and torch has trained a tiny network once, which loads the libraries' code. The process then
answers the same message again: the second figure is without what libraries set up once per process, such as the code
that oneDNN generates for every convolution. Both are measured with glibc's malloc as it is, and as it is at a node with
budget.memory_mb, where freed memory goes back to the system at once. Printed, too: where the message's time goes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALLOCATORS = {"as it is": {}, "gives back": {"MALLOC_MMAP_THRESHOLD_": "65536"}}
PRESET = "inco-cifar10"
ROUNDS = 3
STEPS = 3
"""Steps of the message: from the second step on, Adam's moments are there while the activations are."""


def main() -> None:
    """Measure what the command line asks for."""
    from report import arguments

    parser = arguments(__doc__)
    parser.add_argument("what", choices=("store", "node"))
    parser.add_argument("--size", default="resnet10", help="the size of the node (default: resnet10)")
    parser.add_argument("--batch-size", type=int, default=16, help="the node's batch size (default: 16)")
    options = parser.parse_args()
    if options.what == "store":
        store(options.json)
    else:
        node(options.size, options.batch_size, options.json)


# ---- store


def store(file: Path | None) -> None:
    """File every client's control variate and print what that took."""
    import torch
    from report import machine, report

    from motley.bench import synthetic_dataset
    from motley.config import load_config
    from motley.engine import LocalEngine
    from motley.federation import Federation

    config = load_config(preset=PRESET, overrides=["method.name=HeteroScaffold", "engine.device=cpu"])
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(config, dataset=synthetic_dataset("cifar10"), memory_folder=Path(folder))
        assert isinstance(federation.engine, LocalEngine)
        kept, server, filed = federation.engine.clients.memory, federation.initial_state(), 0
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        begin = time.perf_counter()
        for round_number in range(1, ROUNDS + 1):
            for client, size in enumerate(federation.sizes):
                job = federation.job(server, round_number, client)
                memory = {
                    n: torch.randn_like(t)
                    for n, t in federation.method.client.initial_client_state(size, job.state).items()
                }
                filed += sum(tensor.nbytes for tensor in memory.values()) if round_number == 1 else 0
                kept.put(client, round_number, memory)
            kept.save(dict.fromkeys(range(len(federation.sizes)), round_number))
            kept.forget_older(dict.fromkeys(range(len(federation.sizes)), round_number))
        row = {
            "clients": len(federation.sizes),
            "control variates, MB": filed / 1e6,
            "peak before, MB": before,
            "peak, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "seconds a round": (time.perf_counter() - begin) / ROUNDS,
        }
        report([row], machine("torch", "numpy", "motleyfl"), file)


# ---- node


def node(size: str, batch_size: int, file: Path | None) -> None:
    """Measure a node in a process of its own, and print what it took beside its plan."""
    from report import machine, report

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        planned = write_message(Path(folder), size, batch_size)
        for allocator, variables in ALLOCATORS.items():
            measured = answer_in_a_process(Path(folder), variables)
            first, second = measured["peaks"]
            row = {"size": size, "batch size": batch_size, "malloc": allocator, "plan, MB": planned / 1e6}
            row |= {"first, MB": first / 1e6, "/ plan": first / planned}
            if variables:
                row |= {"second, MB": second / 1e6, "/ plan ": second / planned}
            else:  # the process still has the free memory of the first message, which the second one takes
                row |= {"second, MB": "-", "/ plan ": "-"}
            row |= {f"{what}, s": seconds for what, seconds in measured["seconds"].items()}
            rows.append(row)
    report(rows, machine("torch", "flwr", "motleyfl"), file)


def write_message(folder: Path, size: str, batch_size: int) -> int:
    """Write a node's settings, its data and a training message as a server would send it; return the planned memory."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from motley.assembly import build_split
    from motley.config import load_config
    from motley.core.part import take
    from motley.data.dataset import Examples
    from motley.data.device import DeviceData
    from motley.flower.run_config import to_text
    from motley.plan import cost_of

    overrides = [
        "engine.name=flower",
        "engine.device=cpu",
        f"training.batch_size={batch_size}",
        "training.epochs=1",
    ]
    config = load_config(preset=PRESET, overrides=overrides)
    count = STEPS * batch_size
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    labels = numbers.integers(0, 10, count)
    np.savez(
        folder / "mine.npz",
        x_train=images,
        y_train=labels,
    )
    (folder / "node.toml").write_text(f'client = 0\nsize = "{size}"\n[data]\npath = "mine.npz"\n')
    examples = Examples(images, labels.astype(np.int64))
    data = DeviceData(examples, config.data.transform, torch.device("cpu"), augment=True)
    split = build_split(config, data.shape, 10)
    state = take(split.initial(config.seed), split.part(size))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "state.safetensors")
    about = {"config": to_text(config), "shape": [32, 32, 3, 10], "size": size}
    (folder / "about.json").write_text(json.dumps(about))
    return cost_of(split, size, data.shape, config.training).memory


def answer_in_a_process(folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what a process that is a node, with some variables in its environment, measured of itself."""
    began = time.time()
    command = [sys.executable, __file__, "answer", str(folder), str(began)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def answer(folder: Path, began: float) -> None:
    """Be a node: answer the message in a folder, and print the highest memory and where the time went."""
    seconds = {"process start": time.time() - began}
    clock = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal clock
        seconds[what] = time.perf_counter() - clock
        clock = time.perf_counter()

    import torch

    lap("import torch")
    import flwr.clientapp  # noqa: F401
    from flwr.app import Context, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    lap("import flwr")
    from motley.flower.client import app

    lap("import motley")
    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = 1
    torch.set_num_threads(1)
    warm_up()
    lap("warm up torch")
    peaks = []
    for what in ("first message", "second message"):
        message = read_message(folder)
        context = Context(1, 1, {"motley": str(folder / "node.toml")}, RecordDict(), {})
        before = resident("VmRSS") - message_bytes(message)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        clock = time.perf_counter()
        reply = app(message, context)
        lap(what)
        peaks.append(resident("VmHWM") - before)
        assert not reply.has_error(), reply.error
        assert reply.content["update"]["num_steps"] == STEPS
        del message, reply
    print(json.dumps({"peaks": peaks, "seconds": seconds}))


def read_message(folder: Path) -> Any:
    """Return the message in a folder."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

    about = json.loads((folder / "about.json").read_text())
    content = (folder / "state.safetensors").read_bytes()
    arrays = ArrayRecord({"state": Array("uint8", (len(content),), "safetensors", content)})
    job = ConfigRecord({**about, "round": 1, "client": 0, "client_state_round": -1, "forget": 0})
    message = Message(RecordDict({"job": job, "arrays": arrays}), 1, "train")
    message.metadata.__dict__["_message_id"] = "message-1"
    return message


def message_bytes(message: Any) -> int:
    """Return how large a message's arrays are."""
    return sum(len(array.data) for array in message.content["arrays"].values())


def warm_up() -> None:
    """Train a tiny network once, so that torch's libraries are loaded and have their first buffers."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        nn.Conv2d(3, 8, 3)


def resident(field: str) -> int:
    """Return the bytes of a field of Linux's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["answer"]:
        answer(Path(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
