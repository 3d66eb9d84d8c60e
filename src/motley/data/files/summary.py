"""The remarks of `motley data check` about a data set: properties that may surprise a user."""

from __future__ import annotations

import numpy as np

from motley.data.dataset import Dataset
from motley.data.files.reading import Reading
from motley.models.inputs import (
    ArrayShape,
    ImageShape,
    SignalShape,
    TableShape,
)

#: A class that is this many times larger than another is worth a remark.
IMBALANCE = 20
#: Networks learn targets of this size only slowly.
LARGE_TARGETS = 10


def fitting_models(dataset: Dataset) -> list[str]:
    """Return settings that choose built-in models for such inputs; none if the defaults fit."""
    shape = dataset.shape
    if isinstance(shape, SignalShape):
        return ["model.sizes=cnn1d-1,cnn1d-2,cnn1d-4"]
    if isinstance(shape, TableShape):
        return ["model.sizes=table1,table2,table3"]
    if isinstance(shape, ArrayShape):
        return ["model.sizes=mlp1,mlp2,mlp3"]
    if isinstance(shape, ImageShape):
        return []
    if dataset.task == "next-token":
        return ["model.sizes=lstm1,lstm2,lstm3", "model.lstm.output=every"]
    return ["model.sizes=encoder1,encoder2,encoder3"]


def class_counts(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of training and of test examples of each class."""
    train = np.bincount(dataset.train.targets, minlength=dataset.classes)
    test = np.bincount(dataset.test.targets, minlength=dataset.classes)
    return train, test


def class_name(dataset: Dataset, number: int) -> str:
    """Return the name of a class, or its number."""
    return dataset.class_names[number] if dataset.class_names else str(number)


def client_counts(dataset: Dataset) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the number of training and of test examples of each natural client."""
    train, test = dataset.train.clients, dataset.test.clients
    if train is None or test is None:
        return None
    clients = 1 + max(int(train.max()), int(test.max(initial=0)))
    return np.bincount(train, minlength=clients), np.bincount(test, minlength=clients)


def training_clients(dataset: Dataset) -> np.ndarray:
    """Return the numbers of the natural clients that have training examples."""
    clients = dataset.train.clients
    return np.zeros(0, dtype=np.int64) if clients is None else np.unique(clients)


def warnings_about(reading: Reading) -> list[str]:
    """Return remarks about a data set that can be used but may surprise."""
    remarks = list(reading.notes)
    dataset = reading.dataset
    if dataset.task == "classification":
        remarks += _class_warnings(dataset)
    if dataset.task == "regression":
        targets = dataset.train.targets.astype(np.float64)
        if max(abs(targets.mean()), targets.std()) > LARGE_TARGETS:
            remarks.append(
                f"the targets have mean {targets.mean():.4g} and deviation {targets.std():.4g}; "
                "training is easier with targets around 0 with deviation 1"
            )
    counts = client_counts(dataset)
    if counts is not None:
        remarks += _client_warnings(counts, reading.client_names)
    return remarks


def _class_warnings(dataset: Dataset) -> list[str]:
    remarks = []
    train, test = class_counts(dataset)
    absent = [class_name(dataset, int(number)) for number in np.flatnonzero(train == 0)]
    if absent:
        remarks.append(f"classes without training examples: {_some(absent)}")
    untested = [class_name(dataset, int(number)) for number in np.flatnonzero(test == 0)]
    if untested:
        remarks.append(f"classes without test examples: {_some(untested)}")
    present = train[train > 0]
    if present.max() > IMBALANCE * present.min():
        remarks.append(
            f"the largest class has {present.max():,} training examples and the smallest "
            f"{present.min():,}"
        )
    return remarks


def _client_warnings(counts: tuple[np.ndarray, np.ndarray], names: tuple[str, ...]) -> list[str]:
    remarks = []
    train, test = counts
    single = [names[number] for number in np.flatnonzero(train == 1)]
    if single:
        remarks.append(f"clients with one training example: {_some(single)}")
    untested = [names[number] for number in np.flatnonzero((test == 0) & (train > 0))]
    if untested:
        remarks.append(f"clients without test examples: {_some(untested)}")
    unseen = [names[number] for number in np.flatnonzero(train == 0)]
    if unseen:
        remarks.append(f"clients with test examples only: {_some(unseen)}")
    return remarks


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 10:,} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
