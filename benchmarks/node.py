"""What one message costs a node. Run it so:

    OMP_NUM_THREADS=1 python benchmarks/node.py [--rounds 6] [--size resnet10] [--width 0.125] [--keep-alive 600]
        [--limited] [--json FILE]

A real deployment on this machine: a server with TLS and keys, one node process, and a run of one client, started by
`motley deploy` and ended afterwards. The node trains a small ResNet on all digits (one epoch) in every round, so there
is one message per round. Printed for the first training message and for the median of the later ones:

start     from the node's decision to answer until a process runs that can: Python and Flower's modules
fetch     the message comes from the SuperNode to that process
import    torch and Motley
build     the model, the optimiser and the client around them
train     the local update
other     the rest of the work: settings, examples, packing the answer
send      the answer goes to the SuperNode
round     the whole round as the run sees it, from the job to the update
over      the round without the local update: the price of a message
peak MB   highest resident memory of the process that answers, above that of a process that imported torch only
plan MB   what `motley plan` counts for the size, with what a node's process needs whatever its model

`--keep-alive 0` starts one process per message. `--limited` gives the node a memory budget, so that its allocator returns freed memory at once.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from report import arguments, machine, report

from motley.assembly import build_split
from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.deploy.commands import free_port
from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.plan import NODE_RUNTIME, cost_of
from motley.runs.metrics import MetricsLog

HERE = Path(__file__).resolve().parent
STOP_S = 30.0
ANSWERED = re.compile(r"motley: train message answered in [\d.]+ s \((.*)\)")
SPLIT = "benchmark: "
BE_NODE = "import sys; from pathlib import Path; from motley.deploy.node import be_node; "
BE_NODE += "be_node(Path(sys.argv[1]) / 'node.toml', 120.0, app='node_app:app')"
PARTS = ("start", "fetch", "import", "build", "train", "other", "send")


def main() -> None:
    """Play the run and print what its messages took."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--size", default="resnet10")
    parser.add_argument("--width", type=float, default=0.125)
    parser.add_argument("--keep-alive", type=float, default=600.0, help="keep_alive_s of the node")
    parser.add_argument("--limited", action="store_true", help="give the node a memory budget")
    options = parser.parse_args()
    about = machine("torch", "flwr", "motleyfl")
    with tempfile.TemporaryDirectory() as place:
        config = federation(options.size, options.width, options.rounds)
        folder = create(Path(place) / "federation", config, DeploySettings(port=free_port()))
        planned = planned_memory(config, options.size)
        keep_alive(folder.nodes / "node-0" / "node.toml", options.keep_alive)
        if options.limited:
            limit_memory(folder.nodes / "node-0" / "node.toml", options.size)
        log = Path(place) / "node.log"
        play(folder, log)
        messages = read_messages(log)
        lines = MetricsLog(folder.run / "metrics.jsonl").read()
    if len(messages) != options.rounds or any("refused" in line for line in lines):
        raise MotleyError(f"{len(messages)} messages were answered in {options.rounds} rounds.")
    for message, line in zip(messages, lines, strict=True):
        message["round"] = line["seconds"]["train"]
        message["over"] = message["round"] - message["train"]
    floor = resident_after_import_of_torch()
    rows = []
    for name, some in (("first", messages[:1]), ("later", messages[1:])):
        rows.append({"message": name, **row_of(some, floor), "plan MB": planned / 1e6})
    report(rows, about, options.json, messages=messages)


def federation(size: str, width: float, rounds: int) -> Config:
    """Return a run of one client."""
    settings = (
        f"model.sizes=['{size}']",
        f"model.resnet.width={width}",
        "federation.clients=1",
        "federation.clients_per_round=1",
        f"training.rounds={rounds}",
        "training.epochs=1",
        "training.batch_size=32",
        f"evaluation.every={rounds}",
        "engine.device=cpu",
        "run.tensorboard=false",
        "engine.name=flower",
    )
    return load_config(overrides=settings)


