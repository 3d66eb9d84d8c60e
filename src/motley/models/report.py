"""The facts that Motley knows about models, for `motley model check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

from torch import nn

from motley.core.errors import MotleyError
from motley.models.channels import CLASSES
from motley.models.facts import blocks_of, channels_of, cross_layers_of, head_of, stages_of
from motley.models.inference import InferenceError, inference_of
from motley.models.inference.blocks import single_output
from motley.models.spec import spec_of
from motley.models.stages import chain_of, owned


@dataclass(frozen=True)
class Answer:
    """A fact about a model in words, or why it is not known."""

    text: str = ""
    refused: str = ""


@dataclass(frozen=True)
class ModelReport:
    """One size: its parameters and the known facts about it."""

    parameters: int
    tensors: int
    head: Answer
    blocks: Answer
    pairs: Answer
    #: (stage, parameters in it); empty if the model cannot be cut.
    stages: tuple[tuple[str, int], ...]
    stages_refused: str
    #: Stream -> its width.
    streams: Mapping[str, int]
    streams_refused: str
    #: (parameter, why it is never cut).
    fixed: tuple[tuple[str, str], ...]


def report_of(model: nn.Module) -> ModelReport:
    """Return the facts about a model on the meta device."""
    stages, stages_refused = _stages(model)
    streams, streams_refused = _streams(model)
    return ModelReport(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tensors=len(model.state_dict()),
        head=_answer(lambda: head_of(model)),
        blocks=_answer(lambda: _run_of_names(blocks_of(model)) or "none"),
        pairs=_answer(lambda: _pairs(model)),
        stages=stages,
        stages_refused=stages_refused,
        streams=streams,
        streams_refused=streams_refused,
        fixed=_fixed(model, bool(streams)),
    )


def check_trainable(model: nn.Module, classes: int) -> None:
    """Raise if a model does not return one tensor with a number per class."""
    inference = inference_of(model)
    recording = inference.training.two
    shape = recording.values[single_output(model, recording)].shape
    if shape[0] != recording.values[recording.input].shape[0] or shape[-1] != classes:
        raise MotleyError(
            f"{type(model).__name__} returns shape {shape} for 2 examples; one row of {classes} "
            "logits per example is needed."
        )
    if len(shape) > 2 and shape[1] == classes:
        raise MotleyError(
            f"{type(model).__name__} returns shape {shape}: a map of logits, and Motley trains "
            "classifiers, sequence models and regressions."
        )


def shared_parameters(models: Mapping[str, nn.Module]) -> dict[tuple[str, str], int]:
    """Return, for every two sizes, how many parameters have the same name and shape."""
    shared = {}
    for first, second in combinations(models, 2):
        shapes = {name: tensor.shape for name, tensor in models[second].named_parameters()}
        count = 0
        for name, tensor in models[first].named_parameters():
            if shapes.get(name) == tensor.shape:
                count += tensor.numel()
        shared[first, second] = count
    return shared


def _answer(text: Callable[[], str]) -> Answer:
    try:
        return Answer(text())
    except InferenceError as error:
        return Answer(refused=str(error))


def _stages(model: nn.Module) -> tuple[tuple[tuple[str, int], ...], str]:
    try:
        stages_of(model)
    except InferenceError as error:
        return (), str(error)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    rows = []
    for stage in chain_of(model):
        rows.append((stage.name, sum(sizes[name] for name in owned(model, [stage]))))
    return tuple(rows), ""


def _streams(model: nn.Module) -> tuple[dict[str, int], str]:
    try:
        channels = channels_of(model)
    except InferenceError as error:
        return {}, str(error)
    streams = {}
    for tensor_axes in channels.values():
        for axis in tensor_axes:
            if axis is not None and axis.stream != CLASSES:
                streams[axis.stream] = axis.width
    return streams, ""


def _fixed(model: nn.Module, has_streams: bool) -> tuple[tuple[str, str], ...]:
    if not has_streams or spec_of(model).channels is not None:
        return ()
    fixed = inference_of(model).streams.fixed
    return tuple((channels.name, channels.reason) for channels in fixed)


def _pairs(model: nn.Module) -> str:
    pairs = cross_layers_of(model)
    if not pairs:
        return "none"
    first = pairs[0]
    return f"{len(pairs)}, the first {first.source} -> {first.target}"


def _run_of_names(names: tuple[str, ...]) -> str:
    if len(names) < 4:
        return ", ".join(names)
    return f"{len(names)}: {names[0]}, {names[1]}, ..., {names[-1]}"
