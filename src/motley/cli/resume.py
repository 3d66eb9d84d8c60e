"""`motley resume`: continue a run that was interrupted, or extend a finished one."""

from __future__ import annotations

from pathlib import Path

import typer

from motley.cli.code import import_for_runs
from motley.cli.deploy import simulation
from motley.cli.progress import watch
from motley.cli.warnings import warn
from motley.config import Config
from motley.core.errors import MotleyError
from motley.methods import METHODS
from motley.runs.checkpoint import last_round
from motley.runs.folder import RunFolder
from motley.runs.integrity import changed_settings, newest_metadata
from motley.runs.plugins import changed_plugins
from motley.runs.run import ACCEPTABLE, change_settings, changed_config, resume_run


def resume(
    path: Path = typer.Argument(..., metavar="RUN", help="The run's folder."),
    rounds: int | None = typer.Option(
        None,
        min=1,
        help="First change the run's number of rounds, for example to extend a finished run.",
    ),
    set_: list[str] = typer.Option(
        [],
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="First change a setting that does not affect the training, such as "
        "run.checkpoint_every, evaluation.every, engine.device or data.path; repeatable.",
    ),
    accept: list[str] = typer.Option(
        [],
        "--accept",
        metavar="CHANGE",
        help="Continue although something was changed behind the run's back: metrics or data.",
    ),
) -> None:
    """Continue a run after a crash, Ctrl-C or kill -9, or extend it with --rounds."""
    for word in accept:
        if word not in ACCEPTABLE:
            raise MotleyError(f"--accept {word}: should be {' or '.join(ACCEPTABLE)}.")
    import_for_runs(path)
    folder = RunFolder.open(path)
    before = folder.read_config()
    config = changed_config(path, set_, rounds)
    for warning in _warnings(folder, before, config):
        warn(warning)
    with watch(path) as progress:
        if config.engine.name == "flower-simulation":
            simulate = simulation()
            change_settings(path, set_, rounds)
            simulate(None, path, [progress])
        else:
            resume_run(path, [progress], accept=accept, warn=warn, overrides=set_, rounds=rounds)
        if not progress.rounds:
            progress.say("This run is already finished.")


def _warnings(folder: RunFolder, before: Config, config: Config) -> list[str]:
    """Return warnings about settings that changed since the run began."""
    warnings = []
    rounds_done = last_round(folder.checkpoints)
    metadata = newest_metadata(folder)
    edited = changed_settings(folder, metadata, config) if metadata is not None else {}
    for sentence in changed_plugins(folder.path, config):
        warnings.append(f"{sentence} The run continues with the code as it is now.")
    rounds_changed = config.training.rounds != before.training.rounds or "training.rounds" in edited
    if (
        rounds_done
        and rounds_changed
        and METHODS[config.method.name].requirements.uses_total_rounds
    ):
        warnings.append(
            f"{config.method.name} schedules its training by the total number of rounds, and "
            f"rounds 1 to {rounds_done} ran with another total. The result differs from a run "
            "that had this total from the start."
        )
    return warnings
