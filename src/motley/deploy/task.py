"""One message at a node, from beginning to end, in a process of its own.

    python -m motley.deploy.task SUPERNODE MODULE:ATTRIBUTE

The task's token is the first line of the standard input. This does what Flower's `flwr-clientapp` does, without its
installation of the app that the server sent along: the client app is the one that is named on the command line.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output


def main(address: str, reference: str) -> None:
    """Fetch the message, run the app on it, and hand its answer to the SuperNode.

    If the process ends before that, the SuperNode notices that its heartbeat stops, and answers with an error.
    """
    token = sys.stdin.readline().strip()
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
        reply = answer(reference, message, context)
        push_message(client, reply, context)
        push_task_output(client, context, SubStatus.COMPLETED, "")
    finally:
        heartbeat.stop()
        client.close()


def answer(reference: str, message: Message, context: Context) -> Message:
    """Run the app. Of an exception only the type travels: its text may be about the node's data."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(import_module(module), attribute)(message=message, context=context)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__} at the node; the node's own log has the rest"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


if __name__ == "__main__":
    main(*sys.argv[1:])
