"""docs/models.md, run exactly as it is printed."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import call

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.M)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a working folder with the files of the page: blocks that begin with a file's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for _, text in BLOCKS:
        if name := re.match(r"# ([\w.]+)\n", text):
            (tmp_path / name[1]).write_text(text, encoding="utf-8")
    yield tmp_path
    for module in ("nets", "declared"):
        sys.modules.pop(module, None)


def test_the_program_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(folder / "train.py"))
    rounds = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rounds == ["1", "2"]


def test_the_configuration_trains_and_a_declaration_can_take_its_place(folder: Path) -> None:
    width = ("model.sizes=declared:large", "split.name=width", "split.rates=[1,0.5]")
    for overrides in ((), width):
        arguments = [argument for override in overrides for argument in ("--set", override)]
        answer = call("run", "run.toml", "--out", f"run{len(overrides)}", *arguments)
        assert answer.code == 0, answer.err


def test_the_command_describes_the_model(folder: Path) -> None:
    (command,) = [text for language, text in BLOCKS if language == "console"]
    answer = call(*command.removeprefix("$ motley ").split())
    assert answer.code == 0, answer.err
    assert "blocks: blocks.0, blocks.1, blocks.2" in answer.out
