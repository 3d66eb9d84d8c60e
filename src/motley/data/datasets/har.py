"""UCI HAR: six activities of 30 people, recorded by a phone at the waist.

Every example is a window of 2.56 seconds: 9 signals (body acceleration, gyroscope and total
acceleration, each along x, y and z) of 128 samples. Units are the release's (g, radian per
second). Two forms are read:

- the release: the folders `train` and `test` with `Inertial Signals`, `subject_*.txt`, `y_*.txt`;
- one file `uci_har.npz` with x (N, 9, 128), y (0 to 5), subject and chain, all numbers.

Each person is one client, with a training and a test part of their own. The release's own division
is by person and cannot give that, so both of its folders are read and divided again. Windows
overlap by half: the second half of one is the first half of the next. Windows that are linked like
this are a chain, and a chain is never divided, because a test window whose halves were both trained
on would measure memorization. The last quarter of a person's chains of each activity is the test
part.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout
from motley.data.datasets.arrays import check_array, read_named_arrays
from motley.models.inputs import SignalShape

CHANNELS, LENGTH = 9, 128
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
SIGNALS = tuple(
    f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
PARTS = ("train", "test")
#: The part of a person's chains of one activity that is held out.
TEST_FRACTION = 0.25
#: The largest file of the release has 15 MB.
MAX_TEXT_BYTES = 100_000_000
#: The real arrays have 48 MB.
MAX_ARRAY_BYTES = 200_000_000


#: Each part also has a folder `Inertial Signals`, whose files are looked for when they are read.
LAYOUT = FileLayout(
    "har",
    ("train/subject_train.txt", "train/y_train.txt", "test/subject_test.txt", "test/y_test.txt"),
    folders=("UCI HAR Dataset", "uci-har/UCI HAR Dataset", "uci-har"),
)
ARRAY_LAYOUT = FileLayout("har", ("uci_har.npz",), folders=("uci-har", ""))


@DATASETS.register(
    "har",
    "10,299 windows of 9 motion signals of 30 people, 6 activities; the release's text files "
    "or uci_har.npz",
    paper="Anguita et al. 2013, A Public Domain Dataset for Human Activity Recognition, ESANN",
)
def load(source: DataSource) -> Dataset:
    """Read the release or the .npz file, and hold out the last chains of every person."""
    source.refuse_path("har")
    if ARRAY_LAYOUT.folder_in(source.root) is not None:
        windows, activities, people, chains = _read_arrays(ARRAY_LAYOUT.find(source.root)[0])
    else:
        people_file = LAYOUT.find(source.root)[0]
        windows, activities, people = _read_release(people_file.parent.parent)
        chains = find_chains(windows)
    held_out = hold_out_chains(people, activities, chains)
    # People are numbered from 1 in the release; some may be missing from a smaller copy.
    clients = np.unique(people, return_inverse=True)[1].astype(np.int64)
    examples = Examples(windows, activities, clients, SignalShape(CHANNELS, LENGTH))
    return Dataset(
        "har",
        train=examples.rows(~held_out),
        test=examples.rows(held_out),
        classes=len(ACTIVITIES),
        class_names=ACTIVITIES,
    )


def hold_out_chains(people: np.ndarray, activities: np.ndarray, chains: np.ndarray) -> np.ndarray:
    """Return which windows are test windows: the last chains of each person and activity.

    At least one chain of each person and activity is for training, and one for testing if there
    are two.
    """
    held_out = np.zeros(len(people), dtype=bool)
    for person in np.unique(people):
        for activity in np.unique(activities):
            rows = np.flatnonzero((people == person) & (activities == activity))
            in_order = np.unique(chains[rows])
            if len(in_order) < 2:
                continue
            count = max(1, round(TEST_FRACTION * len(in_order)))
            held_out[rows] = np.isin(chains[rows], in_order[-count:])
    if not held_out.any():
        raise MotleyError(
            "data set 'har': nobody has two separate recordings of one activity, so no test part "
            "can be held out."
        )
    return held_out


def find_chains(windows: np.ndarray) -> np.ndarray:
    """Return the number of each window's chain, in the order of the chains' first windows."""
    half = LENGTH // 2
    starts = {window[:, :half].tobytes(): row for row, window in enumerate(windows)}
    chains = np.full(len(windows), -1, dtype=np.int64)
    has_previous = np.zeros(len(windows), dtype=bool)
    following = np.full(len(windows), -1, dtype=np.int64)
    for row, window in enumerate(windows):
        next_row = starts.get(window[:, half:].tobytes(), -1)
        # A window of constant signals would follow itself.
        if next_row not in (-1, row):
            following[row] = next_row
            has_previous[next_row] = True
    count = 0
    for row in np.argsort(has_previous, kind="stable"):
        if chains[row] >= 0:
            continue
        while row >= 0 and chains[row] < 0:
            chains[row] = count
            row = following[row]
        count += 1
    return chains


# ---- one file with arrays


def _read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return windows, activities, people and chains."""
    arrays = read_named_arrays(path, ("x", "y", "subject", "chain"), MAX_ARRAY_BYTES)
    windows, activities = arrays["x"], arrays["y"]
    check_array(windows, "f", (None, CHANNELS, LENGTH), f"{path}: x")
    for key in ("y", "subject", "chain"):
        check_array(arrays[key], "iu", (len(windows),), f"{path}: {key}")
    windows = _single_precision(windows)
    _check_values(windows, activities, lowest=0, where=f"{path}: ")
    return (
        windows,
        activities.astype(np.int64),
        arrays["subject"].astype(np.int64),
        arrays["chain"].astype(np.int64),
    )


