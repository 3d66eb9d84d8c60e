"""Names from files of others: no script of them runs in the report, and no terminal obeys them."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tomli_w

from motley.files import markdown_text
from motley.report.report_data import gather
from tests.cli.conftest import call
from tests.report.test_browser import CHROMIUM, LISTEN, probed, visit

pytest.importorskip("plotly")

#: HTML, an attribute's end, a link for plotly, rich's markup, ANSI escapes, control characters.
HOSTILE = (
    "</script><script>document.body.dataset.hacked = 1</script>"
    "\" onload='document.body.dataset.hacked = 2' <img src=x onerror='document.body.dataset.hacked=3'>"
    "<a href='javascript:hacked()'>x</a>[red][/][/bold]:x:\x1b[31m\x1b]0;title\x07\x9b\u202e|`\\"
)
#: The same for a folder, whose name has no slash.
FOLDER = "<img src=x onerror='document.body.dataset.hacked=4'>[red]:x:\x1b[31m\u202e"
ASK = """
window.addEventListener("load", () => setTimeout(() => {
  told.hacked = document.body.dataset.hacked ?? "no";
  told.drawn = [...document.querySelectorAll(".plot")].filter((plot) => plot.data).length;
  told.links = document.querySelectorAll("svg a").length;
  tell();
}, 3000));
"""


def hostile_run(source: Path, folder: Path) -> Path:
    """Copy a run, with hostile names wherever its files may have names."""
    shutil.copytree(source, folder)
    config = tomllib.loads((folder / "config.toml").read_text())
    config["preset"] = HOSTILE
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    environment = dict.fromkeys(("motley", "torch", "processor", "cores"), HOSTILE)
    (folder / "environment.json").write_text(json.dumps(environment))
    lines = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for key in ("accuracy", "loss", "class_accuracy"):
            values = line.get(key)
            if isinstance(values, dict) and "mlp1" in values:
                line[key] = {HOSTILE if k == "mlp1" else k: v for k, v in values.items()}
        line["seconds"][HOSTILE] = 0.1
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "analysis").mkdir(exist_ok=True)
    (folder / "analysis" / f"{FOLDER}.png").write_bytes(b"")
    return folder


def hostile_study(source: Path, run: Path, folder: Path) -> Path:
    """Return the folder of a study with hostile texts in every field."""
    folder.mkdir()
    saved = json.loads((source / "study.json").read_text())
    for key, value in saved.items():
        if isinstance(value, str):
            saved[key] = HOSTILE
    saved["missing"] = {HOSTILE: [HOSTILE]}
    for number, cell in enumerate(saved["cells"]):
        cell["column"] = HOSTILE
        cell["method"] = f"{HOSTILE}{number}"
        cell["line"] = [HOSTILE] * len(cell["line"])
        cell["runs"] = {"1": str(run)}
    (folder / "study.json").write_text(json.dumps(saved))
    return folder


@pytest.fixture
def hostile(runs: list[Path], study: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a hostile run and a hostile study."""
    run = hostile_run(runs[0], tmp_path / FOLDER)
    return run, hostile_study(study, run, tmp_path / "study")


