"""Captures of CUDA graphs: what can be tested without a GPU."""

from __future__ import annotations

import gc
import weakref

import pytest

from motley.core.graphs import no_collection
from motley.federation import Federation
from tests.conftest import tiny_config


class Cycle:
    """An object that only the garbage collector can find."""

    def __init__(self) -> None:
        self.itself = self


def make_garbage() -> list[object]:
    """Create enough container objects that the collector runs if it is enabled."""
    return [[] for _ in range(20 * gc.get_threshold()[0] + 1000)]


def test_nothing_is_collected_inside_the_block() -> None:
    dropped = weakref.ref(Cycle())
    with no_collection():
        make_garbage()
        assert dropped() is not None, "a graph would have been destroyed during a capture"
    gc.collect()
    assert dropped() is None


def test_the_collector_is_left_as_it_was() -> None:
    with pytest.raises(RuntimeError), no_collection():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_federation_lives_until_the_collector_finds_it() -> None:
    """That is why a capture must keep the collector away. If this fails, it need not any more."""
    gc.collect()
    with no_collection():
        federation = weakref.ref(Federation(tiny_config()))
        assert federation() is not None
    gc.collect()
    assert federation() is None
