"""Keyed randomness.

Every random choice has its own generator, keyed by the seed, a purpose, and whatever identifies the
choice: round, client, step. No global generator is used, so the order of execution does not matter:
a resumed run, a run with more slots and a run on other nodes all draw the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(seed: int, purpose: str, *which: int | str) -> int:
    """Return a 63-bit hash of the arguments."""
    parts = []
    for part in (seed, purpose, *which):
        text = str(part)
        if "/" in text or "\\" in text:
            # Escaped, so that different arguments never give the same text.
            text = text.replace("\\", "\\\\").replace("/", "\\/")
        parts.append(text)
    text = "/".join(parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, purpose: str, *which: int | str) -> np.random.Generator:
    """Return the NumPy generator of one choice, such as a partition or a client's batches."""
    return np.random.Generator(np.random.Philox(key(seed, purpose, *which)))


@contextmanager
def torch_seed(seed: int, purpose: str, *which: int | str) -> Iterator[None]:
    """Seed torch's CPU generator by a key for the duration of a block, then restore it."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(key(seed, purpose, *which))
        yield
