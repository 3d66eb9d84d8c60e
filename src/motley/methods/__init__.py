"""Methods, one file each."""

from motley.methods.base import METHODS, Collection, Method, MethodSettings, World
from motley.methods.fedavg import FedAvg
from motley.methods.feddyn import FedDyn
from motley.methods.fedimpro import FedImpro
from motley.methods.fedimpro_with import FedImproDyn, FedImproNova, FedImproProx, FedImproScaffold
from motley.methods.fedin import FedIN
from motley.methods.fednova import FedNova
from motley.methods.fedprox import FedProx
from motley.methods.fedspeed import FedSpeed
from motley.methods.moon import Moon
from motley.methods.scaffold import Scaffold

__all__ = [
    "METHODS",
    "Collection",
    "FedAvg",
    "FedDyn",
    "FedIN",
    "FedImpro",
    "FedImproDyn",
    "FedImproNova",
    "FedImproProx",
    "FedImproScaffold",
    "FedNova",
    "FedProx",
    "FedSpeed",
    "Method",
    "MethodSettings",
    "Moon",
    "Scaffold",
    "World",
]
