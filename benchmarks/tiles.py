"""Which tiles of Motley's kernels are fastest where they are used: beside the steps of other clients.

    python -m benchmarks.tiles --output tiles.json --precision tf32 --seconds 240

A kernel that is fastest alone may be slow beside others, because its programs are too large to share a multiprocessor. So
whole training steps are measured, in the setting of `docs/benchmarks.md`: ten slots of a size replay their captured steps
at the same time (`benchmarks/step_profile.py`), and the milliseconds per step are added up over `--sizes`.

The search begins with the values in the code. It tries the other values of one constant at a time, keeps the best, goes on
to the next constant, and ends when a whole pass over all constants has changed nothing, or after `--seconds`. A gain of
less than half a percent counts as noise. Settings that fail, or whose loss after a few steps is another, are written down
and not kept. The constants are those at the top of `motley/kernels/convolve.py`, `stem.py` and `optimizers.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_profile import SETTING, make_slots, milliseconds_per_step
from motley.bench import synthetic_dataset
from motley.config import load_config
from motley.engine.device import numerics, request_hardware_queues
from motley.federation import Federation
from motley.kernels import AVAILABLE
from motley.runs.folder import describe_environment

if AVAILABLE:
    from motley.kernels import convolve, optimizers, stem

#: Slots of a size that replay their steps at the same time.
TOGETHER = 10
#: A setting must be faster by this factor to be kept.
GAIN = 0.995
#: The largest relative difference of the loss after `STEPS` steps from that with the first setting.
LOSS_LIMIT = 0.02
STEPS = 8


@dataclass(frozen=True)
class Constant:
    """One constant of the kernels: an entry of a table, or an attribute of a module."""

    name: str
    place: Any
    key: str
    values: Sequence[int]

    def read(self) -> int:
        """Return its current value."""
        value = (
            self.place[self.key] if isinstance(self.place, dict) else getattr(self.place, self.key)
        )
        return int(value)

    def write(self, value: int) -> None:
        """Change it, for all kernels that are launched from now on."""
        if isinstance(self.place, dict):
            self.place[self.key] = value
        else:
            setattr(self.place, self.key, value)


def all_constants(precision: str) -> list[Constant]:
    """Return the constants that matter in a precision, those with the largest share of the time first."""
    bytes_per_value = 2 if precision in ("fp16", "bf16") else 4
    constants = []
    tables = {
        "TILES": convolve.TILES[bytes_per_value],
        "GRADIENT_TILES": convolve.GRADIENT_TILES[bytes_per_value],
    }
    for table_name, table in tables.items():
        for key in ("IMAGES", "OUTPUTS", "INPUTS"):
            constants.append(Constant(f"{table_name} {key}", table, key, (32, 64, 128)))
        constants.append(Constant(f"{table_name} num_warps", table, "num_warps", (2, 4, 8)))
        constants.append(Constant(f"{table_name} num_stages", table, "num_stages", (2, 3, 4, 5)))
    few = (2**15, 2**16, 2**17, 2**18, 2**19)
    constants.append(Constant("FEW", convolve, "FEW", few))
    constants.append(Constant("stem ROWS", stem, "ROWS", (64, 128, 256)))
    constants.append(Constant("stem BLOCKS", stem, "BLOCKS", (8, 16, 32)))
    constants.append(Constant("optimizer WARPS", optimizers, "WARPS", (4, 8)))
    return constants


def search(
    constants: Sequence[Constant],
    measure: Callable[[], float],
    latest: float,
    note: Callable[[dict[str, Any]], None],
) -> dict[str, int]:
    """Find the best values of constants, one constant at a time, and leave these values in place.

    `measure` returns the milliseconds with the current values, or raises. `latest`: no measurement
    begins after this time. `note` is called with every measurement.
    """

    def try_current(changed: str) -> float:
        values = {constant.name: constant.read() for constant in constants}
        entry: dict[str, Any] = {"changed": changed, "values": values}
        try:
            entry["ms"] = measure()
        except Exception as error:
            traceback.print_exc()
            entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        note(entry)
        return float(entry.get("ms", math.inf))

    best = try_current("nothing")
    if math.isinf(best):
        raise SystemExit("the values in the code cannot be measured")
    has_improved = True
    while has_improved:
        has_improved = False
        for constant in constants:
            kept = constant.read()
            for value in constant.values:
                # The value of the pass's beginning has been measured already.
                if value == kept or time.perf_counter() > latest:
                    continue
                best_value = constant.read()
                constant.write(value)
                milliseconds = try_current(f"{constant.name} = {value}")
                if milliseconds < GAIN * best:
                    best, has_improved = milliseconds, True
                else:
                    constant.write(best_value)
    return {constant.name: constant.read() for constant in constants}


class Measurement:
    """Measures steps of several sizes, and compares their losses with those of the first time."""

    def __init__(self, federation: Federation, sizes: Sequence[str]) -> None:
        self.federation, self.sizes = federation, sizes
        self.first_losses: dict[str, float] = {}

    def __call__(self) -> float:
        """Return the milliseconds per step, added up over the sizes."""
        total = 0.0
        for size in self.sizes:
            slots = make_slots(self.federation, size, TOGETHER)
            total += milliseconds_per_step(slots)
            self._check_loss(slots[0], size)
            del slots
            gc.collect()
            torch.cuda.empty_cache()
        return round(total, 4)

    def _check_loss(self, slot: Any, size: str) -> None:
        """Train a client from the beginning, and raise if its loss is another than the first time."""
        job = slot.learner.job
        slot.load(job, slot.clients.plan(job))
        while slot.learner.num_steps < STEPS and not slot.learner.finished:
            slot.advance()
        torch.cuda.synchronize()
        loss = float(slot.learner.result()[2]) / slot.learner.num_steps
        first = self.first_losses.setdefault(size, loss)
        if not abs(loss - first) <= LOSS_LIMIT * abs(first):
            raise ValueError(f"the loss of {size} is {loss:.4f} instead of {first:.4f}")


def main() -> None:
    """Search, and write every measurement as soon as it is made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--precision", default="fp16", choices=("tf32", "fp16", "bf16"))
    parser.add_argument("--sizes", nargs="+", default=["resnet14", "resnet26"])
    parser.add_argument(
        "--seconds", type=float, default=240, help="begin no measurement after this"
    )
    arguments = parser.parse_args()
    if not (AVAILABLE and torch.cuda.is_available()):
        parser.error("this needs a GPU and Triton")
    latest = time.perf_counter() + arguments.seconds
    request_hardware_queues()
    overrides = [*SETTING, f"engine.precision={arguments.precision}"]
    config = load_config(None, preset="inco-cifar10", overrides=overrides)
    federation = Federation(config, dataset=synthetic_dataset("cifar10"))
    content: dict[str, Any] = {
        "environment": describe_environment(),
        "settings": overrides,
        "sizes": arguments.sizes,
        "measurements": [],
    }

    def note(entry: dict[str, Any]) -> None:
        content["measurements"].append(entry)
        print(f"{entry['changed']:32} {entry.get('ms', entry.get('error'))}", flush=True)
        arguments.output.write_text(json.dumps(content, indent=1))

    with numerics(arguments.precision, 1):
        measure = Measurement(federation, arguments.sizes)
        best = search(all_constants(arguments.precision), measure, latest, note)
    content["best"] = best
    arguments.output.write_text(json.dumps(content, indent=1))
    print(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
