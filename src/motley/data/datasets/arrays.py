"""Named arrays from a .npz file whose keys are known, with a limit on its unpacked size."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.files.archive import DAMAGED, check_archive


def read_named_arrays(path: Path, keys: Sequence[str], max_bytes: int) -> dict[str, np.ndarray]:
    """Return the arrays named `keys`.

    The archive's directory says how large each array is when unpacked, and `check_archive` compares
    it with the shape that the array declares, so a small file cannot fill the memory. Arrays of
    Python objects are rejected, because they are pickles.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > max_bytes:
            raise MotleyError(
                f"{path} unpacks to {unpacked:,} bytes, more than the {max_bytes:,} bytes that "
                "this data set can have."
            )
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive]
            if missing:
                present = ", ".join(archive.files) or "nothing"
                raise MotleyError(f"{path} lacks {', '.join(missing)}. It holds: {present}.")
            return {key: np.asarray(archive[key]) for key in keys}
    except DAMAGED as error:
        raise MotleyError(f"{path} is truncated or damaged: {error}.") from None


def check_array(array: np.ndarray, kinds: str, shape: tuple[int | None, ...], where: str) -> None:
    """Reject an array of another dtype or shape. None stands for any length of that dimension.

    `kinds` are NumPy's letters for kinds of dtype, such as "iu" for whole numbers.
    """
    fits = array.dtype.kind in kinds and array.ndim == len(shape)
    if fits:
        for length, wanted in zip(array.shape, shape, strict=True):
            fits = fits and wanted in (None, length)
    if not fits:
        wanted_shape = ", ".join("N" if length is None else str(length) for length in shape)
        numbers = "numbers" if "f" in kinds else "whole numbers"
        raise MotleyError(
            f"{where} must be {numbers} of shape ({wanted_shape}), "
            f"not {array.dtype} of shape {array.shape}."
        )
