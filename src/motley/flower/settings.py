"""A node's own settings (node.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from motley.core.errors import MotleyError
from motley.data.files.settings import FileSettings
from motley.privacy.settings import PrivacySettings
from motley.settings import Settings, validate


class NodeData(Settings):
    """Where a node's examples are stored. They never leave the node."""

    name: str = "npz"
    path: str = ""
    """The node's own file or folder, for the readers `npz` and `files`."""
    files: FileSettings = FileSettings()
    root: str = ""
    """Folder of the named data sets; empty: $MOTLEY_DATA, or the cache folder."""
    dealt: bool = False
    """False: the node trains on all training examples that it reads. True: it trains on its
    client's share of them according to the run's `data.partition`, for experiments in which every
    node can read the whole data set.
    """
    partition: str = ""
    """This node's copy of the index lists, if `dealt` is true and the run's partition is "file"."""
    public: str = ""
    """This node's copy of the public images, if clients use them and public.name is "npz" or
    "files".
    """


class NodeBudget(Settings):
    """The limits of a node, with the columns of budgets.csv. A missing limit means no limit."""

    memory_mb: float | None = Field(default=None, gt=0)
    """Memory of a client as `motley plan` prints it, in MB of 1e6 bytes."""
    parameters: float | None = Field(default=None, gt=0)
    gflops: float | None = Field(default=None, gt=0)
    """GFLOPs of a training step, forward and backward."""

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return any(limit is not None for limit in self.model_dump().values())


class NodePrivacy(PrivacySettings):
    """The least privacy that a node accepts, and the most that it spends."""

    max_epsilon: float | None = Field(default=None, gt=0)
    """The largest epsilon, at `delta`, of all updates of its data set that the node sends, in all
    runs together. A job whose answer would exceed it is refused. The node counts for itself, and
    relies neither on the sampling of clients nor on the noise of others. Missing: no limit.
    """

    def refusal(self, run: PrivacySettings) -> str | None:
        """Explain why the node refuses a run with these settings; None if it does not."""
        demanding = self.active or self.max_epsilon is not None
        if demanding and run.active and run.reveal_scores and not self.reveal_scores:
            return (
                "privacy.reveal_scores = true; this node reports no scores without noise, unless "
                "its node.toml has the same."
            )
        return run.weaker_than(self)

    @model_validator(mode="after")
    def _scores_cannot_be_counted(self) -> NodePrivacy:
        if self.max_epsilon is not None and self.reveal_scores:
            raise ValueError(
                f"max_epsilon = {self.max_epsilon:g} and reveal_scores = true: scores have no "
                "noise, so no epsilon covers them; set one of the two"
            )
        return self


class NodeSettings(Settings):
    """A node: one client, with its own data."""

    client: int = Field(ge=0)
    """The client's number in the federation. It must not change, and no other node may have it."""
    size: str = ""
    """The size to train; empty: the largest one within the budget, or the run's choice."""
    budget: NodeBudget = NodeBudget()
    data: NodeData = NodeData()
    modules: tuple[str, ...] = ()
    """Modules and packages of your own that a run may use, such as "my_package". A run that names
    anything else by a dotted path is refused: a server must not choose which code a node runs.
    """
    code: str = ""
    """Folder from which these modules are imported; empty: they are installed."""
    memory: str = ""
    """Folder for the client's state between rounds."""
    device: str = "cpu"
    """As `engine.device`."""
    superlink: str = ""
    """The server's host:port."""
    insecure: bool = False
    """No encryption and no keys, for a server on this machine."""
    keep_alive_s: float = Field(default=600.0, ge=0)
    """Seconds that the training process stays alive after a message, with its model and its data;
    0: one process per message.
    """
    max_idle_mb: float = Field(default=4000.0, gt=0)
    """The training process ends if it has more resident memory after a message (on Linux)."""
    stall_s: float = Field(default=600.0, gt=0)
    """The training process is ended, and its message answered with an error, if it uses less than
    one percent of a processor core for this many seconds while it works on a message.
    """
    privacy: NodePrivacy = NodePrivacy()
    """The least privacy that the node accepts: runs with less are refused."""
    repeatable: bool = False
    """Draw the noise of `privacy` from the run's seed, as `motley run` does, instead of anew for
    every update. For experiments: anybody who knows the seed can remove the noise.
    """

    @model_validator(mode="before")
    @classmethod
    def _old_budget(cls, values: Any) -> Any:
        if isinstance(values, dict) and "budget_mib" in values:
            raise ValueError(
                f"budget_mib = {values['budget_mib']!r}: this key (the weights alone, in MiB) was "
                "removed. Use a table [budget] with memory_mb, parameters or gflops, as in "
                "budgets.csv; `motley plan` shows what each size takes."
            )
        return values

    @model_validator(mode="after")
    def _limit_means_something(self) -> NodeSettings:
        limit = self.privacy.max_epsilon
        if limit is not None and self.repeatable:
            raise ValueError(
                f"privacy.max_epsilon = {limit:g} and repeatable = true: noise that follows from "
                "the run's seed protects nothing; set one of the two"
            )
        return self

    @model_validator(mode="after")
    def _one_of_two(self) -> NodeSettings:
        if self.size and self.budget.limited:
            raise ValueError(f"size = {self.size!r} and [budget]: set one of the two")
        return self


def read_node(file: Path) -> NodeSettings:
    """Return the settings in a node.toml. Its paths are relative to its folder."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    try:
        node = validate(NodeSettings, values)
    except MotleyError as error:
        raise MotleyError(f"{file}: {error}") from None
    here = file.absolute().parent
    data: dict[str, Any] = {}
    for key in ("path", "root", "partition", "public"):
        if value := getattr(node.data, key):
            data[key] = str(here / Path(value).expanduser())
    if node.data.files.test:
        test = str(here / Path(node.data.files.test).expanduser())
        data["files"] = node.data.files.model_copy(update={"test": test})
    paths = {"memory": str(here / (node.memory or f"client-{node.client}"))}
    if node.code:
        paths["code"] = str(here / Path(node.code).expanduser())
    return node.model_copy(update={**paths, "data": node.data.model_copy(update=data)})
