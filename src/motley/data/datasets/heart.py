"""Fed-Heart-Disease: who has a heart disease, by hospital.

The four `processed.*.data` files of UCI's heart disease data, one per hospital, prepared as FLamby
(Ogier du Terrail et al., NeurIPS 2022) does, so that results can be compared:

- the columns slope, ca and thal are left out, because most hospitals did not record them, and so
  are rows with missing values: 303, 261, 46 and 130 patients are left;
- the chest pain type and the ECG result become indicator columns, without their first value, which
  makes 13 columns;
- 66 % of a hospital's patients, stratified by the label, are for training. They are drawn by
  scikit-learn's `train_test_split` with the seed that FLamby uses, so these are the same patients;
- columns are standardized. For the data set `heart`, each hospital uses the mean and deviation of
  its own training part, and no statistics leave a hospital, as in FLamby's federated runs. For
  `heart-pooled`, all use those of all training parts together, as in FLamby's pooled training. The
  difference is large: by its own statistics, a hospital with many sick patients looks like one with
  few.

A column that is constant in a training part is only centred. FLamby divides it by 1e-9 instead,
which turns a rare value in the test part into a billion.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout
from motley.models.inputs import TableShape

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
LAYOUT = FileLayout(
    "heart",
    tuple(f"processed.{hospital}.data" for hospital in HOSPITALS),
    folders=("heart-disease", "heart_disease", "heart_disease_dataset"),
)
POOLED_LAYOUT = replace(LAYOUT, name="heart-pooled")
COLUMNS = (
    "age",
    "sex",
    "cp",
    "trestbps",
    "chol",
    "fbs",
    "restecg",
    "thalach",
    "exang",
    "oldpeak",
    "slope",
    "ca",
    "thal",
    "num",
)
#: Recorded by one hospital only.
LEFT_OUT = ("slope", "ca", "thal")
LABEL = "num"
#: Columns that are numbers of categories -> the values that occur.
CATEGORIES = {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
CLASS_NAMES = ("no disease", "disease")
TRAIN_FRACTION = 0.66
#: The seed of FLamby's division into train and test.
SPLIT_SEED = 43
MAX_BYTES = 10_000_000
#: Two for training, whose deviation is needed, and two for testing.
MIN_ROWS = 4


@DATASETS.register(
    "heart",
    "heart disease of 740 patients of 4 hospitals, 13 columns, 2 classes; UCI's four "
    "processed.*.data files, prepared as in FLamby",
    paper="Ogier du Terrail et al. 2022 (FLamby), arXiv:2210.04620",
)
def load(source: DataSource) -> Dataset:
    """Read the four files; every hospital standardizes by its own training part."""
    source.refuse_path("heart")
    return _load(LAYOUT, source, pooled=False)


@DATASETS.register(
    "heart-pooled",
    "the same patients, standardized by the statistics of all four hospitals together",
    paper="Ogier du Terrail et al. 2022 (FLamby), arXiv:2210.04620",
)
def load_pooled(source: DataSource) -> Dataset:
    """Like `load`, but columns are standardized over all hospitals together."""
    source.refuse_path("heart-pooled")
    return _load(POOLED_LAYOUT, source, pooled=True)


def _load(layout: FileLayout, source: DataSource, *, pooled: bool) -> Dataset:
    patients, labels, hospitals, in_train = _read_hospitals(layout.find(source.root))
    standardized = np.empty_like(patients)
    for hospital in np.unique(hospitals):
        rows = hospitals == hospital
        reference = in_train if pooled else in_train & rows
        center, scale = _statistics(patients[reference])
        standardized[rows] = (patients[rows] - center) / scale
    shape = TableShape(patients.shape[1])
    examples = Examples(standardized.astype(np.float32), labels, hospitals, shape)
    return Dataset(
        layout.name,
        train=examples.rows(in_train),
        test=examples.rows(~in_train),
        classes=len(CLASS_NAMES),
        class_names=CLASS_NAMES,
    )


def _read_hospitals(
    files: list[Path],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return all patients, their labels and hospitals, and whether they are for training."""
    patients, labels, hospitals, in_train = [], [], [], []
    for hospital, path in enumerate(files):
        rows, row_labels = read_hospital(path)
        train_rows, _ = stratified_split(row_labels)
        patients.append(rows)
        labels.append(row_labels)
        hospitals.append(np.full(len(rows), hospital, dtype=np.int64))
        in_train.append(np.isin(np.arange(len(rows)), train_rows))
    return (
        np.concatenate(patients),
        np.concatenate(labels),
        np.concatenate(hospitals),
        np.concatenate(in_train),
    )


