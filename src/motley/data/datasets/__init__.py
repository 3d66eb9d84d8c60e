"""One file per data set format. Importing this package registers them all."""

from motley.data.datasets import (
    cifar10,
    cifar100,
    cinic10,
    digits,
    fashion_mnist,
    femnist,
    files,
    mnist,
    npz,
    svhn,
)

__all__ = [
    "cifar10",
    "cifar100",
    "cinic10",
    "digits",
    "fashion_mnist",
    "femnist",
    "files",
    "mnist",
    "npz",
    "svhn",
]
