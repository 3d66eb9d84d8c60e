"""`motley resume`: continue a run that was interrupted, or extend a finished one."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from motley.cli.code import import_for_runs
from motley.cli.deploy import simulation
from motley.cli.progress import watch
from motley.config import Config
from motley.methods import METHODS
from motley.runs.checkpoint import changed_settings, last_round
from motley.runs.folder import RunFolder
from motley.runs.plugins import changed_plugins
from motley.runs.run import resume_run, set_rounds


def resume(
    path: Path = typer.Argument(..., metavar="RUN", help="The run's folder."),
    rounds: int | None = typer.Option(
        None,
        min=1,
        help="First change the run's number of rounds, for example to extend a finished run.",
    ),
) -> None:
    """Continue a run after a crash, Ctrl-C or kill -9, or extend it with --rounds."""
    import_for_runs(path)
    folder = RunFolder.open(path)
    before = folder.read_config()
    config = set_rounds(path, rounds) if rounds is not None else before
    _warn(_warnings(folder, before, config))
    with watch(path) as progress:
        if config.engine.name == "flower-simulation":
            simulation()(None, path, [progress])
        else:
            resume_run(path, [progress])
        if not progress.rounds:
            progress.say("This run is already finished.")


def _warnings(folder: RunFolder, before: Config, config: Config) -> list[str]:
    """Return warnings about settings that changed since the run began."""
    warnings = []
    rounds_done = last_round(folder.checkpoints)
    edited = changed_settings(folder.checkpoints, before)
    if edited:
        changes = ", ".join(
            f"{name} = {new!r} (it was {old!r})" for name, (old, new) in edited.items()
        )
        warnings.append(
            f"{folder.config} was changed after round {rounds_done}: {changes}. The run continues "
            "with the new values; its result will match neither configuration."
        )
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
            f"rounds 1 to {rounds_done} ran with another total. The result differs from that of a "
            "run which had it from the start."
        )
    return warnings


def _warn(warnings: list[str]) -> None:
    for warning in warnings:
        text = f"motley: warning: {warning}"
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)
