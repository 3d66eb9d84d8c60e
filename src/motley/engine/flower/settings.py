"""What a run on Flower can choose (`[engine.flower]`), and what a node says of itself in a TOML file of its own."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import Field, model_validator

from motley.errors import MotleyError
from motley.privacy.settings import PrivacySettings
from motley.settings import Settings, validate


class FlowerSettings(Settings):
    """How long the server waits for nodes, and how large their replies may be."""

    wait_s: float = Field(default=60.0, gt=0)
    """Seconds that a round, and the start of a run, waits for nodes that are not connected."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that a client has for its local update; later replies are ignored."""
    most_mib: float = Field(default=1024.0, gt=0)
    """Maximum size of a node's reply, in MiB."""


class NodeData(Settings):
    """Where a node's examples are. They never leave it."""

    name: str = "npz"
    path: str = ""
    """The node's own file, for the reader `npz`."""
    root: str = ""
    """Folder that holds the named data sets; empty: $MOTLEY_DATA, else the cache folder."""
    dealt: bool = False
    """False: all training examples that are read are the node's. True: it takes its client's share of them, as the
    run's `data.partition` deals them; for experiments in which every node can read the whole data set.
    """


class NodeSettings(Settings):
    """A node: one client, with its own data."""

    client: int = Field(ge=0)
    """Its number in the federation: stable, and no other node's."""
    size: str = ""
    """The size it trains; empty: the largest within its budget, or else the one that the run assigns."""
    budget_mib: float = Field(default=0.0, ge=0)
    """What its model may weigh, in MiB of weights; 0: no matter."""
    data: NodeData = NodeData()
    memory: str = ""
    """Folder for what the client remembers between rounds."""
    device: str = "cpu"
    """As `engine.device`."""
    superlink: str = ""
    """The server's host:port."""
    insecure: bool = False
    """Without encryption and keys: for a server on this machine."""
    privacy: PrivacySettings = PrivacySettings()
    """What the node insists on: a run that guards its uploads less is refused."""
    repeatable: bool = False
    """Draw the noise of `privacy` from the run's seed, as `motley run` does, and not from a secret of the node's own.
    For experiments: who knows the seed can take the noise off.
    """

    @model_validator(mode="after")
    def _one_of_two(self) -> NodeSettings:
        if self.size and self.budget_mib:
            raise ValueError(f"size = {self.size!r} and budget_mib = {self.budget_mib:g}: give one of the two")
        return self


def read_node(file: Path) -> NodeSettings:
    """Read a node's file; the paths in it start from its folder."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    node = validate(NodeSettings, values)
    here = file.absolute().parent
    data = {key: str(here / value) for key in ("path", "root") if (value := getattr(node.data, key))}
    memory = str(here / (node.memory or f"client-{node.client}"))
    return node.model_copy(update={"memory": memory, "data": node.data.model_copy(update=data)})
