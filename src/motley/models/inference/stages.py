"""A model as a chain of stages, from recordings of it.

A model can be cut where a single tensor is handed on: everything after the cut is computed from
that tensor and the model's own weights. A stage runs the model's own modules where it can, and
repeats single operations between them. So it works with any weights that the model has at the
moment, on any device, and in training and evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from motley.models.inference.blocks import is_major
from motley.models.inference.record import Call, InferenceError, Operation, Recording, Ref, refs
from motley.models.spec import Stage


@dataclass(frozen=True)
class OfBatch:
    """A leaf of arguments that depends on the batch: an integer, or the device of its tensors."""

    factor: int = 0
    device: bool = False


#: Arguments of modules that can be repeated.
PLAIN = (Ref, type(None), bool, int, float, complex, str, slice, torch.dtype, torch.device, Enum)


class Step(NamedTuple):
    """One step of a stage: a call of a module of the model, or of a torch function."""

    run: Any
    args: Any
    kwargs: Any
    #: The values among the leaves of the result, by their position.
    outputs: tuple[tuple[int, int], ...]
    #: Whether the result is a single tensor.
    returns_tensor: bool = True


class Program(NamedTuple):
    """The steps of a stage in one mode."""

    steps: tuple[Step, ...]
    input: int
    output: int
    #: Parameters and buffers that steps use themselves: value -> name.
    weights: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Replay:
    """A stage's function of (model, inputs)."""

    training: Program
    evaluation: Program

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        program = self.training if model.training else self.evaluation
        values: dict[int, Tensor] = {program.input: x}
        for value, name in program.weights:
            values[value] = _tensor(model, name)

        def current_value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return values[leaf.value]
            if isinstance(leaf, OfBatch):
                # Not len(x): torch.export would take it for a constant.
                return x.device if leaf.device else leaf.factor * x.shape[0]
            return leaf

        for step in program.steps:
            function = model.get_submodule(step.run) if isinstance(step.run, str) else step.run
            args, kwargs = tree_map(current_value, (step.args, step.kwargs))
            result = function(*args, **kwargs)
            leaves = tree_leaves(result)
            for position, value in step.outputs:
                values[value] = leaves[position]
        return values[program.output]


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    return tensor


class Mode(NamedTuple):
    """Recordings of a model in one mode, with batches of two and of three."""

    two: Recording
    three: Recording


def find_stages(modes: tuple[Mode, Mode], blocks: tuple[str, ...], head: str) -> tuple[Stage, ...]:
    """Return the stages of a model that was recorded in training and in evaluation mode."""
    training, evaluation = modes
    cuts = cut_points(training.two, blocks, head)
    matching = cut_points(evaluation.two, blocks, head)
    if [name for name, _ in cuts] != [name for name, _ in matching]:
        raise InferenceError(
            "the model can be cut at other places in training than in evaluation mode. "
            "Declare ModelSpec.stages."
        )
    stages = []
    in_training = _programs(training, cuts)
    in_evaluation = _programs(evaluation, matching)
    for number, (name, first) in enumerate(cuts):
        last = cuts[number + 1][1] if number + 1 < len(cuts) else len(training.two.operations)
        replay = Replay(in_training[number], in_evaluation[number])
        members = _members(training.two, first, last)
        stages.append(_as_stage(name, replay, members))
    return tuple(stages)


def _as_stage(name: str, replay: Replay, members: tuple[str, ...]) -> Stage:
    """Return a stage that names its module, if it is a single call of one."""
    path = _only_module(replay.training)
    if path is not None and path == _only_module(replay.evaluation):
        return Stage(name, path, (path,))
    return Stage(name, replay, members)


def _only_module(program: Program) -> str | None:
    """Return the module that a program consists of: one call of it on the input, nothing else."""
    if len(program.steps) != 1:
        return None
    step = program.steps[0]
    is_module = isinstance(step.run, str)
    takes_input_only = step.args == (Ref(program.input),) and not step.kwargs
    returns_output_only = step.returns_tensor and step.outputs == ((0, program.output),)
    return step.run if is_module and takes_input_only and returns_output_only else None


# ---- where a model can be cut


def crossing(recording: Recording) -> list[set[int]]:
    """Return, for every position between operations, the values that are handed on there.

    Only values that depend on the input count: others can be computed again.
    """
    last_use: dict[int, int] = {}
    count = len(recording.operations)
    for number, operation in enumerate(recording.operations):
        for value in operation.inputs:
            last_use[value] = number
    for value in refs(recording.output):
        last_use[value] = count
    positions: list[set[int]] = [set() for _ in range(count + 1)]
    for value, last in last_use.items():
        if recording.values[value].depends:
            for position in range(recording.values[value].operation + 1, last + 1):
                positions[position].add(value)
    return positions


