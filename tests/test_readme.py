"""The configurations in the README are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from motley.config import load_config

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.M)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_can_be_loaded(example: str, tmp_path: Path) -> None:
    file = tmp_path / "example.toml"
    file.write_text(example, encoding="utf-8")
    load_config(file)


def test_there_is_an_example() -> None:
    assert EXAMPLES
