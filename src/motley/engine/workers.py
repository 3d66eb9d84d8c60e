"""Worker processes: all cores of a CPU train clients and evaluate sizes.

A section of a round that can run in parallel forks worker processes, which end with the section. A
forked process starts as a copy of this one, so it already has the data set, the models, the global
state and the method, whatever objects a user made them of, and nothing has to be sent to it. Memory
pages are shared until one side writes to them: a worker takes memory for what it changes, which is
one learner. Only results travel, through a pipe.

An evaluation runs in the background: its workers compute while this process begins the next round.

Processes and not threads: between two operations of a small model, Python holds its interpreter
lock, and torch's CPU generator, which steps are keyed by, belongs to the whole process.

Which worker runs a task, and when, changes no result. Every random choice is keyed, every worker
computes with one thread, and whoever calls `run` gets results by the number of their task.
"""

from __future__ import annotations

import ctypes
import gc
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.engine.base import EngineSettings

#: Forking and ending a worker takes about this many seconds.
OVERHEAD = 0.03
#: Linux's number of the option that sends a process a signal when the one that forked it dies.
_PR_SET_PDEATHSIG = 1
#: glibc's numbers of two limits: freed memory above the first goes back to the system, and blocks
#: above the second are mapped on their own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Result:
    """What a task returns: a small object, and tensors by group and name."""

    header: Any
    tensors: Mapping[str, State]
    #: The processor time that the task took in its worker. Unlike the time on the clock, it does
    #: not depend on how many workers shared a core.
    seconds: float = 0.0


Task: TypeAlias = Callable[[int], Result]


class WorkerError(Exception):
    """The traceback of a worker's exception, as its cause."""


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def obstacle(engine: EngineSettings, devices: Sequence[torch.device]) -> str | None:
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
    reason = obstacle(engine, devices)
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
    return total - max(max(seconds), total / workers) > OVERHEAD


def background_workers(seconds: Sequence[float], workers: int) -> int:
    """Return how many workers should run tasks beside the next round; 0: run them here instead.

    The round's own workers use all cores, so this gains what the tasks would leave idle here. More
    than one worker is for tasks that might take longer than the next round.
    """
    total = sum(seconds)
    if workers < 2 or total - total / workers <= OVERHEAD:
        return 0
    wanted = int(total / (5 * OVERHEAD)) if OVERHEAD > 0 else workers
    return max(1, min(wanted, workers, len(seconds)))


@contextmanager
def forked_workers(task: Task, workers: int) -> Iterator[Workers]:
    """Fork workers that run `task` until the block ends. They are killed if it ends early."""
    pool = Workers(task)
    try:
        pool.fork(workers)
        yield pool
    finally:
        pool.end()


class Workers:
    """Processes that run one function, given the numbers of its tasks."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._processes: dict[Connection, Any] = {}
        self._owner = os.getpid()

    def fork(self, count: int) -> None:
        """Start the workers."""
        context = multiprocessing.get_context("fork")
        for _ in range(count):
            here, there = context.Pipe()
            inherited = [*self._processes, here]
            process = context.Process(
                target=_serve, args=(self._task, there, inherited), daemon=True, name="worker"
            )
            with _signals_deferred(), warnings.catch_warnings():
                # Python 3.12 warns that threads of this process, such as those of a progress
                # display, do not exist in a fork. Workers only compute and use none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
                there.close()
                self._processes[here] = process

    def run(self, count: int) -> Iterator[tuple[int, Result]]:
        """Run tasks 0 to `count` - 1, and yield each one's number and result when it has ended."""
        waiting = iter(range(count))
        running: dict[Connection, int] = {}
        for connection in self._processes:
            self._give(connection, waiting, running)
        while running:
            for ready in wait(list(running)):
                connection = cast(Connection, ready)
                number = running.pop(connection)
                result = self.result(connection)
                self._give(connection, waiting, running)
                yield number, result

    def _give(
        self, connection: Connection, waiting: Iterator[int], running: dict[Connection, int]
    ) -> None:
        number = next(waiting, None)
        if number is None:
            return
        running[connection] = number
        with suppress(BrokenPipeError):  # `result` reports a worker that has died
            connection.send(number)

    def deal(self, count: int) -> dict[Connection, deque[int]]:
        """Give tasks 0 to `count` - 1 to the workers in turns; return the tasks of each."""
        dealt: dict[Connection, deque[int]] = {}
        connections = list(self._processes)
        for number in range(count):
            connection = connections[number % len(connections)]
            dealt.setdefault(connection, deque()).append(number)
            with suppress(BrokenPipeError):  # `result` reports a worker that has died
                connection.send(number)
        return dealt

    def result(self, connection: Connection) -> Result:
        """Wait for the next result of a worker, or raise the exception of its task."""
        try:
            answer = _receive(connection)
        except (EOFError, OSError):
            raise self._died(connection) from None
        if isinstance(answer, Result):
            return answer
        error, text = answer
        raise error from WorkerError(f"\n{text}")

    def _died(self, connection: Connection) -> MotleyError:
        process = self._processes[connection]
        process.join(timeout=5)
        code = process.exitcode
        how = f"was killed by signal {-code}" if code and code < 0 else f"ended with code {code}"
        return MotleyError(
            f"a worker process {how}. The most frequent reason is too little memory: use fewer "
            f"workers than {len(self._processes)} (engine.workers; 1 needs the least memory)."
        )

    def end(self) -> None:
        """End all workers, whatever they are doing."""
        if os.getpid() != self._owner:
            return  # a fork of this process has inherited this object, but not the workers
        with _signals_deferred():
            for connection, process in self._processes.items():
                process.kill()
                connection.close()
            for process in self._processes.values():
                process.join()
                process.close()
            self._processes = {}


