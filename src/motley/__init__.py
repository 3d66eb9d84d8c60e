"""Motley: federated learning for a motley crew of devices."""

__version__ = "0.1.0"

from motley.config import Config, load_config
from motley.federation import Federation

__all__ = ["Config", "Federation", "load_config"]
