"""A slot: a learner that stays, its stream, and its step captured once.

A client's turn in a slot is: copy its state in, zero the optimiser, write the plan, replay. On a CPU the same slot runs
its step eagerly. A captured step holds for one shape of message and memory; another shape is captured anew. Batches
shorter than the batch size run eagerly on the slot's stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from motley.engine.base import Job
from motley.engine.clients import Clients, Turn
from motley.engine.learner import shapes_of
from motley.engine.training import Plan
from motley.splits.part import State

WARM_UP = 3
"""Eager steps before a capture, in which libraries choose their algorithms and the optimiser makes its state."""
CHUNK = 4
"""Steps of the longer of a slot's two graphs: the host launches less often, and the GPU waits less between steps."""


class Slot:
    """A place where clients of one size train, one after the other."""

    def __init__(self, clients: Clients, size: str, where: int = 0, urgent: bool = False) -> None:
        self.clients, self.size, self.where, self.urgent = clients, size, where, urgent
        self.learner = clients.learner(size, where)
        self.device = clients.devices[where]
        self.stream = torch.cuda.Stream(self.device, -urgent) if self.device.type == "cuda" else None
        self._captures: dict[object, dict[int, torch.cuda.CUDAGraph]] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """Graphs of the present turn's shapes, by their number of steps."""
        self.busy = False

    def load(self, job: Job, plan: Plan) -> None:
        """Start a client's turn."""
        self.busy = True
        with self._on_stream():
            if self.clients.timeline is not None:
                self.clients.timeline.begin(self, job)
            memory = self.clients.recall(job)
            if self.stream is not None:
                self._graphs = self._captured(job, memory)
            self.clients.seat(self.learner, job, plan, memory)

    def advance(self) -> bool:
        """Take the next step, or several of them; return whether the turn is over."""
        learner = self.learner
        learner.seed_step()
        steps = self._steps_ahead()
        with self._on_stream():
            if steps:
                self._graphs[steps].replay()
            else:
                learner.use_generator()
                learner.step(learner.lengths[learner.taken])
        learner.taken += steps or 1
        return learner.finished

    def _steps_ahead(self) -> int:
        """Return how many steps can be replayed at once: none where the next batch is a short one, or on a CPU."""
        if not self._graphs:
            return 0
        learner = self.learner
        ahead = learner.lengths[learner.taken : learner.taken + CHUNK]
        full = [length == learner.training.batch_size for length in ahead]
        if not full[0]:
            return 0
        return CHUNK if len(full) == CHUNK and all(full) else 1

    def unload(self) -> Turn:
        """End the turn."""
        self.busy = False
        with self._on_stream():
            turn = self.clients.finish(self.learner)
            if self.clients.timeline is not None:
                self.clients.timeline.end(self)
        return turn

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

    def _captured(self, job: Job, memory: State) -> dict[int, torch.cuda.CUDAGraph]:
        """Return the graphs for a job's shapes. What warming up did to the weights is overwritten by the next load."""
        shapes = shapes_of(job.message, memory)
        if shapes not in self._captures:
            self.clients.seat(self.learner, job, self.clients.plan(job), memory)
            self._warm_up()
            self._captures[shapes] = {steps: self._capture(steps) for steps in (1, CHUNK)}
        return self._captures[shapes]

    def _warm_up(self) -> None:
        self.learner.use_generator()
        for _ in range(WARM_UP):
            self.learner.batches.rewind()
            self.learner.step(self.learner.training.batch_size)
        torch.cuda.synchronize(self.device)

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(steps):
                self.learner.step(self.learner.training.batch_size)
        return graph
