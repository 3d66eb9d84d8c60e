"""The local engine: all clients in this process, in slots.

Jobs go to the slots of their size, longest first, and a slot takes its next client as soon as it is
free. All busy slots step in turns. On a GPU each has its own stream, the host only queues work, and
nothing waits until the round's losses are read. There the kernels of the longest jobs go first,
since a round ends when its longest job does.

On a CPU with several cores, worker processes each train one client at a time (`workers.py`), in
slots of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import ClassVar, TypeAlias

from motley.client.clients import Clients, own_randomness
from motley.client.job import CLIENT_SCORES, Job
from motley.client.state_store import BorrowedStates
from motley.core.update import ClientUpdate
from motley.engine.base import Done
from motley.engine.device_pools import DevicePools
from motley.engine.pool import SlotPool
from motley.engine.slots import Slot
from motley.engine.stack import Stack, can_stack
from motley.engine.timeline import Timeline
from motley.engine.workers import (
    KEPT_BYTES,
    Result,
    WorkerPool,
    WorkerTask,
    bundle_size,
    dealt,
    is_worthwhile,
)
from motley.methods.base import Collection

Queues: TypeAlias = dict[str, deque[tuple[Job, bool]]]
#: Fraction of a round's jobs whose kernels go first, on a GPU.
URGENT = 0.3
#: Jobs per worker whose stored client states are in memory at once.
WAVE = 64


class LocalEngine:
    """Runs clients in slots, and on a CPU in worker processes.

    slots: clients of a size that train at the same time on each device; 0: chosen by the device.
    stack: clients of a size that train in one batched step.
    workers: the worker processes; None: all clients train in this process.
    """

    trusted: ClassVar[bool] = True

    def __init__(
        self, clients: Clients, slots: int, stack: int = 1, workers: WorkerPool | None = None
    ) -> None:
        self.clients, self.stack = clients, stack
        self._stacks: dict[str, Stack] = {}
        slots_per_size = slots or (4 if clients.device.type == "cuda" else 1)
        pools = [SlotPool(clients, slots_per_size, where) for where in range(len(clients.devices))]
        self.pool: SlotPool | DevicePools = DevicePools(pools) if len(pools) > 1 else pools[0]
        self._pools = pools
        self._workers = workers
        if workers is not None:
            workers.register("train", self._train_in_worker)
            workers.register("collect", self._collect_in_worker)
        #: Size -> seconds per local step, as last measured in a worker.
        self._step_seconds: dict[str, float] = {}
        #: Collection and size -> seconds per client, as last measured in a worker.
        self._collect_seconds: dict[tuple[str, str], float] = {}

    def record(self, timeline: Timeline) -> None:
        """Record in a timeline which client trains in which slot and when.

        It shows the slots of this process, so clients then train in no other one.
        """
        self._workers = None
        for pool in self._pools:
            pool.timeline = timeline

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        """Train every job's client."""
        with own_randomness(*self.clients.devices):
            updates: list[ClientUpdate] = []
            if self.stack > 1:
                jobs, updates = self._train_stacked(jobs, done)
            jobs = self._longest_first(jobs)
            if self._workers_save_time([self._expected_seconds(job) for job in jobs]):
                updates += self._train_in_workers(jobs, done)
            else:
                updates += self._train_in_slots(jobs, done)
        return sorted(updates, key=lambda update: update.client)

    # ---- in slots of this process

    def _train_in_slots(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        """Train jobs, longest first, in turns."""
        updates = []
        waiting = self._queues(jobs)
        busy: list[Slot] = []
        for slot in self.pool:
            slot.follow()
        try:
            while busy or any(waiting.values()):
                for slot in chain(self._fill_slots(waiting, busy), list(busy)):
                    if slot.advance():
                        busy.remove(slot)
                        updates.append(slot.unload())
                        done(updates[-1].client)
        finally:
            # After an error, too. The slots are used again: by a caller who catches the error, and
            # after a round that was queued early (`speculation.NextRound`).
            for slot in self.pool:
                slot.busy = False
                slot.lead()
        return updates

    def _train_stacked(
        self, jobs: Sequence[Job], done: Done
    ) -> tuple[list[Job], list[ClientUpdate]]:
        """Train the jobs that can be stacked. Return the other jobs, and the updates."""
        others: list[Job] = []
        updates: list[ClientUpdate] = []
        for size, queue in self._queues(self._longest_first(jobs)).items():
            jobs_of_size = [job for job, _ in queue]
            if not can_stack(self.clients, size):
                others += jobs_of_size
                continue
            for first in range(0, len(jobs_of_size), self.stack):
                together = jobs_of_size[first : first + self.stack]
                stack = self._stack(size, len(together))
                stack.follow()
                updates += stack.train(together)
                stack.lead()
                for job in together:
                    done(job.client)
        return others, updates

    def _stack(self, size: str, count: int) -> Stack:
        """Return a stack for clients of a size: on a CPU as wide as they need, on a GPU always the
        same.
        """
        width = count if self.clients.device.type == "cpu" else self.stack
        stack = self._stacks.get(size)
        if stack is None or stack.width != width:
            stack = self._stacks[size] = Stack(self.clients, size, width)
        return stack

    # ---- in worker processes

    def _workers_save_time(self, seconds: Sequence[float]) -> bool:
        """Tell whether worker processes do jobs sooner than this process would.

        `seconds` are how long the jobs take here. A job whose time is not known should be assumed
        to take long, so that workers are tried.
        """
        return self._workers is not None and is_worthwhile(seconds, self._workers.workers)

    def _expected_seconds(self, job: Job) -> float:
        """Return how long the training of a job takes."""
        return self.clients.local_steps(job) * self._step_seconds.get(job.size, 1.0)

    def _train_in_workers(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        """Train jobs in worker processes, those that take longest first."""
        updates = []
        if all(job.size in self._step_seconds for job in jobs):
            jobs = sorted(jobs, key=self._expected_seconds, reverse=True)
        seconds = [self._expected_seconds(job) for job in jobs]
        with closing(self._in_workers("train", [(job, None) for job in jobs], seconds)) as results:
            for job, result in results:
                tensors = result.tensors
                self.clients.states.store.put(job.client, job.round_number, tensors["client state"])
                num_examples, num_steps = result.header
                update = ClientUpdate(
                    client=job.client,
                    delta=tensors["delta"],
                    payload=tensors["payload"],
                    num_examples=num_examples,
                    num_steps=num_steps,
                    loss=tensors["loss"]["loss"],
                )
                updates.append(update)
                # Not the update's number of steps, which private clients report as 1.
                self._step_seconds[job.size] = result.seconds / self.clients.local_steps(job)
                done(job.client)
        return updates

    def _in_workers(
        self,
        function: str,
        jobs: Sequence[tuple[Job, Collection | None]],
        seconds: Sequence[float],
    ) -> Generator[tuple[Job, Result]]:
        """Run a registered function for every job in worker processes; yield results as they come.

        A job may come with a collection that the function completes. `seconds`: how long each job
        takes. The caller must close the generator, or the workers would go on after an exception.
        """
        assert self._workers is not None
        length = WAVE * self._workers.workers
        for first in range(0, len(jobs), length):
            bundle = bundle_size(seconds[first : first + length], self._workers.workers)
            wave = dealt(jobs[first : first + length], bundle)
            # Client states are read in this process. They may be in an SQLite file, and a fork must
            # not use a connection to it.
            tasks = [self._task(job, answer) for job, answer in wave]
            with closing(self._workers.run(function, tasks, bundle)) as results:
                for number, result in results:
                    yield wave[number][0], result

    def _task(self, job: Job, answer: Collection | None) -> WorkerTask:
        """Return the task for a worker that does a job."""
        header = (replace(job, state={}, broadcast={}), answer and replace(answer, values={}))
        tensors = {
            "state": job.state,
            "broadcast": job.broadcast,
            "client state": self.clients.states.stored(job),
            "values": answer.values if answer is not None else {},
        }
        return WorkerTask(header, tensors)

    # ---- inside a worker

    def _begin(self, task: WorkerTask) -> tuple[Job, Collection | None]:
        """Return the job of a task, whose client state is in the store from now on."""
        job, answer = task.header
        job = replace(job, state=task.tensors["state"], broadcast=task.tensors["broadcast"])
        if answer is not None:
            answer = replace(answer, values=task.tensors["values"])
        self.clients.states.store = BorrowedStates(task.tensors["client state"])
        for pool in self._pools:
            pool.make_room(job.size, KEPT_BYTES)
        return job, answer

    def _train_in_worker(self, task: WorkerTask) -> Result:
        """Train one client."""
        job, _ = self._begin(task)
        slot = self.pool.seat(job)
        assert slot is not None  # a worker has one job at a time
        while not slot.advance():
            pass
        update = slot.unload()
        tensors = {
            "delta": update.delta,
            "payload": update.payload,
            "client state": self.clients.states.store.get(job.client, job.round_number),
            "loss": {"loss": update.loss},
        }
        return Result((update.num_examples, update.num_steps), tensors)

    def _collect_in_worker(self, task: WorkerTask) -> Result:
        """Ask one client for a collection."""
        job, answer = self._begin(task)
        collection = self._ask(job, answer)
        return Result(replace(collection, values={}), {"values": collection.values})

    # ---- collections

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        """Ask every job's client for a collection."""
        jobs = [job for job in jobs if self.clients.can_answer(job)]
        own_models = self.clients.method.has_own_models
        with own_randomness(self.clients.device):
            if jobs and jobs[0].collection in CLIENT_SCORES and not own_models:
                return self._client_scores(jobs)
            return self._collect([(job, None) for job in jobs])

    def _client_scores(self, jobs: Sequence[Job]) -> list[Collection]:
        """Score clients on their own test examples: one pass for all that received the same state.

        Personalized scores need the training of every client on its own.
        """
        by_state: dict[tuple[str, int], list[Job]] = {}
        for job in jobs:
            by_state.setdefault((job.size, id(job.state)), []).append(job)
        answers = {}
        for (size, _), same in by_state.items():
            learner = self.pool.any(size).learner
            for answer in self.clients.score_together(learner, same):
                answers[answer.client] = answer
        trained = [job for job in jobs if job.collection == "personalized-score"]
        for answer in self._collect([(job, answers[job.client]) for job in trained]):
            answers[answer.client] = answer
        return [answers[job.client] for job in jobs]

    def _collect(self, jobs: Sequence[tuple[Job, Collection | None]]) -> list[Collection]:
        """Return the collection of every job, in order."""
        seconds = [self._collect_seconds.get((job.collection, job.size), 1.0) for job, _ in jobs]
        if not self._workers_save_time(seconds):
            return [self._ask(job, answer) for job, answer in jobs]
        collections: dict[int, Collection] = {}
        with closing(self._in_workers("collect", jobs, seconds)) as results:
            for job, result in results:
                values = result.tensors["values"]
                collections[job.client] = replace(result.header, values=values)
                self._collect_seconds[job.collection, job.size] = result.seconds
        return [collections[job.client] for job, _ in jobs]

    def _ask(self, job: Job, answer: Collection | None) -> Collection:
        """Ask a client for a collection. `answer` is its score before personalization."""
        slot = self.pool.any(job.size)
        if answer is not None:
            return slot.personalize(job, answer)
        return self.clients.collect(slot.learner, job)

    def save_client_states(self, rounds: Mapping[int, int]) -> None:
        """Write the clients' states."""
        self.clients.states.store.save(rounds)

    def forget_client_states(self, rounds: Mapping[int, int]) -> None:
        """Delete the clients' states of rounds before the given ones."""
        self.clients.states.store.forget_older(rounds)

    # ---- the order of jobs

    def _longest_first(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that have a step to take, longest first.

        A step's duration is roughly proportional to the number of a model's tensors, because each
        has its kernels.
        """
        split = self.clients.method.info.split
        work = {}
        for job in jobs:
            # Not `len(job.state)`, which is 0 for a client with a model of its own.
            tensors = len(split.whole_part(job.size))
            work[job.client] = self.clients.local_steps(job) * tensors
        ordered = sorted(jobs, key=lambda job: (-work[job.client], job.client))
        return [job for job in ordered if work[job.client]]

    def _queues(self, jobs: Sequence[Job]) -> Queues:
        """Return the jobs of each size in their order, and whether they are urgent."""
        urgent = URGENT * len(jobs) if self.clients.device.type == "cuda" else 0
        queues: Queues = {}
        for rank, job in enumerate(jobs):
            queues.setdefault(job.size, deque()).append((job, rank < urgent))
        return queues

    def _fill_slots(self, waiting: Queues, busy: list[Slot]) -> Iterator[Slot]:
        """Give free slots the first waiting jobs of their sizes; yield each slot as soon as it is
        filled.
        """
        for queue in waiting.values():
            while queue and (slot := self.pool.seat(*queue[0])) is not None:
                queue.popleft()
                busy.append(slot)
                yield slot
