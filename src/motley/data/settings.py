"""The `[data]` table: the data set, its transform and its partition among the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from motley.data.dataset import DATASETS, Dataset, load_dataset
from motley.data.files.settings import FileSettings
from motley.data.natural import limit_clients
from motley.data.partition import PARTITIONS, PartitionSettings
from motley.data.transforms import TransformSettings, variants_for
from motley.settings import FilePath, RegistryChoice, Settings, no_effect, with_variant

#: The data set that reads the user's own files with the settings of data.files.
FILES = "files"
PARTITION = RegistryChoice("dirichlet", PARTITIONS, lambda partition: partition)


class DataSettings(Settings):
    """The data set, its transform and its partition among the clients."""

    #: Another data set keeps the transform's variant; it has values of its own for it.
    lasting = ("root", "partition", "transform.variant")

    name: str = "digits"
    """The data set (`motley list datasets`), or the dotted path of a function that returns one."""
    path: FilePath = ""
    """Your own file or folder, for data.name = "files" or "npz". In a TOML file, a relative path
    starts from that file's folder.
    """
    files: FileSettings | None = None
    root: FilePath = ""
    """Folder with the named data sets; empty: $MOTLEY_DATA if it is set, else ~/.cache/motley."""
    max_clients: int = Field(default=0, ge=0)
    """Keep at most this many of the data set's natural clients, in the training and in the test
    part; 0: all.
    """
    max_per_client: int = Field(default=0, ge=0)
    """Keep at most this many training examples, and as many test examples, of each natural client,
    taken at equal distances; 0: all.
    """
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

    @field_validator("files", mode="before")
    @classmethod
    def _only_for_files(cls, value: Any, info: ValidationInfo) -> Any:
        """Give the data set "files" its table, and reject settings of it for other data sets."""
        name = info.data.get("name")
        if name == FILES:
            return {} if value is None else value
        if value and name is not None:
            raise no_effect(value, f"data.name = {name!r}; it is for {FILES!r}")
        return None

    @model_serializer(mode="wrap")
    def _without_unused_files(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        if values.get("files") is None:
            values.pop("files", None)
        return values

    @property
    def root_path(self) -> Path | None:
        """The folder with the data sets, if one is set."""
        return Path(self.root).expanduser() if self.root else None

    @property
    def file_path(self) -> Path | None:
        """The user's own file, if one is set."""
        return Path(self.path).expanduser() if self.path else None

    def load(self) -> Dataset:
        """Read the data set, within the limits on clients and examples."""
        dataset = load_dataset(
            self.name,
            root=self.root_path,
            path=self.file_path,
            files=self.files,
            max_per_client=self.max_per_client,
        )
        return self.limited(dataset)

    def limited(self, dataset: Dataset) -> Dataset:
        """Return a data set within the limits on clients and examples."""
        return limit_clients(dataset, self.max_clients, self.max_per_client)
