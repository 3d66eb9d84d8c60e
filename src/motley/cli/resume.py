"""`motley resume`: go on with a run that was interrupted."""

from __future__ import annotations

from pathlib import Path

import typer

from motley.cli.deploy import simulation
from motley.cli.progress import watch
from motley.runs.folder import RunFolder
from motley.runs.play import resume as resume_run


def resume(path: Path = typer.Argument(..., metavar="RUN", help="The run's folder.")) -> None:
    """Go on with a run after a crash, Ctrl-C or kill -9."""
    with watch(path) as progress:
        if RunFolder.open(path).read_config().engine.name == "flower-simulation":
            simulation()(None, path, [progress])
        else:
            resume_run(path, [progress])
        if not progress.rounds:
            progress.console.print("This run is already finished.", highlight=False)
