"""Worker processes: all cores of a CPU train clients and evaluate sizes.

Workers are forked when they are first needed, and stay for the rounds that follow. A forked process
starts as a copy of this one, so it already has the data set, the split and the method, whatever
objects a user made them of. Memory pages are shared until one side writes to them, and neither side
writes to the data. A worker is sent the same as a node of a deployment: a client's part of the
global state, the method's broadcast and the stored client state. They travel through shared memory
(shared_memory.py), in which all clients of a size have one copy of their part.

A worker cannot see later changes of objects in this process. So whatever a task needs that differs
from round to round is sent with it.

An evaluation runs in the background: workers take its tasks while this process begins the next
round, and before those of that round's training.

Processes and not threads: between two operations of a small model, Python holds its interpreter
lock, and torch's CPU generator, which steps are keyed by, belongs to the whole process.

Which worker runs a task, and when, changes no result. Every random choice is keyed, every worker
computes with one thread, and results are identified by the number of their task.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias, TypeVar, cast

import torch

from motley.core.errors import MotleyError
from motley.core.own_code import RemoteError, place_in_own_code
from motley.engine.base import EngineSettings
from motley.engine.shared_memory import Arena, Arenas, Channel, Groups, Layout, pack

#: Seconds that workers must save to be used, and seconds that sending a task and its result takes.
OVERHEAD, TASK_OVERHEAD = 0.005, 0.0001
#: Small tasks are given to a worker in bundles of at most this many seconds.
BUNDLE_S = 0.015
#: Seconds without a task after which a worker ends. It holds the memory of its learners, and the
#: next task starts another one.
IDLE_S = 60.0
#: The exit status of a worker that ends for this reason.
_IDLE_CODE = 64
#: A worker keeps models of several sizes, to use them again, while they take at most this many
#: bytes. It always keeps one.
KEPT_BYTES = 2**28
#: Linux's number of the option that sends a process a signal when the one that forked it dies.
_PR_SET_PDEATHSIG = 1
#: glibc's numbers of two limits: freed memory above the first goes back to the system, and blocks
#: above the second are mapped on their own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class WorkerTask:
    """The input of a task: a small object that can be pickled, and tensors."""

    header: Any
    tensors: Groups


@dataclass(frozen=True)
class Result:
    """The result of a task: a small object that can be pickled, and tensors."""

    header: Any
    tensors: Groups
    #: The processor time that the task took in its worker, or the mean of its bundle. Unlike the
    #: time on the clock, it does not depend on how many workers shared a core.
    seconds: float = 0.0


Function: TypeAlias = Callable[[WorkerTask], Result]
T = TypeVar("T")


# ---- whether to use workers


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def why_no_workers(engine: EngineSettings, devices: Sequence[torch.device]) -> str | None:
    """Say why clients cannot train in worker processes; None if they can."""
    if engine.name == "debug":
        return "engine.name = 'debug' trains one client at a time"
    if devices[0].type != "cpu" or len(devices) > 1:
        return f"engine.device = {engine.device!r}: workers are for one CPU"
    if engine.threads > 1:
        return f"engine.threads = {engine.threads}: each worker computes with one thread"
    if engine.compile:
        return "engine.compile = true: every worker would compile the models again"
    if sys.platform != "linux":
        return "workers are forked, which is safe on Linux only"
    if multiprocessing.current_process().daemon:
        return "this is a daemonic process of multiprocessing, which may not have children"
    if torch.cuda.is_available():
        # torch then runs backward passes in threads of its own, which a forked process lacks.
        return "a process that sees a GPU cannot fork; CUDA_VISIBLE_DEVICES= hides it"
    return None


def num_workers(engine: EngineSettings, devices: Sequence[torch.device]) -> int:
    """Return the number of worker processes; 1 if everything runs in this process."""
    reason = why_no_workers(engine, devices)
    if engine.workers == 0:
        return 1 if reason else available_cores()
    if engine.workers > 1 and reason:
        raise MotleyError(f"engine.workers = {engine.workers}: {reason}. Allowed are 0 and 1.")
    return engine.workers


def is_worthwhile(seconds: Sequence[float], workers: int) -> bool:
    """Tell whether workers save time, given how long each task takes on one core."""
    if workers < 2 or len(seconds) < 2:
        return False
    total = sum(seconds)
    in_workers = max(max(seconds), total / workers) + TASK_OVERHEAD * len(seconds)
    return total - in_workers > OVERHEAD


def is_worthwhile_in_background(seconds: Sequence[float], workers: int) -> bool:
    """Tell whether tasks should run beside the next round, given how long each takes here.

    The round's own tasks use all workers, so this gains the time in which other cores would be idle
    if the tasks ran here.
    """
    total = sum(seconds)
    return workers > 1 and total - total / workers > OVERHEAD


def bundle_size(seconds: Sequence[float], workers: int) -> int:
    """Return how many tasks a worker should be given at once, given how long each one takes.

    Every message wakes a process, so small tasks travel in bundles of at most BUNDLE_S seconds.
    Every worker gets equally many bundles, so that none is idle while another one has one more.
    """
    bundles_per_worker = math.ceil(sum(seconds) / workers / BUNDLE_S)
    return max(1, math.ceil(len(seconds) / (workers * max(1, bundles_per_worker))))


def dealt(tasks: Sequence[T], bundle: int) -> list[T]:
    """Order tasks, of which the longest come first, so that bundles take about equally long."""
    num_bundles = math.ceil(len(tasks) / bundle)
    in_turns: list[T] = []
    for first in range(num_bundles):
        in_turns.extend(tasks[first::num_bundles])
    return in_turns


# ---- the pool


class WorkerPool:
    """Worker processes that run registered functions. They are forked when they are needed."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._functions: dict[str, Function] = {}
        self._preparations: list[Callable[[], object]] = []
        #: Batches with tasks that have not ended. Workers take tasks of the first one first.
        self._open: list[_Batch] = []
        self._processes = _Processes()
        self._arenas = Arenas()
        weakref.finalize(self, self._processes.end)

    def register(
        self, name: str, function: Function, prepare: Callable[[], object] | None = None
    ) -> None:
        """Let workers run a function. A worker has a copy of it from the time of its fork.

        `prepare` is called in this process before a fork, to make what all workers should share.
        """
        self.close()
        self._functions[name] = function
        if prepare is not None:
            self._preparations.append(prepare)

    def run(
        self, name: str, tasks: Sequence[WorkerTask], bundle: int = 1
    ) -> Generator[tuple[int, Result]]:
        """Run a function on tasks; yield each one's number and result when it has ended.

        `bundle`: how many tasks a worker is given at once (`bundle_size`). If a task fails, or if
        the caller closes the generator early, all workers are ended.
        """
        batch = self._submit(name, tasks, bundle)
        try:
            num_yielded = 0
            while num_yielded < len(tasks):
                if num_yielded == len(batch.results):
                    self._advance(batch, timeout=None)
                arrived = list(islice(batch.results.items(), num_yielded, None))
                yield from arrived
                num_yielded += len(arrived)
        finally:
            if not batch.is_complete:
                self._cancel(batch)

    def start(self, name: str, tasks: Sequence[WorkerTask]) -> BackgroundTasks:
        """Run a function on tasks while this process does something else."""
        return BackgroundTasks(self, self._submit(name, tasks))

    def close(self) -> None:
        """End all workers, whatever they are doing. Unfinished tasks start again when their results
        are requested.
        """
        for batch in self._open:
            batch.restart()
        self._processes.end()
        self._arenas.drop_free()

    # ----

    def _submit(self, name: str, tasks: Sequence[WorkerTask], bundle: int = 1) -> _Batch:
        """Write tasks to shared memory, and hand them to idle workers."""
        size, packed = pack([task.tensors for task in tasks])
        headers = [task.header for task in tasks]
        layouts = [layout for layout, _ in packed]
        batch = _Batch(name, headers, layouts, self._arenas.take(size), bundle)
        self._open.append(batch)
        try:
            for number, (_, new_tensors) in enumerate(packed):
                batch.arena.write(new_tensors)
                batch.waiting.append(number)
                # At once: the first workers begin while the next tasks are written.
                if (number + 1) % bundle == 0:
                    self._hand_out()
            self._hand_out()
        except BaseException:
            self._cancel(batch)
            raise
        if not tasks:
            self._end_batch(batch)
        return batch

    def _hand_out(self) -> None:
        """Give every idle worker the next tasks."""
        for batch in list(self._open):
            if not batch.is_wanted and not self._processes.any_has(batch):
                self._end_batch(batch)
        for batch in self._open:
            if not batch.waiting or not batch.is_wanted:
                continue
            self._fork()
            for worker in self._processes.workers:
                if worker.batch is None and batch.waiting:
                    self._give(worker, batch)

    def _give(self, worker: _Worker, batch: _Batch) -> None:
        """Give a worker the next tasks of a batch."""
        numbers = list(islice(batch.waiting, batch.bundle))
        worker.batch, worker.numbers = batch, numbers
        for _ in numbers:
            batch.waiting.popleft()
        content = (batch.name, [batch.headers[number] for number in numbers])
        layouts = [batch.layouts[number] for number in numbers]
        # If the worker has ended, reading its results reports that.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.channel.send(content, layouts, batch.arena, self._arenas.numbers)

    def _fork(self) -> None:
        """Fork the workers that are missing."""
        if not self._processes.belong_here:
            self.close()
        self._processes.drop_ended()
        num_missing = self.workers - len(self._processes.workers)
        if num_missing:
            for prepare in self._preparations:
                prepare()
            self._processes.fork(num_missing, self._functions, self._arenas)

    def _advance(self, batch: _Batch, timeout: float | None) -> None:
        """Take the results that arrive within a time, and keep the workers busy.

        If a task of `batch` has failed, raise its exception. Other batches keep theirs.
        """
        if batch.error is None:
            try:
                self._take_results(timeout)
            except BaseException:
                # An interruption. A message may have been read or sent in part, so the workers
                # cannot be used any more.
                self.close()
                raise
        if batch.error is not None:
            raise batch.error

    def _take_results(self, timeout: float | None) -> None:
        self._hand_out()
        busy = {}
        for worker in self._processes.workers:
            if worker.batch is not None:
                busy[worker.channel.connection] = worker
        assert busy or timeout is not None  # or this would wait without end
        for ready in wait(list(busy), timeout):
            worker = busy[cast(Connection, ready)]
            if worker not in self._processes.workers:
                continue  # ended since
            batch, numbers = worker.batch, worker.numbers
            assert batch is not None
            try:
                results = worker.receive_results()
            except _GoneError:
                self._processes.drop(worker)
                batch.waiting.extendleft(reversed(numbers))
                continue
            except Exception as error:
                batch.error = error
                self._cancel(batch)
                return
            for number, result in zip(numbers, results, strict=True):
                batch.results.setdefault(number, result)
            worker.batch, worker.numbers = None, []
            if batch.is_complete:
                self._end_batch(batch)
            self._hand_out()

    def _end_batch(self, batch: _Batch) -> None:
        """Let the memory of a batch be used again: no worker reads it any more."""
        if batch in self._open:
            self._open.remove(batch)
            self._arenas.give_back(batch.arena)

    def _cancel(self, batch: _Batch) -> None:
        """Drop the open tasks of a batch, and end all workers. Other batches' tasks start again."""
        self.close()
        self._end_batch(batch)


