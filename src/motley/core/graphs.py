"""Capture CUDA graphs safely: no garbage collection during a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Iterator[None]:
    """Capture the work that the block queues on `stream`, without garbage collection.

    A federation is part of reference cycles, so its graphs live on until Python's collector finds
    them. If the collector ran during the capture of another graph, it would destroy them then, and
    CUDA forbids that: the capture becomes invalid. torch collected before each capture until
    version 2.8, and no longer does (pytorch/pytorch#161037).
    """
    with no_collection(), torch.cuda.graph(graph, pool=pool, stream=stream):
        yield


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
