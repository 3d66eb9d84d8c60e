"""Where the command line imports users' own modules from. Nothing else changes `sys.path`.

The folders are added behind the installed packages, so that a file named like one of them cannot
take its place: the working folder, the folder of a configuration or study, and the folders that a
run has recorded.
"""

from __future__ import annotations

import sys
from pathlib import Path

from motley.runs.plugins import recorded_folders


def import_from(*folders: Path) -> None:
    """Let modules in these folders be imported."""
    for folder in folders:
        entry = str(folder.absolute())
        if entry not in sys.path:
            sys.path.append(entry)


def import_beside(file: Path | None) -> None:
    """Let modules in the working folder and beside a configuration file be imported."""
    import_from(Path.cwd())
    if file is not None:
        import_from(file.parent)


def import_for_runs(*runs: Path) -> None:
    """Let modules be imported that runs, or the runs of studies, have recorded."""
    import_from(Path.cwd())
    for run in runs:
        import_from(*recorded_folders(run))
