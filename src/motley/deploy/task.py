"""One message at a node, from beginning to end, in a process of its own.

    python -m motley.deploy.task SUPERNODE MODULE:ATTRIBUTE

The task's token is the first line of the standard input. This does what Flower's `flwr-clientapp` does, without its
installation of the app that the server sent along: the client app is the one that is named on the command line.
"""

from __future__ import annotations

import sys
import time
import traceback
from importlib import import_module

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output


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


def main(address: str, reference: str) -> None:
    """Fetch the message, run the app on it, and hand its answer to the SuperNode.

    If the process ends before that, the SuperNode notices that its heartbeat stops, and answers
    with an error.
    """
    token, begun = sys.stdin.readline().split()
    laps = Laps(float(begun))
    laps.lap("start")
    client = RuntimeHttpClient.from_server_address(
        address,
        True,
        None,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
            RuntimeTokenHttpInterceptor(token),
        ],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    try:
        message, context, _, _ = pull_task_input(client)
        laps.lap("fetch")
        reply = answer(reference, message, context, laps)
        push_message(client, reply, context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
        laps.lap("send")
    finally:
        heartbeat.stop()
        client.close()
    print(f"motley: {message.metadata.message_type} message answered in {laps}", flush=True)


def answer(reference: str, message: Message, context: Context, laps: Laps) -> Message:
    """Run the app. Of an exception only the type travels: its text may be about the node's data."""
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


if __name__ == "__main__":
    main(*sys.argv[1:])