class BackgroundTasks:
    """Tasks that workers run while this process does something else."""

    def __init__(self, pool: WorkerPool, batch: _Batch) -> None:
        self._pool, self._batch = pool, batch
        weakref.finalize(self, batch.give_up)

    @property
    def ready(self) -> bool:
        """Whether `results` would return, or raise a task's exception, without waiting."""
        batch = self._batch
        num_before = -1
        # As long as results arrive: a worker may have sent several.
        while not batch.is_complete and batch.error is None and len(batch.results) > num_before:
            num_before = len(batch.results)
            with suppress(Exception):  # `results` raises it
                self._pool._advance(batch, timeout=0)
        return batch.is_complete or batch.error is not None

    def results(self) -> list[Result]:
        """Wait for all results and return them in the order of their tasks."""
        batch = self._batch
        while not batch.is_complete:
            self._pool._advance(batch, timeout=None)
        return [batch.results[number] for number in range(len(batch.headers))]


@dataclass(eq=False)
class _Batch:
    """Tasks that were submitted together, in one arena."""

    #: The registered function.
    name: str
    headers: Sequence[Any]
    layouts: Sequence[Layout]
    arena: Arena
    #: How many tasks a worker is given at once.
    bundle: int
    #: The numbers of the tasks that no worker has.
    waiting: deque[int] = field(default_factory=deque)
    #: The results by the numbers of their tasks, in the order in which they came.
    results: dict[int, Result] = field(default_factory=dict)
    error: Exception | None = None
    #: Whether somebody can still read the results.
    is_wanted: bool = True

    @property
    def is_complete(self) -> bool:
        """Whether all tasks have ended."""
        return len(self.results) == len(self.headers)

    def restart(self) -> None:
        """Let all tasks that have not ended wait for a worker."""
        numbers = range(len(self.headers))
        self.waiting = deque(number for number in numbers if number not in self.results)

    def give_up(self) -> None:
        """Let workers skip the tasks that they have not begun.

        This does not end them, because a garbage collection can call it at any moment.
        """
        self.is_wanted = False


