"""Motley: federated learning for a motley crew of devices."""

__version__ = "0.1.0"
