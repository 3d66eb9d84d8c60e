"""Everything on the page *From laptop to three machines* runs as it is printed, in its order."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from motley.deploy.commands import free_port
from tests.cli.conftest import call

PAGE = Path(__file__).parents[2] / "docs" / "three-machines.md"
BLOCKS = re.findall(
    r'^```(\w+)(?: title="([^"]*)")?\n(.*?)^```',
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
#: Seconds before the test gives up: processes start slowly on a busy machine.
PATIENCE = 600.0
INIT = "motley deploy init "


def start(command: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a command of the page in a process of its own, in the current folder."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *shlex.split(command)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def wait_for(log: Path, text: str) -> None:
    end = time.monotonic() + PATIENCE
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < end, log.read_text(errors="replace")
        time.sleep(0.1)


@pytest.mark.slow
def test_the_page_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    processes: list[subprocess.Popen[bytes]] = []
    fingerprints = []
    try:
        for language, title, text in BLOCKS:
            if language == "toml":
                Path(text.split()[1]).write_text(text, encoding="utf-8")
                continue
            for line in text.splitlines():
                if title:
                    log = tmp_path / f"{len(processes)}.log"
                    processes.append(start(line, log))
                    if title == "on the server":
                        wait_for(log, "serving at")
                    if "deploy run" in line:
                        assert processes[-1].wait(PATIENCE) == 0, log.read_text(errors="replace")
                    continue
                # The default port may be taken on a machine that runs several tests.
                port = f" --port {free_port()}" if line.startswith(INIT) else ""
                answer = call(*shlex.split(line + port)[1:])
                assert answer.code == 0, f"{line}\n{answer.out}{answer.err}"
                if "--fingerprint" in line:
                    fingerprints.append(answer.out.split()[-1])
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            process.wait(PATIENCE)
    assert len(fingerprints) == 2 and fingerprints[0] == fingerprints[1]
