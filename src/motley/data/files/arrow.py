"""Parquet files, and tables of Arrow from any other source, as `Table`s."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.delimited import MISSING_MARKS
from motley.data.files.images import decode_images
from motley.data.files.opening import MAX_COLUMNS, MAX_ROWS, check_file
from motley.data.files.table import Column, Table, check_names, is_read, shown
from motley.extras import require
from motley.limits import bounded, check_expansion

if TYPE_CHECKING:
    import pyarrow as pa

#: Limits for Thrift, in which Parquet's metadata is written.
MAX_METADATA = 100_000_000
#: Rows that are decompressed at once.
BATCH_ROWS = 8_192
#: Exceptions that pyarrow raises for damaged files, besides its own. MemoryError is for an absurd
#: size that the file declares.
DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    MemoryError,
    NotImplementedError,
)


def read_parquet(
    path: Path,
    *,
    missing_marks: Sequence[str] = MISSING_MARKS,
    text_columns: Collection[str] = (),
    drop: Collection[str] = (),
    only: Collection[str] = (),
    resize: int = 0,
) -> Table:
    """Return a Parquet file as a table. Its declared sizes are checked before decompression."""
    require("pyarrow", "reading Parquet files")
    check_file(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Not memory-mapped: a file that shrinks while it is read would end the process.
    options: dict[str, Any] = {
        "memory_map": False,
        "thrift_string_size_limit": MAX_METADATA,
        "thrift_container_size_limit": MAX_METADATA,
    }
    try:
        with pq.ParquetFile(path, **options) as file:
            schema = file.schema_arrow
            names = tuple(schema.names)
            check_names(names, path)
            _check_metadata(file.metadata, path)
        wanted = [name for name in names if is_read(name, drop, only)]
        # One long text in a dictionary can be repeated for millions of rows, so texts stay encoded.
        texts = [name for name in wanted if pa.types.is_string(schema.field(name).type)]
        # The length of lists is not declared anywhere that is safe to look at.
        with (
            bounded(f"{path}: its table", path.stat().st_size),
            pq.ParquetFile(path, read_dictionary=texts, **options) as file,
        ):
            table = _read_batches(file, wanted, path)
    except (pa.ArrowException, *DAMAGED) as error:
        raise MotleyError(
            f"{path} is truncated or damaged, or not Parquet: {first_line(error)}."
        ) from None
    return from_arrow(
        table,
        path,
        names,
        missing_marks=missing_marks,
        text_columns=text_columns,
        resize=resize,
    )


def _read_batches(file: Any, columns: list[str], path: Path) -> pa.Table:
    """Read some columns, and stop when they become larger than their file can be expected to be."""
    import pyarrow as pa

    stored = path.stat().st_size
    batches = []
    rows = size = 0
    for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
        batch.validate(full=True)
        rows += batch.num_rows
        size += batch.nbytes
        if rows > file.metadata.num_rows:
            raise MotleyError(f"{path} is damaged: it has more rows than it declares.")
        check_expansion(f"{path}: its table", stored, size)
        batches.append(batch)
    if not batches:
        raise MotleyError(f"{path} has no rows.")
    return pa.Table.from_batches(batches)


def _check_metadata(metadata: Any, path: Path) -> None:
    """Refuse a file whose declared size is absurd."""
    rows, columns = metadata.num_rows, metadata.num_columns
    if not 0 <= rows <= MAX_ROWS:
        raise MotleyError(f"{path} declares {rows:,} rows; at most {MAX_ROWS:,} are read.")
    if columns > MAX_COLUMNS:
        raise MotleyError(f"{path}: {columns:,} columns are more than {MAX_COLUMNS:,}.")
    in_groups = 0
    expanded = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        in_groups += group.num_rows
        # Not the sizes of the columns: pyarrow lets an exception of C++ about damaged statistics
        # of a column through, which ends the process.
        if group.total_byte_size < 0:
            raise MotleyError(f"{path} is damaged: it declares a negative size.")
        expanded += group.total_byte_size
    if in_groups != rows:
        raise MotleyError(f"{path} is damaged: it declares {rows} rows and holds {in_groups}.")
    # Run-length encoding makes columns larger again than the declared size: a number or a
    # reference to a text takes 8 bytes per row.
    check_expansion(f"{path}: its table", path.stat().st_size, max(expanded, 8 * rows * columns))


def from_arrow(
    table: pa.Table,
    path: Path,
    names: tuple[str, ...],
    *,
    missing_marks: Sequence[str] = MISSING_MARKS,
    text_columns: Collection[str] = (),
    resize: int = 0,
    class_names: dict[str, tuple[str, ...]] | None = None,
) -> Table:
    """Turn a table of Arrow into one of numbers, texts, arrays and images.

    `names` has all columns of the file, also those that were not read into the table. `class_names`
    are names for the whole numbers in some columns; such a column becomes a text.
    """
    import pyarrow as pa

    if not table.num_rows:
        raise MotleyError(f"{path} has no rows.")
    marks = frozenset(mark.strip().lower() for mark in missing_marks)
    names_of = class_names or _names_in_metadata(table.schema.metadata)
    columns: dict[str, Column] = {}
    try:
        for name in table.column_names:
            where = f"{path}, column {name!r}"
            values = table.column(name)
            if name in names_of:
                columns[name] = _named_classes(name, values, names_of[name], path)
            else:
                columns[name] = _column(name, values, where, marks, name in text_columns, resize)
    except (pa.ArrowException, *DAMAGED) as error:
        raise MotleyError(f"{path} is damaged: {first_line(error)}.") from None
    lines = np.arange(1, table.num_rows + 1, dtype=np.int64)
    declared = tuple((name, names) for name, names in names_of.items() if name in columns)
    return Table(path, columns, lines, names, "row", class_names=declared)


def _column(
    name: str,
    values: pa.ChunkedArray,
    where: str,
    marks: frozenset[str],
    as_text: bool,
    resize: int,
) -> Column:
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        value_type = values.type.value_type
        if as_text or pa.types.is_string(value_type):
            return Column(name, "text", _texts(values, marks))
        values = values.cast(value_type)
    if isinstance(values.type, pa.ExtensionType):
        values = values.cast(values.type.storage_type)
    # Before booleans become numbers: as texts they are "true" and "false".
    if as_text and not pa.types.is_nested(values.type):
        return Column(name, "text", _texts(values, marks))
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    elif pa.types.is_null(values.type) or pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    arrow_type = values.type
    if pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type):
        return Column(name, "number", _numbers(values, where))
    if pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type):
        return Column(name, "text", _texts(values, marks))
    if _is_image(arrow_type):
        return Column(name, "image", _images(values, where, resize))
    is_list = pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)
    if is_list or pa.types.is_fixed_size_list(arrow_type):
        return Column(name, "array", _array(values, where))
    raise MotleyError(
        f"{where}: values of the type {shown(str(arrow_type))} are not read. Leave the column out "
        "with data.files.drop, or save numbers or texts."
    )


def _numbers(values: pa.ChunkedArray, where: str) -> np.ndarray:
    import pyarrow as pa

    numbers = np.asarray(values.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)
    infinite = np.isinf(numbers)
    if infinite.any():
        raise MotleyError(f"{where}, row {int(np.argmax(infinite)) + 1}: is not a finite number.")
    return numbers


def _texts(values: pa.ChunkedArray, marks: frozenset[str]) -> np.ndarray:
    """Return texts, one string object per distinct text."""
    import pyarrow as pa

    texts = np.empty(len(values), dtype=object)
    start = 0
    for chunk in values.chunks:
        encoded = chunk if pa.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
        # The last entry is for missing values.
        words = np.empty(len(encoded.dictionary) + 1, dtype=object)
        for number, value in enumerate(encoded.dictionary.to_pylist()):
            words[number] = _as_text(value, marks)
        numbers = encoded.indices.cast(pa.int64()).fill_null(len(encoded.dictionary))
        texts[start : start + len(chunk)] = words[numbers.to_numpy(zero_copy_only=False)]
        start += len(chunk)
    return texts


def _as_text(value: Any, marks: frozenset[str]) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    text = sys.intern(str(value).strip())
    return None if text.lower() in marks else text


def _array(values: pa.ChunkedArray, where: str) -> np.ndarray:
    """Return nested lists of numbers, all of one shape, as an array."""
    import pyarrow as pa

    shape = [len(values)]
    flat = values.combine_chunks()
    while pa.types.is_nested(flat.type):
        if isinstance(flat, pa.ExtensionArray):
            flat = flat.storage
        if not hasattr(flat, "flatten") or pa.types.is_struct(flat.type):
            raise MotleyError(f"{where}: lists must hold numbers, not {shown(str(flat.type))}.")
        lists_per_row = math.prod(shape[1:])
        shape.append(_length_of_lists(flat, lists_per_row, where))
        flat = flat.flatten()
    if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)) or flat.null_count:
        raise MotleyError(f"{where}: lists must hold numbers, none of them missing.")
    numbers = flat.to_numpy(zero_copy_only=False).reshape(shape)
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        bad = np.argwhere(~np.isfinite(numbers))[0]
        raise MotleyError(f"{where}, row {bad[0] + 1}: has a value that is not finite.")
    return np.array(numbers)


def _length_of_lists(lists: pa.Array, lists_per_row: int, where: str) -> int:
    """Return the length of all lists of one level of nesting. They must be equally long."""
    import pyarrow.compute as pc

    if lists.null_count:
        missing = lists.is_null().to_pylist().index(True)
        raise MotleyError(f"{where}, row {missing // lists_per_row + 1}: is missing.")
    lengths = np.asarray(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
    is_different = lengths != lengths[0]
    if is_different.any():
        number = int(np.argmax(is_different))
        raise MotleyError(
            f"{where}: the list in row {number // lists_per_row + 1} has "
            f"{lengths[number]} values and the one in row 1 {lengths[0]}. All must be equal."
        )
    if not lengths[0]:
        raise MotleyError(f"{where}: the lists are empty.")
    return int(lengths[0])


def _is_image(arrow_type: pa.DataType) -> bool:
    """Tell whether a type is the one in which `datasets` saves images."""
    import pyarrow as pa

    if not pa.types.is_struct(arrow_type):
        return False
    names = {arrow_type.field(index).name for index in range(arrow_type.num_fields)}
    return names == {"bytes", "path"} and pa.types.is_binary(arrow_type.field("bytes").type)


def _images(values: pa.ChunkedArray, where: str, resize: int) -> np.ndarray:
    files = values.combine_chunks().field("bytes").to_pylist()
    for row, content in enumerate(files):
        if content is None:
            # A path without bytes is not followed: it may name any file of this machine.
            raise MotleyError(f"{where}, row {row + 1}: the image is not in the file.")

    def row_where(row: int) -> str:
        return f"{where}, row {row + 1}"

    return decode_images(len(files), lambda row: files[row], row_where, resize)


def _names_in_metadata(metadata: dict[bytes, bytes] | None) -> dict[str, tuple[str, ...]]:
    """Return the class names that `datasets` writes into a file's metadata."""
    raw = (metadata or {}).get(b"huggingface", b"")
    if not raw or len(raw) > MAX_METADATA:
        return {}
    try:
        content = json.loads(raw)
        features = content["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return names_in_features(features)


def names_in_features(features: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of the columns of the type ClassLabel in a description by `datasets`."""
    names: dict[str, tuple[str, ...]] = {}
    if not isinstance(features, dict):
        return names
    for column, feature in features.items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            classes = feature.get("names")
            if isinstance(classes, list) and classes and all(isinstance(c, str) for c in classes):
                names[str(column)] = tuple(classes)
    return names


def _named_classes(
    name: str, values: pa.ChunkedArray, names: tuple[str, ...], path: Path
) -> Column:
    texts = np.empty(len(values), dtype=object)
    for row, value in enumerate(values.to_pylist()):
        if value is None:
            texts[row] = None
        elif isinstance(value, int) and 0 <= value < len(names):
            texts[row] = names[value]
        else:
            raise MotleyError(
                f"{path}, row {row + 1}, column {name!r}: {shown(value)} is not the number of one "
                f"of its {len(names)} classes."
            )
    return Column(name, "text", texts)


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, shortened."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".")
