"""Public images for distillation: unlabelled, and never taken from a client.

The `[public]` table names their source:

- held-out: training examples that are taken away before the others are dealt to clients.
- a data set other than the clients': its training images, fitted to the shape of the clients'.
- noise: every pixel is drawn at random.

Their labels are dropped here, so no method can use them. Every choice is keyed by the run's seed.
The server and the nodes therefore have the same images in the same order, and a message can name
them by row. The clients' own data set is refused as public data by name, and images that are also
among the clients' training or test images are refused by content: CINIC-10, for example, contains
CIFAR-10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.randomness import generator
from motley.data.dataset import DATASETS, Examples, load_dataset
from motley.data.device import DeviceData, device_data
from motley.data.partition import FromFile, Partition, PartitionSettings
from motley.data.transforms import TransformSettings
from motley.models.inputs import ImageShape
from motley.settings import Choice, FilePath, Settings, Table

#: Images that are fitted to another size at once, which bounds the memory for it.
RESIZE_BATCH = 1000
#: Red, green and blue in a grey value (ITU-R BT.601).
LUMINANCE = (0.299, 0.587, 0.114)


# ---- settings


class PublicSettings(Settings):
    """Public images: unlabelled, and never a client's. For methods that distill on them."""

    lasting = ()

    name: str = "none"
    """The source of the images. none: there are none. held-out: training examples that no client
    gets. noise: random pixels. Otherwise a data set's name (`motley list datasets`), other than the
    clients': its training images, in the size and with the channels of the clients'.
    """

    @property
    def active(self) -> bool:
        """Whether there are public images."""
        return self.name != "none"


class HeldOutSettings(PublicSettings):
    """Training examples that are taken away before the others are dealt to clients."""

    name: Literal["held-out"] = "held-out"
    samples: int = Field(default=1000, ge=1)
    """Number of public images."""


class NoiseSettings(PublicSettings):
    """Images of random pixels, uniform in 0..255."""

    name: Literal["noise"] = "noise"
    samples: int = Field(default=1000, ge=1)
    """Number of public images."""


class PublicDatasetSettings(PublicSettings):
    """Training images of another data set."""

    samples: int = Field(default=0, ge=0)
    """Number of public images, drawn at random; 0: all training images of the data set."""
    path: FilePath = ""
    """Your own file, for public.name = "npz", or a folder of images, for "files"."""

    @property
    def file_path(self) -> Path | None:
        """The user's own file, if one is set."""
        return Path(self.path).expanduser() if self.path else None


class PublicChoice(Choice):
    """The choice of public.name: three sources of its own, and every data set."""

    def __init__(self) -> None:
        super().__init__("none", {})

    @property
    def classes(self) -> Mapping[str, type[Settings]]:
        """The settings class of each source."""
        sources: dict[str, type[Settings]] = {
            "none": PublicSettings,
            "held-out": HeldOutSettings,
            "noise": NoiseSettings,
        }
        for entry in DATASETS:
            sources[entry.name] = PublicDatasetSettings
        return sources

    def class_of(self, values: Table) -> type[Settings] | None:
        """Return the class of a table's values; a user's own data set is one, too."""
        name = values.get(self.key, self.default)
        if isinstance(name, str) and name not in self.classes and name in DATASETS:
            return PublicDatasetSettings
        return super().class_of(values)

    def own_name(self, name: Any) -> Any:
        """Return the name of a data set that an alias stands for."""
        if isinstance(name, str) and name in DATASETS:
            return DATASETS.entry(name).name
        return name


PUBLIC = PublicChoice()


# ---- held-out examples


@dataclass(frozen=True, eq=False)
class Dealt:
    """Training examples by owner: the clients' partition, and the rows that no client gets.

    Rows that are in neither are unused: a file need not name all of them, and not all natural
    clients need take part.
    """

    partition: Partition
    held_out: np.ndarray


def deal(
    train: Examples,
    clients: int,
    seed: int,
    partition: PartitionSettings,
    public: PublicSettings,
) -> Dealt:
    """Take the public examples away, and deal the others to the clients.

    Index lists in a file count over the whole training set, so with them the public examples are
    drawn from those that the file gives to nobody.
    """
    labels, owners = train.targets, train.clients
    if not isinstance(public, HeldOutSettings):
        whole = partition.split_by_clients(labels, owners, clients, seed)
        return Dealt(whole, np.zeros(0, dtype=np.int64))
    if isinstance(partition, FromFile):
        lists = partition.split(labels, clients, seed)
        return Dealt(lists, held_out_of(lists, len(labels), public, seed))
    rows = np.arange(len(labels), dtype=np.int64)
    held_out = draw_rows(rows, public.samples, seed)
    rest = np.delete(rows, held_out)
    rest_owners = None if owners is None else owners[rest]
    dealt = partition.split_by_clients(labels[rest], rest_owners, clients, seed)
    return Dealt(Partition(rest[dealt.indices], dealt.offsets), held_out)


def held_out_of(
    partition: Partition, examples: int, public: PublicSettings, seed: int
) -> np.ndarray:
    """Draw the public examples from those that a given partition leaves to nobody."""
    if not isinstance(public, HeldOutSettings):
        return np.zeros(0, dtype=np.int64)
    unowned = np.setdiff1d(np.arange(examples, dtype=np.int64), partition.indices)
    if len(unowned) < public.samples:
        raise MotleyError(
            f"public.samples = {public.samples}: the given partition leaves only {len(unowned)} of "
            f"{examples} training examples to nobody. Take examples out of it, or set "
            "public.samples lower."
        )
    return draw_rows(unowned, public.samples, seed)


