"""CINIC-10 in its released form: folders of PNG images, one per part and class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from motley.core.errors import MotleyError
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples, FileLayout, make_examples
from motley.extras import require

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
LAYOUT = FileLayout(
    "cinic10",
    ("train", "test"),
    folders=("cinic-10", "CINIC-10", "cinic10", "CINIC10"),
    holds_folders=True,
)
SIDE = 32
#: The released images have about 2 KB each. Metadata in a file could make it arbitrarily large.
MAX_BYTES = 100_000


@DATASETS.register(
    "cinic10",
    "90,000 + 90,000 photographs, 32x32 colour, 10 classes; the released folders of PNG images",
    paper="Darlow, Crowley, Antoniou, Storkey 2018, arXiv:1810.03505",
)
def load(source: DataSource) -> Dataset:
    """Read the folders `train` and `test`, as InCo's code does. The folder `valid` is not used."""
    source.refuse_path("cinic10")
    train, test = LAYOUT.find(source.root)
    require("PIL", "data set 'cinic10'")
    return Dataset("cinic10", _read_part(train), _read_part(test), classes=len(CLASSES))


def _read_part(folder: Path) -> Examples:
    """Return the images of all classes, in an order that does not depend on the file system."""
    _refuse_unknown_classes(folder)
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(CLASSES):
        if not (folder / name).is_dir():
            raise MotleyError(f"{folder}: there is no folder for the class {name!r}.")
        images_of_class = sorted((folder / name).glob("*.png"))
        if not images_of_class:
            raise MotleyError(f"{folder / name}: there are no PNG images in it.")
        paths.extend(images_of_class)
        labels.extend([label] * len(images_of_class))
    images = np.empty((len(paths), SIDE, SIDE, 3), dtype=np.uint8)
    for index, path in enumerate(paths):
        images[index] = read_png(path)
    return make_examples(images, np.array(labels, dtype=np.int64), len(CLASSES), folder)


def _refuse_unknown_classes(folder: Path) -> None:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and entry.name not in CLASSES and not entry.name.startswith("."):
            raise MotleyError(
                f"{entry}: {entry.name!r} is no class of CINIC-10. "
                f"Its classes are {', '.join(CLASSES)}."
            )


def read_png(path: Path) -> np.ndarray:
    """Return an image of 32 x 32 pixels as RGB. Some of the released images are grey."""
    from PIL import Image

    if not path.is_file():
        raise MotleyError(f"{path} is not a regular file.")
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise MotleyError(
                f"{path} has {size:,} bytes; an image of CINIC-10 has at most {MAX_BYTES:,}."
            )
        # `open` reads only the header, so that the size is known before pixels are decompressed.
        with Image.open(path, formats=["PNG"]) as image:
            if image.size != (SIDE, SIDE):
                raise MotleyError(
                    f"{path} must have {SIDE} x {SIDE} pixels, "
                    f"not {image.size[0]} x {image.size[1]}."
                )
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for damaged PNG files.
        raise MotleyError(f"{path} is not a PNG image, or is damaged: {error}.") from None
