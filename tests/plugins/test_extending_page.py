"""docs/extending.md, run exactly as it is printed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import motley.methods
from motley.flower.settings import read_node
from tests.cli.conftest import call

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.M)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_modules: None) -> Iterator[Path]:
    """Return a working folder with the files of the page: blocks that begin with a file's name."""
    monkeypatch.chdir(tmp_path)
    for _, text in BLOCKS:
        if name := re.match(r"# ([\w.]+)\n", text):
            (tmp_path / name[1]).write_text(text, encoding="utf-8")
    yield tmp_path
    for module in ("decay", "nets", "more"):
        sys.modules.pop(module, None)


def unnamed_python() -> list[str]:
    """Return the blocks of Python that do not begin with a file's name."""
    return [text for language, text in BLOCKS if language == "python" and text[0] != "#"]


def test_the_excerpt_of_scaffold_is_in_its_file() -> None:
    source = Path(motley.methods.__file__).with_name("scaffold.py").read_text(encoding="utf-8")
    (excerpt,) = [text for text in unnamed_python() if text.startswith("class ScaffoldClient")]
    for line in excerpt.splitlines():
        code, _, _comment = line.partition("  #")
        assert code.strip() in source


def test_python_without_a_file_name_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = [text for text in unnamed_python() if not text.startswith("class ")]
    assert len(programs) == 2
    sys.path.append(str(folder))
    for program in programs:
        exec(compile(program, "extending.md", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]


def test_commands_run(folder: Path) -> None:
    (commands,) = [text for language, text in BLOCKS if language == "console"]
    for line in commands.splitlines():
        answer = call(*line.removeprefix("$ motley ").split())
        assert answer.code == 0, answer.err
    assert "round 3 of 3" in call("show", "runs/decay").out


@pytest.mark.parametrize("file", ["nets.toml", "more.toml"])
def test_configurations_run(folder: Path, file: str) -> None:
    answer = call("run", file, "--out", "run")
    assert answer.code == 0, answer.err


def test_the_study_can_be_planned(folder: Path) -> None:
    answer = call("study", "study.toml", "--plan")
    assert answer.code == 0, answer.err
    assert "4 runs, 0 finished" in answer.out and "missing" not in answer.out


def test_the_message_about_a_wrong_key_is_as_printed(folder: Path) -> None:
    answer = call("config", "mine.toml", "--set", "method.strenth=0.2")
    said = "method.strenth = 0.2: unknown key 'strenth'. Did you mean 'strength'?"
    assert said in answer.err and said in PAGE.read_text(encoding="utf-8")


def test_the_nodes_settings_can_be_read(folder: Path) -> None:
    node = read_node(folder / "node.toml")
    assert node.modules == ("decay", "nets") and node.code.endswith("/../code")


def test_every_group_of_entry_points_is_listed() -> None:
    from motley.client.training import OPTIMIZER_CLASSES
    from motley.data import DATASETS, PARTITIONS
    from motley.methods import METHODS
    from motley.models import MODELS
    from motley.server.optimizer import SERVER_OPTIMIZER_CLASSES
    from motley.server.pipeline import STAGES
    from motley.splits import SPLITS
    from motley.tasks import LOSSES, METRICS, TASKS

    registries = (
        METHODS,
        MODELS,
        DATASETS,
        PARTITIONS,
        SPLITS,
        OPTIMIZER_CLASSES,
        SERVER_OPTIMIZER_CLASSES,
        STAGES,
        TASKS,
        LOSSES,
        METRICS,
    )
    page = PAGE.read_text(encoding="utf-8")
    for registry in registries:
        assert f"`{registry.group}`" in page
