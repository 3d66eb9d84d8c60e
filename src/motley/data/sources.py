"""Where the named data sets are published: addresses, checksums and the files of archives.

The checksums are those that the data sets' pages or well-known libraries publish: torchvision for
CIFAR, MNIST, Fashion-MNIST, QMNIST and SVHN, TensorFlow Federated for FEMNIST, FLamby for heart
disease, and the archive's repository for CINIC-10. Data sets without a published checksum, or whose
files have to be made with a script, have instructions instead of addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from motley.data.dataset import FileLayout
from motley.data.datasets import (
    cifar10,
    cifar100,
    cinic10,
    fashion_mnist,
    femnist,
    har,
    heart,
    mnist,
    mnist_writers,
    shakespeare,
    svhn,
)

MNIST_URLS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
FASHION_MNIST_URLS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
#: The university moved the pages of CIFAR from the second address to the first.
CIFAR_URLS = ("https://cave.cs.toronto.edu/kriz/", "https://www.cs.toronto.edu/~kriz/")
SVHN_URLS = ("http://ufldl.stanford.edu/housenumbers/",)
CINIC10_URLS = (
    "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/",
    "https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/",
)
FEMNIST_URLS = ("https://storage.googleapis.com/tff-datasets-public/",)
QMNIST_URLS = ("https://raw.githubusercontent.com/facebookresearch/qmnist/master/",)
HEART_URLS = ("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/",)


@dataclass(frozen=True)
class RemoteFile:
    """A published file."""

    name: str
    #: Addresses without the file's name, tried in this order.
    urls: tuple[str, ...]
    #: "md5" or "sha256", a colon, and the checksum.
    checksum: str
    #: The folder in a tar archive whose files are unpacked, "" for the whole archive, or None if
    #: the file is no archive.
    unpack: str | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """The complete addresses."""
        return tuple(url + self.name for url in self.urls)


@dataclass(frozen=True)
class Source:
    """A data set's published files, and where its reader looks for them."""

    #: A data set may be read from several forms of its files; the first is the published one.
    layouts: tuple[FileLayout, ...]
    #: The folder below the data root that the files, or the archive's files, are written to.
    folder: str
    files: tuple[RemoteFile, ...]
    #: How to get files that cannot be downloaded from here; `files` is then empty.
    by_hand: str = ""

    def folder_in(self, root: Path) -> Path | None:
        """Return the folder that holds the data set, in any form, if there is one."""
        for layout in self.layouts:
            folder = layout.folder_in(root)
            if folder is not None:
                return folder
        return None

    def place_of(self, file: RemoteFile, root: Path) -> Path:
        """Return where a file is downloaded to: an archive beside the folder, others into it."""
        if file.unpack is not None:
            return root / file.name
        return root / self.folder / file.name


def _idx_files(urls: tuple[str, ...], checksums: tuple[str, ...]) -> tuple[RemoteFile, ...]:
    files = []
    for name, checksum in zip(mnist.LAYOUT.files, checksums, strict=True):
        files.append(RemoteFile(f"{name}.gz", urls, f"md5:{checksum}"))
    return tuple(files)


HEART_FILES = (
    RemoteFile("processed.cleveland.data", HEART_URLS, "md5:2d91a8ff69cfd9616aa47b59d6f843db"),
    RemoteFile("processed.hungarian.data", HEART_URLS, "md5:22e96bee155b5973568101c93b3705f6"),
    RemoteFile("processed.switzerland.data", HEART_URLS, "md5:9a87f7577310b3917730d06ba9349e20"),
    RemoteFile("processed.va.data", HEART_URLS, "md5:4249d03ca7711e84f4444768c9426170"),
)

