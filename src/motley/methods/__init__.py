"""Methods, one file each."""

from motley.methods.base import METHODS, Collection, Method, MethodSettings, World
from motley.methods.fedavg import FedAvg

__all__ = ["METHODS", "Collection", "FedAvg", "Method", "MethodSettings", "World"]
