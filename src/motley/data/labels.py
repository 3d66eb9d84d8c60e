"""Class names and client names as numbers, and the choice of held-out examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from motley.core.errors import MotleyError
from motley.core.randomness import generator

#: More classes than this are taken for a mistake, such as a column of numbers or identifiers.
MAX_CLASSES = 20_000


def whole_number(text: str) -> int | None:
    """Return the whole number that a text stands for, as 3 for "3" and "3.0", or None."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    # Beyond 2^53 a float does not identify a whole number.
    if math.isfinite(number) and number == math.floor(number) and abs(number) < 2**53:
        return int(number)
    return None


def clean_labels(labels: Sequence[str]) -> list[str]:
    """Return labels without blanks around them. Whole numbers are written in one way, 3 for 3.0.

    pandas writes a column of whole numbers with a missing value as 3.0.
    """
    stripped = [label.strip() for label in labels]
    numbers: dict[str, str] = {}
    for label in set(stripped):
        number = whole_number(label)
        if number is None:
            return stripped
        numbers[label] = str(number)
    return [numbers[label] for label in stripped]


def sorted_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names that occur, sorted; whole numbers are sorted by their value."""
    names = set(labels)
    numbers = {name: whole_number(name) for name in names}
    if all(number is not None for number in numbers.values()):
        return tuple(sorted(names, key=lambda name: (numbers[name], name)))
    return tuple(sorted(names))


def class_numbers(
    labels: Sequence[str], names: tuple[str, ...], where: Callable[[int], str], part: str
) -> np.ndarray:
    """Return the class number of each label.

    `where(i)` names example i, for the message about a label that is not among the names.
    """
    number_of = {name: number for number, name in enumerate(names)}
    numbers = np.empty(len(labels), dtype=np.int64)
    for row, label in enumerate(labels):
        number = number_of.get(label)
        if number is None:
            listed = ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
            raise MotleyError(
                f"{where(row)}: the label {label!r} of the {part} part is not one of the "
                f"{len(names)} classes of the training part ({listed})."
            )
        numbers[row] = number
    return numbers


def check_class_count(names: tuple[str, ...], examples: int, where: str) -> None:
    """Refuse labels that are more like numbers or identifiers than classes."""
    if len(names) < 2:
        only = f" ({names[0]!r})" if names else ""
        raise MotleyError(f"{where}: there is only one class{only}; a classification needs two.")
    too_many = len(names) > 100 and len(names) > examples / 2
    if len(names) > MAX_CLASSES or too_many:
        raise MotleyError(
            f"{where}: {len(names):,} different labels in {examples:,} examples do not look like "
            "classes. For a regression set task = 'regression' (data.files.task)."
        )


def client_numbers(
    train: Sequence[str], test: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Number the clients by their names and return the numbers of both parts, and the names.

    Clients with training examples come first, sorted, so that they are numbered 0, 1, 2, ...
    """
    names = sorted_names(train)
    names += sorted_names([name for name in set(test) if name not in set(names)])
    number_of = {name: number for number, name in enumerate(names)}
    train_numbers = np.array([number_of[name] for name in train], dtype=np.int64)
    test_numbers = np.array([number_of[name] for name in test], dtype=np.int64)
    return train_numbers, test_numbers, names


def hold_out(
    groups: np.ndarray | None,
    classes: np.ndarray | None,
    count: int,
    fraction: float,
    seed: int,
) -> np.ndarray:
    """Return a mask of the test examples: a fraction of each group, and of each class in it.

    `groups` are client numbers, class numbers, or None for a single group. Each group
    keeps at least one training example. Examples of a class that would have no training example
    stay in the training part.
    """
    numbers = np.zeros(count, dtype=np.int64) if groups is None else groups
    mask = np.zeros(count, dtype=bool)
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers)) if count else np.zeros(0, dtype=np.int64)
    for group, rows in enumerate(np.split(order, ends[:-1])):
        if not len(rows):
            continue
        held_out = min(round(fraction * len(rows)), len(rows) - 1)
        rng = generator(seed, "test", group)
        shuffled = rng.permutation(rows)
        if classes is not None:
            shuffled = shuffled[np.argsort(classes[shuffled], kind="stable")]
        if held_out:
            # At equal distances, so that each class gives its share.
            places = (np.arange(held_out) + rng.random()) * (len(rows) / held_out)
            mask[shuffled[np.minimum(places.astype(np.int64), len(rows) - 1)]] = True
    if classes is not None and count:
        in_training = np.bincount(classes[~mask], minlength=int(classes.max()) + 1)
        mask &= in_training[classes] > 0
    return mask
