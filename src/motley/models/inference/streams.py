"""Which channels of a model are coupled, from a recording of it (`Channels`, for width splits)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from motley.models.channels import CLASSES, Axis, Channels
from motley.models.inference.factors import Dim, Dims, Factor, fix, resolve, size_of
from motley.models.inference.record import Attribute, Recording, Ref
from motley.models.inference.rules import Propagation

#: The factors of a dimension: channels of a stream, or numbers that never change.
Length = tuple[Axis | int, ...]


@dataclass(frozen=True)
class FixedChannels:
    """Channels of a parameter that no split can leave out, and why."""

    name: str
    width: int
    reason: str


class Streams:
    """The streams of a recorded model.

    `without` has the streams that failed a check, with the reasons: they are not cut.
    """

    def __init__(
        self, recording: Recording, classifiers: Sequence[str], without: dict[str, str]
    ) -> None:
        self.recording = recording
        self.classifiers = classifiers
        self._propagation = Propagation(recording)
        for name, dims in self._tensors.items():
            if dims and _layer(name) in classifiers:
                fix(dims[0], "one output per class")
        self._fix_products()
        for name, reason in without.items():
            for factor, stream in list(self._names.items()):
                if stream == name:
                    factor.fix(reason)
        self._propagation._settle()

    @cached_property
    def _tensors(self) -> dict[str, Dims]:
        """The dimensions of every parameter and buffer that the model uses."""
        tensors = {}
        for number, value in enumerate(self.recording.values):
            if value.name:
                tensors[value.name] = self._propagation.of(Ref(number))
        return tensors

    def _fix_products(self) -> None:
        """Leave at most one factor of a dimension free: an `Axis` describes one stream.

        Of several the innermost is kept: all heads of an attention, and some channels of each.
        """
        changed = True
        while changed:
            changed = False
            for dims in self._tensors.values():
                for dim in dims:
                    changed = _fix_all_but_last(resolve(dim)) or changed
            self._propagation._settle()

    @cached_property
    def _names(self) -> dict[Factor, str]:
        """Free factor -> the name of its stream: the first layer that writes it."""
        # A layer writes the channels of its tensors' first dimension, so these name streams first.
        dims_of_layers: list[tuple[str, Dim]] = []
        for name, dims in self._tensors.items():
            dims_of_layers += [(_layer(name), dim) for dim in dims[:1]]
        for name, dims in self._tensors.items():
            dims_of_layers += [(_layer(name), dim) for dim in dims[1:]]
        names: dict[Factor, str] = {}
        for layer, dim in dims_of_layers:
            for factor in resolve(dim):
                if not factor.fixed:
                    names.setdefault(factor, layer)
        counts: dict[str, int] = {}
        for factor, name in names.items():
            counts[name] = counts.get(name, 0) + 1
            if counts[name] > 1:
                names[factor] = f"{name}/{counts[name]}"
        return names

    @cached_property
    def channels(self) -> Channels:
        """The streams of every parameter and buffer, by its name."""
        channels: dict[str, tuple[Axis | None, ...]] = {}
        for name, dims in self._tensors.items():
            axes = [self._axis(dim) for dim in dims]
            if _layer(name) in self.classifiers and axes and axes[0] is None:
                axes[0] = Axis(CLASSES, size_of(resolve(dims[0])))
            if any(axis is not None for axis in axes):
                channels[name] = tuple(axes)
        for name, first in self.recording.aliases.items():
            if first in channels:
                channels[name] = channels[first]
        return channels

    def _axis(self, dim: Dim) -> Axis | None:
        """Return the stream of a dimension, and how its channels are laid out; None if fixed."""
        factors = resolve(dim)
        for position, factor in enumerate(factors):
            if not factor.fixed and factor in self._names:
                outer, inner = factors[:position], factors[position + 1 :]
                return Axis(self._names[factor], factor.size, size_of(outer), size_of(inner))
        return None

    @property
    def widths(self) -> dict[str, int]:
        """Stream -> its width, in the order of the model."""
        return {name: factor.size for factor, name in self._names.items() if not factor.root.fixed}

    @cached_property
    def fixed(self) -> list[FixedChannels]:
        """The parameters that are never cut, with the reasons."""
        fixed = []
        for name, dims in self._tensors.items():
            if not dims or _layer(name) in self.classifiers or name in self.channels:
                continue
            factors = resolve(dims[0])
            reasons = [factor.fixed for factor in factors if factor.fixed]
            if reasons:
                # The innermost factor could have been cut: the groups or heads around it are kept.
                fixed.append(FixedChannels(name, size_of(factors), reasons[-1]))
        return fixed

    def lengths_of(self, value: int) -> tuple[Length, ...]:
        """Return the factors of every dimension of a value."""
        return tuple(self._length(dim) for dim in self._propagation.of(Ref(value)))

    @cached_property
    def attributes(self) -> list[tuple[Attribute, Length]]:
        """Attributes of modules that hold the length of a dimension that can be cut."""
        attributes = []
        for attribute, dim in self._propagation.attributes:
            length = self._length(dim)
            if any(isinstance(part, Axis) for part in length):
                attributes.append((attribute, length))
        return attributes

    def _length(self, dim: Dim) -> Length:
        parts: list[Axis | int] = []
        for factor in resolve(dim):
            if factor.fixed or factor not in self._names:
                parts.append(factor.size)
            else:
                parts.append(Axis(self._names[factor], factor.size))
        return tuple(parts)


def cut_length(length: Length, kept: Callable[[Axis], int]) -> int:
    """Return the length of a dimension if `kept` channels of every stream remain."""
    return math.prod(part if isinstance(part, int) else kept(part) for part in length)


def _fix_all_but_last(factors: Dim) -> bool:
    free = [factor for factor in factors if not factor.fixed]
    extra = [factor for factor in free[:-1] if factor is not free[-1]]
    for factor in extra:
        factor.fix("all of it is kept, and channels inside of it are cut, as of heads")
    if not extra and len(free) > 1:  # one stream twice in a dimension
        free[0].fix("it occurs twice in one dimension")
    return len(free) > 1


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name
