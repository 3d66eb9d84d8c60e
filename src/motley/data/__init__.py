"""Data set readers, partitions among clients, and data that stays on the device."""

from motley.data import datasets
from motley.data.convert import from_datasets
from motley.data.dataset import DATASETS, Dataset, Examples, load_dataset
from motley.data.partition import PARTITIONS, Partition, PartitionSettings
from motley.data.settings import DataSettings

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "DataSettings",
    "Dataset",
    "Examples",
    "Partition",
    "PartitionSettings",
    "datasets",
    "from_datasets",
    "load_dataset",
]
