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
from motley.engine.training import Plan
from motley.splits.part import State

WARM_UP = 3
"""Eager steps before a capture, in which libraries choose their algorithms and the optimiser makes its state."""


class Slot:
    """A place where clients of one size train, one after the other."""

    def __init__(self, clients: Clients, size: str) -> None:
        self.clients, self.size = clients, size
        self.learner = clients.learner(size)
        self.device = clients.device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self.busy = False

    def load(self, job: Job, plan: Plan) -> None:
        """Start a client's turn."""
        self.busy = True
        with self._on_stream():
            memory = self.clients.recall(job)
            if self.stream is not None:
                self._graph = self._captured(job, memory)
            self.clients.seat(self.learner, job, plan, memory)

    def advance(self) -> bool:
        """Take one step; return whether the turn is over."""
        learner = self.learner
        length = learner.lengths[learner.taken]
        learner.seed_step()
        with self._on_stream():
            if self._graph is not None and length == learner.training.batch_size:
                self._graph.replay()
            else:
                learner.use_generator()
                learner.step(length)
        learner.taken += 1
        return learner.finished

    def unload(self) -> Turn:
        """End the turn."""
        self.busy = False
        with self._on_stream():
            return self.clients.finish(self.learner)

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

    def _captured(self, job: Job, memory: State) -> torch.cuda.CUDAGraph:
        """Return the graph for a job's shapes. What warming up did to the weights is overwritten by the next load."""
        shapes = tuple((name, tuple(t.shape)) for room in (job.message, memory) for name, t in room.items())
        if shapes not in self._graphs:
            self.clients.seat(self.learner, job, self.clients.plan(job), memory)
            self._graphs[shapes] = self._capture()
        return self._graphs[shapes]

    def _capture(self) -> torch.cuda.CUDAGraph:
        learner = self.learner
        length = learner.training.batch_size
        learner.use_generator()
        for _ in range(WARM_UP):
            learner.rewind()
            learner.step(length)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        learner.optimizer.zero_grad()
        with torch.cuda.graph(graph, stream=self.stream):
            learner.step(length)
        return graph
