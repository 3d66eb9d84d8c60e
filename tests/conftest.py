"""What tests of every kind may ask for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from motley.config import Config, load_config, parse_overrides, resolve
from motley.core.errors import MotleyError
from motley.methods import METHODS, Method, MethodSettings, Requirements

torch.set_num_threads(1)
if hasattr(signal, "SIGHUP"):
    # Under nohup it is ignored, and the processes that tests start would inherit that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

TINY = (
    "data.transform.resize=8",
    "model.sizes=['resnet10','resnet14','resnet18']",
    "model.resnet.width=0.0625",
    "federation.clients=6",
    "federation.clients_per_round=4",
    "training.rounds=3",
    "training.epochs=1",
    "training.batch_size=32",
    "run.checkpoint_every=1",
)
"""Overrides that make the quickstart preset a run of a few seconds."""


def tiny_config(*overrides: str) -> Config:
    """Return a small digits federation of three sizes, with a layer of overrides on top."""
    return resolve("quickstart", [parse_overrides(TINY), parse_overrides(overrides)])


SHORT = {
    **{name: ("method.steps=2", "method.batch_size=16") for name in ("feddf", "fedet")},
    "fedrep": ("method.head_epochs=0.25",),
}
"""Settings of methods whose defaults take too long for a test."""


def chosen(name: str) -> tuple[str, ...]:
    """Return the settings that choose a method, and those that it needs beside its name."""
    needs = METHODS[name].requirements
    settings = [f"method.name={name}", *SHORT.get(name, ())]
    if needs.public_data:
        settings += ["public.name=noise", "public.samples=32"]
    if not needs.exchanges_weights:
        settings += ["server.ema_decay=0"]
    return tuple(settings)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shard I/N`, for processes that share a GPU and must not start at the same moment."""
    parser.addoption("--shard", metavar="I/N", help="run only every N-th test, from the I-th on")


@pytest.hookimpl(trylast=True)  # after -m and -k have left tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one shard of the tests."""
    shard = config.getoption("--shard")
    if shard is None:
        return
    try:
        number, count = (int(part) for part in shard.split("/"))
    except ValueError:
        number = count = 0
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--shard {shard!r} is not I/N with 1 <= I <= N, such as 1/3")
    left_out = [item for index, item in enumerate(items) if index % count != number - 1]
    items[:] = items[number - 1 :: count]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train clients in the tests' own process: pytest already keeps all cores busy.

    Workers are used by tests that set engine.workers.
    """
    monkeypatch.setattr("motley.engine.workers.available_cores", lambda: 1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the repository; tests that need them skip where there are none."""
    folder = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data sets are not at {folder}")
    return folder


class LogitsSettings(MethodSettings):
    """A method's own setting."""

    temperature: float = 1.0


class Logits(Method):
    """A method that sends no weights."""

    Settings = LogitsSettings
    requirements = Requirements(exchanges_weights=False)


@pytest.fixture
def logits() -> Iterator[str]:
    """Register a method that exchanges no weights, for one test."""
    METHODS.register("logits", "a toy")(Logits)
    yield "logits"
    del METHODS._entries["logits"]


def written(folder: Path, text: str) -> Path:
    """Return a new configuration file."""
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refused(*overrides: str, **given: Any) -> str:
    """Return what is said about a configuration that is refused."""
    with pytest.raises(MotleyError) as raised:
        load_config(overrides=overrides, **given)
    return str(raised.value)
