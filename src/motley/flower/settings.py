"""A node's own settings (node.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from motley.core.errors import MotleyError
from motley.privacy.settings import PrivacySettings
from motley.settings import Settings, validate


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
    partition: str = ""
    """This node's copy of the file of index lists, if `dealt` and the run's partition is "file"."""


class NodeBudget(Settings):
    """The limits of a node, as in a line of budgets.csv; a limit that is not given is none."""

    memory_mb: float | None = Field(default=None, gt=0)
    """Memory of a training step, in MB of 1e6 bytes."""
    parameters: float | None = Field(default=None, gt=0)
    gflops: float | None = Field(default=None, gt=0)
    """Of a training step: forward and backward."""

    @property
    def limited(self) -> bool:
        """Whether any limit is given."""
        return any(limit is not None for limit in self.model_dump().values())


class NodeSettings(Settings):
    """A node: one client, with its own data."""

    client: int = Field(ge=0)
    """Its number in the federation: stable, and no other node's."""
    size: str = ""
    """The size it trains; empty: the largest within its budget, or else the one that the run assigns."""
    budget: NodeBudget = NodeBudget()
    data: NodeData = NodeData()
    memory: str = ""
    """Folder for the client's state between rounds."""
    device: str = "cpu"
    """As `engine.device`."""
    superlink: str = ""
    """The server's host:port."""
    insecure: bool = False
    """Without encryption and keys: for a server on this machine."""
    keep_alive_s: float = Field(default=600.0, ge=0)
    """Seconds that the process that trains stays alive after a message, with its model and data; 0: one process per
    message.
    """
    max_idle_mb: float = Field(default=4000.0, gt=0)
    """That process ends if it holds more memory than this after a message, in MB of 1e6 bytes (Linux)."""
    privacy: PrivacySettings = PrivacySettings()
    """The least privacy that the node asks for: a run that guards its uploads less is refused."""
    repeatable: bool = False
    """Draw the noise of `privacy` from the run's seed, as `motley run` does, and not from a secret of the node's own.
    For experiments: who knows the seed can take the noise off.
    """

    @model_validator(mode="before")
    @classmethod
    def _old_budget(cls, values: Any) -> Any:
        if isinstance(values, dict) and "budget_mib" in values:
            raise ValueError(
                f"budget_mib = {values['budget_mib']!r}: this key (the weights alone, in MiB) is gone. Use a table "
                "[budget] with memory_mb, parameters or gflops of a training step, as in budgets.csv; `motley plan` "
                "shows what each size takes."
            )
        return values

    @model_validator(mode="after")
    def _one_of_two(self) -> NodeSettings:
        if self.size and self.budget.limited:
            raise ValueError(f"size = {self.size!r} and [budget]: give one of the two")
        return self


def read_node(file: Path) -> NodeSettings:
    """Read a node's file; the paths in it start from its folder."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    node = validate(NodeSettings, values)
    here = file.absolute().parent
    data = {}
    for key in ("path", "root", "partition"):
        if value := getattr(node.data, key):
            data[key] = str(here / Path(value).expanduser())
    memory = str(here / (node.memory or f"client-{node.client}"))
    return node.model_copy(update={"memory": memory, "data": node.data.model_copy(update=data)})