def cut_points(recording: Recording, blocks: tuple[str, ...], head: str) -> list[tuple[str, int]]:
    """Return the stages as (name, number of the first operation), the head last."""
    tensors = crossing(recording)
    cuttable = [_can_cut(recording, values) for values in tensors]
    head_at = _head_start(recording, head)
    if not cuttable[head_at]:
        raise InferenceError(
            f"{len(tensors[head_at])} tensors are handed on before the last layer, {head!r}, so "
            "the model is no chain of stages."
        )
    points = _block_points(recording, blocks, head_at, cuttable)
    if len(points) < 2:
        points = _layer_points(recording, head_at, cuttable)
    return [*points, ("head", head_at)]


def _can_cut(recording: Recording, handed_on: set[int]) -> bool:
    """Tell whether a model can be cut: one tensor is handed on, with one row per example."""
    if len(handed_on) != 1:
        return False
    (value,) = handed_on
    batch = recording.values[recording.input].shape[0]
    return recording.values[value].shape[:1] == (batch,)


def _head_start(recording: Recording, head: str) -> int:
    for call in reversed(recording.calls):
        if call.path == head:
            return call.first
    for number, operation in reversed(list(enumerate(recording.operations))):
        names = [recording.values[value].name for value in operation.inputs]
        if any(name.startswith(f"{head}.") for name in names):
            return number
    raise InferenceError(f"the last layer, {head!r}, is not used. Declare ModelSpec.head.")


# The points are names of stages with the numbers of their first operations.


def _block_points(
    recording: Recording, blocks: tuple[str, ...], head_at: int, cuttable: list[bool]
) -> list[tuple[str, int]]:
    """Cut before every block at which a single tensor is handed on.

    If weights are used before the first block or after the last one, there are also a stage "stem"
    and a stage "tail".
    """
    first_calls: dict[str, Call] = {}
    for call in recording.calls:
        first_calls.setdefault(call.path, call)
    calls = []
    for path in blocks:
        # Blocks that did not run, or ran after the head, are no places to cut at.
        if path in first_calls and first_calls[path].last <= head_at:
            calls.append(first_calls[path])
    points = [(call.path, call.first) for call in calls if cuttable[call.first]]
    if not points:
        return []
    first_name, first_start = points[0]
    if not _has_weights(recording, 0, first_start):
        points[0] = (first_name, 0)  # nothing but views of the input comes before
    elif first_start > 0:
        points.insert(0, ("stem", 0))
    _, last_start = points[-1]
    last_end = calls[-1].last
    if last_start < last_end < head_at and cuttable[last_end]:
        points.append(("tail", last_end))
    return points


def _layer_points(
    recording: Recording, head_at: int, cuttable: list[bool]
) -> list[tuple[str, int]]:
    """Cut before every layer that has a weight matrix."""
    points: list[tuple[str, int]] = []
    for number, operation in enumerate(recording.operations[:head_at]):
        if is_major(recording, operation) and (not points or cuttable[number]):
            name = operation.layer or f"layer{len(points)}"
            names = [earlier for earlier, _ in points]
            if name not in names:
                points.append((name, _layer_start(recording, number, cuttable) if points else 0))
    return points


def _layer_start(recording: Recording, number: int, cuttable: list[bool]) -> int:
    """Return the first operation of the layer of an operation, if the model can be cut there."""
    layer = recording.operations[number].layer
    for call in recording.calls:
        if call.path == layer and call.first <= number < call.last:
            return call.first if cuttable[call.first] else number
    return number


def _has_weights(recording: Recording, first: int, last: int) -> bool:
    return bool(_members(recording, first, last))


def _members(recording: Recording, first: int, last: int) -> tuple[str, ...]:
    """Return the parameters and buffers that a range of operations uses."""
    names: dict[str, None] = {}  # used as an ordered set
    for operation in recording.operations[first:last]:
        for value in operation.inputs:
            name = recording.values[value].name
            if name:
                names[name] = None
    return tuple(names)


# ---- the steps of a stage


def _programs(mode: Mode, cuts: list[tuple[str, int]]) -> list[Program]:
    if len(mode.two.operations) != len(mode.three.operations):
        raise InferenceError("the model computes other operations for another batch size.")
    tensors = crossing(mode.two)
    ends = [first for _, first in cuts[1:]] + [len(mode.two.operations)]
    programs = []
    value = mode.two.input
    for (name, first), last in zip(cuts, ends, strict=True):
        (output,) = tensors[last] if last < len(tensors) - 1 else (mode.two.output.value,)
        try:
            programs.append(_Compiler(mode, first, last, value, output).program())
        except InferenceError as error:
            raise InferenceError(f"stage {name!r}: {error}") from error
        value = output
    return programs


