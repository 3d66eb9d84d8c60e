"""CPU time per round of every method, as a multiple of FedAvg's. On any machine:

    OMP_NUM_THREADS=1 python benchmarks/method_cost.py [--rounds 5] [--methods NAME ...] [--json FILE]

The quickstart's five ResNets on digits, with one local epoch, on one core. All methods sample the same clients with the
same examples. They run in turns, one round each, so that other work on the machine slows all of them, and CPU time is
measured instead of seconds. The first round of each method is left out: it builds the models. FedAvg runs first and
last in every turn; the ratio of the two is the control.

Printed for every method: the median ratio to the mean of the two FedAvg rounds of the same turn, the same for the
phases of a round (train: the clients; merge: the server and its collections; evaluate), and why it may cost more. A
method that does more passes over its batches than FedAvg, or trains at the server, does so by its definition.

`benchmarks/methods.py` has the times on a GPU, where launches and not arithmetic decide.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from report import arguments, machine, report

from motley.config import load_config
from motley.federation import Federation
from motley.methods import METHODS
from motley.server.state import ServerState

SETTING = ("training.epochs=1", "engine.workers=1", "engine.device=cpu")
#: FedAvg is measured anyway. FjORD draws widths, and here sizes differ in depth.
LEFT_OUT = ("fedavg", "fjord")
#: Without one global model, the models of the round's clients are evaluated. This is all that FD
#: and FedProto do more: they collect their means per class in the training steps.
OWN_MODELS = "ten clients' models are evaluated, not five sizes"
#: What a method does by its definition that FedAvg does not.
MORE_WORK = {
    "ccvr": "features of all clients once per evaluation",
    "ccvr-moon": "MOON, and CCVR's features",
    "ccvr-prox": "features of all clients once per evaluation",
    "depthfl": "a loss at every exit, and its teachers",
    "ditto": f"two models train on every batch; {OWN_MODELS}",
    "fd": OWN_MODELS,
    "feddf": "the server distills",
    "fedet": "the server distills",
    "fedgen": "the server trains a generator, and clients a second batch",
    "fedimpro": "shared features join every batch at the high level",
    "fedimpro-dyn": "FedImpro's",
    "fedimpro-nova": "FedImpro's",
    "fedimpro-prox": "FedImpro's",
    "fedimpro-scaffold": "FedImpro's",
    "fedin": "a second pass through the intermediate layers",
    "fedmd": f"clients train on public images too; {OWN_MODELS}",
    "fedproto": OWN_MODELS,
    "fedrep": f"the head's own epochs, forward; {OWN_MODELS}",
    "fedspeed": "two passes per step",
    "fedsam": "two passes per step",
    "heterofl": "a pass over all clients' examples for the statistics",
    "local": OWN_MODELS,
    "moon": "two more forward passes per step",
    "scalefl": "a loss at every exit",
}


def settings(name: str) -> list[str]:
    """Return the settings that choose a method, and those that it needs beside its name."""
    needs = METHODS[name].requirements
    chosen = [*SETTING, f"method.name={name}"]
    if needs.public_data:
        chosen += ["public.name=held-out", "public.samples=200"]
    if not needs.exchanges_weights:
        chosen += ["server.ema_decay=0"]
    return chosen


class Runner:
    """A federation of one method, and the CPU time of each of its rounds."""

    def __init__(self, name: str) -> None:
        self.federation = Federation(load_config(preset="quickstart", overrides=settings(name)))
        self.server: ServerState = self.federation.initial_state()
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.advance()
        self.seconds.clear()
        self.phases.clear()

    def advance(self) -> None:
        """Run one round."""
        begin = time.process_time()
        self.server, record = self.federation.run_round(self.server)
        self.seconds.append(time.process_time() - begin)
        self.phases.append(record.seconds)


def row(name: str, runner: Runner, fedavg: list[float]) -> dict[str, Any]:
    """Return what a method costs. `fedavg` is the CPU time of FedAvg's round in every turn."""
    ratios = [own / plain for own, plain in zip(runner.seconds, fedavg, strict=True)]
    total = sum(sum(phases.values()) for phases in runner.phases)
    shares = {}
    for phase in ("train", "merge", "evaluate"):
        spent = sum(phases.get(phase, 0.0) for phases in runner.phases)
        shares[f"{phase}, %"] = round(100 * spent / total)
    return {
        "method": name,
        "of FedAvg's": round(statistics.median(ratios), 2),
        "least": round(min(ratios), 2),
        "most": round(max(ratios), 2),
        **shares,
        "more work": MORE_WORK.get(name, ""),
    }


def main() -> None:
    """Measure all methods in turns."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", help="default: all")
    options = parser.parse_args()
    about = machine("torch", "motleyfl")
    names = options.methods or [entry.name for entry in METHODS if entry.name not in LEFT_OUT]
    first, last = Runner("fedavg"), Runner("fedavg")
    runners = {}
    for name in names:
        try:
            runners[name] = Runner(name)
        except Exception as error:
            print(f"{name}: left out: {error}")
    for number in range(options.rounds):
        first.advance()
        for runner in runners.values():
            runner.advance()
        last.advance()
        print(f"turn {number + 1} of {options.rounds}", flush=True)
    pairs = zip(first.seconds, last.seconds, strict=True)
    fedavg = [statistics.fmean(pair) for pair in pairs]
    rows = [row("fedavg, first", first, fedavg), row("fedavg, last", last, fedavg)]
    measured = [row(name, runner, fedavg) for name, runner in runners.items()]
    rows += sorted(measured, key=lambda one: one["of FedAvg's"])
    report(rows, about, options.json)


if __name__ == "__main__":
    main()
