"""Engines: how clients are run."""

from motley.core.update import ClientUpdate
from motley.engine.base import Engine, EngineSettings, Failure, Job
from motley.engine.clients import Clients
from motley.engine.debug import DebugEngine
from motley.engine.local import LocalEngine

__all__ = ["ClientUpdate", "Clients", "DebugEngine", "Engine", "EngineSettings", "Failure", "Job", "LocalEngine"]
