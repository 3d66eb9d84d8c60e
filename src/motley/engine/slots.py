"""A slot: a learner that many clients use one after the other, its stream, and its captured steps.

To train a client, a slot copies the client's state in, zeroes the optimizer, writes the plan and
replays its graphs. On a CPU the same slot runs its steps eagerly. A captured step is for one shape
of broadcast and client state and for one phase of the method; others are captured anew. A batch
shorter than the batch size runs eagerly on the slot's stream when its length first occurs, and is
captured if it occurs again.

All graphs of a slot share their memory: no two of them run at once, and none leaves anything in it
for another one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from motley.client.clients import Clients
from motley.client.job import Job
from motley.client.learner import shapes_of
from motley.client.training import Plan, TrainingSettings
from motley.core.graphs import capture
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.engine.timeline import Timeline
from motley.engine.workers import available_cores
from motley.kernels.compiling import compiling_ahead
from motley.methods.base import Collection

#: Eager steps before a capture, in which libraries choose their algorithms and the optimizer
#: creates its state.
WARM_UP = 3
#: Maximum number of graphs for short batches of a slot and a shape; further lengths run eagerly.
SHORT = 16
#: Steps of the longer of a slot's two graphs. The host launches less often, and the GPU waits less
#: between steps.
CHUNK = 4
#: Graphs by their number of full steps. A short batch's graph has the negative length of the batch
#: as its key.
Graphs: TypeAlias = dict[int, torch.cuda.CUDAGraph]


def lengths_to_compile(training: TrainingSettings) -> list[int]:
    """Return lengths of batches whose steps launch all kernels that a client needs.

    The last batch of a client can have any length. Kernels are not compiled for each of them, but
    some have variants for short batches, for very short ones, and for powers of two
    (`motley.kernels.compiled_in`). Compiled one by one when such a batch is first met, they would
    take most of the first round.
    """
    full = training.batch_size
    lengths = [full]
    if not training.drop_last:
        for short in (full - 1, full // 2, full // 4 + 1, full // 4, full // 16 + 1):
            # One example is too few for batch norm.
            if 2 <= short < full and short not in lengths:
                lengths.append(short)
    return lengths


class Slot:
    """A place where clients of one size train, one after the other."""

    def __init__(self, clients: Clients, size: str, where: int = 0, urgent: bool = False) -> None:
        self.clients, self.size, self.where, self.urgent = clients, size, where, urgent
        self.learner = clients.learner(size, where)
        self.device = clients.devices[where]
        self.stream = (
            torch.cuda.Stream(self.device, -urgent) if self.device.type == "cuda" else None
        )
        #: Shapes -> phase -> graphs.
        self._captures: dict[object, dict[int, Graphs]] = {}
        #: Phase -> graphs for the current client's shapes; empty on a CPU.
        self._graphs: dict[int, Graphs] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.stream is not None else None
        #: Phases and lengths of short batches that have run eagerly once, as a capture requires.
        self._met: set[tuple[int, int]] = set()
        self.busy = False
        #: Records which client trains here and when, if it is set.
        self.timeline: Timeline | None = None

    def load(self, job: Job, plan: Plan) -> None:
        """Load a client, ready for its first step."""
        self.busy = True
        with self._on_stream():
            if self.timeline is not None:
                self.timeline.begin(self, job)
            job, client_state = self.clients.states.resume(job)
            if self.stream is not None:
                self._graphs = self._captured(job, client_state)
            self.clients.seat(self.learner, job, plan, client_state)

    def advance(self) -> bool:
        """Take the next step, or several of them; return whether the client has finished."""
        learner = self.learner
        learner.seed_step()
        learner.enter_phase()
        graphs = self._graphs.get(learner.phase, {})
        steps = self._steps_ahead()
        with self._on_stream():
            length = learner.lengths[learner.num_steps]
            graph = graphs.get(steps) or self._short(graphs, length)
            if graph is not None:
                graph.replay()
            else:
                learner.use_generator()
                learner.step(length)
        learner.num_steps += steps or 1
        return learner.finished

    def _short(self, graphs: Graphs, length: int) -> torch.cuda.CUDAGraph | None:
        """Return the graph for a short batch, captured when its length occurs a second time.

        `graphs` are the current phase's.
        """
        if self.stream is None:
            return None
        occurrence = (self.learner.phase, length)
        has_room = sum(key < 0 for key in graphs) < SHORT
        if -length not in graphs and occurrence in self._met and has_room:
            self.learner.use_generator()
            graphs[-length] = self._capture(1, length)
        self._met.add(occurrence)
        return graphs.get(-length)

    def _steps_ahead(self) -> int:
        """Return how many steps of one phase can be replayed at once.

        0 if the next batch is short, or on a CPU.
        """
        if not self._graphs:
            return 0
        learner = self.learner
        ahead = learner.lengths[learner.num_steps : learner.num_steps + CHUNK]
        full = [length == learner.training.batch_size for length in ahead]
        if not full[0]:
            return 0
        if len(full) < CHUNK or not all(full):
            return 1
        last_phase = learner.phase_of(learner.num_steps + CHUNK - 1)
        return CHUNK if last_phase == learner.phase else 1

    def unload(self) -> ClientUpdate:
        """End the client's training."""
        self.busy = False
        with self._on_stream():
            update = self.clients.finish(self.learner)
            if self.timeline is not None:
                self.timeline.end(self)
        return update

    def personalize(self, job: Job, answer: Collection) -> Collection:
        """Train a client without sending or storing anything, and add its score to its answer."""
        plan = self.clients.plan(job)
        if not plan.lengths:
            return self.clients.add_same_score(answer)
        self.follow()
        self.timeline = None  # it shows the training of rounds, and this is an evaluation
        try:
            self.load(job, plan)
            while not self.learner.finished:
                self.advance()
            with self._on_stream():
                answer = self.clients.add_personalized(answer, self.learner)
        finally:
            self.busy = False
            self.lead()
        return answer

    def follow(self) -> None:
        """Let the slot's stream wait for the server's work so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def lead(self) -> None:
        """Let the server's stream wait for the slot's work so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    def _captured(self, job: Job, client_state: State) -> dict[int, Graphs]:
        """Return the graphs of every phase for a job's shapes. The warm-up's weights are
        overwritten by the next load.
        """
        shapes = shapes_of(job.broadcast, client_state)
        if shapes not in self._captures:
            self.clients.seat(self.learner, job, self.clients.plan(job), client_state)
            batch_size = self.learner.training.batch_size
            by_phase: dict[int, Graphs] = {}
            for phase in range(self.learner.algorithm.num_phases):
                self.learner.phase = phase
                self._compile_kernels()
                self._warm_up()
                by_phase[phase] = {steps: self._capture(steps, batch_size) for steps in (1, CHUNK)}
            self._captures[shapes] = by_phase
        return self._captures[shapes]

    def _compile_kernels(self) -> None:
        """Compile Motley's kernels for a step, all at once: one by one is slow.

        The values that the step computes are overwritten by the next load.
        """
        if not self.learner.uses_kernels:
            return
        self.learner.use_generator()
        with compiling_ahead(available_cores()):
            for length in lengths_to_compile(self.learner.training):
                self.learner.batches.rewind()
                self.learner.step(length)

    def _warm_up(self) -> None:
        self.learner.use_generator()
        for _ in range(WARM_UP):
            self.learner.batches.rewind()
            self.learner.step(self.learner.training.batch_size)
        torch.cuda.synchronize(self.device)

    def _capture(self, steps: int, length: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        assert self.stream is not None
        with self.learner.captured(steps), capture(graph, self.stream, self._pool):
            for _ in range(steps):
                self.learner.step(length)
        return graph
