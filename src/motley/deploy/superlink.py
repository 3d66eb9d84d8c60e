"""The server process: Flower's SuperLink on two sockets.

The public socket is behind a gate (gate.py), and the Control API needs a token. `motley deploy
server` opens the sockets and starts this module as a separate process:

    python -m motley.deploy.superlink FOLDER PUBLIC_SOCKET PRIVATE_SOCKET
"""

from __future__ import annotations

import asyncio
import binascii
import hmac
import os
import socket
import sys
import tomllib
from base64 import b64decode
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from flwr.common.constant import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    TRANSPORT_TYPE_GRPC_RERE,
)
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from motley.deploy.folder import DeployFolder
from motley.deploy.gate import NODE_PATHS, SELF_REGISTRATION_PATHS, FleetGate
from motley.deploy.replies import Replies
from motley.engine.base import FlowerSettings
from motley.runs.folder import RunFolder

#: Seconds that a server which is told to end waits for open requests. Without a limit it would wait
#: forever for the end of a run's output, for which `motley deploy run` waits in turn.
SHUTDOWN_S = 5


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


class NodeSignatures:
    """Tells which registered node has signed a request, before its body is read.

    Flower makes the same checks, and compares the key with the node that the body names, but only
    after it has read the whole request.
    """

    def __init__(self, app: Any) -> None:
        """`app` is Flower's application, which knows the registered keys once it has started."""
        self.app = app

    async def __call__(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the public key of the node; None if the request is not signed by one."""
        return await asyncio.to_thread(self.key_of, headers)

    def key_of(self, headers: dict[bytes, bytes]) -> bytes | None:
        """Return the public key of the node that has signed these headers."""
        given = {name.decode("latin-1").lower(): value for name, value in headers.items()}
        try:
            key = b64decode(given[FLEET_HTTP_PUBLIC_KEY_HEADER.lower()], validate=True)
            signature = b64decode(given[FLEET_HTTP_SIGNATURE_HEADER.lower()], validate=True)
            signed = given[TIMESTAMP_HEADER.lower()]
            age = (now() - datetime.fromisoformat(signed.decode("ascii"))).total_seconds()
            recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            if not recent or not verify_signature(bytes_to_public_key(key), signed, signature):
                return None
        except (KeyError, ValueError, TypeError, binascii.Error, UnsupportedAlgorithm):
            return None
        state = self.app.state.linkstate_factory.state()
        return key if state.get_node_id_by_public_key(key) is not None else None


def max_reply_mib(folder: DeployFolder) -> float:
    """Return the largest size of an answer in MiB: the run's, or the one that it will have.

    It is read anew for every answer, because the configuration may be edited until the run begins.
    """
    for file in (RunFolder(folder.run).config, folder.config):
        with suppress(OSError, ValueError, KeyError, TypeError):
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            return float(values["engine"]["flower"]["max_reply_mib"])
    return FlowerSettings().max_reply_mib


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
    app = create_app(config, SuperLinkLifespan)
    replies = Replies(lambda: max_reply_mib(folder))
    gate = FleetGate(app, (host, port), allowed, replies, NodeSignatures(app))
    server = uvicorn.Server(
        uvicorn.Config(
            gate,
            ws="none",
            proxy_headers=False,
            server_header=False,
            log_config=get_uvicorn_log_config(console_handler.level),
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )
    gate.waiting.stopping = lambda: server.should_exit
    # Flower interrupts this process if its parent is gone. By then the server has shut down.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[public, private])


if __name__ == "__main__":
    main(*sys.argv[1:])
