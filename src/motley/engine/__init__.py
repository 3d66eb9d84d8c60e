"""Engines: how clients are run."""

from motley.engine.base import Engine, EngineSettings, Failure, Job, Upload
from motley.engine.clients import Clients
from motley.engine.debug import DebugEngine
from motley.engine.local import LocalEngine

__all__ = ["Clients", "DebugEngine", "Engine", "EngineSettings", "Failure", "Job", "LocalEngine", "Upload"]
