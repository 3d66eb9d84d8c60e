"""benchmarks/gpu.sh, as far as it can be tested without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from motley.config import load_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu.sh"


def test_every_file_that_the_script_names_exists() -> None:
    text = SCRIPT.read_text()
    named = re.findall(r"(?:benchmarks|campaign|tests)/[\w/.-]+\w", text)
    modules = re.findall(r"-m (benchmarks[\w.]+)", text)
    named += [f"{module.replace('.', '/')}.py" for module in modules]
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_variants_of_the_script_are_valid_settings() -> None:
    # Written for bash, so "$half" stands for a precision.
    text = SCRIPT.read_text().replace("$half", "fp16")
    variants = re.findall(r'--variant "[^":]+: ([^"]+)"', text)
    assert len(variants) > 5
    for variant in variants:
        overrides = [setting.strip() for setting in variant.split(";")]
        for preset in ("inco-cifar10", "fedimpro-cifar10"):
            load_config(preset=preset, overrides=overrides)


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", SCRIPT, tmp_path / "out", "roundz"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "unknown stage 'roundz'; stages: tests rounds" in done.stderr
