"""What a method costs a client: parameters, traffic, computation and memory (FedIN, Table 2).

All of it is counted from what really travels, is held and is computed. One client of each size takes a turn of one step
on a CPU; then a step of the second round is followed operation by operation: in its first, FedIN has no features yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from motley.analysis.findings import ANALYSES, Findings, new_figure
from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.engine import DebugEngine, Job
from motley.engine.clients import own_randomness
from motley.engine.learner import Learner
from motley.federation import Federation, size_in_bytes
from motley.plan import LiveBytes
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Overhead:
    """What clients send, hold and compute; means are over sizes, one client of each."""

    sizes: int
    """How many sizes somebody holds."""
    parameters: float
    """Mean number of parameters that a client sends: FedAvg's "Params". Buffers are not counted, as in the paper."""
    message: float
    """Mean number of values that the method adds to them."""
    model_bytes: int
    """The parts of these sizes together, buffers included: FedAvg's "Memory"."""
    received_bytes: float
    """Mean of the method's message to a client."""
    remembered_bytes: float
    """Mean of what a client keeps for the method between rounds."""
    flops: float
    """Mean floating-point operations of a training step, all passes of the method."""
    peak_bytes: float
    """Mean of what is alive at once when a step is at its fullest: weights, the copy that was received, messages and
    memories, gradients, the optimiser's state and activations. Examples count as one batch.
    """

    @property
    def method_bytes(self) -> float:
        """Mean of what a client holds for the method in its turn."""
        return self.received_bytes + self.remembered_bytes

    @property
    def kept_bytes(self) -> float:
        """Mean of what a client keeps between rounds: its part, and what the method remembers."""
        return self.model_bytes / self.sizes + self.remembered_bytes


class Step(NamedTuple):
    """What one step takes."""

    flops: int
    peak_bytes: int


def plainly(config: Config) -> Config:
    """Return a configuration whose clients take one step on a CPU, by torch's own operations."""
    engine = config.engine.model_copy(update={"name": "debug", "device": "cpu", "precision": "fp32"})
    training = config.training.model_copy(update={"steps": 1})
    return config.model_copy(update={"engine": engine, "training": training})


def overhead_of(federation: Federation) -> Overhead:
    """Count for a federation of one-step clients (`plainly`)."""
    engine, server = federation.engine, federation.start()
    assert isinstance(engine, DebugEngine)
    jobs = [federation.job(server, 1, client) for client in _one_of_each(federation, 1)]
    sent = {job.client: job for job in jobs}
    uploads = [answer for answer in engine.train(jobs, lambda client: None) if isinstance(answer, ClientUpdate)]
    updates = [federation.update(sent[upload.client], upload) for upload in uploads]
    learned = federation.method.update(server.method, server.state, updates)
    again = [(c, federation.size_of(c, 2)) for c in _one_of_each(federation, 2)]
    messages = [federation.method.broadcast(learned, server.state, 2, client) for client, _ in again]
    states = {job.size: job.state for job in jobs}
    second = [Job(2, c, s, states[s], message) for (c, s), message in zip(again, messages, strict=True)]
    steps = [step_of(engine, job) for job in second]
    parameters = [{n: u.delta[n] for n in federation.split.parameters_of(u.size)} for u in updates]
    return Overhead(
        sizes=len(jobs),
        parameters=fmean(map(_numbers, parameters)),
        message=fmean(_numbers(update.payload) for update in updates),
        model_bytes=sum(size_in_bytes(job.state) for job in jobs),
        received_bytes=fmean(map(size_in_bytes, messages)),
        remembered_bytes=fmean(
            size_in_bytes(federation.method.initial_client_state(job.size, job.state)) for job in jobs
        ),
        flops=fmean(step.flops for step in steps),
        peak_bytes=fmean(step.peak_bytes for step in steps),
    )


def _one_of_each(federation: Federation, round_number: int) -> list[int]:
    """Return for every size that somebody holds its client with the most examples."""
    richest: dict[str, int] = {}
    examples = federation.partition.sizes
    for client in range(federation.config.federation.clients):
        size = federation.size_of(client, round_number)
        if examples[client] > examples[richest.get(size, client)] or size not in richest:
            richest[size] = client
    return list(richest.values())


def step_of(engine: DebugEngine, job: Job) -> Step:
    """Take one step of a client, and follow what it computes and what it has alive.

    A step before it makes room for the optimiser's state, as every step but a run's first finds it.
    """
    clients = engine.clients
    with own_randomness(clients.device):
        learner, plan = clients.learner(job.size), clients.plan(job)
        clients.seat(learner, job, plan, clients.recall(job))
        learner.step(plan.lengths[0])
        learner.batches.rewind()
        for parameter in learner.parameters.values():
            parameter.grad = None
        held = _held(learner)
        with LiveBytes(held) as live, FlopCounterMode(display=False) as counter:
            learner.step(plan.lengths[0])
    return Step(counter.get_total_flops(), sum(tensor.nbytes for tensor in held) + live.peak)


def _held(learner: Learner) -> list[Tensor]:
    """Return what a learner keeps from step to step."""
    states = (learner.tensors, learner.start, learner.message, learner.memory, learner.notes)
    moments = [moment for own in learner.optimizer.state.values() for moment in own.values()]
    return [*(tensor for state in states for tensor in state.values()), *(m for m in moments if isinstance(m, Tensor))]


def _numbers(state: State) -> int:
    return sum(tensor.numel() for tensor in state.values())


COLUMNS = (
    "run",
    "million parameters",
    "million values beside them",
    "MB down",
    "MB up",
    "GFLOPs a step",
    "peak MB of a step",
    "MB kept by a client",
)


@ANALYSES.register("overhead", "parameters, traffic, FLOPs and peak memory a client, a method")
def overhead(paths: Sequence[Path]) -> Findings:
    """Count, as means over sizes; traffic is what the run sent, a client and round."""
    rows = [_row(path) for path in paths]
    return Findings(COLUMNS, rows, _draw(rows))


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    figure = new_figure(12, 2 * (0.9 + 0.4 * len(rows)))
    axes = figure.subplots(2, 4, sharey=True).flatten()
    for number, axis in enumerate(axes[: len(COLUMNS) - 1], start=1):
        most = max(row[number] for row in rows)
        bars = axis.barh([row[0] for row in rows], [row[number] for row in rows])
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.set(title=COLUMNS[number], xlim=(0, 1.3 * most or 1))
    for axis in axes[len(COLUMNS) - 1 :]:
        axis.axis("off")
    return figure


def _row(path: Path) -> tuple[Any, ...]:
    lines = MetricsLog(path / "metrics.jsonl").read()
    asked = sum(len(line["clients"]) for line in lines)
    config = RunFolder.open(path).read_config()
    if not asked:
        raise MotleyError(f"{path} has no finished round yet.")
    cost = overhead_of(Federation(plainly(config)))
    return (
        path.name,
        cost.parameters / 1e6,
        cost.message / 1e6,
        sum(line["bytes"]["down"] for line in lines) / asked / 1e6,
        sum(line["bytes"]["up"] for line in lines) / asked / 1e6,
        cost.flops / 1e9,
        cost.peak_bytes / 1e6,
        cost.kept_bytes / 1e6,
    )
