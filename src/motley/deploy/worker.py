"""Runs the client app that is installed at the node on the messages that arrive.

Flower's SuperNode would install the app that comes with a message and run it: a server, or anybody
who has taken one over, could run any code at every node. Flower can check the signatures of apps
(`--trusted-entities`), but it signs only apps from its own hub. So Motley starts the SuperNode
without the part that runs apps (`--isolation process`) and does that part itself: it runs its own
client app, and neither installs nor imports the app that the server sent.

The app runs in a worker process (task.py), which answers one message after the other. It starts
with the first message and stays for `keep_alive_s` seconds after the last one, so that the next
message finds torch imported and the client built.

If the worker dies during a message, the message is answered with an error at once, and the next
message starts another worker. The same happens if it freezes (it sends a sign of life every two
seconds), or computes next to nothing for `stall_s` seconds. A worker is also ended when the server
no longer waits for its answer, so that a message that never ends does not keep the node from the
next one.

A message can also be dropped while it arrives: the run that sent it has ended, for example because
the server was killed and another run continues. The SuperNode hands a message out before its
content is there, and does not take it back, so the worker would wait for the rest of it. But it
hands out one message at a time. If there is another one, the message before it was dropped.
"""

from __future__ import annotations

import base64
import math
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from motley.core.errors import MotleyError
from motley.files import write_secret
from motley.flower.failures import NodeError, keep_text

CLIENT_APP = "motley.flower.client:app"
#: Seconds between two polls for a message.
POLL_S = 0.2
#: Seconds that a worker may take to end when it is told to.
END_S = 5.0
#: A busy worker shows a sign of life every ALIVE_S seconds. Flower gives a task up after 60 s
#: without its heartbeat and says only that the app crashed; a worker that has been silent for
#: FROZEN_S seconds is ended before that, so that the answer has the reason.
ALIVE_S, FROZEN_S = 2.0, 45.0
#: Seconds that a new worker may take until its first sign of life: Python and Flower's modules have
#: to be imported, which takes a few seconds, and far longer on a machine that is overloaded.
START_S = 300.0
#: Checks are fractions of a second apart. If more seconds than this pass between two of them, this
#: process was stopped itself, and the pause does not count.
PAUSED_S = 5.0
#: A worker that uses a smaller fraction than this of one core makes no progress.
IDLE_FRACTION = 0.01
#: Seconds that a worker may go on after the server has stopped waiting for its answer.
LATE_S = 5.0
#: The result of `run_tasks` if it has ended the SuperNode, so that the node reconnects.
RECONNECT = 1000
#: Seconds between two looks for another message while the content of this one has not arrived.
ANOTHER_S = 2.0

# The reports of a worker: one word, and sometimes a value.
#: It has fetched a message; the value is that message without its content.
FETCHED = "fetched"
#: The content of that message has arrived, too.
ARRIVED = "arrived"
#: A sign of life; the value is the processor time that the worker has used so far.
ALIVE = "alive"
#: It begins to send its answer.
SENDING = "sending"
#: It has dealt with a message, and can take the next one.
STAYS = "stays"
#: It has dealt with a message, and ends.
ENDS = "ends"
#: Its output has ended. Not sent by a worker: the thread that listens adds it.
GONE = "gone"


