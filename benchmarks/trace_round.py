"""Count the calls inside Motley during one round: one client, one local step, on the CPU.

    python benchmarks/trace_round.py

The federation is FedProx with InCo and server momentum over two sizes of MLP. Only functions of the
package `motley` are counted; comprehensions, lambdas and generated functions are not. The first rounds
build models and caches, so a later one is traced. The numbers say how much of the code base a reader
meets on the way of one weight through one round.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import motley
from motley import Federation
from motley.config import load_config

PACKAGE = str(Path(motley.__file__).parent)
SETTINGS = (
    "data.name=digits",
    'model.sizes=["mlp1","mlp3"]',
    "federation.clients=4",
    "federation.clients_per_round=1",
    "training.steps=1",
    "method.name=InCoProx",
    "server.optimizer.name=momentum",
    "engine.device=cpu",
)

#: Rounds before the traced one. Clients of both sizes have trained by then.
WARM_UP = 8


class Trace:
    """Calls of Motley's own functions, in order."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.switches = 0
        self._last_file = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        file = str(Path(code.co_filename).relative_to(PACKAGE))
        self.calls[file, code.co_qualname] += 1
        if file != self._last_file:
            self.switches += 1
            self._last_file = file


def main() -> None:
    """Trace a round in which nothing is built any more, and print the counts."""
    federation = Federation(load_config(overrides=list(SETTINGS)))
    state = federation.initial_state()
    for _ in range(WARM_UP):
        state, _ = federation.run_round(state)
    trace = Trace()
    sys.setprofile(trace)
    try:
        federation.run_round(state)
    finally:
        sys.setprofile(None)
    files = Counter(file for file, _ in trace.calls)
    print(f"calls       {sum(trace.calls.values()):>5}")
    print(f"functions   {len(trace.calls):>5}")
    print(f"files       {len(files):>5}")
    print(f"switches    {trace.switches:>5}   (from one file to another)")
    if "--functions" in sys.argv:
        for (file, function), count in sorted(trace.calls.items()):
            print(f"{count:>5}  {file}  {function}")


if __name__ == "__main__":
    main()
