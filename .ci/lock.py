"""Write requirements-lock.txt: everything that the development install needs, with hashes.

The versions are those of the environment that runs this (`make lock` uses .venv, with which the
tests pass). pip asks the package index for the hash of each file, without downloading it. Local
wheels are not asked, because theirs may be other builds.

torch is left out: one version of it has several builds, for CPUs and for versions of CUDA, and each
has a hash, and dependencies, of its own. constraints.txt has its version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCK = Path(__file__).parent.parent / "requirements-lock.txt"
PROJECT = "motleyfl"
#: Not locked: the project itself, and torch with its many builds.
LEFT_OUT = (PROJECT, "torch", "triton")
HEADER = """\
# Everything that `pip install -e ".[dev]"` needs, with hashes.
# For Linux on x86-64 and Python {python}.
# `make lock` writes this file. To install what it names, and nothing else:
#
#   pip install torch -c constraints.txt          (any build; README.md, "Which torch")
#   pip install --require-hashes --no-deps -r requirements-lock.txt
#   pip install --no-deps -e .
"""


def installed(name: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of all packages that an installed package needs, with some extras."""
    versions: dict[str, str] = {}
    seen = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        package, extra = waiting.pop()
        package = canonicalize_name(package)
        # The NVIDIA libraries belong to a build of torch.
        if (package, extra) in seen or package.startswith("nvidia-"):
            continue
        seen.add((package, extra))
        distribution = metadata.distribution(package)
        versions[package] = distribution.version
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            for inner in ("", *requirement.extras):
                waiting.append((requirement.name, inner))
    return {package: versions[package] for package in sorted(versions) if package not in LEFT_OUT}


def hashes_of(versions: dict[str, str]) -> dict[str, str]:
    """Return the SHA-256 hash of the file that pip would install for each package."""
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        environment.pop(variable, None)
    with tempfile.TemporaryDirectory() as folder:
        pins, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        command += ["--ignore-installed", "--report", str(report), "-r", str(pins)]
        subprocess.run(command, env=environment, check=True)
        entries = json.loads(report.read_text())["install"]
    hashes = {}
    for entry in entries:
        name = canonicalize_name(entry["metadata"]["name"])
        hashes[name] = entry["download_info"]["archive_info"]["hashes"]["sha256"]
    return hashes


def main() -> None:
    """Write the lock file."""
    versions = installed(PROJECT, ("dev",))
    hashes = hashes_of(versions)
    lines = [HEADER.format(python=f"{sys.version_info.major}.{sys.version_info.minor}")]
    for name, version in versions.items():
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{hashes[name]}\n")
    LOCK.write_text("".join(lines))
    print(f"{LOCK.name}: {len(versions)} packages")


if __name__ == "__main__":
    main()