class TaskSource:
    """The SuperNode's messages, which it hands out on loopback to processes that know a secret."""

    def __init__(self, folder: Path, port: int) -> None:
        """`folder` is the node's folder. Every start writes a new secret to it."""
        self.address = f"127.0.0.1:{port}"
        self.port = port
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = folder / "superexec.secret"
        self.secret.unlink(missing_ok=True)
        write_secret(self.secret, secrets.token_bytes(32))

    def flags(self) -> list[str]:
        """Return the flags of a SuperNode that runs no app itself and hands its messages to us."""
        secret = ["--superexec-auth-secret-file", str(self.secret)]
        return ["--isolation", "process", "--host", "127.0.0.1", "--port", str(self.port), *secret]

    def connect(self) -> RuntimeHttpClient:
        """Return a client of the SuperNode's Runtime API."""
        proof = SuperExecAuthHttpInterceptor(
            master_secret=self.secret.read_bytes(),
            protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}),
        )
        version = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        return RuntimeHttpClient.from_server_address(
            self.address, True, None, interceptors=[version, proof]
        )


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of the node's worker process."""

    #: The client app, as MODULE:ATTRIBUTE.
    app: str = CLIENT_APP
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Seconds that the process stays alive after a message; 0: one process per message.
    keep_alive_s: float = 0.0
    #: If the process has more resident memory than this after a message, it ends.
    max_idle_mb: float = float("inf")
    #: Seconds with hardly any computation, during a message, after which the process is ended.
    stall_s: float = float("inf")
    #: The file for the texts of failures.
    log: Path | None = None


class WorkerError(NodeError):
    """The worker ended, or was ended, before it had answered its message."""


class DroppedError(Exception):
    """The SuperNode has dropped the current message, and hands out another one."""

    def __init__(self, next_token: str) -> None:
        super().__init__("the run of this message has ended.")
        #: The token of the other message's task.
        self.next_token = next_token


