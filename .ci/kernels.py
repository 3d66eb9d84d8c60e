"""Run the tests of Motley's kernels in Triton's interpreter, which needs no GPU.

Triton is installed into build/triton and not into .venv, because torch and Motley work differently
if it can be imported. If there is no Triton for this machine, the tests are skipped with a message.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PIN = ROOT / "requirements-kernels.txt"
FOLDER = ROOT / "build" / "triton"
TESTS = ("tests/engine/test_kernels_interpreted.py", "tests/benchmarks/test_large_maps.py")


def install() -> None:
    """Install the pinned Triton, if that has not been done. Exits if it cannot be."""
    marker = FOLDER / "installed.txt"
    wanted = f"Python {sys.version_info.major}.{sys.version_info.minor}\n{PIN.read_text()}"
    if marker.exists() and marker.read_text() == wanted:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--target", str(FOLDER), "-r", str(PIN)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        marker.write_text(wanted)
        return
    print(done.stderr, file=sys.stderr)
    # pip says the same about an index that cannot be reached, after it has tried again.
    if "No matching distribution found" in done.stderr and "Retrying" not in done.stderr:
        print(f"test-kernels: skipped: {PIN.name} names no Triton for this machine.")
        sys.exit(0)
    sys.exit("test-kernels: Triton cannot be installed.")


def main() -> None:
    """Run the tests. A skipped test is a failure: what it needs is here."""
    install()
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-rs", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    if done.returncode == 0 and re.search(r"\d+ skipped", done.stdout):
        sys.exit("test-kernels: tests were skipped.")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
