"""The cost of a method for a client: parameters, traffic, computation and memory (FedIN, Table 2).

Costs are counted from the tensors that are sent, kept and computed. One client of each size runs a
local update of one step on a CPU. Then one step of the second round is traced, operation by
operation; the first round would not do, because FedIN has no features to send before the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from motley.analysis.findings import Findings, analysis, new_figure
from motley.client.clients import own_randomness
from motley.client.learner import Learner
from motley.config import Config
from motley.core.errors import MotleyError
from motley.core.part import State, size_in_bytes
from motley.core.update import ClientUpdate
from motley.counting import LiveBytes, flop_counter
from motley.engine import DebugEngine, Job
from motley.federation import Federation
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog
from motley.server.exchange import complete_update

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Overhead:
    """The costs of clients. Means are over sizes, with one client of each."""

    #: The number of sizes that at least one client has.
    sizes: int
    #: Mean number of parameters that a client sends, the paper's "Params". Buffers are not counted.
    parameters: float
    #: Mean number of values in the method's payload.
    payload: float
    #: The parts of all sizes together, including buffers: the paper's "Memory".
    model_bytes: int
    #: Mean size of the method's broadcast to a client.
    broadcast_bytes: float
    #: Mean size of the client state that the method keeps between rounds.
    client_state_bytes: float
    #: Mean floating-point operations per training step, over all passes of the method.
    flops: float
    #: Mean peak of live memory in a step: weights, the received part, broadcast and client state,
    #: gradients, optimizer state and activations. Of the examples, one batch counts.
    peak_bytes: float

    @property
    def method_bytes(self) -> float:
        """Mean memory that a client needs for the method during a local update."""
        return self.broadcast_bytes + self.client_state_bytes

    @property
    def kept_bytes(self) -> float:
        """Mean memory that a client needs between rounds: its part and its client state."""
        return self.model_bytes / self.sizes + self.client_state_bytes


class StepCost(NamedTuple):
    """The cost of one training step."""

    flops: int
    peak_bytes: int


def one_step_on_cpu(config: Config) -> Config:
    """Return a configuration whose clients take one step on a CPU, with plain torch operations."""
    engine = config.engine.model_copy(
        update={"name": "debug", "device": "cpu", "precision": "fp32"}
    )
    training = config.training.model_copy(update={"steps": 1})
    return config.model_copy(update={"engine": engine, "training": training})


def measure_overhead(federation: Federation) -> Overhead:
    """Measure the costs of a federation whose clients take one step (`one_step_on_cpu`)."""
    method = federation.method
    engine, server = federation.engine, federation.initial_state()
    assert isinstance(engine, DebugEngine)
    # Round 1: one local update per size.
    jobs = {}
    for client in _one_client_per_size(federation, 1):
        jobs[client] = federation.job(server, 1, client)
    updates = []
    with federation.numerics():
        answers = engine.train(list(jobs.values()), lambda client: None)
    for update in answers:
        if isinstance(update, ClientUpdate):
            updates.append(complete_update(federation.context, jobs[update.client], update))
    parameter_counts = []
    for update in updates:
        names = federation.split.parameters_of(update.size)
        parameter_counts.append(_count({name: update.delta[name] for name in names}))
    states = {job.size: job.state for job in jobs.values()}
    client_states = [
        method.client.initial_client_state(size, state) for size, state in states.items()
    ]
    # Round 2: trace one step per size. Sizes may have been redrawn.
    method_state = method.server.update(server.method_state, server.state, updates)
    broadcasts, steps = [], []
    for client in _one_client_per_size(federation, 2):
        size = federation.size_of(client, 2)
        broadcast = method.server.broadcast(method_state, server.state, 2, client)
        broadcasts.append(broadcast)
        steps.append(trace_step(engine, Job(2, client, size, states[size], broadcast)))
    return Overhead(
        sizes=len(jobs),
        parameters=fmean(parameter_counts),
        payload=fmean(_count(update.payload) for update in updates),
        model_bytes=sum(size_in_bytes(state) for state in states.values()),
        broadcast_bytes=fmean(map(size_in_bytes, broadcasts)),
        client_state_bytes=fmean(map(size_in_bytes, client_states)),
        flops=fmean(step.flops for step in steps),
        peak_bytes=fmean(step.peak_bytes for step in steps),
    )


def _one_client_per_size(federation: Federation, round_number: int) -> list[int]:
    """Return one client per size: of the clients of that size, the one with most examples."""
    chosen: dict[str, int] = {}
    examples = federation.partition.sizes
    for client in range(federation.config.federation.clients):
        size = federation.size_of(client, round_number)
        if size not in chosen or examples[client] > examples[chosen[size]]:
            chosen[size] = client
    return list(chosen.values())


def trace_step(engine: DebugEngine, job: Job) -> StepCost:
    """Run one step of a client, counting its operations and the memory that is live.

    A first step, which is not counted, allocates the optimizer's state.
    """
    clients = engine.clients
    with own_randomness(clients.device):
        learner, plan = clients.learner(job.size), clients.plan(job)
        job, client_state = clients.states.resume(job)
        clients.seat(learner, job, plan, client_state)
        learner.step(plan.lengths[0])
        learner.batches.rewind()
        learner.drop_gradients()
        permanent = _permanent_tensors(learner)
        with LiveBytes(permanent) as live, flop_counter() as counter:
            learner.step(plan.lengths[0])
    permanent_bytes = sum(tensor.nbytes for tensor in permanent)
    return StepCost(counter.get_total_flops(), permanent_bytes + live.peak)


def _permanent_tensors(learner: Learner) -> list[Tensor]:
    """Return the tensors that a learner keeps from step to step."""
    tensors: list[Tensor] = []
    states = [learner.state, learner.received, learner.broadcast, learner.client_state]
    for state in (*states, *learner.scratch.values()):
        tensors.extend(state.values())
    for optimizer_state in learner.optimizer.state.values():
        for value in optimizer_state.values():
            if isinstance(value, Tensor):
                tensors.append(value)
    return tensors


def _count(state: State) -> int:
    """Return the number of values in a state."""
    return sum(tensor.numel() for tensor in state.values())


COLUMNS = (
    "run",
    "million parameters",
    "million values of payload",
    "MB down",
    "MB up",
    "GFLOPs per step",
    "peak MB per step",
    "MB kept per client",
)


@analysis("overhead", "parameters, traffic, FLOPs and peak memory per client")
def overhead(paths: Sequence[Path]) -> Findings:
    """Measure the costs of runs, as means over sizes.

    Traffic is read from the run's metrics, per client and round.
    """
    rows = [_row(path) for path in paths]
    return Findings(COLUMNS, rows, _draw(rows))


def _draw(rows: list[tuple[Any, ...]]) -> Figure:
    figure = new_figure(12, 2 * (0.9 + 0.4 * len(rows)))
    axes = figure.subplots(2, 4, sharey=True).flatten()
    for number, axis in enumerate(axes[: len(COLUMNS) - 1], start=1):
        values = [row[number] for row in rows]
        bars = axis.barh([row[0] for row in rows], values)
        axis.bar_label(bars, fmt="%.3g", padding=2)
        axis.set(title=COLUMNS[number], xlim=(0, 1.3 * max(values) or 1))
    for axis in axes[len(COLUMNS) - 1 :]:
        axis.axis("off")
    return figure


def _row(path: Path) -> tuple[Any, ...]:
    lines = MetricsLog(path / "metrics.jsonl").read()
    local_updates = sum(len(line["clients"]) for line in lines)
    config = RunFolder.open(path).read_config()
    if not local_updates:
        raise MotleyError(f"{path} has no finished round yet.")
    cost = measure_overhead(Federation(one_step_on_cpu(config)))
    return (
        path.name,
        cost.parameters / 1e6,
        cost.payload / 1e6,
        sum(line["bytes"]["down"] for line in lines) / local_updates / 1e6,
        sum(line["bytes"]["up"] for line in lines) / local_updates / 1e6,
        cost.flops / 1e9,
        cost.peak_bytes / 1e6,
        cost.kept_bytes / 1e6,
    )
