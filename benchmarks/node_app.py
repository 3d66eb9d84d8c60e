"""The client app that `node.py` has a node run: Motley's own, which prints where its time goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import motley.node
from motley.flower.client import app as honest

SPLIT = "benchmark: "

seconds: dict[str, float] = {}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the time of every call of a function to a part of the message's time."""

    def call(*arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun

    return call


motley.node.Client.__init__ = timed("build", motley.node.Client.__init__)  # type: ignore[method-assign]
motley.node.Client.train = timed("train", motley.node.Client.train)  # type: ignore[method-assign]


def peak() -> int:
    """Return this process's highest resident memory.

    `getrusage` is of no use here: its figure starts with the peak of the process that started this
    one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no VmHWM")


def app(message: Any, context: Any) -> Any:
    """Answer, and print the seconds of each part, the process's peak of memory and its modules."""
    seconds.clear()
    reply = honest(message, context)
    about = {
        "seconds": dict(seconds),
        "peak": peak(),
        "dynamo": "torch._dynamo" in sys.modules,
    }
    print(f"{SPLIT}{json.dumps(about)}", flush=True)
    return reply
