"""The folder of a deployed federation.

run.toml                 the configuration of the run; edit it before the run begins
deploy.toml              where the server is
app/pyproject.toml       what Flower is told to run
certificates/            the federation's authority and the server's certificate; stays on the server
nodes/node-0/ ...        what each node takes with it: node.toml, its key, the authority's certificate
flower/                  Flower's own state
run/                     the run, once it has begun
"""

from __future__ import annotations

import ipaddress
import shutil
import tomllib
from pathlib import Path

import tomli_w
from pydantic import Field, model_validator

from motley.config import Config, read_resolved
from motley.data.partition import FromFile
from motley.deploy.keys import write_certificates, write_node_key
from motley.engine.flower.settings import NodeSettings
from motley.errors import MotleyError
from motley.federation import assign_sizes
from motley.settings import Settings, validate

LINK = "motley"
"""The name under which Flower's commands know the server."""

APP = """[project]
name = "motley-app"
version = "1.0.0"
description = "A Motley federation. All of its code is in the installed package motleyfl."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "motley"

[tool.flwr.app.components]
serverapp = "motley.engine.flower.server:app"
clientapp = "motley.engine.flower.client:app"

[tool.flwr.app.config]
config = ""
out = ""
"""


class DeploySettings(Settings):
    """Where the server is, and whether it is guarded."""

    host: str = "127.0.0.1"
    """The name or address that nodes reach the server by."""
    port: int = Field(default=8443, ge=1, le=65535)
    insecure: bool = False
    """Without encryption and keys: on this machine only."""

    @model_validator(mode="after")
    def _insecure_at_home(self) -> DeploySettings:
        if self.insecure and not self.loopback:
            raise ValueError(f"insecure is for this machine only: host = {self.host!r} should be 127.0.0.1")
        return self

    @property
    def loopback(self) -> bool:
        """Whether the server is reached from this machine only."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{self.host}:{self.port}"


class DeployFolder:
    """Where things lie."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "run.toml"
        self.settings = self.path / "deploy.toml"
        self.app = self.path / "app"
        self.certificates = self.path / "certificates"
        self.nodes = self.path / "nodes"
        self.flower = self.path / "flower"
        self.run = self.path / "run"

    @classmethod
    def open(cls, path: Path) -> DeployFolder:
        """Open a folder that `motley deploy init` made."""
        folder = cls(path)
        if not folder.settings.exists():
            raise MotleyError(f"{path} is no deployment: there is no {folder.settings.name} in it.")
        return folder

    def read_settings(self) -> DeploySettings:
        """Return where the server is."""
        return validate(DeploySettings, tomllib.loads(self.settings.read_text(encoding="utf-8")))

    def read_config(self) -> Config:
        """Return the configuration of the run."""
        return read_resolved(self.config)

    def public_keys(self) -> list[Path]:
        """Return the public keys of the nodes."""
        return sorted(self.nodes.glob("*/key.pub"))


def create(path: Path, config: Config, settings: DeploySettings) -> DeployFolder:
    """Write a folder for a federation: one node a client, each with the size that the configuration assigns."""
    if path.exists() and any(path.iterdir()):
        raise MotleyError(f"{path} already exists and is not empty; a deployment needs a folder of its own.")
    folder = DeployFolder(path)
    folder.app.mkdir(parents=True)
    folder.config.write_text(config.to_toml(), encoding="utf-8")
    folder.settings.write_text(tomli_w.dumps(settings.model_dump()), encoding="utf-8")
    (folder.app / "pyproject.toml").write_text(APP, encoding="utf-8")
    if not settings.insecure:
        write_certificates(folder.certificates, settings.host)
    link = {"address": settings.address}
    guard = {"insecure": True} if settings.insecure else {"root-certificates": str(folder.certificates / "ca.crt")}
    folder.flower.mkdir()
    (folder.flower / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": LINK, LINK: {**link, **guard}}}), encoding="utf-8"
    )
    for client, size in enumerate(assign_sizes(config)):
        if config.federation.assign == "budget":
            size = ""  # the server assigns sizes by its budgets.csv when the run begins
        _write_node(folder, settings, config, client, size)
    return folder


def _write_node(folder: DeployFolder, settings: DeploySettings, config: Config, client: int, size: str) -> None:
    place = folder.nodes / f"node-{client}"
    place.mkdir(parents=True)
    data = {"name": config.data.name, "path": config.data.path, "root": config.data.root, "dealt": True}
    if isinstance(config.data.partition, FromFile):
        data["partition"] = str(config.data.partition.path)
    node = {"client": client, "size": size, "superlink": settings.address, "insecure": settings.insecure}
    about = {**node, "memory": "memory", "data": data, "privacy": config.privacy.model_dump()}
    values = validate(NodeSettings, about).model_dump(exclude_none=True)
    (place / "node.toml").write_text(tomli_w.dumps(values), encoding="utf-8")
    if not settings.insecure:
        write_node_key(place)
        shutil.copy(folder.certificates / "ca.crt", place)