class Worker:
    """A process that runs the client app on one message after the other.

    Every message's token goes to its standard input, because every user of the machine could read
    an argument. The process reports its progress on its standard output, in the words above.
    """

    def __init__(self, address: str, settings: WorkerSettings) -> None:
        command = [sys.executable, "-m", "motley.deploy.task", address, settings.app]
        command.append(str(settings.max_idle_mb))
        self._settings = settings
        self._process = subprocess.Popen(
            command,
            env=dict(settings.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reports: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._busy = False
        self._last_used = time.monotonic()
        #: The current message, without its content, once the worker has fetched it.
        self.message: Message | None = None
        #: Whether the worker has begun to send its answer to that message.
        self.sending = False
        Thread(target=self._listen, name="worker", daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, value = line.strip().partition(" ")
            self._reports.put((word, value))
        self._reports.put((GONE, ""))

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def idle_s(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self._last_used

    @property
    def alive(self) -> bool:
        """Whether the process can take a message."""
        return self._process.poll() is None

    def answer(
        self, token: str, node: subprocess.Popen[bytes], another: Callable[[], str] = str
    ) -> bool:
        """Hand a message over, wait until it is dealt with, and return whether the worker stays.

        It returns early if the node ends. A WorkerError is raised if the worker ends, freezes or
        stalls, or if the server no longer waits for its answer.

        `another` returns the token of another message, or an empty text. It is called while the
        content of this message has not arrived, and a DroppedError is raised if there is one.
        """
        self._busy = True
        self.message, self.sending = None, False
        killed_before = oom_kills()
        progress = Progress(self._settings.stall_s)
        # When to look for another message; never before this one was fetched.
        look_at = math.inf
        try:
            self._send(token)
        except OSError:  # the worker has just died
            raise self._died(killed_before) from None
        while node.poll() is None:
            # Reports with any other word come from the app's own code; they have no meaning here.
            word, value = self._next_report()
            if word == FETCHED:
                self.message = message_from_proto(MessageProto.FromString(base64.b64decode(value)))
                look_at = time.monotonic() + ANOTHER_S
            elif word == ARRIVED:
                look_at = math.inf
            elif word == SENDING:
                self.sending = True
            elif word == ALIVE:
                progress.show(float(value))
            elif word == GONE:
                raise self._died(killed_before)
            elif word in (STAYS, ENDS):
                self._busy = False
                self._last_used = time.monotonic()
                return word == STAYS
            progress.check(self.message)
            if time.monotonic() > look_at:
                look_at = time.monotonic() + ANOTHER_S
                next_token = another()
                if next_token:
                    raise DroppedError(next_token)
        return False

    def _send(self, token: str) -> None:
        """Hand the token of a message over, with the time at which this was done (task.py)."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{token} {time.time()}\n")
        self._process.stdin.flush()

    def _next_report(self) -> tuple[str, str]:
        """Return the word and the value of the next report; empty after POLL_S without any."""
        try:
            return self._reports.get(timeout=POLL_S)
        except Empty:
            return "", ""

    def _died(self, killed_before: int) -> WorkerError:
        """Return why the process ended."""
        status = self._process.wait()
        text = f"the training process ended during a message: {status_text(status)}"
        if status == -signal.SIGKILL and oom_kills() > killed_before:
            return WorkerError("out-of-memory", f"{text}; the system ran out of memory.")
        return WorkerError("worker-died", f"{text}.")

    def end(self) -> None:
        """End the process: a busy one is killed, an idle one ends by itself when its input does."""
        assert self._process.stdin is not None
        if self._busy:
            self._process.kill()
        with suppress(OSError):  # closing flushes, which fails if the process is dead
            self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Progress:
    """Notices that a busy worker has frozen, has stalled, or is too late."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self._last_sign = self._last_progress = self._last_check = time.monotonic()
        #: The processor time of the worker at its last progress; None before a sign of life.
        self._used_s: float | None = None

    def show(self, used_s: float) -> None:
        """Record a sign of life, with the processor time that the worker has used so far."""
        now = time.monotonic()
        self._last_sign = now
        # Compared with the time since the last progress, so that many small amounts count as well.
        enough_s = IDLE_FRACTION * (now - self._last_progress)
        if self._used_s is None or used_s - self._used_s > enough_s:
            self._used_s, self._last_progress = used_s, now

    def check(self, message: Message | None) -> None:
        """Raise if the worker should be ended. `message` is the current one, if it is known."""
        now = time.monotonic()
        if now - self._last_check > PAUSED_S:  # this process was stopped itself, and saw no signs
            pause = now - self._last_check
            self._last_sign += pause
            self._last_progress += pause
        self._last_check = now
        started = self._used_s is not None
        silence_s = FROZEN_S if started else START_S
        if now - self._last_sign > silence_s:
            raise WorkerError(
                "worker-died", f"the training process showed no sign of life for {silence_s:g} s."
            )
        if started and now - self._last_progress > self.stall_s:
            raise WorkerError(
                "stalled",
                f"stall_s = {self.stall_s:g}: the training process has computed next to nothing "
                "for this long; it was ended.",
            )
        if message is not None:
            waited_for_until = message.metadata.created_at + message.metadata.ttl
            if time.time() > waited_for_until + LATE_S:
                raise WorkerError(
                    "stalled", "the server no longer waits for this answer; the work was ended."
                )


def status_text(status: int) -> str:
    """Describe the exit status of a process."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def oom_kills() -> int:
    """Return how many processes Linux has killed so far because memory ran out; 0 elsewhere."""
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    count = re.search(r"^oom_kill (\d+)$", counters, re.MULTILINE)
    return int(count[1]) if count else 0


class FreeResponses:
    """Lets the memory of a response be freed as soon as it is no longer used.

    A response of httpx and its stream refer to each other, so its content and that of its request
    would stay in memory until Python next looks for such cycles, which can be after the training. A
    message has the client's whole part in it, and the answer has its delta.
    """

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Send the request; replace the stream of the response, which has been read."""
        response = call_next(context)
        response.stream = httpx.ByteStream(response.content)
        return response


def task_client(address: str, token: str, **options: Any) -> RuntimeHttpClient:
    """Return a client of the SuperNode's Runtime API that acts for one message's task."""
    return RuntimeHttpClient.from_server_address(
        address,
        True,
        None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
            FreeResponses(),
        ],
        **options,
    )


def answer_with_error(address: str, token: str, message: Message | None, reason: str) -> None:
    """Answer a message in place of a worker that cannot do it any more.

    `message` is None if the worker had not fetched it; then it is fetched here. If the worker died
    in the moment of fetching, it is not known which message it was. Then the task is left as it is:
    the SuperNode answers by itself when it misses the task's heartbeat, after a minute.
    """
    client = task_client(address, token)
    try:
        message = message or fetch_without_content(client)
        if message is None:
            return
        run, node = message.metadata.run_id, message.metadata.dst_node_id
        TaskIdentity.run_id, TaskIdentity.node_id = run, node
        reply = Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)
        push_message(client, reply, Context(run, node, {}, RecordDict(), {}))
        # Not before the reply is there: Flower would never answer the message of a finished task.
        push_task_output(client, None, SubStatus.FAILED, reason)
    except (httpx.HTTPError, RuntimeError) as error:
        print(f"motley: the failure could not be reported: {error}", file=sys.stderr, flush=True)
    finally:
        client.close()


def fetch_without_content(client: RuntimeHttpClient) -> Message | None:
    """Return the message of a task, or None if it cannot be fetched any more."""
    # Starting the task fails if the worker did it before it died.
    with suppress(httpx.HTTPStatusError):
        client.PullTaskInput(PullTaskInputRequest())
    messages = client.PullMessages(PullAppMessagesRequest()).messages_list
    return message_from_proto(messages[0]) if messages else None


def finish_dropped(address: str, token: str) -> None:
    """Finish the task of a message that was dropped.

    It gets no answer: the run has ended, and the SuperNode would take it for the answer to the
    message after it. If the task were left alone, the SuperNode would answer by itself.
    """
    client = task_client(address, token)
    try:
        push_task_output(client, None, SubStatus.FAILED, "the run of this message has ended")
    except (httpx.HTTPError, RuntimeError) as error:
        print(f"motley: a dropped message could not be ended: {error}", file=sys.stderr, flush=True)
    finally:
        client.close()


def end_supernode(node: subprocess.Popen[bytes]) -> None:
    """End a SuperNode gently, so that it can sign off from the server."""
    node.terminate()
    try:
        node.wait(END_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()


def next_task(client: RuntimeHttpClient) -> str:
    """Return the token of the next message's task; empty if there is none, or no SuperNode yet."""
    try:
        answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    except httpx.TransportError:
        return ""
    except httpx.HTTPStatusError as error:
        raise MotleyError(
            f"the SuperNode of this node refused to hand out messages: {error}"
        ) from None
    return str(answer.token) if answer.HasField("task") else ""


def run_tasks(node: subprocess.Popen[bytes], source: TaskSource, settings: WorkerSettings) -> int:
    """Have every message answered by a worker, until the SuperNode ends; return how it ended.

    A SuperNode that has received the beginning of an answer waits forever for the rest. So if a
    worker ends while it sends, the SuperNode is ended, too, and RECONNECT is returned.
    """
    client = source.connect()
    worker: Worker | None = None
    # The token of the message that replaced a dropped one.
    next_token = ""
    try:
        while node.poll() is None:
            token, next_token = next_token or next_task(client), ""
            if not token:
                if worker is not None and worker.idle_s > settings.keep_alive_s:
                    worker.end()
                    worker = None
                time.sleep(POLL_S)
                continue
            worker = _living(worker) or Worker(source.address, settings)
            stays = False
            try:
                stays = worker.answer(token, node, lambda: next_task(client))
            except DroppedError as dropped:
                worker.end()
                finish_dropped(source.address, token)
                next_token = dropped.next_token
            except WorkerError as failure:
                worker.end()
                reason = keep_text(failure, settings.log)
                if worker.sending:
                    end_supernode(node)
                    return RECONNECT
                answer_with_error(source.address, token, worker.message, reason)
            if not stays or settings.keep_alive_s == 0:
                worker.end()
                worker = None
    finally:
        client.close()
        if worker is not None:
            worker.end()
    return node.returncode


def _living(worker: Worker | None) -> Worker | None:
    """Return the worker if it can take a message. If it has died, free its resources."""
    if worker is None or worker.alive:
        return worker
    worker.end()
    return None
