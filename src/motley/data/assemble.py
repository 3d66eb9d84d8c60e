"""Put inputs, targets and clients together to a data set: number classes, hold out a test part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from motley.core.errors import MotleyError
from motley.data.arrays import check_class_numbers, class_targets
from motley.data.dataset import Dataset, Examples
from motley.data.labels import (
    check_class_count,
    class_numbers,
    clean_labels,
    client_numbers,
    hold_out,
    sorted_names,
)
from motley.models.inputs import InputShape, TokenShape


@dataclass(frozen=True, eq=False)
class Records:
    """Examples as they were read, before classes and clients have numbers."""

    #: In the form that `Examples` wants.
    inputs: np.ndarray
    #: Texts (class names), or numbers of shape (N, ...).
    targets: Sequence[str] | np.ndarray
    #: The name of each example's client.
    clients: Sequence[str] | None
    #: The place of an example, for messages.
    where: Callable[[int], str]

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, chosen: np.ndarray) -> Records:
        """Return some of the examples, given by their numbers."""
        targets = self.targets
        if isinstance(targets, np.ndarray):
            targets = targets[chosen]
        else:
            targets = [targets[row] for row in chosen]
        clients = None if self.clients is None else [self.clients[row] for row in chosen]
        where = self.where
        return Records(self.inputs[chosen], targets, clients, lambda row: where(int(chosen[row])))


@dataclass(frozen=True, eq=False)
class Assembled:
    """A data set, and the names of its clients in the order of their numbers."""

    dataset: Dataset
    client_names: tuple[str, ...]
    #: The test part was held out from the training part.
    held_out: bool


def split_records(
    records: Records, task: str, fraction: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the training part and of a held-out test part.

    A fraction of every client is held out, or of every class if there are no clients.
    """
    classes = None
    if task == "classification":
        if isinstance(records.targets, np.ndarray):
            labels = class_targets(records.targets, records.where)
            if labels.ndim != 1:
                raise MotleyError(
                    f"{records.where(0)}: a classification has one label per example, not the "
                    f"shape {labels.shape}. For sequences of tokens set task = 'next-token' "
                    "(data.files.task)."
                )
            classes = np.unique(labels, return_inverse=True)[1]
        else:
            names = sorted_names(records.targets)
            check_class_count(names, len(records), records.where(0))
            classes = class_numbers(records.targets, names, records.where, "training")
    groups = classes
    if records.clients is not None:
        groups = client_numbers(records.clients, ())[0]
    mask = hold_out(groups, classes, len(records), fraction, seed)
    if not mask.any():
        raise MotleyError(
            f"{records.where(0)} and the other examples ({len(records)} in all): a fraction of "
            f"{fraction:g} leaves no example for testing. Give a test file, or a larger fraction."
        )
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def assemble(
    name: str,
    train: Records,
    test: Records | None,
    shape: InputShape,
    *,
    task: str,
    classes: tuple[str, ...] = (),
    outputs: int = 0,
    test_fraction: float = 0.2,
    test_seed: int = 0,
    tested: bool = True,
) -> Assembled:
    """Return a data set.

    Without a test part, `test_fraction` of the examples becomes one, unless nothing is tested.
    `classes` are the classes' names, if they are known; `outputs` is the number of classes or
    tokens, if it is.
    """
    train = _with_clean_labels(train)
    test = None if test is None else _with_clean_labels(test)
    held_out = test is None and tested
    if held_out:
        train_rows, test_rows = split_records(train, task, test_fraction, test_seed)
        train, test = train.rows(train_rows), train.rows(test_rows)
    if test is None:
        test = train.rows(np.zeros(0, dtype=np.int64))
    if (train.clients is None) != (test.clients is None):
        with_clients, without = (train, test) if test.clients is None else (test, train)
        raise MotleyError(
            f"{with_clients.where(0)} has a client and {without.where(0)} has none: either both "
            "parts name the client of each example, or none does."
        )
    if task == "regression":
        targets = _regression_targets(train, test, outputs)
    elif isinstance(train.targets, np.ndarray):
        if task == "next-token" and isinstance(shape, TokenShape):
            outputs = outputs or shape.vocabulary
        targets = _numbered_targets(train, test, task, classes, outputs, tested)
    else:
        targets = _named_targets(train, test, classes, tested)
    train_clients = test_clients = None
    client_names: tuple[str, ...] = ()
    if train.clients is not None and test.clients is not None:
        train_clients, test_clients, client_names = client_numbers(train.clients, test.clients)
    dataset = Dataset(
        name,
        Examples(train.inputs, targets.train, train_clients, shape),
        Examples(test.inputs, targets.test, test_clients, shape),
        targets.outputs,
        classes_inferred=targets.inferred,
        tested=tested,
        task=task,
        class_names=targets.names,
    )
    return Assembled(dataset, client_names, held_out)


@dataclass(frozen=True, eq=False)
class _Targets:
    """The targets of both parts as numbers."""

    train: np.ndarray
    test: np.ndarray
    #: The number of outputs that a model needs: classes, tokens, or numbers per example.
    outputs: int
    names: tuple[str, ...] = ()
    #: The number of classes was taken from the largest label.
    inferred: bool = False


def _regression_targets(train: Records, test: Records, outputs: int) -> _Targets:
    train_targets, test_targets = _numbers(train), _numbers(test)
    outputs = outputs or int(np.prod(train_targets.shape[1:], dtype=np.int64))
    return _Targets(train_targets, test_targets, outputs)


def _numbered_targets(
    train: Records, test: Records, task: str, names: tuple[str, ...], outputs: int, tested: bool
) -> _Targets:
    """Return targets that are class or token numbers already."""
    train_targets = class_targets(np.asarray(train.targets), train.where)
    test_targets = class_targets(np.asarray(test.targets), test.where)
    inferred = not outputs and not names and task == "classification"
    largest = max(int(train_targets.max()), int(test_targets.max(initial=0)))
    if inferred:
        count = len(train) + len(test)
        check_class_numbers(largest + 1, count, train.where(0), tested=tested)
    outputs = outputs or len(names) or largest + 1
    return _Targets(train_targets, test_targets, outputs, names, inferred)


def _named_targets(train: Records, test: Records, names: tuple[str, ...], tested: bool) -> _Targets:
    """Number the classes of targets that are texts, by `names` or else in sorted order."""
    train_names, test_names = list(train.targets), list(test.targets)
    names = names or sorted_names(train_names)
    if tested:
        check_class_count(names, len(train), train.where(0))
    train_targets = class_numbers(train_names, names, train.where, "training")
    test_targets = class_numbers(test_names, names, test.where, "test")
    return _Targets(train_targets, test_targets, len(names), names)


def _with_clean_labels(records: Records) -> Records:
    """Return records whose labels and clients have no blanks around them."""
    clients = None if records.clients is None else [name.strip() for name in records.clients]
    if isinstance(records.targets, np.ndarray):
        return replace(records, clients=clients)
    return replace(records, targets=clean_labels(records.targets), clients=clients)


def _numbers(records: Records) -> np.ndarray:
    """Return a regression's targets in single precision."""
    if not isinstance(records.targets, np.ndarray):
        raise MotleyError(f"{records.where(0)}: the targets of a regression must be numbers.")
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(records.targets, dtype=np.float32)
    finite = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        raise MotleyError(f"{records.where(row)}: the target {records.targets[row]} is not finite.")
    return values