def _statistics(patients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each column, 1 if a column is constant."""
    deviation = patients.std(axis=0, ddof=1)
    constant = (patients == patients[0]).all(axis=0)
    return patients.mean(axis=0), np.where(constant, 1.0, deviation)


def read_hospital(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the complete patients' 13 columns (float64), and their labels 0 and 1."""
    rows = _complete_rows(path)
    table = dict(zip(_kept_columns(), np.array(rows).T, strict=True))
    features = []
    for name, values in table.items():
        if name not in CATEGORIES and name != LABEL:
            features.append(values)
    for name, categories in CATEGORIES.items():
        unknown = ~np.isin(table[name], categories)
        if unknown.any():
            raise MotleyError(
                f"{path}: column {name} holds {table[name][unknown][0]:g}; "
                f"it must be one of {', '.join(str(value) for value in categories)}."
            )
        for category in categories[1:]:
            features.append((table[name] == category).astype(np.float64))
    diagnosis = table[LABEL]
    if not np.isin(diagnosis, (0, 1, 2, 3, 4)).all():
        raise MotleyError(f"{path}: the last column, the diagnosis, must be in 0..4.")
    # 1 to 4 are degrees of narrowing; FLamby and most others only ask whether there is any.
    return np.stack(features, axis=1), (diagnosis > 0).astype(np.int64)


def _kept_columns() -> list[str]:
    return [name for name in COLUMNS if name not in LEFT_OUT]


def _complete_rows(path: Path) -> list[list[float]]:
    kept = [COLUMNS.index(name) for name in _kept_columns()]
    rows = []
    for number, cells in enumerate(_read_cells(path), start=1):
        if not cells:
            continue
        if len(cells) != len(COLUMNS):
            raise MotleyError(
                f"{path}: row {number} has {len(cells)} values; it must have {len(COLUMNS)}."
            )
        values = [cells[column].strip() for column in kept]
        if "?" in values:
            continue
        try:
            numbers = [float(value) for value in values]
        except ValueError as error:
            raise MotleyError(f"{path}: row {number}: {error}.") from None
        if not np.isfinite(numbers).all():
            raise MotleyError(f"{path}: row {number} has a value that is not finite.")
        rows.append(numbers)
    if len(rows) < MIN_ROWS:
        raise MotleyError(f"{path} has {len(rows)} complete rows; at least {MIN_ROWS} are needed.")
    return rows


def _read_cells(path: Path) -> list[list[str]]:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise MotleyError(f"{path} has {size:,} bytes; the real files have about 10,000.")
        with path.open(encoding="ascii", newline="") as file:
            return list(csv.reader(file))
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise MotleyError(f"{path} is damaged: {error}.") from None


# ---- FLamby's division into train and test


def stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and testing, in the order of the file.

    The draw equals scikit-learn's `train_test_split(..., random_state=43, stratify=labels)`, which
    FLamby calls; scikit-learn itself is not needed. As there, the split is not stratified if a
    label has fewer than three patients.
    """
    random = np.random.RandomState(SPLIT_SEED)
    train_size = int(TRAIN_FRACTION * len(labels))
    test_size = len(labels) - train_size
    counts = np.bincount(labels, minlength=2)
    if counts.min() <= 2:
        order = random.permutation(len(labels))
        return np.sort(order[test_size:]), np.sort(order[:test_size])
    train_counts = _proportional_counts(counts, train_size, random)
    # The second draw is of rows that are all used, but it advances the random numbers.
    _proportional_counts(counts - train_counts, test_size, random)
    train, test = [], []
    for label, train_count in enumerate(train_counts):
        rows = random.permutation(np.flatnonzero(labels == label))
        train.append(rows[:train_count])
        test.append(rows[train_count:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _proportional_counts(
    counts: np.ndarray, draws: int, random: np.random.RandomState
) -> np.ndarray:
    """Return the most likely counts of `draws` draws without replacement, ties drawn at random."""
    exact = counts / counts.sum() * draws
    whole = np.floor(exact)
    remaining = int(draws - whole.sum())
    rest = exact - whole
    for value in np.sort(np.unique(rest))[::-1]:
        if not remaining:
            break
        candidates = np.flatnonzero(rest == value)
        chosen = min(len(candidates), remaining)
        whole[random.choice(candidates, size=chosen, replace=False)] += 1
        remaining -= chosen
    return whole.astype(np.int64)
