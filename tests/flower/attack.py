"""An attacker with the server's address and the public ca.crt, who uses Flower's own commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tomli_w

from motley.deploy.keys import write_node_key

LINK = "target"

PROJECT = """[project]
name = "evil"
version = "1.0.0"
description = "Writes a file wherever it runs."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "stranger"

[tool.flwr.app.components]
serverapp = "evil:server"
clientapp = "evil:client"

[tool.flwr.app.config]
"""

#: Importing the module is enough to leave a mark: no function of it needs to be called.
CODE = """import os
from pathlib import Path

from flwr.app import Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

role = os.environ.get("MOTLEY_ROLE", "unknown")
(Path({marks!r}) / role).touch()

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid, context):
    messages = [Message(RecordDict(), node, MessageType.QUERY) for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(messages, timeout=60):
        print("node", reply.metadata.src_node_id, "error" if reply.has_error() else "ran the code", flush=True)


@client.query()
def query(message, context):
    return Message(RecordDict(), reply_to=message)
"""


class Stranger:
    """Flower's command line with the attacker's configuration, key and app."""

    def __init__(self, folder: Path, address: str, certificate: Path | None) -> None:
        self.home = folder / "home"
        self.app = folder / "evil"
        self.marks = folder / "marks"
        for place in (self.home, self.app, self.marks):
            place.mkdir(parents=True)
        guard: dict[str, object] = {"insecure": True}
        if certificate is not None:
            guard = {"root-certificates": str(certificate)}
        link = {"address": address, **guard}
        (self.home / "config.toml").write_text(
            tomli_w.dumps({"superlink": {"default": LINK, LINK: link}})
        )
        (self.app / "pyproject.toml").write_text(PROJECT)
        (self.app / "evil.py").write_text(CODE.format(marks=str(self.marks)))
        write_node_key(folder)
        self.key = folder / "key.pub"

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of Flower's commands against the server."""
        binary = Path(sys.executable).parent / "flwr"
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        return subprocess.run(
            [str(binary), *arguments],
            env={**os.environ, "FLWR_HOME": str(self.home), **quiet},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def list_nodes(self) -> subprocess.CompletedProcess[str]:
        """Ask for the federation's nodes."""
        return self.flwr("supernode", "list", LINK, "--format", "json")

    def register_key(self) -> subprocess.CompletedProcess[str]:
        """Register an own key, so that an own node would be admitted."""
        return self.flwr("supernode", "register", str(self.key), LINK)

    def run_code(self) -> subprocess.CompletedProcess[str]:
        """Submit an app that leaves a mark wherever it runs."""
        return self.flwr("run", str(self.app), LINK, "--stream")

    def left_marks(self) -> list[str]:
        """Return where the app ran: the roles of the processes that imported it."""
        return sorted(mark.name for mark in self.marks.iterdir())