class Elements(HTMLParser):
    """The scripts of a page, and the attributes of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def test_the_report_holds_no_element_from_a_name(hostile: tuple[Path, Path]) -> None:
    from motley.report.page import render

    for path in hostile:
        page = render(gather([path]), f"{HOSTILE} {path.name}", live=True)
        elements = Elements()
        elements.feed(page)
        assert not [name for name in elements.attributes if name.startswith("on")]
        assert "a" not in elements.tags
        assert len(re.findall(r"<script>", page)) == 1  # page.js; the rest is data
        assert "dataset.hacked = 1</script>" not in page
        assert "&lt;script&gt;document.body.dataset.hacked" in page


def test_plotly_is_given_names_without_tags(hostile: tuple[Path, Path]) -> None:
    from motley.report.page import render

    page = render(gather([hostile[0]]), "one")
    texts: list[str] = []

    def walk(value: object, key: str = "") -> Iterator[str]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(inner, name)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner, key)
        elif isinstance(value, str) and key != "legendgroup":
            yield value

    for data in re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.S):
        texts += walk(json.loads(data))
    assert any("&lt;a href=" in text for text in texts)
    assert not [text for text in texts if re.search(r"<(?!extra>|/extra>)", text)]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_no_script_of_a_name_runs_in_a_browser(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    from motley.report.page import render

    assert "told" in LISTEN
    for number, path in enumerate(hostile):
        file = tmp_path / f"page{number}.html"
        file.write_text(
            probed(render(gather([path]), HOSTILE), ASK), encoding="utf-8", errors="replace"
        )
        told = visit(file.as_uri(), tmp_path)
        assert told["hacked"] == "no"
        assert told["drawn"] and not told["links"]
        assert told["violations"] == []  # nothing was blocked, because there was nothing


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_policy_blocks_a_script_that_slips_through(runs: list[Path], tmp_path: Path) -> None:
    from motley.report.page import render

    page = render(gather(runs[:1]), "one").replace(
        "<h1>", "<script>document.body.dataset.hacked = 1</script><h1>"
    )
    file = tmp_path / "page.html"
    file.write_text(probed(page, ASK))
    told = visit(file.as_uri(), tmp_path)
    assert told["hacked"] == "no" and told["violations"] == ["inline"]


def obeyed(text: str) -> list[str]:
    """Return the control characters in a text that a terminal would obey."""
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_terminals_are_shown_names_as_they_are(hostile: tuple[Path, Path], tmp_path: Path) -> None:
    run, study = hostile
    commands = (
        ("show", run),
        ("show", run, run),
        ("list", "runs", tmp_path),
        ("report", study, "-o", tmp_path / "page.html", "--title", HOSTILE),
        ("report", run, "-o", tmp_path / "page.html"),
        ("show", tmp_path / f"absent{FOLDER}"),
        ("config", "--set", f"model.sizes={HOSTILE}"),
        ("run", "--preset", HOSTILE),
        ("export", run, "--size", HOSTILE),
        ("list", HOSTILE),
    )
    for command in commands:
        answer = call(*command)
        assert not obeyed(answer.out + answer.err), command
        assert "bug in Motley" not in answer.err
    shown = call("show", run)
    assert shown.code == 0
    assert "[red][/][/bold]:x:\\x1b[31m\\x1b]0;title\\x07\\x9b\\u202e" in shown.out


def test_class_names_of_a_table_are_shown_as_they_are(tmp_path: Path) -> None:
    names = ["[/]", "[red]x\x1b[31m"]
    rows = "".join(f'{i},"{names[i % 2]}","c[/]{i % 3}"\n' for i in range(30))
    file = tmp_path / "[bold]mine.csv"
    file.write_text(f"[red]a,label,who\n{rows}")
    answer = call("data", "check", file, "--client", "who")
    assert answer.code == 0, answer.err
    assert "[red]x\\x1b[31m" in answer.out and "[/]" in answer.out
    assert not obeyed(answer.out)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cells": [{}]}, r"cells\.0\.method: Field required"),
        ({"cells": 3}, "cells: Input should be a valid list"),
        ({"scale": ["<b>"]}, "scale: Input should be a valid string"),
        ({"planned_runs": "1"}, "planned_runs: Input should be a valid integer"),
        ({"missing": {"a": "b"}}, r"missing\.a: Input should be a valid list"),
        (None, "its content: "),
    ],
)
def test_a_damaged_study_is_refused_with_the_field(
    study: Path, tmp_path: Path, change: object, said: str
) -> None:
    saved = json.loads((study / "study.json").read_text())
    content = {**saved, **change} if isinstance(change, dict) else change
    (tmp_path / "study.json").write_text(json.dumps(content))
    answer = call("report", tmp_path, "-o", tmp_path / "page.html")
    assert answer.code == 2
    assert re.search(rf"study\.json is not the description of a study: {said}", answer.err)


def test_deeply_nested_study_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("[" * 100_000 + "]" * 100_000)
    answer = call("report", tmp_path, "-o", tmp_path / "page.html")
    assert answer.code == 2 and "study.json cannot be read" in answer.err


def test_names_in_markdown() -> None:
    assert markdown_text("a|b\n`c`\x1b<d>&[e](f)") == "a\\|b \\`c\\` &lt;d&gt;&amp;\\[e\\](f)"
    assert markdown_text("resnet18 of cifar-10, 3.5 %") == "resnet18 of cifar-10, 3.5 %"
