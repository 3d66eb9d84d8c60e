"""The process that runs the client app on a node's messages, one after the other.

    python -m motley.deploy.task SUPERNODE MODULE:ATTRIBUTE MAX_IDLE_MB

Every line of the standard input is the token of one message's task and the time at which it was
written. After every message the process reports on the standard output whether it stays; whatever
the app prints goes to the standard error. The process ends with its input, or after a message that
leaves it with more resident memory than MAX_IDLE_MB.

For one message this does what Flower's `flwr-clientapp` does, without its installation of the app
that the server sent along: the client app is the one that is named on the command line.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import IO

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from motley.deploy.worker import STAYS


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
    reports = take_over_output()
    try:
        for line in sys.stdin:
            token, begun = line.split()
            answer_message(address, reference, token, Laps(float(begun)))
            stays = holds_at_most(float(max_idle_mb))
            print(STAYS if stays else "ends", file=reports, flush=True)
            if not stays:
                break
    except KeyboardInterrupt:
        pass  # Ctrl-C, or Flower: this task is no longer wanted


def take_over_output() -> IO[str]:
    """Return the standard output; from now on everything printed goes to the standard error."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return reports


def answer_message(address: str, reference: str, token: str, laps: Laps) -> None:
    """Fetch a message, run the app on it, and hand its answer to the SuperNode.

    If the process ends before that, the SuperNode notices that its heartbeat stops, and answers
    with an error.
    """
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
        message_type = message.metadata.message_type
        reply = run_app(reference, message, context, laps)
        del message
        push_message(client, reply, context)
    finally:
        # Before the task ends: a heartbeat of a task that has ended would interrupt this process.
        heartbeat.stop()
    push_task_output(client, context, SubStatus.COMPLETED, "")
    client.close()
    laps.lap("send")
    print(f"motley: {message_type} message answered in {laps}", flush=True)


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
