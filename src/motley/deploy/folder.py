"""The folder of a deployed federation.

run.toml                 the configuration of the run; edit it before the run begins
deploy.toml              the server's address
app/pyproject.toml       the app that Flower runs
certificates/            the federation's certificate authority and the server's certificate;
                         stays on the server
plugins.json             where users' own modules were imported from, if the run uses any
nodes/node-0/ ...        the files of each node: node.toml, the certificate ca.crt, and key.pub,
                         the key that is bound to client 0; its private key is made on the node
revoked_keys             public keys that are no longer admitted (identity.py)
flower/                  Flower's state, and the secrets of the running server
run/                     the run, once it has begun

Only the user who made the folder can read it.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, field_validator, model_validator

from motley.assembly import assign_sizes
from motley.config import Config, read_resolved
from motley.core.dotted import module_of
from motley.core.errors import MotleyError
from motley.data.partition import FromFile
from motley.data.public import PublicDatasetSettings
from motley.deploy.keys import write_certificates, write_node_key
from motley.deploy.permissions import private_files
from motley.files import write_secret
from motley.flower.settings import NodeSettings
from motley.runs.plugins import plugins_of, require_importable, write_plugins
from motley.settings import Settings, validate

#: Where the nodes' private keys are made: in the new folder, or on the nodes' machines.
KeyPlace = Literal["here", "nodes"]

#: One label of a host name (RFC 1123).
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")

APP = """[project]
name = "motley-app"
version = "1.0.0"
description = "A Motley federation. All of its code is in the installed package motleyfl."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "motley"

[tool.flwr.app.components]
serverapp = "motley.cli.server_app:app"
clientapp = "motley.flower.client:app"

[tool.flwr.app.config]
config = ""
out = ""
"""


class DeploySettings(Settings):
    """The server's address, and whether it uses encryption and keys."""

    host: str = "127.0.0.1"
    """The server's name or address, as nodes see it."""
    port: int = Field(default=8443, ge=1, le=65535)
    insecure: bool = False
    """No encryption and no keys; on this machine only."""

    @field_validator("host")
    @classmethod
    def _reachable(cls, host: str) -> str:
        """Reject hosts that no node could reach: the server's certificate names the host."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            if not is_host_name(host):
                raise ValueError(
                    "should be the host name or the IP address that nodes reach the server by"
                ) from None
            return host
        if address.is_unspecified:
            raise ValueError(
                "should be the address that nodes reach the server by, "
                "and they cannot reach this one"
            )
        return host

    @model_validator(mode="after")
    def _insecure_at_home(self) -> DeploySettings:
        if self.insecure and not self.loopback:
            raise ValueError(
                f"insecure is for this machine only: host = {self.host!r} should be 127.0.0.1"
            )
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
        """The server's host and port, as HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_host_name(text: str) -> bool:
    """Tell whether a text can be a host name."""
    labels = text.split(".")
    well_formed = all(LABEL.fullmatch(label) for label in labels)
    # A name that ends in a number would be taken for an IPv4 address.
    return well_formed and len(text) <= 253 and not labels[-1].isdigit()


@dataclass
class ServerSecrets:
    """The secrets of a running server's processes. They are new with every start of the server."""

    #: The address of the Control API and the Runtime API, on loopback.
    address: str
    #: Grants access to the Control API.
    token: str
    #: Grants access to the tasks of a run in the Runtime API.
    superexec: bytes


