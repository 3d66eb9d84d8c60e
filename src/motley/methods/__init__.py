"""Methods, one file each: its paper, its settings, its client half and its server half.

Importing this package imports every module in it, so a new method registers itself by its file.
"""

from importlib import import_module
from pkgutil import iter_modules

from motley.methods.base import (
    METHODS,
    ClientAlgorithm,
    Collection,
    Method,
    MethodSettings,
    Requirements,
    ServerAlgorithm,
)
from motley.methods.info import ClientInfo, FederationInfo
from motley.methods.step import Step

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "METHODS",
    "ClientAlgorithm",
    "ClientInfo",
    "Collection",
    "FederationInfo",
    "Method",
    "MethodSettings",
    "Requirements",
    "ServerAlgorithm",
    "Step",
]
