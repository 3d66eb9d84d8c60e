"""The command line, called in this process, and one tiny run that tests may read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest

from motley.cli import main
from tests.conftest import TINY


class Answer(NamedTuple):
    """The exit status and the output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


def overrides(*more: str) -> list[str]:
    """Return arguments that make a run tiny."""
    return [argument for override in (*TINY, *more) for argument in ("--set", override)]


def call(*arguments: object) -> Answer:
    """Run the command line with arguments. Exceptions other than SystemExit reach the test."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr("sys.argv", ["motley", *map(str, arguments)])
        patch.setattr("sys.path", list(sys.path))  # commands add folders of users' modules
        patch.setenv("COLUMNS", "300")
        for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
            patch.delenv(name, raising=False)
        with pytest.raises(SystemExit) as left:
            main()
    code = left.value.code
    return Answer(
        code if isinstance(code, int) else int(code is not None), out.getvalue(), err.getvalue()
    )


@pytest.fixture
def motley(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return the command line, called in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return call


class TinyRun(NamedTuple):
    """A finished run and the output of its command."""

    path: Path
    answer: Answer


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Return a finished run of three rounds. Tests must not change it."""
    path = tmp_path_factory.mktemp("tiny") / "run"
    more = ("evaluation.last_k=2", "evaluation.targets=[0.01, 1.0]", "server.inco.variant=official")
    return TinyRun(path, call("run", *overrides(*more), "--out", path))
