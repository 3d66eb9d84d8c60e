"""`motley watch`: serve a run's report as a live page."""

from __future__ import annotations

from pathlib import Path

import typer

from motley.cli.code import import_for_runs
from motley.cli.terminal import Console
from motley.core.errors import MotleyError
from motley.extras import require
from motley.report.report_data import gather


def watch(
    path: Path = typer.Argument(
        ..., metavar="RUN-or-STUDY", help="The folder of a run or a study."
    ),
    port: int = typer.Option(8421, min=0, max=65535, help="The local port; 0: any free one."),
) -> None:
    """Serve a run's report on this machine, live while the run goes on, until Ctrl-C."""
    require("plotly", "motley watch")
    from motley.report.server import LOOPBACK, serve

    import_for_runs(path)
    gather([path])  # raises if the folder is neither a run nor a study
    try:
        server = serve(path, port)
    except OSError as error:
        raise MotleyError(f"--port {port}: cannot be used: {error}.") from None
    Console().print(f"http://{LOOPBACK}:{server.server_port}/  (Ctrl-C stops it)", highlight=False)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
