"""Kills the processes of a real deployment at random for hours, and checks that nothing is lost. On Linux:

    OMP_NUM_THREADS=1 python benchmarks/soak.py [--seconds 7200] [--seed 1] [--nodes 4] [--every 20] [--json FILE]

A server with TLS and keys and several nodes run on this machine. Every node reaches the server through a proxy of its
own on 127.0.0.1, which can cut the link or slow it down. At random moments (keyed by the seed) one of these happens:

worker    a node's training process gets SIGKILL or SIGTERM, or SIGSTOP and some seconds later SIGCONT
node      the same to a node's process, or to the SuperNode that it has started; not to node 0
run       the process of the run gets SIGKILL or SIGTERM
server    the server, or the SuperLink that it has started, gets SIGKILL or SIGTERM
link      a node's link is cut, or slowed down, for some seconds

Whatever ends is started again, as a service manager would do, with the commands of docs/deploy.md and no other help.
The run has `server.min_fraction = 1` and many attempts: a round whose updates did not all arrive is repeated. At the
end this is checked, and the exit status is 1 if anything is wrong:

- metrics.jsonl has every round once, in order, and every refusal has a reason;
- the last checkpoint has the same bits as the local engine after as many rounds;
- the resident memory and the open files of no process that lived for long have grown.

Printed: the events by kind with the seconds until the next round ended, the rounds, and the repeated rounds. The
deployment's folder with its logs is deleted if nothing is wrong, and kept otherwise.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from report import arguments, machine, report

from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.deploy.commands import free_port
from motley.deploy.folder import DeployFolder, DeploySettings, create
from motley.runs.checkpoint import fingerprint, load_checkpoint
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run

MARK = "MOTLEY_SOAK"
ROLE = "MOTLEY_SOAK_ROLE"
#: Seconds between two looks at the processes, and between two samples of their memory.
LOOK_S, SAMPLE_S = 0.5, 10.0
#: Seconds that stopped processes and broken links stay so.
SHORTEST_S, LONGEST_S = 1.0, 90.0
#: A slow link delays every piece of data by these seconds and carries this many bytes per second.
DELAY_S, RATE = 0.2, 100_000
#: Seconds after which a round must have ended, whatever has happened.
STUCK_S = 900.0
#: Growth of a process between its fifth minute and its end that counts as a leak.
LEAK_MB, LEAK_FILES, SETTLED_S = 60.0, 20, 300.0
#: What happens how often.
WEIGHTS = {"worker": 8, "node": 5, "run": 2, "server": 1, "link": 5}
#: A word in the command line of a process, and its name here.
KINDS = {
    "motley.deploy.task": "worker",
    "motley.deploy.supernode": "supernode",
    "flower-supernode": "supernode",
    "motley.deploy.superlink": "superlink",
    "flower-superexec": "superexec",
    "flwr-serverapp": "run",
}
COMMANDS = {"server": "server", "node": "node", "run": "run command"}


def main() -> int:
    """Run the test and print its summary."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between events")
    parser.add_argument("--keep", type=Path, help="keep the deployment in this new folder")
    options = parser.parse_args()
    about = machine("torch", "flwr", "motleyfl")
    temporary = None if options.keep else Path(tempfile.mkdtemp())
    folder = options.keep or temporary / "soak"
    soak = Soak(folder, options.nodes, random.Random(options.seed), options.every)
    try:
        soak.play(options.seconds)
    finally:
        soak.end()
    faults, summary = soak.verdict()
    if faults:
        print(f"the logs of the deployment are in {folder}")
    elif temporary is not None:
        shutil.rmtree(temporary)
    summary = {"seconds": options.seconds, "seed": options.seed, **summary, "faults": faults}
    for name, value in summary.items():
        print(f"{name}: {value}")
    report(soak.rows(), about, options.json, **summary)
    return 1 if faults else 0


def federation(nodes: int, rounds: int, engine: str) -> Config:
    """Return the run. SCAFFOLD has client states, so a doubled or lost local update shows."""
    sizes = ["resnet10", "resnet14", "resnet18"][:nodes]
    settings = (
        "data.transform.resize=8",
        f"model.sizes={sizes}",
        "model.resnet.width=0.0625",
        "method.name=scaffold",
        f"federation.clients={nodes}",
        f"federation.clients_per_round={nodes}",
        f"training.rounds={rounds}",
        "training.steps=5",
        "training.batch_size=32",
        "evaluation.every=50",
        "run.checkpoint_every=1",
        "run.tensorboard=false",
        "server.min_fraction=1",
        "server.attempts=1000",
        "engine.device=cpu",
        "engine.flower.wait_s=300",
        "engine.flower.timeout_s=120",
        f"engine.name={engine}",
    )
    return load_config(overrides=settings)