def draw_rows(rows: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Draw some of the rows by the seed; return them in ascending order."""
    if samples > len(rows):
        raise MotleyError(
            f"public.samples = {samples}: there are only {len(rows)} images to choose from."
        )
    return np.sort(generator(seed, "public").permutation(rows)[:samples])


# ---- the images


class PublicData:
    """Public images in memory. They are copied to a device when a method first asks for them there.

    `images(rows)` returns them normalized as the clients' images are, and not augmented.
    """

    def __init__(self, images: np.ndarray, transform: TransformSettings) -> None:
        # There are no labels; `Examples` wants some.
        self._examples = Examples(images, np.zeros(len(images), dtype=np.int64))
        self._transform = transform
        self._copies: dict[torch.device, DeviceData] = {}

    def __len__(self) -> int:
        return len(self._examples)

    @property
    def raw(self) -> np.ndarray:
        """The images as bytes (N, height, width, channels), in the clients' shape."""
        return self._examples.inputs

    def copy_to(self, device: torch.device) -> DeviceData:
        """Copy the images to a device, unless they are there already.

        A GPU waits for this copy, so it should be made before the first round.
        """
        if device not in self._copies:
            self._copies[device] = device_data(
                self._examples, self._transform, device, augment=False
            )
        return self._copies[device]

    def images(self, rows: Tensor) -> Tensor:
        """Return the images of some rows (N, C, H, W; channels last), on the device of `rows`."""
        return self.copy_to(rows.device).batch(rows)[0]


def public_images(
    settings: PublicSettings,
    train: Examples,
    held_out: np.ndarray,
    seed: int,
    root: Path | None,
) -> np.ndarray:
    """Return the public images that the settings name, in the shape of the training images.

    `held_out` are the rows of `train` that no client gets. Named data sets are read from `root`.
    """
    shape = train.inputs.shape[1:]
    if isinstance(settings, HeldOutSettings):
        return train.inputs[held_out]
    if not isinstance(train.shape, ImageShape):
        raise MotleyError(
            f"public.name = {settings.name!r}: the clients' examples are no images. "
            "Use public.name = 'held-out'."
        )
    if train.any_range:
        raise MotleyError(
            f"public.name = {settings.name!r}: the clients' images are numbers beyond 0 to 1, and "
            "public images are bytes, which become 0 to 1. Use public.name = 'held-out'."
        )
    if isinstance(settings, NoiseSettings):
        rng = generator(seed, "public", "noise")
        return rng.integers(0, 256, (settings.samples, *shape), dtype=np.uint8)
    assert isinstance(settings, PublicDatasetSettings)
    dataset = load_dataset(settings.name, root=root, path=settings.file_path, tested=False)
    images = dataset.train.inputs
    if images.dtype != np.uint8 or images.ndim != 4:
        raise MotleyError(
            f"public.name = {settings.name!r}: public examples must be images of bytes, not "
            f"{dataset.shape} of the type {images.dtype}."
        )
    if settings.samples:
        images = images[draw_rows(np.arange(len(images)), settings.samples, seed)]
    return fit_images(images, shape, f"public.name = {settings.name!r}")


def fit_images(images: np.ndarray, shape: tuple[int, ...], setting: str) -> np.ndarray:
    """Return images with the height, width and channels of `shape`.

    Grey images are repeated in all three channels, coloured ones become grey, and sizes change by
    bilinear interpolation. Other numbers of channels are refused; `setting` names the setting.
    """
    height, width, channels = shape
    if images.shape[3] == 1 and channels == 3:
        images = np.repeat(images, 3, axis=3)
    elif images.shape[3] == 3 and channels == 1:
        grey = images.astype(np.float32) @ np.array(LUMINANCE, dtype=np.float32)
        images = np.rint(grey).astype(np.uint8)[..., np.newaxis]
    elif images.shape[3] != channels:
        raise MotleyError(
            f"{setting}: its images have {images.shape[3]} channels and the clients' {channels}. "
            "Only grey and coloured images (1 and 3 channels) are converted into each other."
        )
    if images.shape[1:3] == (height, width):
        return images
    shrinks = height < images.shape[1] or width < images.shape[2]
    resized = np.empty((len(images), *shape), dtype=np.uint8)
    for start in range(0, len(images), RESIZE_BATCH):
        batch = torch.from_numpy(images[start : start + RESIZE_BATCH]).permute(0, 3, 1, 2).float()
        scaled = F.interpolate(batch, size=(height, width), mode="bilinear", antialias=shrinks)
        pixels = scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        resized[start : start + RESIZE_BATCH] = pixels.numpy()
    return resized


def refuse_clients_images(
    public: np.ndarray, images: np.ndarray, setting: str, part: str = "training"
) -> None:
    """Refuse public images that are also training or test images of the clients, byte for byte.

    `part` says which of them `images` are. A test image is unlabelled here too, but a model that
    was distilled on it is not tested on unseen images.
    """
    hashes = [hashlib.blake2b(image.tobytes()).digest() for image in public]
    # Only hashes of public images are kept: there may be millions of training images.
    of_public, of_both = set(hashes), set()
    for image in images:
        digest = hashlib.blake2b(image.tobytes()).digest()
        if digest in of_public:
            of_both.add(digest)
    shared = sum(digest in of_both for digest in hashes)
    if shared:
        raise MotleyError(
            f"{setting}: {shared} of its {len(public)} images are also {part} images of the "
            "clients' data set, so they are not public. Use another data set, or "
            "public.name = 'held-out'."
        )
