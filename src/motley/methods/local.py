"""Local training alone: every client trains a model of its own, and nothing is exchanged.

This is the baseline for methods without a common model (FedProto, FD, FedMD). Clients start from
the initial weights of their size.
"""

from __future__ import annotations

from motley.methods.base import METHODS, Method, Requirements


@METHODS.register("local", "every client trains a model of its own, and nothing is exchanged")
class Local(Method):
    """Both halves at their defaults, without any exchange."""

    requirements = Requirements(exchanges_weights=False)
