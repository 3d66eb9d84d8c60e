"""Folders that `datasets` of Hugging Face writes with `save_to_disk`.

The Arrow files are read with pyarrow alone. The library `datasets` is not imported, so that nothing
is downloaded, no script is run and nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from motley.core.errors import MotleyError
from motley.data.files.arrow import DAMAGED, first_line, from_arrow, names_in_features
from motley.data.files.arrow_messages import is_compressed
from motley.data.files.delimited import MISSING_MARKS
from motley.data.files.opening import MAX_COLUMNS, MAX_ROWS, check_file
from motley.data.files.table import Table, check_names, is_read
from motley.extras import require
from motley.limits import check_data

DICT_FILE = "dataset_dict.json"
STATE_FILE = "state.json"
INFO_FILE = "dataset_info.json"
MAX_JSON_BYTES = 50_000_000


def is_saved_dataset(folder: Path) -> bool:
    """Tell whether `save_to_disk` wrote this folder."""
    return (folder / DICT_FILE).is_file() or (folder / STATE_FILE).is_file()


def split_folders(folder: Path) -> tuple[Path, Path | None]:
    """Return the folders of the training part and of the test part, if there is one."""
    if not (folder / DICT_FILE).is_file():
        return folder, None
    content = _read_json(folder / DICT_FILE)
    splits = content.get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise MotleyError(f"{folder / DICT_FILE}: 'splits' must be a list of names.")
    if "train" not in splits:
        raise MotleyError(f"{folder}: it has no split 'train', only {', '.join(splits) or 'none'}.")
    for name in ("test", "validation"):
        if name in splits:
            return folder / "train", folder / name
    return folder / "train", None


def read_saved_dataset(
    folder: Path,
    *,
    missing_marks: Sequence[str] = MISSING_MARKS,
    text_columns: Collection[str] = (),
    drop: Collection[str] = (),
    only: Collection[str] = (),
    resize: int = 0,
) -> Table:
    """Return one split that `save_to_disk` wrote, as a table."""
    require("pyarrow", "reading a folder of Hugging Face's datasets")
    import pyarrow as pa

    if not folder.is_dir():
        raise MotleyError(f"there is no folder {folder}.")
    files = _data_files(folder)
    check_data(f"{folder}: its tables", sum(file.stat().st_size for file in files))
    tables = [_read_stream(file) for file in files]
    try:
        whole = pa.concat_tables(tables)
        check_names(whole.column_names, folder)
        names = tuple(whole.column_names)
        whole = whole.select([name for name in names if is_read(name, drop, only)])
    except (pa.ArrowException, *DAMAGED) as error:
        raise MotleyError(
            f"{folder}: its files do not fit together: {first_line(error)}."
        ) from None
    if whole.num_rows > MAX_ROWS or whole.num_columns > MAX_COLUMNS:
        raise MotleyError(f"{folder} has too many rows or columns.")
    info = folder / INFO_FILE
    features = _read_json(info).get("features") if info.is_file() else None
    return from_arrow(
        whole,
        folder,
        names,
        missing_marks=missing_marks,
        text_columns=text_columns,
        resize=resize,
        class_names=names_in_features(features),
    )


def _data_files(folder: Path) -> list[Path]:
    """Return the data files that state.json names. They must be in the folder itself."""
    state = _read_json(folder / STATE_FILE)
    entries = state.get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise MotleyError(f"{folder / STATE_FILE}: '_data_files' must be a list of files.")
    if state.get("_indices_files"):
        raise MotleyError(
            f"{folder / STATE_FILE}: a separate file of indices is not read. Save it again with a "
            "recent version of datasets."
        )
    files = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise MotleyError(f"{folder / STATE_FILE}: {name!r} is not the name of a file.")
        check_file(folder / name)
        files.append(folder / name)
    return files


def _read_stream(path: Path) -> Any:
    """Read one Arrow file. Its arrays are views of the bytes that were read."""
    import pyarrow as pa

    try:
        batches = []
        expanded = 0
        # From a buffer: a message that declares a larger body than there is raises an error. Read
        # from a file, its declared size would be allocated first.
        content = pa.py_buffer(path.read_bytes())
        for message in pa.ipc.MessageReader.open_stream(content):
            if message.type not in ("record batch", "dictionary"):
                continue
            metadata = message.metadata.to_pybytes()
            if is_compressed(metadata, is_dictionary=message.type == "dictionary"):
                raise MotleyError(
                    f"{path}: compressed Arrow files are not read; `save_to_disk` writes none."
                )
        with pa.ipc.open_stream(content) as reader:
            for batch in reader:
                # Before anything else looks at it: offsets may point anywhere.
                batch.validate(full=True)
                expanded += batch.nbytes
                check_data(f"{path}: its table", expanded)
                batches.append(batch)
            table = pa.Table.from_batches(batches, reader.schema)
    except (pa.ArrowException, struct.error, *DAMAGED) as error:
        raise MotleyError(f"{path} is truncated or damaged: {first_line(error)}.") from None
    return table


def _read_json(path: Path) -> dict[str, Any]:
    check_file(path)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise MotleyError(f"{path} has more than {MAX_JSON_BYTES:,} bytes.")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None
    if not isinstance(content, dict):
        raise MotleyError(f"{path} must hold a table {{...}}.")
    return content
