"""Methods, one file each: its paper, its settings, its client half and its server half."""

from motley.methods.base import (
    METHODS,
    ClientAlgorithm,
    Collection,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.depthfl import DepthFL
from motley.methods.fedavg import FedAvg
from motley.methods.feddyn import FedDyn
from motley.methods.fedimpro import FedImpro
from motley.methods.fedimpro_combinations import (
    FedImproDyn,
    FedImproNova,
    FedImproProx,
    FedImproScaffold,
)
from motley.methods.fedin import FedIN
from motley.methods.fednova import FedNova
from motley.methods.fedprox import FedProx
from motley.methods.fedspeed import FedSpeed
from motley.methods.fjord import FjORD
from motley.methods.heterofl import HeteroFL
from motley.methods.inclusivefl import InclusiveFL
from motley.methods.info import ClientInfo, FederationInfo
from motley.methods.moon import Moon
from motley.methods.scaffold import Scaffold
from motley.methods.scalefl import ScaleFL
from motley.methods.step import Step

__all__ = [
    "METHODS",
    "ClientAlgorithm",
    "ClientInfo",
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
    "Requirements",
    "Scaffold",
    "ScaleFL",
    "ServerAlgorithm",
    "Step",
]
