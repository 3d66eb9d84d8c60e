"""Warnings on stderr, among them those about runs whose files were changed from outside."""

from __future__ import annotations

from pathlib import Path

from motley.cli.terminal import Console
from motley.core.errors import MotleyError
from motley.runs.folder import RunFolder
from motley.runs.integrity import find_problems


def warn(text: str) -> None:
    """Print a warning to stderr."""
    Console(stderr=True).print(
        f"motley: warning: {text}", highlight=False, markup=False, soft_wrap=True
    )


def warn_about(*paths: Path, model: bool = False) -> None:
    """Warn about changes of runs that they did not make themselves.

    `model`: the command uses the model of the newest checkpoint.
    Folders that are no runs, and files that cannot be read, are left to the command, which names
    them.
    """
    for path in paths:
        folder = RunFolder(path)
        try:
            problems = find_problems(folder, model=model) if folder.config.exists() else []
        except (MotleyError, OSError):
            continue
        for problem in problems:
            warn(problem)