# ---- the processes


class _GoneError(Exception):
    """A worker was told to end, or has ended because it was idle, just as it got a task."""


@dataclass(eq=False)
class _Worker:
    """A worker process, as its owner sees it."""

    process: Any
    channel: Channel
    #: The batch and the numbers of the tasks that it has; None and empty if it is idle.
    batch: _Batch | None = None
    numbers: list[int] = field(default_factory=list)

    def receive_results(self) -> list[Result]:
        """Wait for the results of its tasks, or raise the exception of one of them."""
        try:
            content, tensors = self.channel.receive()
        except (EOFError, OSError) as error:
            raise self._why_ended(error) from None
        if isinstance(content, _Failed):
            raise content.error from RemoteError(f"\n{content.text}", content.place)
        headers, seconds = content
        results = []
        for header, groups in zip(headers, tensors, strict=True):
            # Copied, because the worker's next result takes the same memory.
            copies = {}
            for group, shared in groups.items():
                copies[group] = {name: tensor.clone() for name, tensor in shared.items()}
            results.append(Result(header, copies, seconds / len(headers)))
        return results

    def _why_ended(self, error: Exception) -> Exception:
        """Return why the process ended; `error` itself if it has not ended."""
        self.process.join(timeout=5)
        code = self.process.exitcode
        if code is None:
            return error
        # A service manager that stops a run sends a signal to all of its processes.
        if code in (_IDLE_CODE, -signal.SIGTERM, -signal.SIGHUP):
            return _GoneError()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return MotleyError(
            f"a worker process {how}. The most frequent reason is too little memory: use fewer "
            "workers (engine.workers; 1 needs the least memory)."
        )


