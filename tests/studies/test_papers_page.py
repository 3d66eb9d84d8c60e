"""docs/papers.md: what it names exists, and nothing of the three papers is missing."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from motley.analysis import ANALYSES
from motley.config import load_config, parse_overrides
from motley.settings import validate
from motley.studies.declaration import studies

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
TEXT = PAGE.read_text(encoding="utf-8")
#: Everything between backticks.
CODE = re.findall(r"`([^`]+)`", TEXT)
#: Paper -> the numbers of its last equation, table and figure.
LAST = {
    "InCo Aggregation": {"Eq.": 40, "Table": 4, "Figure": 19},
    "FedIN": {"Eq.": 21, "Table": 6, "Figure": 11},
    "FedImpro": {"Eq.": 23, "Table": 11, "Figure": 13},
}
STATES = ("exact", "reproduced", "differs", "pending", "data", "none")


def commands(start: str) -> list[list[str]]:
    """Return the page's commands that begin with `start`, as lists of words."""
    return [shlex.split(code) for code in CODE if code.startswith(start + " ")]


def options(words: list[str], name: str) -> list[str]:
    """Return the values of an option that may be given several times."""
    values = []
    for option, value in itertools.pairwise(words):
        if option == name:
            values.append(value)
    return values


def rows() -> list[tuple[str, list[str]]]:
    """Return every row of every table with five columns, with the paper that it belongs to."""
    paper = ""
    result = []
    for line in TEXT.splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        if not line.startswith("| ") or line.startswith("| in the paper"):
            continue
        cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        if len(cells) == 5:
            result.append((paper, [cell.strip() for cell in cells]))
    return result


def test_every_study_named_exists_and_every_study_is_named() -> None:
    named = {words[2] for words in commands("motley study")}
    assert named == set(studies())


def test_lines_data_sets_and_cases_of_studies_exist() -> None:
    library = studies()
    for words in commands("motley study"):
        study = library[words[2]]
        assert set(options(words, "--method")) <= {row.name for row in study.methods}, words
        assert set(options(words, "--data")) <= {column.name for column in study.data}, words
        assert set(options(words, "--case")) <= {case.name for case in study.cases}, words


#: Analyses of Motley's own, which none of the three papers has.
OF_NO_PAPER = {"exits", "test-clients"}


def test_every_analysis_named_exists_and_every_analysis_is_named() -> None:
    named = {words[2] for words in commands("motley analyze")}
    assert named | OF_NO_PAPER == {entry.name for entry in ANALYSES}


def test_settings_of_analyses_are_valid() -> None:
    for words in commands("motley analyze"):
        analysis = ANALYSES[words[2]]
        validate(analysis.settings_class, parse_overrides(options(words, "--set")), words[2])


@pytest.mark.parametrize("words", commands("motley run"), ids=" ".join)
def test_every_run_is_a_valid_configuration(words: list[str]) -> None:
    (preset,) = options(words, "--preset")
    load_config(preset=preset, overrides=options(words, "--set"))


def test_files_and_names_in_them_exist() -> None:
    for code in CODE:
        reference = re.fullmatch(r"([\w/-]+\.py)(?::([\w.]+))?", code)
        if not reference:
            continue
        file, name = reference.groups()
        folder = ROOT if file.startswith("tests/") else ROOT / "src" / "motley"
        assert (folder / file).is_file(), code
        if name:
            path = "motley." + file.removesuffix(".py").replace("/", ".")
            target = importlib.import_module(path)
            for part in name.split("."):
                target = getattr(target, part)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (PAGE.parent / target.partition("#")[0]).is_file(), target


@pytest.mark.parametrize("paper", LAST)
def test_no_equation_table_or_figure_is_missing(paper: str) -> None:
    first_column = " ".join(cells[0] for name, cells in rows() if name == paper)
    for item, last in LAST[paper].items():
        numbers = {int(number) for number in re.findall(rf"{re.escape(item)} (\d+)", first_column)}
        assert numbers == set(range(1, last + 1)), item


def test_every_row_has_a_state() -> None:
    for _, cells in rows():
        words = re.findall(r"\*\*(\w+)\*\*", cells[4])
        assert words or cells[4].startswith(("as ", "see ", "beyond ", "the numbers of")), cells
        assert set(words) <= set(STATES), cells
