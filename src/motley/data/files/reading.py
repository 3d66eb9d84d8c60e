"""Read the user's own files in any supported format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.arrays import shaped_inputs
from motley.data.assemble import Assembled, Records, assemble, split_records
from motley.data.dataset import Dataset
from motley.data.files.arrow import read_parquet
from motley.data.files.columns import (
    Encoder,
    Roles,
    check_same_columns,
    choose_roles,
    clients_of,
    columns_read_as_text,
    columns_to_read,
    common_shape,
    handle_missing,
    missing_counts,
    table_inputs,
    targets_of,
    task_of,
)
from motley.data.files.delimited import read_delimited
from motley.data.files.hugging_face import is_saved_dataset, read_saved_dataset, split_folders
from motley.data.files.images import ImageFile, has_images, list_images, read_image_files
from motley.data.files.json_lines import read_json_lines
from motley.data.files.opening import check_file
from motley.data.files.settings import FileSettings
from motley.data.files.table import Column, Table
from motley.data.files.text import (
    TextFile,
    read_texts,
    text_files,
    token_numbers,
    vocabulary_of,
    windows_of,
)
from motley.data.labels import clean_labels
from motley.limits import check_data
from motley.models.inputs import TokenShape

ENDINGS = {
    ".npz": "npz",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".txt": "text",
    ".text": "text",
}
PICKLES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".joblib", ".npy.pkl"})
#: The first bytes of files -> their format.
MAGIC = {b"PAR1": "parquet", b"PK\x03\x04": "npz"}


@dataclass(frozen=True)
class ColumnSummary:
    """The facts about a column that `motley data check` prints."""

    name: str
    role: str
    values: str
    missing: int


@dataclass(frozen=True, eq=False)
class Reading:
    """A data set, and notes that were made while it was read."""

    dataset: Dataset
    format: str
    #: In the order of the clients' numbers; empty if there are no natural clients.
    client_names: tuple[str, ...]
    #: The test part was held out from the training part.
    held_out: bool
    notes: tuple[str, ...] = ()
    columns: tuple[ColumnSummary, ...] = ()
    #: How rows of a table become inputs; None for other formats.
    encoder: Encoder | None = None
    #: The characters of plain text; character i has the number i + 1.
    vocabulary: tuple[str, ...] = ()


def read_files(
    path: Path, settings: FileSettings, *, name: str = "files", tested: bool = True
) -> Reading:
    """Return the data set in a file or folder. Without `tested`, it has no test examples."""
    path = path.expanduser()
    file_format = format_of(path, settings.format)
    test_path = Path(settings.test).expanduser() if settings.test and tested else None
    readers: dict[str, Callable[[Path, Path | None, FileSettings, bool, str], Reading]] = {
        "images": _read_images,
        "npz": _read_npz,
        "text": _read_text,
    }
    read = readers.get(file_format, _read_table_files)
    return read(path, test_path, settings, tested, name)


def format_of(path: Path, asked: str = "auto") -> str:
    """Return the format of a file or folder: the one that is asked for, or by name and content."""
    try:
        if not path.exists():
            raise MotleyError(f"there is no file or folder {path}.")
        if asked != "auto":
            return asked
        if path.is_dir():
            return _folder_format(path)
        check_file(path)
        ending = path.suffix.lower()
        if ending in ENDINGS:
            return ENDINGS[ending]
        with path.open("rb") as file:
            start = file.read(8)
    except (OSError, ValueError) as error:
        raise MotleyError(f"{path} cannot be read: {error}.") from None
    if ending in PICKLES or start[:1] == b"\x80":
        raise MotleyError(
            f"{path} looks like a pickle. Reading one would run the code in it, so it is refused. "
            "Save the arrays with np.savez, or a table as CSV or Parquet."
        )
    if start[:4] in MAGIC:
        return MAGIC[start[:4]]
    endings = ", ".join(ENDINGS)
    raise MotleyError(
        f"{path}: its format is not recognised by its ending; files that end in {endings} are. Set "
        "data.files.format."
    )


def _folder_format(folder: Path) -> str:
    if is_saved_dataset(folder):
        return "huggingface"
    if has_images(folder):
        return "images"
    for place in (folder, folder / "train"):
        if place.is_dir() and text_files(place):
            return "text"
    raise MotleyError(
        f"{folder}: there are no images, no text files and no data set of Hugging Face in it. For "
        "a table, give the path of its file, and a test file with data.files.test."
    )


def _reading(assembled: Assembled, file_format: str, notes: list[str]) -> Reading:
    return Reading(
        assembled.dataset, file_format, assembled.client_names, assembled.held_out, tuple(notes)
    )


def _refuse_task(path: Path, settings: FileSettings, allowed: tuple[str, ...]) -> None:
    if settings.task not in ("auto", *allowed):
        raise MotleyError(
            f"{path}: data.files.task = {settings.task!r} does not fit this format; it can be "
            f"{' or '.join(allowed)}."
        )


# ---- images


def _read_images(
    path: Path, test_path: Path | None, settings: FileSettings, tested: bool, name: str
) -> Reading:
    _refuse_task(path, settings, ("classification",))
    listing = list_images(path, test_path)
    test_files = listing.test if tested else None
    # Read together, so that both parts have one size, and colours if any image has them.
    files = listing.train + (test_files or [])
    pixels = read_image_files(files, settings.resize)
    count = len(listing.train)
    train = _image_records(listing.train, pixels[:count], listing.has_clients)
    test = None
    if test_files is not None:
        test = _image_records(test_files, pixels[count:], listing.has_clients)
    _, shape = shaped_inputs(pixels[:1], "image", str(path))
    assembled = assemble(
        name,
        train,
        test,
        shape,
        task="classification",
        classes=settings.classes,
        test_fraction=settings.test_fraction,
        test_seed=settings.test_seed,
        tested=tested,
    )
    notes = [f"files that are not images are ignored: {listing.ignored}"] if listing.ignored else []
    return _reading(assembled, "images", notes)


def _image_records(files: list[ImageFile], pixels: np.ndarray, has_clients: bool) -> Records:
    clients = [file.client for file in files] if has_clients else None
    return Records(
        pixels, [file.label for file in files], clients, lambda row: str(files[row].path)
    )


# ---- arrays


def _read_npz(
    path: Path, test_path: Path | None, settings: FileSettings, tested: bool, name: str
) -> Reading:
    from motley.data.datasets.npz import read_arrays

    required = ("x_train", "y_train")
    optional = ("x_test", "y_test", "clients_train", "clients_test")
    arrays = read_arrays(path, required, optional)
    if test_path is not None:
        # The test file replaces the test part that the first file may have.
        test_arrays = read_arrays(test_path, ("x_test", "y_test"), ("clients_test",))
        arrays = {key: value for key, value in arrays.items() if not key.endswith("_test")}
        arrays.update(test_arrays)
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise MotleyError(f"{path}: x_test and y_test must be there together, or neither.")
    inputs, shape = shaped_inputs(arrays["x_train"], settings.inputs, f"{path}: x_train")
    task = settings.task
    if task == "auto":
        task = "regression" if arrays["y_train"].dtype.kind == "f" else "classification"
    train = _array_records(path, "train", inputs, arrays)
    test = None
    if tested and "x_test" in arrays:
        where = f"{test_path or path}: x_test"
        test_inputs, test_shape = shaped_inputs(arrays["x_test"], settings.inputs, where)
        shape = common_shape(shape, test_shape, where)
        test = _array_records(test_path or path, "test", test_inputs, arrays)
    assembled = assemble(
        name,
        train,
        test,
        shape,
        task=task,
        classes=settings.classes,
        test_fraction=settings.test_fraction,
        test_seed=settings.test_seed,
        tested=tested,
    )
    return _reading(assembled, "npz", [])


def _array_records(
    path: Path, part: str, inputs: np.ndarray, arrays: dict[str, np.ndarray]
) -> Records:
    targets = arrays[f"y_{part}"]
    clients = arrays.get(f"clients_{part}")

    def where(row: int) -> str:
        return f"{path}: example {row} of the {part} part"

    if targets.ndim == 0 or len(targets) != len(inputs):
        raise MotleyError(
            f"{path}: x_{part} has {len(inputs)} examples and y_{part} has the shape "
            f"{targets.shape}."
        )
    if clients is not None and (clients.ndim != 1 or len(clients) != len(inputs)):
        raise MotleyError(
            f"{path}: clients_{part} must have the shape ({len(inputs)},), not {clients.shape}."
        )
    names = None if clients is None else [str(client) for client in clients.tolist()]
    if targets.dtype.kind in "US":
        texts = targets.astype(str).tolist()
        if targets.ndim != 1:
            raise MotleyError(f"{path}: y_{part} must have one text per example.")
        return Records(inputs, texts, names, where)
    return Records(inputs, targets, names, where)


# ---- text


def _read_text(
    path: Path, test_path: Path | None, settings: FileSettings, tested: bool, name: str
) -> Reading:
    _refuse_task(path, settings, ("next-token",))
    train_path, included_test_path = _text_parts(path)
    if tested and test_path is None:
        test_path = included_test_path
    held_out = tested and test_path is None
    train_files = read_texts(train_path, settings.encoding)
    test_files: list[TextFile] = []
    if test_path is not None:
        test_files = read_texts(test_path, settings.encoding)
    elif held_out:
        # The end of each text, not windows from all over it: neighbouring windows are too alike.
        cut_files = [_cut_text(file, settings.test_fraction) for file in train_files]
        train_files = [head for head, _ in cut_files]
        test_files = [tail for _, tail in cut_files]
    vocabulary = vocabulary_of([file.text for file in train_files])
    length = settings.sequence_length
    has_clients = train_path.is_dir()
    train, too_short = _text_records(train_files, vocabulary, length, has_clients)
    if not len(train):
        longest = max(len(file.text) for file in train_files)
        raise MotleyError(
            f"{path}: the longest training text has {longest} characters, too few for one example "
            f"of data.files.sequence_length = {length} and the character after it."
        )
    test = None
    if tested:
        test, _ = _text_records(test_files, vocabulary, length, has_clients)
        if not len(test):
            raise MotleyError(
                f"{test_path or path}: the test text is too short for one example of "
                f"data.files.sequence_length = {length}. Set it lower, or test_fraction higher."
            )
    notes = [_note_on_short_texts(too_short)] if too_short else []
    shape = TokenShape(length, len(vocabulary) + 1)
    assembled = assemble(
        name, train, test, shape, task="next-token", outputs=shape.vocabulary, tested=tested
    )
    reading = _reading(assembled, "text", notes)
    return replace(reading, held_out=held_out, vocabulary=vocabulary)


def _text_parts(path: Path) -> tuple[Path, Path | None]:
    """Return the training part and the test part of a file or folder, if it has these parts."""
    if not path.is_dir() or not (path / "train").is_dir():
        return path, None
    test_path = path / "test"
    return path / "train", test_path if test_path.is_dir() else None


def _note_on_short_texts(clients: list[str]) -> str:
    more = ", ..." if len(clients) > 5 else ""
    listed = ", ".join(clients[:5]) + more
    return f"texts that are too short for an example ({len(clients)}): {listed}"


def _cut_text(file: TextFile, fraction: float) -> tuple[TextFile, TextFile]:
    at = len(file.text) - round(fraction * len(file.text))
    return TextFile(file.path, file.text[:at]), TextFile(file.path, file.text[at:])


def _text_records(
    files: list[TextFile], vocabulary: tuple[str, ...], length: int, has_clients: bool
) -> tuple[Records, list[str]]:
    """Return the windows of all texts, and the clients whose text is too short for one."""
    characters = sum(len(file.text) for file in files)
    check_data(f"{characters:,} characters as tokens", 16 * characters)
    inputs: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    clients: list[str] = []
    too_short: list[str] = []
    for file in files:
        windows, next_tokens = windows_of(token_numbers(file.text, vocabulary), length)
        if not len(windows):
            too_short.append(file.client)
        inputs.append(windows)
        targets.append(next_tokens)
        clients += [file.client] * len(windows)
    # There may be no files, and nothing to concatenate.
    empty = np.zeros((0, length), dtype=np.int64)
    all_inputs = np.concatenate([*inputs, empty])
    all_targets = np.concatenate([*targets, empty])
    names = clients if has_clients else None
    where = str(files[0].path) if files else ""
    return Records(all_inputs, all_targets, names, lambda row: f"{where}: window {row}"), too_short


# ---- tables


def _read_table(path: Path, file_format: str, settings: FileSettings) -> Table:
    text_columns = columns_read_as_text(settings)
    only = columns_to_read(settings)
    marks = settings.missing_marks
    if file_format == "csv":
        table = read_delimited(
            path,
            delimiter=settings.delimiter,
            header=settings.header,
            encoding=settings.encoding,
            missing_marks=marks,
            text_columns=text_columns,
            drop=settings.drop,
            only=only,
        )
    elif file_format == "jsonl":
        table = read_json_lines(
            path,
            encoding=settings.encoding,
            missing_marks=marks,
            text_columns=text_columns,
            drop=settings.drop,
            only=only,
        )
    else:
        read = read_parquet if file_format == "parquet" else read_saved_dataset
        table = read(
            path,
            missing_marks=marks,
            text_columns=text_columns,
            drop=settings.drop,
            only=only,
            resize=settings.resize,
        )
    return table


def _read_table_files(
    path: Path, test_path: Path | None, settings: FileSettings, tested: bool, name: str
) -> Reading:
    file_format = format_of(path, settings.format)
    if file_format == "huggingface":
        path, saved_test_path = split_folders(path)
        if tested:
            test_path = test_path or saved_test_path
    whole = _read_table(path, file_format, settings)
    roles = choose_roles(whole, settings)
    train = handle_missing(whole, roles, settings.missing)
    num_left_out = len(whole) - len(train)
    test = None
    if test_path is not None:
        test = _read_table(test_path, file_format, settings)
        check_same_columns(train, test, roles)
        test = handle_missing(test, roles, settings.missing)
    task = task_of(train, roles.target, settings.task)
    held_out = tested and test_path is None
    if held_out:
        # Split before the encoder is fitted, so that it does not see the test rows.
        train, test = _split_table(train, roles, task, settings)
    inputs, test_inputs, shape, encoder = table_inputs(train, test, roles.features, settings)
    test_records = None
    if test is not None and test_inputs is not None:
        test_records = _table_records(test, test_inputs, roles, task)
    classes: tuple[str, ...] = ()
    if task == "classification":
        classes = settings.classes or dict(train.class_names).get(roles.target, ())
    assembled = assemble(
        name,
        _table_records(train, inputs, roles, task),
        test_records,
        shape,
        task=task,
        classes=classes,
        tested=tested,
    )
    notes = list(whole.notes)
    if num_left_out:
        notes.append(f"{num_left_out} rows with missing values are left out")
    if encoder is not None and encoder.constant:
        notes.append(f"all training rows have one value in: {', '.join(encoder.constant[:10])}")
    return Reading(
        assembled.dataset,
        file_format,
        assembled.client_names,
        held_out,
        tuple(notes),
        _summaries(whole, roles, settings),
        encoder,
    )


def _split_table(
    table: Table, roles: Roles, task: str, settings: FileSettings
) -> tuple[Table, Table]:
    """Return the rows of a table for training, and the held-out ones for testing."""
    no_inputs = np.zeros((len(table), 0), dtype=np.float32)
    records = _table_records(table, no_inputs, roles, task)
    train_rows, test_rows = split_records(records, task, settings.test_fraction, settings.test_seed)
    return table.rows(train_rows), table.rows(test_rows)


def _table_records(table: Table, inputs: np.ndarray, roles: Roles, task: str) -> Records:
    targets = targets_of(table, roles.target, task)
    if not isinstance(targets, np.ndarray):
        targets = clean_labels(targets)
    return Records(inputs, targets, clients_of(table, roles.client), table.where)


def _summaries(table: Table, roles: Roles, settings: FileSettings) -> tuple[ColumnSummary, ...]:
    missing = missing_counts(table, roles.used)
    summaries = []
    for name, column in table.columns.items():
        role = _role_of(column, roles, settings)
        values = _describe_values(column)
        summaries.append(ColumnSummary(name, role, values, missing.get(name, 0)))
    return tuple(summaries)


def _role_of(column: Column, roles: Roles, settings: FileSettings) -> str:
    """Return the role of a column as `motley data check` prints it."""
    if column.name == roles.target:
        return "target"
    if column.name == roles.client:
        return "client"
    if column.name not in roles.features:
        return "not used"
    if column.kind == "text":
        return "text" if settings.inputs == "text" else "category"
    return column.kind


def _describe_values(column: Column) -> str:
    if column.kind == "number":
        present = column.values[~np.isnan(column.values)]
        return f"{present.min():g} to {present.max():g}" if len(present) else "none"
    if column.kind == "text":
        distinct = len({text for text in column.values.tolist() if text is not None})
        return f"{distinct} different"
    return f"{column.values.dtype}, shape {column.values.shape[1:]}"
