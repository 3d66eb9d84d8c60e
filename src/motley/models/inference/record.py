"""Record the operations of a model in order, and which module each belongs to.

The model runs once on inputs without values (torch's meta device), and a torch function mode notes
every call. Nothing is traced symbolically, so Python code that looks at shapes, loops or unpacks
works unchanged. torch.fx and torch.export would also turn `self.training` and every width that the
code reads into constants; here stages call the model's own modules, which keep reading them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from motley.core.errors import MotleyError
from motley.core.meta import on_meta


class InferenceError(MotleyError):
    """A fact about a model that could not be inferred. The message names the layer."""


@dataclass(frozen=True)
class Ref:
    """A tensor of a recording: the number of its value."""

    value: int


class SizeOf(NamedTuple):
    """Where an integer comes from: one dimension of a value."""

    value: int
    dim: int


class Attribute(NamedTuple):
    """Where an integer comes from: an attribute of a module, or an item of one."""

    path: str
    name: str
    item: int | None = None

    def __str__(self) -> str:
        owner = f"{self.path}." if self.path else ""
        item = "" if self.item is None else f"[{self.item}]"
        return f"{owner}{self.name}{item}"


class Traced(int):
    """An integer that knows where it comes from. Results of arithmetic are plain integers."""

    source: SizeOf | Attribute

    @classmethod
    def of(cls, number: int, source: SizeOf | Attribute) -> Traced:
        """Return a number that knows where it comes from."""
        traced = cls(number)
        traced.source = source
        return traced


@dataclass(frozen=True)
class Value:
    """A tensor: its shape, and its name if it is a parameter or a buffer."""

    shape: tuple[int, ...]
    #: Its name in the model.
    name: str = ""
    #: Whether it was computed from the model's input.
    depends: bool = False
    #: The number of the operation that computed it; -1 for inputs, weights and constants.
    operation: int = -1
    #: Whether its numbers are floating point: integers choose, and carry no channels.
    floating: bool = True
    #: Whether it is a tensor of unknown origin, such as one that a module keeps in a plain
    #: attribute.
    constant: bool = False


@dataclass(frozen=True)
class Operation:
    """One call of a torch function. Tensors in its arguments are `Ref`s."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: The values that it returns, flattened.
    outputs: tuple[int, ...]
    #: The path of the innermost module that made the call.
    layer: str

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that was given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def inputs(self) -> list[int]:
        """The values that it reads."""
        return refs((self.args, self.kwargs))


@dataclass
class Call:
    """One call of a module: the operations `first` up to `last` were made inside of it."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: int
    last: int = -1
    outputs: Any = None
    #: How many calls it is inside of.
    depth: int = 0


@dataclass
class Recording:
    """A run of a model."""

    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    #: Parameters that a model has under several names: further name -> first name.
    aliases: dict[str, str] = field(default_factory=dict)
    #: The value of the model's input.
    input: int = 0
    #: The model's output: a `Ref`, or another structure of them.
    output: Any = None

    def describe(self, operation: Operation) -> str:
        """Return an operation for a message, with its layer."""
        where = f"layer {operation.layer!r}" if operation.layer else "the model's own forward"
        return f"{operation.name} in {where}"


def refs(tree: Any) -> list[int]:
    """Return the values that occur in arguments."""
    return [leaf.value for leaf in tree_leaves(tree) if isinstance(leaf, Ref)]


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, without copying its values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad)
        else:
            memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def record(model: nn.Module, inputs: Tensor, training: bool) -> Recording:
    """Run a copy of a model on inputs, and return the recording.

    If the inputs are on the meta device, so is the copy, and nothing is computed.
    """
    on_device = on_meta() if inputs.is_meta else nullcontext()
    copied = meta_copy(model) if inputs.is_meta else copy.deepcopy(model)
    copied.train(training)
    _trace_attributes(copied)
    recorder = _Recorder(copied, inputs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), on_device, recorder:
            output = copied(inputs)
    except Exception as error:  # a user's model can raise anything
        where = f"in layer {recorder.layer!r}" if recorder.layer else "in the model's own forward"
        reason = str(error).strip().partition("\n")[0]
        raise InferenceError(
            f"{type(model).__name__} cannot be run on a batch of shape {tuple(inputs.shape)}: "
            f"{type(error).__name__} {where}: {reason}"
        ) from error
    recorder.recording.output = recorder.replaced(output)
    return recorder.recording


def _trace_attributes(model: nn.Module) -> None:
    """Mark the integers that modules keep as attributes, so that their use can be seen."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if type(value) is int:
                module.__dict__[name] = Traced.of(value, Attribute(path, name))
            elif type(value) is tuple and value and all(type(item) is int for item in value):
                items = [Traced.of(v, Attribute(path, name, at)) for at, v in enumerate(value)]
                module.__dict__[name] = tuple(items)


