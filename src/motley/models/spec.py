"""What a family declares about its sizes, and the registry of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from motley.core.registry import Registry
from motley.models.channels import Channels


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
