"""The app of a real node whose client 1 fails in another way in every one of the first rounds."""

from __future__ import annotations

import os
import resource
import signal
import time

from flwr.app import Context, Message

from motley.flower.client import NodeApp, build, settings_of

honest = build()
app = NodeApp(None)


def kill() -> None:
    """Die as a process dies that the system kills."""
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust() -> None:
    """Ask for more memory than the process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**35, hard))
    try:
        bytearray(2**36)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def stall() -> None:
    """Do nothing, with all other threads alive."""
    time.sleep(3600)


def freeze() -> None:
    """Stop all threads of the process."""
    os.kill(os.getpid(), signal.SIGSTOP)


FAILURES = [
    (kill, "worker-died"),
    (exhaust, "out-of-memory"),
    (stall, "stalled"),
    (freeze, "stalled"),
]
"""What client 1 does in rounds 1, 2, ..., and the kind of failure in the metrics."""


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Say who this is."""
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as asked; client 1 fails first."""
    round_number = int(message.metadata.group_id)
    if settings_of(context, None).client == 1 and round_number <= len(FAILURES):
        FAILURES[round_number - 1][0]()
    return honest(message, context)
