"""Everything on the page *Your own data* runs as it is printed, in its order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import call

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.M)


def test_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    printed = ""
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
        elif language == "toml":
            Path(text.split()[1]).write_text(text, encoding="utf-8")
        elif language == "sh":
            for line in text.splitlines():
                answer = call(*shlex.split(line)[1:])
                assert answer.code == 0, f"{line}\n{answer.out}{answer.err}"
                printed = answer.out
        elif text.startswith("patients.csv"):
            shown = [line.split() for line in text.splitlines() if line != "..."]
            assert [line.split() for line in printed.splitlines()][: len(shown)] == shown
    assert (tmp_path / "patients.png").is_file()
    assert (tmp_path / "runs" / "roles" / "metrics.jsonl").is_file()
    assert names["record"].round_number == 2