def _value(tensor: Tensor, **facts: Any) -> Value:
    return Value(tuple(tensor.shape), floating=tensor.is_floating_point(), **facts)


class _Recorder(TorchFunctionMode):
    """Notes every call of a torch function and of a module."""

    def __init__(self, model: nn.Module, inputs: Tensor) -> None:
        super().__init__()
        self.recording = Recording()
        self._numbers: dict[int, int] = {}
        #: All tensors are kept, so that no two of them have the same id.
        self._tensors: list[Tensor] = []
        self._open: list[Call] = []
        self._new(inputs, _value(inputs, depends=True))
        named = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            if id(tensor) not in self._numbers:
                self._new(tensor, _value(tensor, name=name))
            else:
                first = self.recording.values[self._numbers[id(tensor)]].name
                self.recording.aliases[name] = first
        for path, module in model.named_modules():
            module.register_forward_pre_hook(self._enter(path), with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    @property
    def layer(self) -> str:
        """The path of the module that is running."""
        return self._open[-1].path if self._open else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The arguments are replaced before the call: an operation may change them in place.
        noted_args, noted_kwargs = self.replaced(args), self.replaced(kwargs)
        result = func(*args, **kwargs)
        name = canonical_name(func)
        if name in ("shape", "size"):
            return self._traced_size(noted_args, result)
        changed = result
        if name == "setitem":
            changed = args[0]
        tensors = [leaf for leaf in tree_leaves(changed) if isinstance(leaf, Tensor)]
        if not tensors:
            return result
        depends = any(self.recording.values[v].depends for v in refs((noted_args, noted_kwargs)))
        number = len(self.recording.operations)
        outputs = []
        for tensor in tensors:
            outputs.append(self._new(tensor, _value(tensor, depends=depends, operation=number)))
        self.recording.operations.append(
            Operation(func, name, noted_args, noted_kwargs, tuple(outputs), self.layer)
        )
        return result

    def _new(self, tensor: Tensor, value: Value) -> int:
        number = len(self.recording.values)
        self.recording.values.append(value)
        self._numbers[id(tensor)] = number
        self._tensors.append(tensor)
        return number

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            return self._new(tensor, _value(tensor, constant=True))
        return self._numbers[id(tensor)]

    def replaced(self, tree: Any) -> Any:
        """Return arguments with a `Ref` in the place of every tensor."""
        with torch._C.DisableTorchFunction():
            return tree_map_only(Tensor, lambda tensor: Ref(self._number(tensor)), tree)

    def _traced_size(self, args: tuple[Any, ...], result: Any) -> Any:
        """Return a shape whose integers know that they are sizes of this value."""
        value = args[0].value
        if isinstance(result, torch.Size):
            items = [Traced.of(size, SizeOf(value, dim)) for dim, size in enumerate(result)]
            return torch.Size(items)
        dim = args[1] if len(args) > 1 else 0
        return Traced.of(result, SizeOf(value, int(dim) % len(self.recording.values[value].shape)))

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            first = len(self.recording.operations)
            depth = len(self._open)
            call = Call(path, self.replaced(args), self.replaced(kwargs), first, depth=depth)
            self.recording.calls.append(call)
            self._open.append(call)

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open.pop()
        call.last = len(self.recording.operations)
        call.outputs = self.replaced(output)


def canonical_name(function: Any) -> str:
    """Return a short name: "add" for torch.add, Tensor.add_ and the operator."""
    qualified = resolve_name(function) or getattr(function, "__name__", "") or str(function)
    name = qualified.removesuffix(".__get__").rpartition(".")[2]
    return name.strip("_")
