"""Read the files of `motley predict` into arrays: images, .npy, .npz and CSV."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.archive import DAMAGED, check_archive
from motley.data.files.images import COLOUR_MODES, GREY_MODES
from motley.data.files.table import parse_number
from motley.export.inputs import InputFormat
from motley.export.rows import RowReader
from motley.extras import require
from motley.models.inputs import KINDS, ImageShape

#: Endings of image files.
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
#: Endings of tables.
TABLES = (".csv", ".tsv", ".tab")
#: Names that an .npz file may give to its inputs, in order of preference.
NAMES = ("inputs", "x", "x_test")
#: An image file may declare at most this many pixels. Pillow would decode much larger ones.
MAX_PIXELS = 2**26


def read_inputs(
    path: Path, inputs: InputFormat, rows: RowReader | None = None, *, resize: bool = False
) -> np.ndarray:
    """Return the inputs in a file, in the format of the data set: (N, ...).

    `rows` reads tables and texts if the run's data set was the user's own. With `resize`, an image
    file of another size is scaled to the size of the data set's images.
    """
    if not path.exists():
        raise MotleyError(f"{path}: there is no such file.")
    if path.is_dir():
        raise MotleyError(f"{path}: is a folder; give the names of files.")
    ending = path.suffix.lower()
    if ending in IMAGES:
        return read_image(path, inputs, resize=resize)
    if ending in (".npy", ".npz"):
        return inputs.read_array(_read_numpy(path), str(path))
    if ending in TABLES:
        has_encoder = rows is not None and rows.encoder is not None
        array = rows.read_table(path) if rows is not None and has_encoder else _read_csv(path)
        return inputs.read_array(array, str(path))
    if ending == ".txt" and rows is not None and rows.vocabulary:
        return inputs.read_array(rows.read_text(path, inputs.dims[0]), str(path))
    raise MotleyError(
        f"{path}: has an unknown ending. Allowed: .npy, .npz, {', '.join(TABLES)}, images "
        f"({', '.join(IMAGES)}), and .txt for models of text."
    )


def read_image(path: Path, inputs: InputFormat, *, resize: bool) -> np.ndarray:
    """Read an image file, in grey or colour as the data set's images are."""
    shape = inputs.shape
    if not isinstance(shape, ImageShape):
        raise MotleyError(f"{path}: is an image, and the model takes {KINDS[type(shape)]}.")
    if shape.channels not in (1, 3):
        raise MotleyError(
            f"{path}: the model's images have {shape.channels} channels; give them as .npy."
        )
    require("PIL", "reading an image")
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise MotleyError(
                    f"{path}: has {image.width}x{image.height} pixels; at most {MAX_PIXELS:,} are "
                    "read."
                )
            # Pillow would cut 16-bit values off at 255.
            if image.mode not in GREY_MODES | COLOUR_MODES:
                raise MotleyError(
                    f"{path}: has pixels of the type {image.mode!r}; save it with 8 bits per "
                    "channel."
                )
            converted = image.convert("L" if shape.channels == 1 else "RGB")
    except MotleyError:
        raise
    except Exception as error:  # Pillow's decoders raise many exceptions for damaged files
        raise MotleyError(f"{path}: cannot be read as an image: {error}") from None
    wanted = (shape.width, shape.height)
    if converted.size != wanted:
        if not resize:
            raise MotleyError(
                f"{path}: is {converted.width}x{converted.height} pixels, and the data set's "
                f"images are {shape.width}x{shape.height}. --resize scales it."
            )
        converted = converted.resize(wanted, Image.Resampling.BILINEAR)
    array = np.asarray(converted, dtype=np.uint8)
    if inputs.dtype == "float32" and not inputs.any_range:
        return inputs.read_array((array / 255).astype(np.float32), str(path))
    return inputs.read_array(array, str(path))


def _read_numpy(path: Path) -> np.ndarray:
    try:
        if path.suffix.lower() == ".npz":
            name = _array_name(path, list(check_archive(path)))
            with np.load(path, allow_pickle=False) as archive:
                return np.asarray(archive[name])
        # Mapped into memory: a header that declares more than the file has allocates nothing.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except DAMAGED as error:
        raise MotleyError(f"{path}: cannot be read: {error}") from None


def _array_name(path: Path, names: list[str]) -> str:
    """Return the name of the array with the inputs: a known one, or the only one."""
    for name in NAMES:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    raise MotleyError(
        f"{path}: has the arrays {', '.join(names) or 'none'}; call the inputs {NAMES[0]!r}."
    )


def _read_csv(path: Path) -> np.ndarray:
    """Return the numbers of a CSV file, whose first line may have the names of the columns."""
    rows: list[list[float]] = []
    delimiter = "," if path.suffix.lower() == ".csv" else "\t"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            for line, cells in enumerate(csv.reader(file, delimiter=delimiter), 1):
                if not cells:
                    continue
                try:
                    rows.append([float(cell) for cell in cells])
                except ValueError:
                    # A first line with some numbers is a row that lacks others, not a header.
                    has_number = any(parse_number(cell) is not None for cell in cells)
                    if rows or line > 1 or has_number:
                        raise MotleyError(
                            f"{path}, line {line}: has a cell that is not a number."
                        ) from None
                if rows and len(rows[-1]) != len(rows[0]):
                    raise MotleyError(
                        f"{path}, line {line}: has {len(rows[-1])} cells, and the lines before it "
                        f"have {len(rows[0])}."
                    )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MotleyError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise MotleyError(f"{path}: has no line of numbers.")
    return np.array(rows, dtype=np.float32)