# ---- links


class Link:
    """A proxy between a node and the server, which can be cut or slowed down."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server_port: int) -> None:
        self.port = free_port()
        self.server_port = server_port
        self.state = "up"
        self._open: set[asyncio.StreamWriter] = set()
        asyncio.run_coroutine_threadsafe(self._listen(), loop).result()

    async def _listen(self) -> None:
        await asyncio.start_server(self._connect, "127.0.0.1", self.port)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.server_port)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))
        self._open -= {writer, back}

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                while self.state == "cut":  # as a pulled plug: nothing arrives, and nobody is told
                    await asyncio.sleep(0.1)
                if self.state == "slow":
                    await asyncio.sleep(DELAY_S + len(data) / RATE)
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()


# ---- processes


@dataclass
class Process:
    """One process of the deployment."""

    pid: int
    role: str
    kind: str
    begun: float
    samples: list[tuple[float, float, int]] = field(default_factory=list)
    """Age in seconds, resident MB, open files."""


def kind_of(command: str) -> str:
    """Return what a process of the deployment is, by its command line."""
    for word, kind in KINDS.items():
        if word in command:
            return kind
    found = re.search(r"deploy (server|node|run) ", command)
    return COMMANDS[found[1]] if found else "other"


def sample(process: Process) -> None:
    """Take note of a process's memory and files."""
    with suppress(OSError, IndexError, ValueError):
        place = Path(f"/proc/{process.pid}")
        pages = int((place / "statm").read_text().split()[1])
        files = len(list((place / "fd").iterdir()))
        resident = pages * os.sysconf("SC_PAGESIZE") / 1e6
        process.samples.append((time.monotonic() - process.begun, resident, files))


@dataclass
class Event:
    """Something that was done to the deployment."""

    kind: str
    at: float
    target: str
    rounds_before: int
    recovered_s: float | None = None


