"""`motley run`: start a run."""

from __future__ import annotations

from pathlib import Path

import typer

from motley.cli.code import import_beside
from motley.cli.deploy import simulation
from motley.cli.progress import watch
from motley.config import load_config
from motley.runs.folder import next_free
from motley.runs.run import start_run


def run(
    file: Path | None = typer.Argument(None, help="A TOML file. Default: the quickstart preset."),
    preset: str = typer.Option("", help="Start from a named preset (motley list presets)."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting; repeatable."
    ),
    profile: bool = typer.Option(
        False, "--profile", help="Draw which slot trained which client when: timeline.png."
    ),
    engine: str = typer.Option(
        "", help="Run clients with another engine: local, debug or flower-simulation."
    ),
    out: Path | None = typer.Option(
        None, help="The run's folder. Default: the next free name in runs/."
    ),
) -> None:
    """Train a federation from one TOML file, a preset, or the defaults.

    `motley config` with the same file, preset and overrides prints all settings that the run would
    have, with their documentation. `motley list settings` prints all settings that exist.
    """
    import_beside(file)
    overrides = [*set_, f"engine.name={engine}"] if engine else set_
    config = load_config(file, preset=preset, overrides=overrides)
    name = config.preset or f"{config.data.name}-{config.method.name}"
    path = out or next_free(Path("runs"), name)
    with watch(path) as progress:
        if config.engine.name == "flower-simulation" and not profile:
            simulation()(config, path, [progress])
        else:
            start_run(config, path, [progress], profile=profile)
