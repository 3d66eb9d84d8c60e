"""Run the tests of Motley's kernels that need Triton and no GPU: interpreted, and compiled.

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
INTERPRETED = ("tests/engine/test_kernels_interpreted.py", "tests/benchmarks/test_large_maps.py")
COMPILED = ("tests/engine/test_kernels_compiled.py", "tests/engine/test_compiling.py")


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


def run(tests: tuple[str, ...], interpret: bool) -> None:
    """Run tests, and exit if one fails or is skipped: what they need is here."""
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-n", "2", "-rs", *tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    if re.search(r"\d+ skipped", done.stdout):
        sys.exit("test-kernels: tests were skipped.")


def main() -> None:
    """Install Triton, and run the tests."""
    install()
    run(INTERPRETED, interpret=True)
    run(COMPILED, interpret=False)


if __name__ == "__main__":
    main()
