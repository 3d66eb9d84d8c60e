"""Randomness is keyed, not streamed.

Every random choice is drawn from a generator of its own, made from (seed, purpose, and whatever tells this choice from
the others: round, client, step). No global generator is read, and no order of execution matters: a resumed run, a run
with more slots and a run on other nodes all draw the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(seed: int, purpose: str, *which: int | str) -> int:
    """Return 63 bits that depend on every argument and on nothing else."""
    parts = (str(part).replace("\\", "\\\\").replace("/", "\\/") for part in (seed, purpose, *which))
    text = "/".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *which: int | str) -> np.random.Generator:
    """Return a NumPy generator for one choice (a partition, a round's clients, a client's batches)."""
    return np.random.Generator(np.random.Philox(key(seed, purpose, *which)))


@contextmanager
def torch_seed(seed: int, purpose: str, *which: int | str) -> Iterator[None]:
    """Run a block with torch's own CPU generator keyed, and leave the caller's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(key(seed, purpose, *which))
        yield
