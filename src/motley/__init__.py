"""Motley: federated learning for a motley crew of devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from motley.version import __version__ as __version__

if TYPE_CHECKING:
    from motley import data as data
    from motley.config import Config, load_config
    from motley.core.errors import MotleyError
    from motley.data.partition import Dirichlet, Iid, Natural, PartitionSettings, Shards
    from motley.export.loading import load
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
    from motley.objects import EMA, InCo, ServerOptimizer
    from motley.runs.run import resume_run, start_run
    from motley.server.optimizer import ServerOptimizerSettings
    from motley.server.pipeline import ServerStage, StageResult, StageSettings
    from motley.settings import Settings
    from motley.splits import Split, SplitSettings
    from motley.tasks import Metric, Task

__all__ = [
    "EMA",
    "ClientAlgorithm",
    "Config",
    "Dirichlet",
    "Federation",
    "Iid",
    "InCo",
    "Method",
    "MethodSettings",
    "Metric",
    "ModelSpec",
    "MotleyError",
    "Natural",
    "PartitionSettings",
    "Requirements",
    "ServerAlgorithm",
    "ServerOptimizer",
    "ServerOptimizerSettings",
    "ServerStage",
    "Settings",
    "Shards",
    "Split",
    "SplitSettings",
    "StageResult",
    "StageSettings",
    "Step",
    "Task",
    "load",
    "load_config",
    "resume_run",
    "start_run",
]

#: Public name -> the module that defines it. These modules are imported on first use, because they
#: need torch, which takes seconds to import: `motley --help` and `motley --version` avoid it.
_MODULES = {
    "ClientAlgorithm": "motley.methods",
    "Config": "motley.config",
    "Dirichlet": "motley.data.partition",
    "EMA": "motley.objects",
    "Federation": "motley.federation",
    "Iid": "motley.data.partition",
    "InCo": "motley.objects",
    "Method": "motley.methods",
    "MethodSettings": "motley.methods",
    "Metric": "motley.tasks",
    "ModelSpec": "motley.models",
    "MotleyError": "motley.core.errors",
    "Natural": "motley.data.partition",
    "PartitionSettings": "motley.data.partition",
    "Requirements": "motley.methods",
    "ServerAlgorithm": "motley.methods",
    "ServerOptimizer": "motley.objects",
    "ServerOptimizerSettings": "motley.server.optimizer",
    "ServerStage": "motley.server.pipeline",
    "Settings": "motley.settings",
    "Shards": "motley.data.partition",
    "Split": "motley.splits",
    "SplitSettings": "motley.splits",
    "StageResult": "motley.server.pipeline",
    "StageSettings": "motley.server.pipeline",
    "Step": "motley.methods",
    "Task": "motley.tasks",
    "load": "motley.export.loading",
    "load_config": "motley.config",
    "resume_run": "motley.runs.run",
    "start_run": "motley.runs.run",
}


def __getattr__(name: str) -> Any:
    if name == "data":  # `import motley` is enough to use motley.data.from_datasets
        return import_module("motley.data")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "data"})
