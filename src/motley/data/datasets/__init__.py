"""One file per data set format. Importing this package registers them all."""

from motley.data.datasets import cifar10, digits, fashion_mnist, npz

__all__ = ["cifar10", "digits", "fashion_mnist", "npz"]