def planned_memory(config: Config, size: str) -> int:
    """Return the memory that is planned for a node of a size, above `import torch`."""
    dataset = load_dataset("digits")
    shape = config.data.transform.shape_of(dataset.shape)
    return (
        cost_of(build_split(config, shape, dataset.classes), size, shape, config.training).memory
        + NODE_RUNTIME
    )


def keep_alive(file: Path, seconds: float) -> None:
    """Set how long the training process of a node stays after a message."""
    text = re.sub(r"^keep_alive_s = .*$", f"keep_alive_s = {seconds}", file.read_text(), flags=re.M)
    if "keep_alive_s" not in text:
        text = f"keep_alive_s = {seconds}\n{text}"
    file.write_text(text)


def limit_memory(file: Path, size: str) -> None:
    """Give a node a budget that every size fits, instead of its size."""
    text = file.read_text().replace(f'size = "{size}"', 'size = ""')
    file.write_text(text.replace("[budget]\n", "[budget]\nmemory_mb = 1e6\n"))


def play(folder: DeployFolder, node_log: Path) -> None:
    """Run the server, the node and the run, to the run's end."""
    server_log = node_log.with_name("server.log")
    node = [sys.executable, "-c", BE_NODE, str(folder.nodes / "node-0")]
    with ExitStack() as processes:
        server_output = processes.enter_context(server_log.open("w"))
        node_output = processes.enter_context(node_log.open("w"))
        processes.enter_context(process(deploy("server", folder.path), server_output))
        while "serving at" not in server_log.read_text():
            time.sleep(0.1)
        processes.enter_context(process(node, node_output))
        played = subprocess.run(
            deploy("run", folder.path), capture_output=True, text=True, check=False
        )
        if played.returncode:
            raise MotleyError(played.stdout + played.stderr + node_log.read_text())


def deploy(*words: object) -> list[str]:
    """Return one of Motley's commands."""
    return [sys.executable, "-m", "motley", "deploy", *map(str, words)]


@contextmanager
def process(command: Sequence[str], output: IO[str]) -> Iterator[None]:
    """Run a command until the block ends."""
    path = os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", "")))
    running = subprocess.Popen(
        command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        yield
    finally:
        running.send_signal(signal.SIGINT)  # so that it ends the processes that it has started
        running.wait(STOP_S)


def read_messages(log: Path) -> list[dict[str, Any]]:
    """Return the parts of every training message's time, from what the node printed."""
    messages = []
    split: dict[str, Any] = {}
    for line in log.read_text().splitlines():
        if line.startswith(SPLIT):
            split = json.loads(line.removeprefix(SPLIT))
        answered = ANSWERED.search(line)
        if answered is None:
            continue
        parts = {
            name: float(seconds)
            for name, seconds in (part.split() for part in answered[1].split(", "))
        }
        work = parts.pop("work")
        parts |= {"build": 0.0, **split["seconds"]}
        parts["other"] = work - parts["build"] - parts["train"]
        messages.append({**{name: parts.get(name, 0.0) for name in PARTS}, "peak": split["peak"]})
    return messages


def row_of(messages: Sequence[dict[str, Any]], floor: int) -> dict[str, float]:
    """Return the medians of some messages' parts."""
    middle = {
        name: statistics.median(message[name] for message in messages)
        for name in (*PARTS, "round", "over", "peak")
    }
    parts = {name: middle[name] for name in PARTS}
    whole = sum(parts.values())
    return {
        **parts,
        "sum, s": whole,
        "round, s": middle["round"],
        "over, s": middle["over"],
        "peak MB": (middle["peak"] - floor) / 1e6,
    }


def resident_after_import_of_torch() -> int:
    """Return the highest resident memory of a process that imports torch and does nothing else."""
    measure = "import torch; print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", measure], capture_output=True, check=True, text=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
