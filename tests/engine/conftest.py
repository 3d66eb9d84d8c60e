"""Makes the methods of `toy_methods` known by name while the engine tests run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.methods import METHODS

sys.path.insert(0, str(Path(__file__).parent))

from toy_methods import Alternating, EveryHook, Looking, Noisy


@pytest.fixture(scope="session", autouse=True)
def toy_methods() -> Iterator[None]:
    """Register the toy methods, and take them out again."""
    toys = {"noisy": Noisy, "every-hook": EveryHook, "alternating": Alternating, "looking": Looking}
    for name, method in toys.items():
        METHODS.register(name, "made up for tests")(method)
    yield
    for name in toys:
        del METHODS._entries[name]
