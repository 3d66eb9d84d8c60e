"""Model families: plain modules, and what a family declares about itself.

A family declares its sizes by registering an `Architecture` for each, which layers cross-layer gradients may pair, and
the chain of stages at which a method may cut it (`stages.py`), and which channels belong together. Nothing here knows
of clients or rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from motley.models.channels import Channels
from motley.registry import Registry


class ImageShape(NamedTuple):
    """What a model is fed: channels, height, width."""

    channels: int
    height: int
    width: int


class CrossLayer(NamedTuple):
    """A pair of parameters of one shape: the shallow one ("layer 0") helps the deep one (InCo, Section 3.2)."""

    source: str
    target: str


@dataclass(frozen=True)
class Architecture:
    """One size of a family: how to build it, and which of its layers help which."""

    family: str
    build: Callable[[Any, ImageShape, int], nn.Module]
    """(the family's settings, image shape, classes) -> a fresh module, initialised from torch's global generator."""
    cross_layers: Callable[[nn.Module], Sequence[CrossLayer]]
    channels: Callable[[nn.Module], Channels] | None = None
    """Which channels belong together; None: the family cannot be split in width."""


MODELS: Registry[Architecture] = Registry("model")

from motley.models import cnn, mlp, preact, resnet, vgg, vit  # noqa: E402, F401  (each registers its sizes)
