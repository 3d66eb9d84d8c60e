"""The `[data]` table: the data set, its transform and its partition among the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import SerializeAsAny, field_validator, model_validator

from motley.data.dataset import DATASETS
from motley.data.partition import PARTITIONS, PartitionSettings
from motley.data.transforms import TransformSettings, fill_preset
from motley.settings import Settings, validate


class DataSettings(Settings):
    """The data set, its transform and its partition among the clients."""

    name: str = "digits"
    """The data set (`motley list datasets`)."""
    path: str = ""
    """Your own data file, for data.name = "npz". In a TOML file, a relative path starts from that
    file's folder.
    """
    root: str = ""
    """Folder with the named data sets; empty: $MOTLEY_DATA if it is set, else ~/.cache/motley."""
    transform: TransformSettings = TransformSettings()
    partition: SerializeAsAny[PartitionSettings]

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {"name": "digits", "partition": {}, **values}
        name = DATASETS.entry(str(values["name"]), "data.name").name
        transform = values.get("transform", {})
        if isinstance(transform, dict):
            values["transform"] = fill_preset(transform, name)
        return {**values, "name": name}

    @field_validator("partition", mode="before")
    @classmethod
    def _chosen_partition(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        values = {"name": "dirichlet", **value}
        settings = PARTITIONS.entry(str(values["name"]), "data.partition.name").item
        return validate(settings, values, where="data.partition")

    @property
    def root_path(self) -> Path | None:
        """The folder with the data sets, if one is set."""
        return Path(self.root).expanduser() if self.root else None

    @property
    def file_path(self) -> Path | None:
        """The user's own file, if one is set."""
        return Path(self.path).expanduser() if self.path else None
