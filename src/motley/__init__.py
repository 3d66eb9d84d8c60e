"""Motley: federated learning for a motley crew of devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from motley.client.training import OptimizerSettings
    from motley.config import Config, load_config
    from motley.data.partition import PartitionSettings
    from motley.federation import Federation
    from motley.methods import (
        ClientAlgorithm,
        Method,
        MethodSettings,
        Requirements,
        ServerAlgorithm,
        Step,
    )
    from motley.models import ModelSpec
    from motley.server.optimizer import ServerOptimizerSettings
    from motley.server.pipeline import ServerStage, StageResult, StageSettings
    from motley.settings import Settings
    from motley.splits import Split, SplitSettings

__all__ = [
    "ClientAlgorithm",
    "Config",
    "Federation",
    "Method",
    "MethodSettings",
    "ModelSpec",
    "OptimizerSettings",
    "PartitionSettings",
    "Requirements",
    "ServerAlgorithm",
    "ServerOptimizerSettings",
    "ServerStage",
    "Settings",
    "Split",
    "SplitSettings",
    "StageResult",
    "StageSettings",
    "Step",
    "load_config",
]

#: Public name -> the module that defines it. These modules are imported on first use, because they
#: need torch, which takes seconds to import: `motley --help` and `motley --version` avoid it.
_MODULES = {
    "ClientAlgorithm": "motley.methods",
    "Config": "motley.config",
    "Federation": "motley.federation",
    "Method": "motley.methods",
    "MethodSettings": "motley.methods",
    "ModelSpec": "motley.models",
    "OptimizerSettings": "motley.client.training",
    "PartitionSettings": "motley.data.partition",
    "Requirements": "motley.methods",
    "ServerAlgorithm": "motley.methods",
    "ServerOptimizerSettings": "motley.server.optimizer",
    "ServerStage": "motley.server.pipeline",
    "Settings": "motley.settings",
    "Split": "motley.splits",
    "SplitSettings": "motley.splits",
    "StageResult": "motley.server.pipeline",
    "StageSettings": "motley.server.pipeline",
    "Step": "motley.methods",
    "load_config": "motley.config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
