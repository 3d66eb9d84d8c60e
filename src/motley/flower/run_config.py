"""The run's configuration for the nodes, without any paths.

A path on the server's machine means nothing on a node, and a malicious server could name one of
the node's files to learn something about it. So the server removes all paths from the
configuration, and the node, which does not trust the server, removes them again before it does
anything else. The node's own node.toml names the files that it needs. Likewise it lists the modules
that dotted paths may lead into: importing one runs its code.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from motley.config import Config, path_settings
from motley.core.dotted import is_dotted_path, module_of
from motley.flower.failures import NodeError, failing_as
from motley.flower.settings import NodeSettings
from motley.settings import validate

Values = dict[str, Any]


def to_text(config: Config) -> str:
    """Return a configuration as TOML for the nodes, without paths."""
    return tomli_w.dumps(without_paths(config.model_dump(mode="json")))


def from_text(text: str, node: NodeSettings) -> Config:
    """Read the configuration that a server sent; its paths are replaced by the node's own."""
    with failing_as("bad-config"):
        values = without_paths(tomllib.loads(text))
        for key, value in strings_in(values):
            if "/" in value or "\\" in value:
                raise NodeError("bad-config", f"{key} = {value!r}: a server may not name paths.")
            refuse_unknown_code(node, key, value)
        if table_in(values, "data", "partition").get("name") == "file":
            values["data"]["partition"].update(own_partition(node))
        if table_in(values, "public").get("name") in ("npz", "files"):
            values["public"]["path"] = node.data.public
        federation = table_in(values, "federation")
        if federation.get("size_assignment") == "budget":
            if not federation.get("sizes"):
                raise NodeError(
                    "bad-config",
                    "federation.sizes: a run with budgets should name every client's size.",
                )
            federation["size_assignment"] = "blocks"
        if table_in(values, "attack").get("name", "none") != "none":
            reason = "the run has an [attack], which is for simulated clients only."
            raise NodeError("refused-by-node", reason)
        return validate(Config, values)


def refuse_unknown_code(node: NodeSettings, key: str, value: str) -> None:
    """Refuse a dotted path into a module that node.toml does not list, before it is imported."""
    if not is_dotted_path(value):
        return
    module = module_of(value)
    if not any(module == name or module.startswith(f"{name}.") for name in node.modules):
        raise NodeError(
            "refused-by-node",
            f"{key} = {value!r}: node.toml does not allow this module; "
            f"modules = {list(node.modules)}.",
        )


def own_partition(node: NodeSettings) -> Values:
    """Return the settings of a partition "file" at this node."""
    if not node.data.dealt:
        return {"path": ""}  # never read: all examples are the node's own
    if not node.data.partition:
        raise NodeError(
            "node-settings",
            "data.partition: is not set. The run deals examples by a file of index lists "
            '(data.partition.name = "file"); with data.dealt = true, node.toml should name this '
            "node's copy of it.",
        )
    return {"path": node.data.partition}


def without_paths(values: Mapping[str, Any]) -> Values:
    """Return the values of a configuration without the settings that name files.

    A tracking URI of MLflow (`run.mlflow`) may contain a password, and only the server logs.
    """
    kept = copy.deepcopy(dict(values))
    for *tables, name in (*path_settings(), ("run", "mlflow")):
        table_in(kept, *tables).pop(name, None)
    # Nodes read their own files with their own settings.
    table_in(kept, "data").pop("files", None)
    return kept


def table_in(values: Values, *names: str) -> Values:
    """Return a nested table; an empty one if it is missing."""
    table: Any = values
    for name in names:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def strings_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string in nested tables and lists, with its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from strings_in(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner, key)
