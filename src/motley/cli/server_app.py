"""The app that a SuperLink runs: a run on Flower nodes, with the display of `motley run`."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from motley.cli.code import import_for_runs
from motley.cli.progress import watch
from motley.config import Config
from motley.core.errors import MotleyError
from motley.deploy.folder import DeployFolder
from motley.deploy.identity import FolderRegistrar
from motley.flower.nodes import Registrar
from motley.flower.server import serve
from motley.runs.folder import RunFolder
from motley.settings import validate

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the app's settings `config` describe, in the folder `out`."""
    path = Path(str(context.run_config["out"]))
    import_for_runs(path.parent, path)
    begun = RunFolder(path).config.exists()
    try:
        config = None
        if not begun:
            config = validate(Config, tomllib.loads(str(context.run_config["config"])))
        with watch(path) as progress:
            serve(grid, config, path, [progress], registrar_of(path.parent))
    except MotleyError:
        # The run's status keeps the message, and `motley deploy run` prints it. Flower would log it
        # with a traceback and call it unhandled.
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        raise


def registrar_of(path: Path) -> Registrar | None:
    """Return the object that identifies nodes by their keys; None if there are no keys."""
    folder = DeployFolder(path)
    if not folder.settings.exists() or folder.read_settings().insecure:
        return None
    return FolderRegistrar(folder)
