"""Methods, one file each."""

from motley.methods.base import METHODS, Collection, FederationInfo, Method, MethodSettings
from motley.methods.depthfl import DepthFL
from motley.methods.fedavg import FedAvg
from motley.methods.feddyn import FedDyn
from motley.methods.fedimpro import FedImpro
from motley.methods.fedimpro_with import FedImproDyn, FedImproNova, FedImproProx, FedImproScaffold
from motley.methods.fedin import FedIN
from motley.methods.fednova import FedNova
from motley.methods.fedprox import FedProx
from motley.methods.fedspeed import FedSpeed
from motley.methods.fjord import FjORD
from motley.methods.heterofl import HeteroFL
from motley.methods.inclusivefl import InclusiveFL
from motley.methods.moon import Moon
from motley.methods.scaffold import Scaffold
from motley.methods.scalefl import ScaleFL

__all__ = [
    "METHODS",
    "Collection",
    "DepthFL",
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
    "FederationInfo",
    "FjORD",
    "HeteroFL",
    "InclusiveFL",
    "Method",
    "MethodSettings",
    "Moon",
    "Scaffold",
    "ScaleFL",
]
