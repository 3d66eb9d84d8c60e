"""The facts about one model, each inferred when it is first asked for, and shared by its copies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from motley.models.channels import Channels
from motley.models.inference.blocks import find_blocks, find_head, find_pairs, single_output
from motley.models.inference.check import check_stages, randomize, wrong_streams
from motley.models.inference.record import InferenceError, Recording, meta_copy, record
from motley.models.inference.stages import Mode, find_stages
from motley.models.inference.streams import FixedChannels, Streams
from motley.models.inputs import InputShape, TableShape, TokenShape, dims_of, example_inputs
from motley.models.spec import BuiltWith, CrossLayer, ModelSpec, Stage, spec_of

#: Batch sizes of the recordings: numbers that differ between them depend on the batch size.
SMALL, LARGE = 2, 3


T = TypeVar("T")


class fact(Generic[T]):  # noqa: N801  (used as a decorator, like cached_property)
    """A property that is computed once, whether it returns a value or is refused."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> T:
        results: dict[str, T | InferenceError] = instance.results
        if self._name not in results:
            try:
                results[self._name] = self._compute(instance)
            except InferenceError as error:
                results[self._name] = error
        result = results[self._name]
        if isinstance(result, InferenceError):
            raise result
        return result


class Inference:
    """The facts that can be inferred about a model.

    Every property raises `InferenceError` if its fact cannot be inferred.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        self.model = meta_copy(model)
        self.spec = spec
        self.results: dict[str, Any] = {}
        if spec.built_with is None:
            raise InferenceError(
                f"{type(model).__name__} declares nothing, and the shape of its inputs is unknown."
            )
        self.built_with: BuiltWith = spec.built_with

    # ---- recordings

    @fact
    def training(self) -> Mode:
        """Recordings in training mode."""
        return self._recorded(training=True)

    @fact
    def evaluation(self) -> Mode:
        """Recordings in evaluation mode."""
        return self._recorded(training=False)

    def _recorded(self, training: bool) -> Mode:
        small, large = (self.record(self.model, count, training) for count in (SMALL, LARGE))
        return Mode(small, large)

    def record(self, model: nn.Module, count: int, training: bool) -> Recording:
        """Return a recording of this model, or of one that was cut from it."""
        shape = self.built_with.shape
        try:
            return record(model, example_inputs(shape, count, "meta"), training)
        except InferenceError:
            # Some models look at values, for example to find out whether a mask is needed.
            with _on_the_cpu():
                real, inputs = self._random_model(model), random_inputs(shape, count)
            return record(real, inputs, training)

    @property
    def recording(self) -> Recording:
        """The recording from which channels are inferred. The model must return one tensor."""
        recording = self.training.two
        single_output(self.model, recording)
        return recording

    # ---- facts

    @fact
    def head(self) -> str:
        """The path of the last layer."""
        if self.spec.head is not None:
            return self.spec.head
        path, _ = find_head(self.model, self.recording, self.built_with.classes)
        return path

    @fact
    def blocks(self) -> tuple[str, ...]:
        """The repeated blocks. There may be none."""
        if self.spec.blocks is not None:
            return self.spec.blocks
        return find_blocks(self.model, self.recording)

    @fact
    def cross_layers(self) -> tuple[CrossLayer, ...]:
        """The pairs of parameters that InCo mixes. There may be none."""
        return tuple(find_pairs(self.model, self.blocks))

    @fact
    def stages(self) -> tuple[Stage, ...]:
        """The stages, checked to give the model's outputs."""
        single_output(self.model, self.training.two)
        stages = find_stages((self.training, self.evaluation), self.blocks, self.head)
        with _on_the_cpu():
            check_stages(self._random_model(), stages, self._random_inputs())
        return stages

    @fact
    def streams(self) -> Streams:
        """The channels that belong together. Streams that fail the check are not cut."""
        refused: dict[str, str] = {}
        while True:
            streams = Streams(self.recording, self._classifiers, refused)
            wrong = self._wrong_streams(streams.channels)
            if not wrong:
                return streams
            for stream in wrong:
                refused[stream] = "permuting these channels changes what the model computes"

    def _wrong_streams(self, channels: Channels) -> list[str]:
        try:
            with _on_the_cpu():
                return wrong_streams(self._random_model(), channels, self._random_inputs())
        except InferenceError:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise InferenceError(
                f"{type(self.model).__name__} could not be run with random weights to check its "
                f"channels: {type(error).__name__}: {reason}. Declare ModelSpec.channels."
            ) from error

    @property
    def channels(self) -> Channels:
        """The streams of every parameter. InferenceError if no stream can be cut."""
        streams = self.streams
        if not streams.widths:
            raise InferenceError(
                f"{type(self.model).__name__} has no channels that can be cut: "
                f"{_listed(streams.fixed)}. Declare ModelSpec.channels."
            )
        return streams.channels

    @property
    def _classifiers(self) -> tuple[str, ...]:
        if self.spec.classifiers:
            return self.spec.classifiers
        try:
            return (self.head,)
        except InferenceError:
            return ()

    # ---- a model with values, for checks

    def _random_model(self, model: nn.Module | None = None) -> nn.Module:
        """Return the model, or one that was cut from it, with random weights on the CPU."""
        model = self.model if model is None else model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            real = self.spec.build(*self.built_with)
            if signature(real) != signature(model):
                real = _materialized(model, real)
            randomize(real)
        return real

    def _random_inputs(self) -> Tensor:
        return random_inputs(self.built_with.shape, SMALL)


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Create tensors with values, even where a blueprint is being built on the meta device."""
    with torch._C.DisableTorchFunction():
        yield


def _materialized(model: nn.Module, like: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device with memory for its values.

    Integer buffers, such as position numbers, are taken from a model with the same ones.
    """
    real = copy.deepcopy(model).to_empty(device="cpu")
    buffers = dict(like.named_buffers())
    with torch.no_grad():
        for name, buffer in real.named_buffers():
            source = buffers.get(name)
            if source is not None and source.shape == buffer.shape:
                buffer.copy_(source)
            else:
                buffer.zero_()
    return real