#: Of `shakespeare` and `shakespeare-every`, which are made from the same files.
SHAKESPEARE = Source(
    (shakespeare.LEAF_LAYOUT, shakespeare.WHOLE_LEAF_LAYOUT, shakespeare.TEXT_LAYOUT),
    "shakespeare",
    (),
    by_hand="LEAF makes the files from Shakespeare's collected works: clone "
    "https://github.com/TalwalkarLab/leaf, run `./preprocess.sh -s niid --sf 1.0 -k 0 "
    "-t sample -tf 0.8` in its folder data/shakespeare, and copy the folders data/train and "
    "data/test to 'shakespeare/train' and 'shakespeare/test' there.",
)

#: Name of a data set -> its source. Data sets that need no files of their own are not in it.
SOURCES = {
    "cifar10": Source(
        (cifar10.LAYOUT,),
        cifar10.FOLDER,
        (
            RemoteFile(
                "cifar-10-python.tar.gz",
                CIFAR_URLS,
                "md5:c58f30108f718f92721af3b95e74349a",
                unpack=cifar10.FOLDER,
            ),
        ),
    ),
    "cifar100": Source(
        (cifar100.LAYOUT,),
        cifar100.FOLDER,
        (
            RemoteFile(
                "cifar-100-python.tar.gz",
                CIFAR_URLS,
                "md5:eb9058c3a382ffc7106e4002c42a8d85",
                unpack=cifar100.FOLDER,
            ),
        ),
    ),
    "cinic10": Source(
        (cinic10.LAYOUT,),
        "cinic-10",
        (
            RemoteFile(
                "CINIC-10.tar.gz",
                CINIC10_URLS,
                "md5:6ee4d0c996905fe93221de577967a372",
                unpack="",
            ),
        ),
    ),
    "fashion-mnist": Source(
        (fashion_mnist.LAYOUT,),
        "fashion-mnist",
        _idx_files(
            FASHION_MNIST_URLS,
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "femnist": Source(
        (femnist.LAYOUT, femnist.LEAF_LAYOUT),
        "femnist",
        (
            RemoteFile(
                "fed_emnist.tar.bz2",
                FEMNIST_URLS,
                "sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
                unpack="",
            ),
        ),
    ),
    "har": Source(
        (har.LAYOUT, har.ARRAY_LAYOUT),
        "UCI HAR Dataset",
        (),
        by_hand="Download 'UCI HAR Dataset.zip' from https://archive.ics.uci.edu/dataset/240 and "
        "unpack it there, so that there is a folder 'UCI HAR Dataset' with the folders 'train' "
        "and 'test'.",
    ),
    "heart": Source(
        (heart.LAYOUT,),
        "heart-disease",
        HEART_FILES,
    ),
    "heart-pooled": Source((heart.POOLED_LAYOUT,), "heart-disease", HEART_FILES),
    "mnist": Source(
        (mnist.LAYOUT,),
        "mnist",
        _idx_files(
            MNIST_URLS,
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "mnist-writers": Source(
        (mnist_writers.LAYOUT, mnist_writers.ARRAY_LAYOUT),
        "qmnist",
        (
            RemoteFile(
                "qmnist-train-images-idx3-ubyte.gz",
                QMNIST_URLS,
                "md5:ed72d4157d28c017586c42bc6afe6370",
            ),
            RemoteFile(
                "qmnist-train-labels-idx2-int.gz",
                QMNIST_URLS,
                "md5:0058f8dd561b90ffdd0f734c6a30e5e4",
            ),
            RemoteFile(
                "qmnist-test-images-idx3-ubyte.gz",
                QMNIST_URLS,
                "md5:1394631089c404de565df7b7aeaf9412",
            ),
            RemoteFile(
                "qmnist-test-labels-idx2-int.gz",
                QMNIST_URLS,
                "md5:5b5b05890a5e13444e108efe57b788aa",
            ),
        ),
    ),
    "shakespeare": SHAKESPEARE,
    "shakespeare-every": SHAKESPEARE,
    "svhn": Source(
        (svhn.LAYOUT,),
        "svhn",
        (
            RemoteFile("train_32x32.mat", SVHN_URLS, "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
            RemoteFile("test_32x32.mat", SVHN_URLS, "md5:eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
}
