"""Calls Flower's Control API on loopback, with the token from the deployment's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from motley.core.errors import MotleyError
from motley.deploy.folder import DeployFolder

#: Flower's name for the state of a node that is no longer admitted.
EXCLUDED = "unregistered"


class BearerToken:
    """Adds the token to every request."""

    def __init__(self, token: str) -> None:
        self.token = token

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        """Send a request with the token."""
        context.request.headers["authorization"] = f"Bearer {self.token}"
        response: httpx.Response = call_next(context)
        return response


class Control:
    """A client of the Control API. It raises MotleyError if the server does not answer."""

    def __init__(self, folder: DeployFolder) -> None:
        self.folder = folder
        secrets = folder.read_secrets()
        insecure = folder.read_settings().insecure
        self._client = ControlHttpClient.from_server_address(
            secrets.address,
            insecure,
            None if insecure else (folder.certificates / "ca.crt").read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="motley"),
                BearerToken(secrets.token),
            ],
        )

    def nodes(self) -> list[Any]:
        """Return the registered nodes, as Flower's NodeInfo."""
        return [node for node in self.all_nodes() if node.status != EXCLUDED]

    def all_nodes(self) -> list[Any]:
        """Return the registered nodes and those that are no longer admitted."""
        with self._explained():
            return list(self._client.ListNodes(ListNodesRequest()).nodes_info)

    def register(self, key: bytes, name: str) -> None:
        """Admit the node with a public key."""
        with self._explained():
            self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def unregister(self, node: int) -> None:
        """Exclude a node."""
        with self._explained():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node))

    def start(self, app: Path, values: dict[str, bool | float | int | str]) -> int:
        """Start a run of an app with these settings; return its number."""
        content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(values)
        )
        with self._explained():
            return int(self._client.StartRun(request).run_id)

    def logs(self, run: int) -> Iterator[str]:
        """Yield the output of a run until it ends."""
        with self._explained():
            for response in self._client.StreamLogs(StreamLogsRequest(run_id=run)):
                yield response.log_output

    def runs(self) -> list[Any]:
        """Return all runs, as Flower's Run, the latest first."""
        with self._explained():
            runs = self._client.ListRuns(ListRunsRequest()).run_dict.values()
        return sorted(runs, key=lambda run: str(run.pending_at), reverse=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the HTTP client's exceptions into messages."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            detail = FlowerError.from_json(error.response.text)
            reason = detail.message if detail else f"HTTP status {error.response.status_code}"
            raise MotleyError(f"the server refused: {reason}") from None
        except httpx.HTTPError as error:
            raise NoServerError(
                f"no server answers for {self.folder.path} ({error}). "
                f"To start it: motley deploy server {self.folder.path}"
            ) from None


class NoServerError(MotleyError):
    """No server answers."""
