"""The `[data]` table: the data set, its transform and its partition among the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import SerializeAsAny, model_validator

from motley.data.dataset import DATASETS
from motley.data.partition import PARTITIONS, PartitionSettings
from motley.data.transforms import TransformSettings, variants_for
from motley.settings import FilePath, RegistryChoice, Settings, with_variant

PARTITION = RegistryChoice("dirichlet", PARTITIONS, lambda partition: partition)


class DataSettings(Settings):
    """The data set, its transform and its partition among the clients."""

    #: Another data set keeps the transform's variant; it has values of its own for it.
    lasting = ("root", "partition", "transform.variant")

    name: str = "digits"
    """The data set (`motley list datasets`), or the dotted path of a function that returns one."""
    path: FilePath = ""
    """Your own data file, for data.name = "npz". In a TOML file, a relative path starts from that
    file's folder.
    """
    root: FilePath = ""
    """Folder with the named data sets; empty: $MOTLEY_DATA if it is set, else ~/.cache/motley."""
    transform: TransformSettings = TransformSettings()
    partition: Annotated[SerializeAsAny[PartitionSettings], PARTITION]

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        """Give the transform the values that its variant has for this data set."""
        if not isinstance(values, dict):
            return values
        name = DATASETS.entry(values.get("name", "digits"), "data.name").name
        filled = {"partition": {}, **values, "name": name}
        transform = values.get("transform", {})
        if isinstance(transform, dict):
            filled["transform"] = with_variant(transform, variants_for(name, transform), "plain")
        return filled

    @property
    def root_path(self) -> Path | None:
        """The folder with the data sets, if one is set."""
        return Path(self.root).expanduser() if self.root else None

    @property
    def file_path(self) -> Path | None:
        """The user's own file, if one is set."""
        return Path(self.path).expanduser() if self.path else None
