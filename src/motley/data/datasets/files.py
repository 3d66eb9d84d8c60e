"""The user's own files, in any format of `motley.data.files`."""

from __future__ import annotations

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource
from motley.data.files.reading import read_files


@DATASETS.register(
    "files",
    "your own files: image folders, .npz, CSV, Parquet, JSON lines, text, Hugging Face datasets",
)
def load(source: DataSource) -> Dataset:
    """Read the file or folder at data.path."""
    if source.path is None:
        raise MotleyError(
            "data set 'files' needs data.path: a folder of images, or a .npz, .csv, .parquet, "
            ".jsonl or .txt file."
        )
    return read_files(source.path, source.files, tested=source.tested).dataset
