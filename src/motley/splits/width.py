"""Splits by width: a size has all layers of one architecture, with a fraction of their channels.

One of three rules selects the channels:

- leading (HeteroFL, FjORD): the first channels, so that a narrow model is contained in every wider
  one;
- rolling (FedRolex): a window that moves by one channel per round and wraps around. Round 1 has the
  leading channels, and streams of the same width move together;
- random (Federated Dropout): channels drawn per client and round.

Every layer that reads or writes a residual stream selects the same channels, so the sliced network
is well formed. The leading channels are evaluated or, with a rolling window, those of the round's
window: channels of different layers that were never trained together do not form a working model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.meta import on_meta
from motley.core.part import Part, Piece, State
from motley.core.randomness import generator
from motley.models.channels import CLASSES, Axis, Channels, axes, positions
from motley.models.facts import InferenceError, channels_of, width_attributes_of
from motley.models.inference import inference_of
from motley.models.inference.cut import check_cut, resize_attributes
from motley.models.lstm import LSTMLayer
from motley.models.spec import declare, spec_of
from motley.splits.base import (
    SPLITS,
    STATISTICS,
    Blueprint,
    Split,
    SplitSettings,
    build_on_meta,
)
from motley.splits.narrow import narrow

Rate = Annotated[float, Field(gt=0, le=1)]


class WidthSettings(SplitSettings):
    """The widths, and the rule that selects the channels."""

    name: str = "width"
    rates: tuple[Rate, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """One size per rate: the fraction of the channels it keeps, rounded up. The global model has
    the full width, whether or not a size has it.
    """
    channels: Literal["leading", "rolling", "random"] = "leading"
    """The channels that a size keeps: the leading ones (HeteroFL), a window that moves on in every
    round (FedRolex), or random ones (Federated Dropout).
    """
    scaler: bool = False
    """Divide a layer's output by the size's rate (HeteroFL, Section 3), in evaluation too.
    HeteroFL's authors turn it off there, but evaluate rate 1 only, where it changes nothing. Before
    a batch norm its only effect is through the norm's epsilon.
    """

    @field_validator("rates")
    @classmethod
    def _named_once(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if not rates or len(set(rates)) < len(rates):
            raise ValueError("there must be at least one rate, and no rate twice")
        return rates

    def sizes(self, architectures: tuple[str, ...]) -> tuple[str, ...]:
        """Return one name per rate."""
        return tuple(f"{architectures[0]}-w{rate:g}" for rate in self.rates)

    def whole(self, architectures: tuple[str, ...]) -> str | None:
        """Return the size of rate 1, the last if there are several (levels of `grid`)."""
        whole = None
        for size, rate in zip(self.sizes(architectures), self.rates, strict=True):
            if rate == 1:
                whole = size
        return whole


@SPLITS.register(
    "width",
    "a size holds a fraction of every layer's channels: leading, rolling or random",
    paper="HeteroFL, ICLR 2021; FedRolex, NeurIPS 2022",
)
class Width(Split):
    """One architecture in several widths."""

    Settings = WidthSettings
    settings: WidthSettings

    def draw_up(self, builds: Mapping[str, Callable[[], nn.Module]]) -> dict[str, Blueprint]:
        """Return one blueprint per rate, and keep that of the full-width model."""
        if len(builds) != 1:
            raise MotleyError(
                f"model.sizes = {list(builds)!r}: split.name = {self.settings.name!r} takes "
                "exactly one architecture; its sizes are in split.rates."
            )
        ((self.architecture, self.base),) = builds.items()
        sizes = self.settings.sizes((self.architecture,))
        self.rates = dict(zip(sizes, self.settings.rates, strict=True))
        self.whole = Blueprint.of(self.architecture, partial(self.full_width_model, len(sizes) - 1))
        return {size: self._blueprint(level) for level, size in enumerate(sizes)}

    def full_width_model(self, level: int) -> nn.Module:
        """Return the model of a size at full width."""
        return self.base()

    def _blueprint(self, level: int) -> Blueprint:
        build = partial(self._build_narrow, level)
        with on_meta():
            self._check_inferred(level)
            module = build_on_meta(self.architecture, build)
        return replace(self.whole, build=build, module=module)

    def _check_inferred(self, level: int) -> None:
        """Check that a narrow model whose channels were inferred runs as they say."""
        spec = self.whole.spec
        if spec.channels is None and spec.built_with is not None:
            rate = self.settings.rates[level]
            try:
                whole = build_on_meta(self.architecture, partial(self.full_width_model, level))
                cut = build_on_meta(self.architecture, partial(self._cut, level))
                check_cut(inference_of(whole), cut, lambda axis: num_kept(axis, rate))
            except InferenceError as error:
                raise MotleyError(f"split.rates = {rate:g}: {error}") from error

    def _cut(self, level: int) -> nn.Module:
        """Return a new model of a size, with fewer channels."""
        model, rate = self.full_width_model(level), self.settings.rates[level]
        shapes = {}
        for name, tensor in _tensors(model).items():
            lengths = []
            for axis, length in zip(self.axes[name], tensor.shape, strict=True):
                if axis is None:
                    lengths.append(length)
                else:
                    lengths.append(num_kept(axis, rate) * axis.repeats * axis.inner)
            shapes[name] = tuple(lengths)
        narrow(model, shapes)
        attributes = width_attributes_of(self.whole.module)
        resize_attributes(model, attributes, lambda axis: num_kept(axis, rate))
        # A new object: facts that were inferred about the whole model are not true of this one.
        return declare(model, replace(spec_of(model)))

    def _build_narrow(self, level: int) -> nn.Module:
        model, rate = self._cut(level), self.settings.rates[level]
        if self.settings.scaler and rate < 1:
            for name, module in model.named_modules():
                if isinstance(module, nn.RNNBase | LSTMLayer):
                    raise MotleyError(
                        "split.scaler = true: is not defined for recurrent layers, whose outputs "
                        f"are also their inputs ({name!r}). Use split.scaler = false."
                    )
                written = self.axes.get(f"{name}.weight", (None,))[0]
                if (
                    isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear)
                    and written is not None
                    and written.stream != CLASSES
                ):
                    module.register_forward_hook(Scaler(rate))
        return model

    @cached_property
    def axes(self) -> dict[str, tuple[Axis | None, ...]]:
        """The channel stream of every dimension of every tensor; None for those never sliced."""
        whole = self.whole.module
        try:
            channels = channels_of(whole)
        except InferenceError as error:
            raise MotleyError(
                f"model.sizes = {[self.architecture]!r}: cannot be split in width: {error}"
            ) from error
        return axes({**channels, **self.more_channels(whole)}, _tensors(whole))

    def more_channels(self, whole: nn.Module) -> Channels:
        """Return the channels of layers that a subclass adds to the architecture."""
        return {}

    def check(self) -> None:
        """Nothing to check: narrow models are parts of the whole model by construction."""

    def global_name(self, size: str, name: str) -> str:
        return name

    @property
    def parts_change(self) -> bool:
        return self.settings.channels != "leading"

    def whole_part(self, size: str, round_number: int = 0, client: int = 0) -> Part:
        rule = self.settings.channels
        if rule == "leading" or round_number == 0 or self.rates[size] == 1:
            return self._part(size, 0, 0)
        return self._part(size, round_number, client if rule == "random" else 0)

    def evaluated(self, size: str, round_number: int) -> Part:
        """Return the window of the round if it rolls, and else the leading channels."""
        return self.part(size, round_number if self.settings.channels == "rolling" else 0)

    @lru_cache(maxsize=256)  # noqa: B019  (a split lives as long as its federation)
    def _part(self, size: str, round_number: int, client: int) -> Part:
        chosen: dict[str, slice | Tensor | None] = {}  # by stream
        for tensor_axes in self.axes.values():
            for axis in tensor_axes:
                if axis is not None and axis.stream not in chosen:
                    chosen[axis.stream] = self._chosen(axis, size, round_number, client)
        names = self.blueprints[size].module.state_dict()
        return {name: self._piece(size, name, chosen) for name in names}

    def _chosen(
        self, axis: Axis, size: str, round_number: int, client: int
    ) -> slice | Tensor | None:
        """Return the channels of a stream that a client has, or None for all of them."""
        count = num_kept(axis, self.rates[size])
        if count == axis.width:
            return None
        if round_number and self.settings.channels == "random":
            rng = generator(self.seed, "channels", round_number, client, axis.stream)
            return torch.from_numpy(rng.permutation(axis.width)[:count]).sort().values
        first = (round_number - 1) % axis.width if round_number else 0
        if first + count <= axis.width:
            return slice(first, first + count)
        return torch.arange(first, first + count) % axis.width

    def _piece(self, size: str, name: str, chosen: Mapping[str, slice | Tensor | None]) -> Piece:
        place = self._placed(size, name)
        wanted = [None if axis is None else chosen[axis.stream] for axis in self.axes[name]]
        if place != name or all(channels is None for channels in wanted):
            return Piece(place)
        index: list[slice | Tensor] = []
        for axis, channels in zip(self.axes[name], wanted, strict=True):
            if axis is None or channels is None:
                index.append(slice(None))
            else:
                index.append(positions(axis, channels))
        return Piece(name, tuple(index))

    @cached_property
    def meta_state(self) -> State:
        """All tensors of the global state, without values, including per-size statistics."""
        return self.without_private(self._whole_meta_state)

    @cached_property
    def _whole_meta_state(self) -> State:
        """`meta_state` if nothing were private."""
        per_size = self.settings.normalization_statistics == "per-size"
        state: State = {}
        for size in self.sizes:
            tensors = self.blueprints[size].module.state_dict()
            for name, piece in self.whole_part(size).items():
                state[piece.name] = tensors[name]
        for name, tensor in self.whole.module.state_dict().items():
            if not (per_size and name.endswith(STATISTICS)):
                state[name] = tensor
        return state

    def initial(self, seed: int) -> State:
        """Return the initial weights of the whole model, and initial per-size statistics."""
        whole = self._drawn(self.whole.build, seed).state_dict()
        state = {}
        for name, tensor in self.meta_state.items():
            state[name] = whole[name] if name in whole else initial_statistics(name, tensor)
        return state

    def without_private(self, tensors: State) -> State:
        """Return the tensors of the whole model that some size shares."""
        if not self.has_private:
            return tensors
        shared: set[str] = set()
        for size in self.sizes:
            shared.update(piece.name for piece in self.part(size).values())
        return {name: tensor for name, tensor in tensors.items() if name in shared}


def _tensors(model: nn.Module) -> State:
    """Return a model's parameters and buffers, including buffers that are not in its state."""
    return {**dict(model.named_buffers()), **model.state_dict()}


@dataclass(frozen=True)
class Scaler:
    """A hook that divides a layer's output by the rate of its model (HeteroFL, Section 3)."""

    rate: float

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output / self.rate


def initial_statistics(name: str, like: Tensor) -> Tensor:
    """Return the initial running statistics: mean 0, variance 1."""
    return torch.full(like.shape, 1 if name.endswith("running_var") else 0, dtype=like.dtype)


def num_kept(axis: Axis, rate: float) -> int:
    """Return how many channels of a stream a rate keeps, rounded up. Classes are all kept."""
    if axis.stream == CLASSES:
        return axis.width
    # The tolerance is for products such as 25 * 0.28, which is just above 7 in floating point.
    return max(1, math.ceil(axis.width * rate - 1e-9))