class DeployFolder:
    """The paths of a deployment, and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.config = self.path / "run.toml"
        self.settings = self.path / "deploy.toml"
        self.app = self.path / "app"
        self.certificates = self.path / "certificates"
        self.nodes = self.path / "nodes"
        self.flower = self.path / "flower"
        self.control = self.flower / "control.toml"
        self.superexec = self.flower / "superexec.secret"
        self.database = self.flower / "state.db"
        self.revoked_keys = self.path / "revoked_keys"
        self.run = self.path / "run"

    @classmethod
    def open(cls, path: Path) -> DeployFolder:
        """Return the folder that `motley deploy init` made, after checking that it is one."""
        folder = cls(path)
        if not folder.settings.exists():
            raise MotleyError(f"{path} is no deployment: there is no {folder.settings.name} in it.")
        return folder

    def read_settings(self) -> DeploySettings:
        """Return the settings of the deployment, such as the server's address."""
        try:
            values = tomllib.loads(self.settings.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise MotleyError(f"{self.settings}: cannot be read: {error}.") from None
        return validate(DeploySettings, values)

    def write_secrets(self, address: str) -> None:
        """Generate and save new secrets for a server with this private address."""
        self.flower.mkdir(mode=0o700, exist_ok=True)
        self.remove_secrets()
        write_secret(self.superexec, secrets.token_bytes(32))
        values = {"address": address, "token": secrets.token_hex(32)}
        write_secret(self.control, tomli_w.dumps(values).encode())

    def read_secrets(self) -> ServerSecrets:
        """Return the secrets of the running server."""
        try:
            values = tomllib.loads(self.control.read_text(encoding="utf-8"))
            return ServerSecrets(values["address"], values["token"], self.superexec.read_bytes())
        except FileNotFoundError:
            raise MotleyError(
                f"no server is running for {self.path}. "
                f"To start it: motley deploy server {self.path}"
            ) from None
        except (OSError, ValueError, KeyError) as error:
            raise MotleyError(f"{self.control}: cannot be read: {error}.") from None

    def remove_secrets(self) -> None:
        """Delete the secrets of a server that has ended."""
        self.control.unlink(missing_ok=True)
        self.superexec.unlink(missing_ok=True)

    def read_config(self) -> Config:
        """Return the configuration of the run."""
        return read_resolved(self.config)

    def private_key(self, client: int) -> Path:
        """Return the place of a client's private key, if it is on this machine."""
        return self.nodes / f"node-{client}" / "key"

    def public_keys(self) -> dict[int, Path]:
        """Return the files with the clients' public keys: nodes/node-CLIENT/key.pub."""
        files = {}
        for file in self.nodes.glob("node-*/key.pub"):
            number = file.parent.name.removeprefix("node-")
            if number.isdecimal() and str(int(number)) == number:
                files[int(number)] = file
        return dict(sorted(files.items()))


def create(
    path: Path, config: Config, settings: DeploySettings, keys: KeyPlace | None = None
) -> DeployFolder:
    """Write the folder of a federation, with one node per client, each with its assigned size.

    By default the nodes' keys are made here only if the nodes are on this machine too.
    """
    if keys is None:
        keys = "here" if settings.loopback else "nodes"
    with private_files():
        return _create(path, config, settings, keys)


def _create(path: Path, config: Config, settings: DeploySettings, keys: KeyPlace) -> DeployFolder:
    sizes = assign_sizes(config)
    require_importable(config)
    try:
        if path.exists() and not path.is_dir():
            raise MotleyError(f"{path} is a file; a deployment needs a folder of its own.")
        if path.exists() and any(path.iterdir()):
            raise MotleyError(
                f"{path} already exists and is not empty; a deployment needs a folder of its own."
            )
        folder = DeployFolder(path)
        _write_server(folder, config, settings)
        for client, size in enumerate(sizes):
            if config.federation.size_assignment == "budget":
                size = ""  # the server assigns sizes by its budgets.csv when the run begins
            _write_node(folder, settings, config, client, size)
            if keys == "here" and not settings.insecure:
                write_node_key(folder.nodes / f"node-{client}")
    except OSError as error:
        raise MotleyError(
            f"{path}: a deployment cannot be written there: {error.strerror}."
        ) from None
    return folder


def _write_server(folder: DeployFolder, config: Config, settings: DeploySettings) -> None:
    folder.app.mkdir(parents=True)
    folder.config.write_text(config.to_toml(), encoding="utf-8")
    folder.settings.write_text(tomli_w.dumps(settings.model_dump()), encoding="utf-8")
    (folder.app / "pyproject.toml").write_text(APP, encoding="utf-8")
    write_plugins(folder.path, config)
    folder.flower.mkdir()
    if not settings.insecure:
        write_certificates(folder.certificates, settings.host)


def _write_node(
    folder: DeployFolder, settings: DeploySettings, config: Config, client: int, size: str
) -> None:
    place = folder.nodes / f"node-{client}"
    place.mkdir(parents=True)
    data: dict[str, Any] = {
        "name": config.data.name,
        "path": config.data.path,
        "root": config.data.root,
        "dealt": True,
    }
    if config.data.files is not None:
        data["files"] = config.data.files.model_dump(exclude_defaults=True)
    if isinstance(config.data.partition, FromFile):
        data["partition"] = str(config.data.partition.path)
    if isinstance(config.public, PublicDatasetSettings):
        data["public"] = config.public.path
    node: dict[str, Any] = {
        "client": client,
        "size": size,
        "superlink": settings.address,
        "insecure": settings.insecure,
    }
    plugins = plugins_of(config)
    if plugins:
        node["modules"] = sorted({module_of(plugin.path) for plugin in plugins})
        folders = {plugin.folder for plugin in plugins if plugin.folder}
        node["code"] = folders.pop() if len(folders) == 1 else ""
    about = {**node, "memory": "memory", "data": data, "privacy": config.privacy.model_dump()}
    values = validate(NodeSettings, about).model_dump(exclude_none=True)
    (place / "node.toml").write_text(tomli_w.dumps(values), encoding="utf-8")
    if not settings.insecure:
        shutil.copyfile(folder.certificates / "ca.crt", place / "ca.crt")