class _Compiler:
    """Turns a range of operations into steps."""

    def __init__(self, mode: Mode, first: int, last: int, start: int, output: int) -> None:
        self.mode = mode
        self.first, self.last, self.start, self.output = first, last, start, output
        self.known = {start}
        self.steps: list[Step] = []
        self.weights: dict[int, str] = {}

    def program(self) -> Program:
        self._range(self.first, self.last, depth=1)
        return Program(tuple(self.steps), self.start, self.output, tuple(self.weights.items()))

    def _range(self, first: int, last: int, depth: int) -> None:
        """Add the operations of a range: by calls of modules of a depth, or one by one."""
        number = first
        while number < last:
            call = self._call_at(number, depth)
            if call is None:
                self._operation(number)
                number += 1
            elif self._can_call(call):
                self._module(call)
                number = call.last
            else:
                end = min(call.last, last)
                self._range(number, end, depth + 1)
                number = end

    def _call_at(self, number: int, depth: int) -> Call | None:
        """Return the call of this depth that contains an operation."""
        for call in self.mode.two.calls:
            if call.depth == depth and call.first <= number < call.last:
                return call
        return None

    def _can_call(self, call: Call) -> bool:
        """Tell whether a whole module can be called: nothing else looks inside of it."""
        if call.first < self.first or call.last > self.last:
            return False
        recording = self.mode.two
        if not all(isinstance(leaf, PLAIN) for leaf in tree_leaves((call.args, call.kwargs))):
            return False  # an object that may keep tensors of this run, such as a cache
        for value in refs((call.args, call.kwargs)):
            if recording.values[value].depends and value not in self.known:
                return False
        inside: set[int] = set()
        for operation in recording.operations[call.first : call.last]:
            inside.update(operation.outputs)
        used = set(refs(recording.output))
        for number, operation in enumerate(recording.operations):
            if not call.first <= number < call.last:
                used.update(operation.inputs)
        return inside & used <= set(refs(call.outputs))

    def _module(self, call: Call) -> None:
        other = self.mode.three.calls[self.mode.two.calls.index(call)]
        args, kwargs = _with_batch((call.args, call.kwargs), (other.args, other.kwargs))
        self._need(refs((call.args, call.kwargs)))
        outputs = []
        for position, leaf in enumerate(tree_leaves(call.outputs)):
            if isinstance(leaf, Ref):
                outputs.append((position, leaf.value))
                self.known.add(leaf.value)
        returns_tensor = isinstance(call.outputs, Ref)
        self.steps.append(Step(call.path, args, kwargs, tuple(outputs), returns_tensor))

    def _operation(self, number: int) -> None:
        operation = self.mode.two.operations[number]
        other = self.mode.three.operations[number]
        if self.known.issuperset(operation.outputs):
            return
        self._need(operation.inputs)
        given = operation.args, operation.kwargs
        args, kwargs = _with_batch(given, (other.args, other.kwargs))
        outputs = tuple(enumerate(operation.outputs))
        function = _set_item if operation.name == "setitem" else operation.function
        self.steps.append(Step(function, args, kwargs, outputs))
        self.known.update(operation.outputs)

    def _need(self, values: Sequence[int]) -> None:
        """Make values available: weights of the model, or results that do not need the input."""
        recording = self.mode.two
        for number in values:
            value = recording.values[number]
            if number in self.known:
                continue
            if value.name:
                self.weights[number] = value.name
                self.known.add(number)
            elif value.operation >= 0 and not value.depends:
                self._operation(value.operation)
            else:
                raise InferenceError(_missing(recording, number, value.constant))


def _set_item(tensor: Tensor, index: Any, value: Any) -> Tensor:
    """Assign to a part of a tensor, and return the tensor, as a recording has it (record.py)."""
    tensor[index] = value
    return tensor


def _missing(recording: Recording, number: int, constant: bool) -> str:
    if constant:
        return (
            "uses a tensor that is neither a parameter nor a buffer. Register it with "
            "register_buffer."
        )
    operation: Operation = recording.operations[recording.values[number].operation]
    return f"needs the result of {recording.describe(operation)}, which is computed before it."


def _with_batch(two: Any, three: Any) -> Any:
    """Return arguments with marks where they depend on the batch size or on the device."""
    leaves, structure = tree_flatten(two)
    others, _ = tree_flatten(three)
    marked: list[Any] = []
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(leaf, torch.device):
            marked.append(OfBatch(device=True))
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            marked.append(_number(leaf, other))
        else:
            if isinstance(leaf, slice) and leaf != other:
                raise InferenceError("a slice depends on the batch size.")
            marked.append(leaf)
    return tree_unflatten(marked, structure)


def _number(two: int, three: int) -> int | OfBatch:
    """Return an integer argument, given its values for batches of two and of three."""
    if two == three:
        return int(two)
    if two * 3 == three * 2:
        return OfBatch(two // 2)
    raise InferenceError(
        f"an argument depends on the batch size: {int(two)} for 2, {int(three)} for 3."
    )
