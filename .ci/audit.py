"""Look for known vulnerabilities of everything in requirements-lock.txt, of torch and of Triton.

The audit fails for packages that Motley's users install with it (the dependencies in
pyproject.toml) or that constraints.txt pins, if a version without the vulnerability exists. All
others are tools of development or dependencies of dependencies; they are listed, and whoever
updates the lock file reads it. Without a network the audit is skipped, and says so.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parent.parent
ENVIRONMENT = ROOT / "build" / "audit"


def pins(text: str) -> dict[str, str]:
    """Return the versions that a requirements file pins."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\]+)", text, flags=re.MULTILINE))


def required(pyproject: str) -> set[str]:
    """Return the names of the dependencies that every install has."""
    names = set()
    for text in tomllib.loads(pyproject)["project"]["dependencies"]:
        match = re.match(r"[A-Za-z0-9._-]+", text)
        assert match is not None
        names.add(match[0].lower())
    return names


def judged(found: dict[str, list[dict]], ours: set[str]) -> tuple[list[str], list[str]]:
    """Return the lines about vulnerabilities that fail the audit, and about others."""
    failing, others = [], []
    for package in found["dependencies"]:
        for problem in package.get("vulns", []):
            fixed = ", ".join(problem["fix_versions"])
            line = f"{package['name']} {package['version']}: {problem['id']}"
            line += f", fixed in {fixed}" if fixed else ", no fixed version yet"
            (failing if fixed and package["name"].lower() in ours else others).append(line)
    return failing, others


def unaudited(found: dict[str, list[dict]]) -> list[str]:
    """Return the packages that pip-audit got no answer about, which it calls no vulnerability."""
    return [package["name"] for package in found["dependencies"] if "skip_reason" in package]


def skip(reason: str) -> NoReturn:
    """End without a result."""
    print(f"audit: skipped: {reason}")
    sys.exit(0)


def advisories(versions: dict[str, str]) -> dict[str, list[dict]]:
    """Ask pip-audit, which is installed into an environment of its own."""
    program = ENVIRONMENT / "bin" / "pip-audit"
    if not program.exists():
        venv.create(ENVIRONMENT, with_pip=True)
        command = [ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "--quiet", "pip-audit"]
        if subprocess.run(command, capture_output=True).returncode:
            skip("pip-audit cannot be installed.")
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [program, *options, "--output", report, "-r", wanted]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            return json.loads(report.read_text())
        except subprocess.TimeoutExpired:
            skip("the advisory service does not answer.")
        except (OSError, ValueError):
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            skip(f"the advisory service cannot be reached: {lines[-1][:200]}")


def main() -> None:
    """Print what is known, and exit with status 1 if something must be done."""
    constraints = pins((ROOT / "constraints.txt").read_text())
    versions = {**pins((ROOT / "requirements-lock.txt").read_text()), **constraints}
    versions |= pins((ROOT / "requirements-kernels.txt").read_text())
    ours = required((ROOT / "pyproject.toml").read_text()) | set(constraints)
    found = advisories(versions)
    unknown = unaudited(found)
    if len(unknown) == len(found["dependencies"]):
        # A mirror of the package index answers requests for packages, and knows no advisories.
        skip("the advisory service knows none of the packages.")
    failing, others = judged(found, ours)
    if unknown:
        print(f"audit: not known to the advisory service: {', '.join(unknown)}")
    for line in others:
        print(f"audit: note: {line}")
    for line in failing:
        print(f"audit: {line}")
    audited = len(found["dependencies"]) - len(unknown)
    print(f"audit: {audited} packages, {len(failing)} to update, {len(others)} notes")
    sys.exit(1 if failing else 0)


if __name__ == "__main__":
    main()