class _Processes:
    """The processes of a pool."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        #: The process and the thread that have forked them.
        self._owner = (0, 0)

    @property
    def belong_here(self) -> bool:
        """Whether the workers, if there are any, were forked by this process and this thread.

        Linux ends workers with the thread that has forked them (`_serve`).
        """
        return not self.workers or self._owner == (os.getpid(), threading.get_native_id())

    def drop_ended(self) -> None:
        """Forget idle workers that have ended. The end of a busy one is noticed by its result."""
        for worker in list(self.workers):
            if worker.batch is None and not worker.process.is_alive():
                self.drop(worker)

    def any_has(self, batch: _Batch) -> bool:
        """Tell whether a worker has tasks of a batch."""
        return any(worker.batch is batch for worker in self.workers)

    def drop(self, worker: _Worker) -> None:
        """Forget a worker that has ended."""
        worker.channel.close()
        self.workers.remove(worker)

    def fork(self, count: int, functions: dict[str, Function], arenas: Arenas) -> None:
        """Start workers. `arenas` are those of this process."""
        self._owner = (os.getpid(), threading.get_native_id())
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            here, there = context.Pipe()
            channel = Channel(here)
            channels = [channel, *(worker.channel for worker in self.workers)]
            process = context.Process(
                target=_serve, args=(functions, there, channels, arenas), daemon=True, name="worker"
            )
            with _signals_deferred(), warnings.catch_warnings():
                # Python 3.12 warns that threads of this process, such as those of a progress
                # display, do not exist in a fork. Workers only compute and use none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
                there.close()
                self.workers.append(_Worker(process, channel))

    def end(self) -> None:
        """End all workers, whatever they are doing."""
        ended, self.workers = self.workers, []
        if self._owner[0] != os.getpid():
            return  # a fork of their owner has inherited this object, but not the workers
        with _signals_deferred():
            for worker in ended:
                worker.process.kill()
                worker.channel.close()
            for worker in ended:
                worker.process.join()
                worker.process.close()


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle signals that stop a run at the end of the block.

    Python runs functions after a fork (`os.register_at_fork`), in which the exception of a signal
    handler is printed and lost: a Ctrl-C during a fork would not stop the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    received: list[int] = []
    handlers = {}
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(kind)
        # None: a handler that is not Python's, which could not be put back.
        if handler not in (signal.SIG_IGN, None):
            handlers[kind] = handler
            signal.signal(kind, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for kind, handler in handlers.items():
            signal.signal(kind, handler)
        for number in received:
            signal.raise_signal(number)


# ---- in a worker


@dataclass(frozen=True)
class _Failed:
    """The exception of a task, its traceback as text, and its `place_in_own_code`."""

    error: Exception
    text: str
    place: str | None


def _serve(
    functions: dict[str, Function],
    connection: Connection,
    inherited_channels: Sequence[Channel],
    inherited_arenas: Arenas,
) -> None:
    """Run tasks until the other side ends this process, or there is no task for IDLE_S seconds."""
    # A terminal sends a Ctrl-C to all processes. The one that forked the workers reacts to it, and
    # ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # If that process is killed, a worker must not train on for minutes beside the resumed run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Copies of the other side's ends. If they stayed open here, no worker would notice that the
    # other side was killed, and memory that it has released would not be freed.
    for other in inherited_channels:
        other.close()
    inherited_arenas.close()
    # A garbage collection would write to every page that holds an object, and so copy it.
    gc.freeze()
    # Keep freed memory for the next step: returning it to the system after every step would double
    # the page faults of a round.
    with suppress(AttributeError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    # Not as the other side happened to have them when it forked this process. Its threads of OpenMP
    # do not exist here, and more than one thread would wait for them.
    torch.set_num_threads(1)
    with torch.inference_mode(False), torch.enable_grad():
        _run_tasks(functions, connection)


def _run_tasks(functions: dict[str, Function], connection: Connection) -> None:
    channel, arenas = Channel(connection), Arenas()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the other side is gone
        while connection.poll(IDLE_S):
            (name, headers), tensors = channel.receive()
            begin = time.process_time()
            try:
                results = []
                for header, groups in zip(headers, tensors, strict=True):
                    results.append(functions[name](WorkerTask(header, groups)))
            except Exception as error:
                text, place = traceback.format_exc(), place_in_own_code(error)
                failed = _Failed(_portable(error), text, place)
                _send(channel, arenas, failed, [])
            else:
                content = [result.header for result in results], time.process_time() - begin
                _send(channel, arenas, content, [result.tensors for result in results])
        sys.exit(_IDLE_CODE)


def _send(channel: Channel, arenas: Arenas, content: Any, tensors: Sequence[Groups]) -> None:
    """Send the outcome of tasks to the process that has forked this one."""
    size, packed = pack(tensors)
    arena = arenas.take(size)
    for _, new_tensors in packed:
        arena.write(new_tensors)
    layouts = [layout for layout, _ in packed]
    channel.send(content, layouts, arena, arenas.numbers)
    # The next task arrives after the other side has copied these results.
    arenas.give_back(arena)


def _portable(error: Exception) -> Exception:
    """Return an exception that can be sent; one of a user's own may not be."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
