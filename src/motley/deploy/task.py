"""The process that runs the client app on a node's messages, one after the other.

    python -m motley.deploy.task SUPERNODE MODULE:ATTRIBUTE MAX_IDLE_MB

Every line of the standard input is the token of one message's task and the time at which it was
written. The process reports on its standard output, in the words of worker.py: when it has fetched
a message, every two seconds while it is alive, and whether it stays after a message. The app's own
output goes to the standard error. The process ends when its input ends, or after a message that
leaves it with more resident memory than MAX_IDLE_MB.

It takes the place of Flower's `flwr-clientapp`, which would install the app that the server sent
along. Here the command line names the client app.
"""

from __future__ import annotations

import base64
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Event, Lock, Thread

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullTaskInputRequest
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from motley.deploy.worker import ALIVE, ALIVE_S, ARRIVED, ENDS, FETCHED, SENDING, STAYS, task_client

#: Seconds after which a missing piece of a message is asked for again, on this machine.
FETCH_AGAIN_S = 0.1


class Reports:
    """Tells the node what this process does, on its original standard output."""

    def __init__(self) -> None:
        """Take over the standard output; everything printed goes to the standard error instead."""
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._lock = Lock()
        self._idle = Event()

    def say(self, word: str, value: object = "") -> None:
        """Report one of the words in worker.py."""
        with self._lock:
            print(word, value, file=self._output, flush=True)

    def start_work(self) -> None:
        """Show signs of life until the work is finished."""
        self._idle = Event()
        Thread(target=self._live, args=(self._idle,), name="alive", daemon=True).start()

    def finish_work(self) -> None:
        """Show no more signs of life."""
        self._idle.set()

    def _live(self, idle: Event) -> None:
        while True:
            try:
                self.say(ALIVE, time.process_time())
            except OSError:  # the node is gone, so the answer would not be read
                os._exit(1)
            if idle.wait(ALIVE_S):
                return


class Laps:
    """Splits the time of a message into named parts."""

    def __init__(self, begun: float) -> None:
        """`begun` is the wall-clock time at which the message was handed to this process."""
        self.begun = begun
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Add the time since the last lap to a part."""
        total = time.time() - self.begun
        self.seconds[name] = self.seconds.get(name, 0.0) + total - sum(self.seconds.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.3f} s ({parts})"


def main(address: str, reference: str, max_idle_mb: str) -> None:
    """Answer messages until the input ends."""
    reports = Reports()
    try:
        for line in sys.stdin:
            token, begun = line.split()
            reports.start_work()
            answer_message(address, reference, token, Laps(float(begun)), reports)
            reports.finish_work()
            stays = holds_at_most(float(max_idle_mb))
            reports.say(STAYS if stays else ENDS)
            if not stays:
                break
    except KeyboardInterrupt:
        pass  # Ctrl-C, or Flower: this task is no longer wanted
    except httpx.HTTPError as error:
        # The node notices the end of this process, and answers with an error if anybody waits.
        reason = str(error).splitlines()[0]
        sys.exit(f"motley: the SuperNode does not know this message any more: {reason}")


def answer_message(address: str, reference: str, token: str, laps: Laps, reports: Reports) -> None:
    """Fetch a message, run the app on it, and hand its answer to the SuperNode.

    If the process ends before that, the node notices it and answers with an error. For this purpose
    the process reports which message it has fetched.
    """
    laps.lap("start")
    client = task_client(address, token, retry_invoker=make_simple_http_retry_invoker())
    heartbeat = HeartbeatSender(heartbeat_function(client))
    heartbeat.start()
    try:
        message, context = fetch(client, reports)
        laps.lap("fetch")
        message_type = message.metadata.message_type
        reply = run_app(reference, message, context, laps)
        del message
        reports.say(SENDING)
        push_message(client, reply, context)
    finally:
        # Before the task ends: a heartbeat of a task that has ended would interrupt this process.
        heartbeat.stop()
    push_task_output(client, context, SubStatus.COMPLETED, "")
    client.close()
    laps.lap("send")
    print(f"motley: {message_type} message answered in {laps}", flush=True)


def heartbeat_function(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Return the function that sends a heartbeat and tells whether it has arrived.

    A SuperNode that refuses it has given the task up, for example while this process was stopped.
    The next request of the task fails for the same reason. Flower's thread would print a traceback
    before that, and could not be stopped afterwards.
    """
    send = make_task_heartbeat_fn_http(client)

    def send_unless_refused() -> bool:
        try:
            return send()
        except httpx.HTTPStatusError:
            return True

    return send_unless_refused


def fetch(client: RuntimeHttpClient, reports: Reports) -> tuple[Message, Context]:
    """Fetch the message of a task. The node is told its id before the content has arrived."""
    task = client.PullTaskInput(PullTaskInputRequest())
    TaskIdentity.task_id = task.task_id
    TaskIdentity.run_id = task.run.run_id
    TaskIdentity.node_id = task.context.node_id
    context = context_from_proto(task.context)
    response = client.PullMessages(PullAppMessagesRequest())
    about = response.messages_list[0].SerializeToString()
    reports.say(FETCHED, base64.b64encode(about).decode())
    tree = response.message_object_trees[0]
    node = Node(node_id=context.node_id)
    # The SuperNode hands a task out while its message still arrives. By default a piece that is
    # missing is asked for again after one second, then after two, and so on.
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(client.PullObject, node, context.run_id),
        make_confirm_message_received_fn_protobuf(
            client.ConfirmMessageReceived, node, context.run_id
        ),
        return_type=Message,
        initial_backoff=FETCH_AGAIN_S,
        backoff_cap=FETCH_AGAIN_S,
        max_tries_per_object=None,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    reports.say(ARRIVED)
    return message, context


def run_app(reference: str, message: Message, context: Context, laps: Laps) -> Message:
    """Run the app. If it raises, send only the exception's type: its text may quote the data."""
    module, _, attribute = reference.partition(":")
    try:
        app = getattr(import_module(module), attribute)
        laps.lap("import")
        return app(message=message, context=context)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__} at the node; the node's own log has the rest"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
    finally:
        laps.lap("work")


def holds_at_most(limit_mb: float) -> bool:
    """Tell whether this process's resident memory is within a limit; always true outside Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return True
    resident_mb = pages * os.sysconf("SC_PAGESIZE") / 1e6
    if resident_mb > limit_mb:
        print(
            f"motley: the worker holds {resident_mb:.0f} MB, "
            f"more than max_idle_mb = {limit_mb:g}; it ends",
            flush=True,
        )
    return resident_mb <= limit_mb


if __name__ == "__main__":
    main(*sys.argv[1:])
