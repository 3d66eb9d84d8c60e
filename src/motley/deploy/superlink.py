"""The server process: Flower's SuperLink on two sockets.

The public socket is behind a gate (gate.py), and the Control API needs a token. `motley deploy
server` opens the sockets and starts this module as a separate process:

    python -m motley.deploy.superlink FOLDER PUBLIC_SOCKET PRIVATE_SOCKET
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import TRANSPORT_TYPE_GRPC_RERE
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from motley.deploy.folder import DeployFolder
from motley.deploy.gate import NODE_PATHS, SELF_REGISTRATION_PATHS, FleetGate


class TokenPlugin(NoOpControlAuthnPlugin):
    """Admits callers of the Control API that know the token in the deployment's secrets."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self.token = token

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, Any]:
        """Compare a request's bearer token with the deployment's."""
        for _, given in metadata:
            if hmac.compare_digest(str(given).encode(), self.token.encode()):
                return super().validate_tokens_in_metadata(metadata)
        return False, None


def superlink_config(folder: DeployFolder, private: tuple[str, int]) -> SuperLinkLifespanConfig:
    """Return the SuperLink's settings. It starts no processes itself; see `superexec_command`."""
    insecure = folder.read_settings().insecure
    ca, certificate, key = (
        folder.certificates / name for name in ("ca.crt", "server.pem", "server.key")
    )
    return SuperLinkLifespanConfig(
        control_address="",
        health_server_address=None,
        host=private[0],
        port=private[1],
        insecure=insecure,
        certificates=None
        if insecure
        else (ca.read_bytes(), certificate.read_bytes(), key.read_bytes()),
        superexec_auth_secret=folder.read_secrets().superexec,
        authn_plugin=TokenPlugin(folder.read_secrets().token),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=not insecure,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None if insecure else str(ca),
        ssl_certfile=None if insecure else str(certificate),
        ssl_keyfile=None if insecure else str(key),
        database=str(folder.flower / "state.db"),
        isolation="process",
        runtime_dependency_install=False,
    )


def main(path: str, public_socket: str, private_socket: str) -> None:
    """Serve until a signal ends the process."""
    # If `motley deploy server` is killed, this process would live on and keep the port.
    start_parent_process_monitor(os.getppid())
    folder = DeployFolder.open(Path(path))
    public, private = (
        socket.socket(fileno=int(number)) for number in (public_socket, private_socket)
    )
    host, port = private.getsockname()[:2]
    config = superlink_config(folder, (host, port))
    allowed = NODE_PATHS | SELF_REGISTRATION_PATHS if config.insecure else NODE_PATHS
    gate = FleetGate(create_app(config, SuperLinkLifespan), (host, port), allowed)
    server = uvicorn.Server(
        uvicorn.Config(
            gate,
            ws="none",
            proxy_headers=False,
            server_header=False,
            log_config=get_uvicorn_log_config(console_handler.level),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
    )
    server.run(sockets=[public, private])


if __name__ == "__main__":
    main(*sys.argv[1:])