def _listed(fixed: list[FixedChannels]) -> str:
    lines = [f"{channels.name} ({channels.reason})" for channels in fixed[:3]]
    more = f" and {len(fixed) - 3} more" if len(fixed) > 3 else ""
    return "; ".join(lines) + more


def random_inputs(shape: InputShape, count: int) -> Tensor:
    """Return random inputs: tokens and categories from their ranges, other numbers normal."""
    generator = torch.Generator().manual_seed(0)
    dims = (count, *dims_of(shape))
    if isinstance(shape, TokenShape):
        return torch.randint(shape.vocabulary, dims, generator=generator)
    inputs = torch.randn(dims, generator=generator)
    if isinstance(shape, TableShape):
        for column, categories in enumerate(shape.categories, shape.numbers):
            numbers = torch.randint(categories, (count,), generator=generator)
            inputs[:, column] = numbers.float()
    return inputs


def signature(model: nn.Module) -> tuple[Any, ...]:
    """Return names and shapes of all tensors. Models of one factory that agree in it are alike."""
    return tuple((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items())


def _identity(value: Any) -> Any:
    """Return a key of a build function. Partials with equal contents have equal keys."""
    if isinstance(value, partial):
        keywords = tuple((key, _identity(value.keywords[key])) for key in sorted(value.keywords))
        return _identity(value.func), tuple(map(_identity, value.args)), keywords
    if not callable(value):
        return repr(value)
    # The inference holds the build, so that its id is not used again.
    return value if isinstance(value, Hashable) else id(value)


#: Inferences by model and declaration, and by the arguments of `build`: all copies of a model share
#: one.
_of_models: WeakKeyDictionary[nn.Module, tuple[ModelSpec, Inference]] = WeakKeyDictionary()
_of_builds: dict[Any, Inference] = {}


def inference_of(model: nn.Module) -> Inference:
    """Return the inference of a model. Models built in the same way share it."""
    spec = spec_of(model)
    known = _of_models.get(model)
    if known is not None and known[0] is spec:
        return known[1]
    built_with = spec.built_with
    key: Any = None
    if built_with is not None:
        settings, shape, classes = built_with
        build = _identity(spec.build)
        declared = spec.head, spec.blocks, spec.classifiers
        key = (build, repr(settings), shape, classes, declared, signature(model))
    inference = _of_builds.get(key) if key is not None else None
    if inference is None:
        inference = Inference(model, spec)
        _of_builds[key] = inference
    _of_models[model] = (spec, inference)
    return inference
