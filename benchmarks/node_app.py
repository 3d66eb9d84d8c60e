"""The client app that `node.py` has a node run: Motley's own, which prints where its time goes."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
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


def app(message: Any, context: Any) -> Any:
    """Answer, and print the seconds of each part, the process's peak of memory and its modules."""
    seconds.clear()
    reply = honest(message, context)
    about = {
        "seconds": dict(seconds),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "dynamo": "torch._dynamo" in sys.modules,
    }
    print(f"{SPLIT}{json.dumps(about)}", flush=True)
    return reply
