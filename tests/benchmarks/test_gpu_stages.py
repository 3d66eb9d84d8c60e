"""benchmarks/gpu.sh, as far as it can be tested without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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


@pytest.mark.skipif(
    shutil.which("nvidia-cuda-mps-control") is not None, reason="would start a service of the GPU"
)
@pytest.mark.parametrize("smoke", ["", "1"])
def test_every_command_that_fails_is_named(smoke: str, tmp_path: Path) -> None:
    stages = ("tests", "rounds", "fedimpro", "methods", "peers", "cores", "jobs", "campaign")
    environment = {**os.environ, "PYTHON": "false", "SMOKE": smoke, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", SCRIPT, tmp_path / "out", *stages], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1
    commands = ("tests-1", "tests-2", "tests-3", "rounds", "first_round", "fedimpro", "large_maps")
    commands += ("methods", "peers", "cores", "jobs-1", "jobs-3", "campaign")
    expected = [f"failed: {command} (status 1)" for command in commands]
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("failed")] == [
        *expected,
        "failed: results.tgz (there are no results)",
    ]
    for command in commands:
        assert (tmp_path / "out" / f"{command}.log").exists()