class Soak:
    """A deployment under attack."""

    def __init__(self, path: Path, nodes: int, draw: random.Random, every: float) -> None:
        self.draw, self.every, self.nodes = draw, every, nodes
        path.mkdir(parents=True)
        self.logs = path / "logs"
        self.logs.mkdir()
        port = free_port()
        config = federation(nodes, 10**6, "flower")
        self.folder: DeployFolder = create(path / "federation", config, DeploySettings(port=port))
        loop = asyncio.new_event_loop()
        Thread(target=loop.run_forever, daemon=True).start()
        self.links = [Link(loop, port) for _ in range(nodes)]
        for client, link in enumerate(self.links):
            file = self.folder.nodes / f"node-{client}" / "node.toml"
            file.write_text(file.read_text().replace(f"127.0.0.1:{port}", f"127.0.0.1:{link.port}"))
        self.commands: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts: Counter[str] = Counter()
        self.processes: dict[int, Process] = {}
        self.events: list[Event] = []
        #: What has to be undone, and when.
        self.repairs: list[tuple[float, str, int]] = []
        self.rounds = 0
        self.last_round = time.monotonic()
        self.faults: list[str] = []
        #: The machine's load over the last minute, every SAMPLE_S seconds.
        self.loads: list[float] = []

    # ---- the service manager

    def keep_up(self) -> None:
        """Start what is not running."""
        for role, words in self.wanted().items():
            process = self.commands.get(role)
            if process is not None and process.poll() is None:
                continue
            if process is not None:
                self.restarts[role.partition("-")[0]] += 1
            self.commands[role] = self.start(role, *words)

    def wanted(self) -> dict[str, tuple[object, ...]]:
        """Return the command of every role."""
        wanted: dict[str, tuple[object, ...]] = {"server": ("server", self.folder.path)}
        for client in range(self.nodes):
            wanted[f"node-{client}"] = ("node", self.folder.nodes / f"node-{client}")
        if "serving at" in self.said("server"):
            wanted["run"] = ("run", self.folder.path)
        return wanted

    def start(self, role: str, *words: object) -> subprocess.Popen[bytes]:
        """Start one of the commands of `motley deploy`."""
        with (self.logs / role).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "motley", "deploy", *map(str, words)],
                env={**os.environ, MARK: str(self.folder.path), ROLE: role},
                stdout=log,
                stderr=log,
            )

    def said(self, role: str) -> str:
        """Return the output of a role's commands."""
        log = self.logs / role
        return log.read_text(errors="replace") if log.exists() else ""

    def look(self) -> None:
        """Find the processes of the deployment, also those that Flower has started."""
        found = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdecimal():
                continue
            with suppress(OSError):
                variables = (place / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"{MARK}={self.folder.path}" not in variables:
                    continue
                command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                role = next(v.partition("=")[2] for v in variables if v.startswith(f"{ROLE}="))
                found[int(place.name)] = (role, kind_of(command))
        for pid, (role, kind) in found.items():
            known = self.processes.get(pid)
            if known is None or (known.role, known.kind) != (role, kind):
                self.processes[pid] = Process(pid, role, kind, time.monotonic())
        self.alive = [self.processes[pid] for pid in found]

    # ---- the attacks

    def attack(self) -> None:
        """Do one thing at random."""
        kind = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        long = self.draw.choice((SHORTEST_S, 5.0, 20.0, LONGEST_S)) * self.draw.uniform(0.5, 1.0)
        until = time.monotonic() + long
        if kind == "link":
            client = self.draw.randrange(self.nodes)
            state = self.draw.choice(("cut", "slow"))
            self.links[client].state = state
            self.repairs.append((until, "link", client))
            self.log(f"link {state}", f"node-{client} for {long:.0f} s")
            return
        signals = [signal.SIGKILL, signal.SIGTERM]
        if kind in ("worker", "node"):
            signals.append(signal.SIGSTOP)
        chosen = self.draw.choice(signals)
        targets = [process for process in self.alive if self.is_target(process, kind)]
        if not targets:
            return
        target = self.draw.choice(sorted(targets, key=lambda process: process.pid))
        with suppress(ProcessLookupError):
            os.kill(target.pid, chosen)
        name = f"{kind} {chosen.name}"
        if chosen == signal.SIGSTOP:
            self.repairs.append((until, "process", target.pid))
            self.log(name, f"{target.role} {target.kind} for {long:.0f} s")
        else:
            self.log(name, f"{target.role} {target.kind}")

    @staticmethod
    def is_target(process: Process, kind: str) -> bool:
        """Tell whether a process can be attacked in a way."""
        if kind == "node":  # node 0 lives to the end, so that its growth can be seen
            return process.kind in ("node", "supernode") and process.role != "node-0"
        if kind == "server":
            return process.kind in ("server", "superlink", "superexec")
        return process.kind == kind

    def log(self, kind: str, target: str) -> None:
        """Remember an event."""
        now = time.monotonic()
        self.events.append(Event(kind, now, target, self.rounds))
        print(f"{time.strftime('%H:%M:%S')} round {self.rounds}: {kind}: {target}", flush=True)

    def repair(self, now: float) -> None:
        """Undo what has lasted long enough."""
        for repair in [repair for repair in self.repairs if repair[0] <= now]:
            self.repairs.remove(repair)
            _, what, number = repair
            if what == "link":
                self.links[number].state = "up"
            else:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGCONT)

    def count_rounds(self) -> None:
        """See whether rounds have ended, and how long that took after every event."""
        lines = self.lines()
        rounds = int(lines[-1]["round"]) if lines else 0
        now = time.monotonic()
        if rounds > self.rounds:
            self.rounds, self.last_round = rounds, now
            for event in self.events:
                if event.recovered_s is None:
                    event.recovered_s = now - event.at
        if now - self.last_round > STUCK_S:
            raise MotleyError(f"no round has ended for {STUCK_S:g} s.")

    def lines(self) -> list[dict[str, Any]]:
        """Return the run's metrics."""
        file = self.folder.run / "metrics.jsonl"
        return MetricsLog(file).read() if file.exists() else []

    # ---- the test

    def play(self, seconds: float) -> None:
        """Attack for some seconds, then wait until a round ends without attacks."""
        self.last_round = time.monotonic()
        begun = next_attack = next_sample = None
        try:
            while True:
                now = time.monotonic()
                self.keep_up()
                self.look()
                self.repair(now)
                self.count_rounds()
                if self.rounds == 0:  # attacks begin after the first round
                    time.sleep(LOOK_S)
                    continue
                if begun is None:
                    begun = next_attack = now
                if next_sample is None or now >= next_sample:
                    next_sample = now + SAMPLE_S
                    self.loads.append(os.getloadavg()[0])
                    for process in self.alive:
                        sample(process)
                if now - begun > seconds:
                    break
                assert next_attack is not None
                if now >= next_attack:
                    self.attack()
                    next_attack = now + self.draw.expovariate(1 / self.every)
                time.sleep(LOOK_S)
            self.recover()
        except MotleyError as error:
            self.faults.append(str(error))

    def recover(self) -> None:
        """Undo everything and wait for two rounds."""
        self.repair(float("inf"))
        wanted = self.rounds + 2
        while self.rounds < wanted:
            self.keep_up()
            self.look()
            self.count_rounds()
            time.sleep(LOOK_S)
        for process in self.alive:
            sample(process)

    def end(self) -> None:
        """End all processes of the deployment."""
        while True:
            self.look()
            if not self.alive:
                return
            for process in self.alive:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            for command in self.commands.values():
                command.poll()
            time.sleep(0.2)

    def verdict(self) -> tuple[list[str], dict[str, Any]]:
        """Return what is wrong, and a summary."""
        faults = list(self.faults)
        lines = self.lines()
        server = load_checkpoint(self.folder.run / "checkpoints")
        done = 0 if server is None else server.round_number
        rounds = [line["round"] for line in lines]
        # A run that was killed between the metrics and the checkpoint has one line more.
        if rounds[:done] != list(range(1, done + 1)) or len(rounds) > done + 1:
            faults.append(f"metrics.jsonl has the rounds {rounds}; the checkpoint is of {done}.")
        refusals = [
            reasons
            for line in lines
            for reasons in (line.get("refused", {}), *line.get("repeated", []))
        ]
        for reasons in refusals:
            for client, reason in reasons.items():
                if not str(reason).strip():
                    faults.append(f"client {client} was refused without a reason.")
        if any(line.get("refused") for line in lines):
            faults.append("a round ended without all updates, in spite of server.min_fraction = 1.")
        if server is not None:
            with tempfile.TemporaryDirectory() as place:
                config = federation(self.nodes, done, "local")
                _, local = start_run(config, Path(place) / "run")
            if fingerprint(local.state) != fingerprint(server.state):
                faults.append(f"after {done} rounds the bits differ from the local engine's.")
        growth = self.growth()
        faults += [text for text in growth.values() if "leak" in text]
        tracebacks = sum(self.said(role).count("Traceback") for role in ("run", "server"))
        kinds = Counter(
            re.sub(r"reference \w+|\d+(\.\d+)?", "*", str(reason))
            for reasons in refusals
            for reason in reasons.values()
        )
        return faults, {
            "rounds": done,
            "repeated rounds": sum(1 for line in lines if line.get("repeated")),
            "repetitions": sum(len(line.get("repeated", [])) for line in lines),
            "events": len(self.events),
            "restarts by the service manager": dict(self.restarts),
            "reasons": dict(kinds),
            "tracebacks in the output of server and run": tracebacks,
            "load, lowest, median, highest": spread(self.loads),
            "growth": growth,
            "Flower's database, MB": database_size(self.folder) / 1e6,
        }

    def growth(self) -> dict[str, str]:
        """Return how much memory and how many files the longest-lived process of each kind gained."""
        oldest: dict[str, Process] = {}
        for process in self.processes.values():
            life = process.samples[-1][0] if process.samples else 0.0
            before = oldest.get(process.kind)
            if (before is None or life > before.samples[-1][0]) and process.samples:
                oldest[process.kind] = process
        texts = {}
        for kind, process in sorted(oldest.items()):
            settled = [entry for entry in process.samples if entry[0] >= SETTLED_S]
            if len(settled) < 2:
                continue
            (age, resident, files), (end, last_resident, last_files) = settled[0], settled[-1]
            text = f"{resident:.0f} to {last_resident:.0f} MB and {files} to {last_files} files "
            text += f"between {age:.0f} and {end:.0f} s"
            leaks = last_resident - resident > LEAK_MB or last_files - files > LEAK_FILES
            texts[kind] = f"{kind}: a leak? {text}" if leaks else text
        return texts

    def rows(self) -> list[dict[str, str | int | float]]:
        """Return the events by kind."""
        grouped: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            grouped[event.kind].append(event)
        rows: list[dict[str, str | int | float]] = []
        for kind, events in sorted(grouped.items()):
            seconds = [event.recovered_s for event in events if event.recovered_s is not None]
            rows.append(
                {
                    "event": kind,
                    "times": len(events),
                    "median s until a round ends": statistics.median(seconds) if seconds else 0.0,
                    "longest": max(seconds, default=0.0),
                }
            )
        return rows


def spread(values: list[float]) -> list[float]:
    """Return the lowest, the median and the highest value."""
    return [min(values), statistics.median(values), max(values)] if values else []


def database_size(folder: DeployFolder) -> int:
    """Return the bytes of the files in which Flower keeps messages."""
    return sum(file.stat().st_size for file in folder.flower.glob("state.db*"))


if __name__ == "__main__":
    sys.exit(main())
