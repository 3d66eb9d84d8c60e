"""Engines: how many clients are run at once."""

from motley.client.clients import Clients
from motley.client.job import Job
from motley.core.update import ClientUpdate
from motley.engine.base import Engine, EngineSettings, Failure
from motley.engine.debug import DebugEngine
from motley.engine.local import LocalEngine

__all__ = [
    "ClientUpdate",
    "Clients",
    "DebugEngine",
    "Engine",
    "EngineSettings",
    "Failure",
    "Job",
    "LocalEngine",
]
