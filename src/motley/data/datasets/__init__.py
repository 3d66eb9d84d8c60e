"""One file per data set format. Importing this package registers them all."""

from motley.data.datasets import (
    cifar10,
    cifar100,
    cinic10,
    digits,
    fashion_mnist,
    femnist,
    files,
    har,
    heart,
    mnist,
    mnist_writers,
    npz,
    shakespeare,
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
    "har",
    "heart",
    "mnist",
    "mnist_writers",
    "npz",
    "shakespeare",
    "svhn",
]