class BackgroundTasks:
    """Tasks that worker processes run while this process does something else.

    Nobody hands out tasks in the meantime, so every worker gets its share at the beginning. The
    workers end when all results are there, or when nobody refers to this object any more.
    """

    def __init__(self, task: Task, count: int, workers: int) -> None:
        self._count = count
        self._results: dict[int, Result] = {}
        self._error: BaseException | None = None
        self._workers = Workers(task)
        self._end = weakref.finalize(self, self._workers.end)
        self._workers.fork(workers)
        #: The tasks whose results have not arrived, by the connection that they come from.
        self._running = self._workers.deal(count)

    @property
    def ready(self) -> bool:
        """Whether `results` would return, or raise a task's exception, without waiting."""
        self._receive(timeout=0)
        return not self._running

    def results(self) -> list[Result]:
        """Wait for all results and return them in the order of their tasks."""
        while self._running:
            self._receive(timeout=None)
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(self._count)]

    def _receive(self, timeout: float | None) -> None:
        """Take the results that have arrived by now, or within a time."""
        for ready in wait(list(self._running), timeout):
            connection = cast(Connection, ready)
            try:
                result = self._workers.result(connection)
            except Exception as error:
                self._error = error
                self._running = {}
                break
            numbers = self._running[connection]
            self._results[numbers.popleft()] = result
            if not numbers:
                del self._running[connection]
        if not self._running:
            self._end()


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


def _serve(task: Task, connection: Connection, inherited: Sequence[Connection]) -> None:
    """Run tasks until the other side ends this process."""
    # A terminal sends a Ctrl-C to all processes. The one that forked the workers reacts to it, and
    # ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # If that process is killed, a worker must not train on for minutes beside the resumed run.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Copies of the other side's ends. If they stayed open here, no worker would notice that the
    # other side was killed.
    for other in inherited:
        other.close()
    # A garbage collection would write to every page that holds an object, and so copy it.
    gc.freeze()
    # Keep freed memory for the next step. A worker starts with no memory of its own, and returning
    # it to the system after every step would double the page faults of a round.
    with suppress(AttributeError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    with suppress(EOFError, OSError):  # the other side is gone
        while True:
            number = connection.recv()
            try:
                begin = time.process_time()
                result = task(number)
                seconds = time.process_time() - begin
            except Exception as error:
                connection.send_bytes(pickle.dumps((_portable(error), traceback.format_exc())))
            else:
                _send(connection, result, seconds)


def _portable(error: Exception) -> Exception:
    """Return an exception that can be sent; one of a user's own may not be."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# ---- messages: a header, then the bytes of every tensor


def _send(connection: Connection, result: Result, seconds: float) -> None:
    layout, contents = [], []
    for group, tensors in result.tensors.items():
        for name, tensor in tensors.items():
            layout.append((group, name, tensor.dtype, tuple(tensor.shape)))
            contents.append(tensor.detach().contiguous())
    groups = list(result.tensors)
    connection.send_bytes(pickle.dumps((result.header, groups, layout, seconds)))
    for tensor in contents:
        if tensor.numel():
            connection.send_bytes(_bytes_of(tensor))


def _receive(connection: Connection) -> Result | tuple[Exception, str]:
    """Return a worker's result, or the exception that it raised and the exception's traceback.

    Workers are forks of this process, and nobody else has the pipe, so the header may be a pickle.
    """
    message = pickle.loads(connection.recv_bytes())
    if len(message) == 2:
        error, text = message
        return error, text
    header, groups, layout, seconds = message
    tensors: dict[str, State] = {group: {} for group in groups}
    for group, name, dtype, shape in layout:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            connection.recv_bytes_into(_bytes_of(tensor))
        tensors[group][name] = tensor
    return Result(header, tensors, seconds)


def _bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor, also of types that NumPy does not know."""
    return tensor.view(-1).view(torch.uint8).numpy()