# ---- the release


def _read_release(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return windows, activities and people of both parts."""
    windows, activities, people = [], [], []
    for part in PARTS:
        people_file = folder / part / f"subject_{part}.txt"
        activity_file = folder / part / f"y_{part}.txt"
        part_people = _read_whole_numbers(people_file)
        part_activities = _read_whole_numbers(activity_file)
        signals = []
        for signal in SIGNALS:
            file = folder / part / "Inertial Signals" / f"{signal}_{part}.txt"
            values = _read_text(file)
            if values.shape != (len(part_people), LENGTH):
                raise MotleyError(
                    f"{file} must have {len(part_people)} rows of {LENGTH} numbers, as "
                    f"{people_file.name} has rows; it has {values.shape[0]} rows of "
                    f"{values.shape[1]}."
                )
            signals.append(_single_precision(values))
        if len(part_activities) != len(part_people):
            raise MotleyError(
                f"{activity_file} has {len(part_activities)} rows, but {people_file.name} has "
                f"{len(part_people)}."
            )
        part_windows = np.stack(signals, axis=1)
        _check_values(part_windows, part_activities, lowest=1, where=f"{folder / part}: ")
        windows.append(part_windows)
        # The release numbers activities from 1.
        activities.append(part_activities - 1)
        people.append(part_people)
    return np.concatenate(windows), np.concatenate(activities), np.concatenate(people)


def _read_text(path: Path) -> np.ndarray:
    """Return a text file of numbers, one row per line."""
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise MotleyError(
                f"{path} has {size:,} bytes; a file of UCI HAR has at most {MAX_TEXT_BYTES:,}."
            )
        if not size:
            raise MotleyError(f"{path} is empty.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a file of blank lines, which is refused below
            values = np.loadtxt(path, dtype=np.float64, ndmin=2, encoding="ascii", comments=None)
    except OSError as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    except ValueError as error:
        # Some of NumPy's messages end in a full stop.
        raise MotleyError(f"{path} is truncated or damaged: {str(error).rstrip('.')}.") from None
    if not values.size:
        raise MotleyError(f"{path} has no numbers in it.")
    return values


def _single_precision(values: np.ndarray) -> np.ndarray:
    """Return numbers as float32. Those that are too large become infinite, and are refused."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32)


def _read_whole_numbers(path: Path) -> np.ndarray:
    values = _read_text(path)
    if values.shape[1] != 1 or not np.array_equal(values, np.rint(values)):
        raise MotleyError(f"{path} must have one whole number per line.")
    if not (np.abs(values) < 1000).all():
        raise MotleyError(f"{path} has numbers that are neither a person nor an activity.")
    return values[:, 0].astype(np.int64)


def _check_values(windows: np.ndarray, activities: np.ndarray, lowest: int, where: str) -> None:
    if not len(windows):
        raise MotleyError(f"{where}there are no windows.")
    if not np.isfinite(windows).all():
        row = int(np.argwhere(~np.isfinite(windows))[0, 0])
        raise MotleyError(f"{where}window {row} has values that are not finite.")
    highest = lowest + len(ACTIVITIES) - 1
    if activities.min() < lowest or activities.max() > highest:
        raise MotleyError(
            f"{where}activities go from {activities.min()} to {activities.max()}; "
            f"they must be in {lowest}..{highest}."
        )
