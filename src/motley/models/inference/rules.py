"""One rule per torch function: how channels of its inputs become channels of its outputs.

A rule gets the factors of an operation's inputs (`factors.py`), unifies those that must be the same
channels, and returns the factors of its outputs. A function without a rule whose output has the
shape of its inputs is taken to work on every element by itself; the check with permuted channels
(`check.py`) shows if it does not. Any other function without a rule fixes all channels it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from motley.models.inference.factors import (
    Dim,
    Dims,
    align,
    blocks_of,
    fix,
    new_dim,
    regroup,
    resolve,
    size_of,
    unify,
)
from motley.models.inference.record import (
    Attribute,
    Operation,
    Recording,
    Ref,
    SizeOf,
    Traced,
)

Rule = Callable[["Propagation", Operation], None]
#: The rule of every function that has one, by its canonical name.
RULES: dict[str, Rule] = {}

#: Why positions of a map or signal cannot be left out.
POSITIONS = "positions of a map or signal"

# In the rules, `x` is an operation's main input, as in torch's documentation. A dimension is a list
# of factors, an empty one if it has length 1 and is broadcast (`factors.py`).


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of some functions, by their canonical names."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


class Propagation:
    """The factors of every value of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._dims: dict[int, Dims] = {}
        #: Pairs of dimensions that must stay equally long.
        self.aligned: list[tuple[Dim, Dim]] = []
        #: Attributes of modules that are used as the length of a dimension.
        self.attributes: list[tuple[Attribute, Dim]] = []
        self.of(Ref(recording.input), "the model's input")
        for operation in recording.operations:
            RULES.get(operation.name, _default)(self, operation)
        for value in _values_of(recording.output):
            for dim in self.of(Ref(value)):
                fix(dim, "the model's output")
        self._settle()

    def of(self, ref: Ref, fixed: str = "") -> Dims:
        """Return the dimensions of a value. Those of weights are new when they are first used."""
        if ref.value not in self._dims:
            value = self.recording.values[ref.value]
            if value.constant:
                fixed = "a tensor that is neither a parameter nor a buffer"
            elif value.name and not value.floating:
                fixed = "a buffer of integers"
            self._dims[ref.value] = [new_dim(size, fixed) for size in value.shape]
        return [resolve(dim) for dim in self._dims[ref.value]]

    def shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of a value."""
        return self.recording.values[value].shape

    def set(self, operation: Operation, *outputs: Dims) -> None:
        """Set the dimensions of an operation's outputs."""
        for value, dims in zip(operation.outputs, outputs, strict=True):
            self._dims[value] = dims

    def unify(self, operation: Operation, a: Dim, b: Dim) -> None:
        """Make two dimensions the same channels, unless one of them is broadcast."""
        a, b = resolve(a), resolve(b)
        if a and b:
            unify(a, b)

    def sized(self, operation: Operation, size: Any, dim: Dim) -> None:
        """Note that the code gives the length of a dimension by an integer."""
        if not isinstance(size, Traced):
            return
        if isinstance(size.source, Attribute):
            # Dimensions with one attribute for their length must stay equally long.
            for attribute, other in self.attributes:
                if attribute == size.source:
                    self.aligned.append((other, dim))
                    break
            self.attributes.append((size.source, dim))
        else:
            # The code says that both are equally long, so they must be so in a narrow model too.
            source: SizeOf = size.source
            self.aligned.append((self.of(Ref(source.value))[source.dim], dim))

    def new(self, value: int, fixed: str = "") -> Dims:
        """Return new dimensions for a value."""
        return [new_dim(size, fixed) for size in self.shape(value)]

    def _settle(self) -> None:
        """Split and fix dimensions until aligned ones have factors of the same sizes."""
        for _ in range(len(self.aligned) + 1):
            before = self._state()
            for a, b in self.aligned:
                align(a, b)
            if self._state() == before:
                return

    def _state(self) -> list[tuple[int, bool]]:
        state = []
        for dims in self._dims.values():
            for dim in dims:
                state += [(factor.size, bool(factor.fixed)) for factor in resolve(dim)]
        return state


def _values_of(tree: Any) -> list[int]:
    return [leaf.value for leaf in tree_leaves(tree) if isinstance(leaf, Ref)]


def _tensors(operation: Operation) -> list[Ref]:
    tree = (operation.args, operation.kwargs)
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Ref)]


# ---- functions without a rule, and elementwise ones

#: Functions whose outputs have the shape of their inputs, but which depend on the order.
SCANS = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
ORDERED = {*SCANS, "flip", "roll", "sort", "argsort", "msort", "tril", "triu", "rot90", "renorm"}


def _default(run: Propagation, operation: Operation) -> None:
    tensors = _tensors(operation)
    shapes = [run.shape(ref.value) for ref in tensors]
    try:
        broadcast = tuple(torch.broadcast_shapes(*shapes)) if shapes else None
    except RuntimeError:
        broadcast = None
    same_shape = all(run.shape(value) == broadcast for value in operation.outputs)
    if same_shape and operation.name not in ORDERED:
        _elementwise(run, operation)
    elif not tensors:
        _factory(run, operation)
    else:
        _unknown(run, operation)


def _elementwise(run: Propagation, operation: Operation) -> None:
    for value in operation.outputs:
        rank = len(run.shape(value))
        dims: Dims = [[] for _ in range(rank)]
        for ref in _tensors(operation):
            # Shapes are aligned at their last dimension.
            for from_end, dim in enumerate(reversed(run.of(ref)), 1):
                if dims[-from_end]:
                    run.unify(operation, dims[-from_end], dim)
                elif dim:
                    dims[-from_end] = dim
        run._dims[value] = dims


def _unknown(run: Propagation, operation: Operation) -> None:
    reason = f"{run.recording.describe(operation)} has no rule"
    for ref in _tensors(operation):
        for dim in run.of(ref):
            fix(dim, reason)
    run.set(operation, *(run.new(value, reason) for value in operation.outputs))


@rule("arange", "linspace", "eye", "tensor", "as_tensor", "scalar_tensor", "tril_indices")
def _positions(run: Propagation, operation: Operation) -> None:
    reason = run.recording.describe(operation)
    run.set(operation, *(run.new(value, reason) for value in operation.outputs))


def _factory(run: Propagation, operation: Operation) -> None:
    """Zeros, ones or random numbers: every channel is like every other."""
    outputs = [run.new(value) for value in operation.outputs]
    _note_sizes(run, operation, operation.args, outputs[0])
    run.set(operation, *outputs)


@rule("new_zeros", "new_ones", "new_empty", "new_full")
def _new_factory(run: Propagation, operation: Operation) -> None:
    output = run.new(operation.outputs[0])
    _note_sizes(run, operation, operation.args[1:], output)
    run.set(operation, output)


def _note_sizes(run: Propagation, operation: Operation, sizes: Any, dims: Dims) -> None:
    """Note where the sizes of a new shape come from, one per dimension."""
    given = [leaf for leaf in tree_leaves(sizes) if isinstance(leaf, int)]
    if len(given) == len(dims):
        for size, dim in zip(given, dims, strict=True):
            run.sized(operation, size, dim)


# ---- layers


@rule("linear")
def _linear(run: Propagation, operation: Operation) -> None:
    x, weight = run.of(operation.argument(0, "input")), run.of(operation.argument(1, "weight"))
    run.unify(operation, x[-1], weight[1])
    _bias(run, operation, operation.argument(2, "bias"), weight[0])
    run.set(operation, [*x[:-1], weight[0]])


def _bias(run: Propagation, operation: Operation, bias: Ref | None, dim: Dim) -> None:
    if bias is not None:
        run.unify(operation, run.of(bias)[0], dim)


@rule("conv1d", "conv2d", "conv3d")
def _convolution(run: Propagation, operation: Operation) -> None:
    _fix_positions(run, operation)
    x = run.of(operation.argument(0, "input"))
    # The weight has the shape (output channels, input channels of one group, *kernel).
    written, read_in_group = run.of(operation.argument(1, "weight"))[:2]
    groups = operation.argument(6, "groups", 1)
    if groups == 1:
        run.unify(operation, x[1], read_in_group)
    else:
        inputs_per_group = size_of(x[1]) // groups
        group = _convolution_groups(run, operation, groups, inputs_per_group)
        unify(x[1], [*group, *resolve(read_in_group)])
        # In a depthwise convolution whole groups are left out, so their outputs stay together.
        is_depthwise = inputs_per_group == 1
        fixed = "outputs per channel of a depthwise convolution" if is_depthwise else ""
        unify(written, [*group, *new_dim(size_of(written) // groups, fixed)])
        run.sized(operation, groups, group)
    _set_convolved(run, operation, written)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed_convolution(run: Propagation, operation: Operation) -> None:
    _fix_positions(run, operation)
    x = run.of(operation.argument(0, "input"))
    # The weight has the shape (input channels, output channels of one group, *kernel).
    read, written_in_group = run.of(operation.argument(1, "weight"))[:2]
    groups = operation.argument(6, "groups", 1)
    run.unify(operation, x[1], read)
    written = written_in_group
    if groups > 1:
        inputs_per_group = size_of(x[1]) // groups
        group = _convolution_groups(run, operation, groups, inputs_per_group)
        unify(x[1], [*group, *new_dim(inputs_per_group)])
        written = [*group, *resolve(written_in_group)]
        run.sized(operation, groups, group)
    _set_convolved(run, operation, written)


def _convolution_groups(
    run: Propagation, operation: Operation, groups: int, inputs_per_group: int
) -> Dim:
    """Return the dimension that counts the groups of a convolution.

    All groups are kept, and some channels inside of each. A depthwise convolution has one channel
    per group, so there the groups themselves are the channels.
    """
    is_depthwise = inputs_per_group == 1
    return new_dim(groups, "" if is_depthwise else f"groups of {run.recording.describe(operation)}")


def _fix_positions(run: Propagation, operation: Operation) -> None:
    """Fix all dimensions of a convolution's input and weight but the batch and the channels."""
    x = run.of(operation.argument(0, "input"))
    weight = run.of(operation.argument(1, "weight"))
    for dim in (*weight[2:], *x[2:]):
        fix(dim, POSITIONS)


def _set_convolved(run: Propagation, operation: Operation, written: Dim) -> None:
    """Set the output of a convolution, which has the channels `written`."""
    batch = run.of(operation.argument(0, "input"))[0]
    bias = operation.argument(2, "bias")
    if bias is not None:
        unify(run.of(bias)[0], written)
    spatial = [new_dim(size, POSITIONS) for size in run.shape(operation.outputs[0])[2:]]
    run.set(operation, [batch, resolve(written), *spatial])


@rule("batch_norm", "instance_norm")
def _batch_norm(run: Propagation, operation: Operation) -> None:
    x = run.of(operation.argument(0, "input"))
    for ref in _tensors(operation)[1:]:
        run.unify(operation, run.of(ref)[0], x[1])
    run.set(operation, x)


@rule("layer_norm", "rms_norm")
def _layer_norm(run: Propagation, operation: Operation) -> None:
    x = run.of(operation.argument(0, "input"))
    sizes = operation.argument(1, "normalized_shape")
    for ref in _tensors(operation)[1:]:
        weight = run.of(ref)
        for weight_dim, dim in zip(weight, x[-len(weight) :], strict=True):
            run.unify(operation, weight_dim, dim)
    for size, dim in zip(sizes, x[-len(sizes) :], strict=True):
        run.sized(operation, size, dim)
    run.set(operation, x)


@rule("group_norm")
def _group_norm(run: Propagation, operation: Operation) -> None:
    x, groups = run.of(operation.argument(0, "input")), operation.argument(1, "num_groups")
    for ref in _tensors(operation)[1:]:
        run.unify(operation, run.of(ref)[0], x[1])
    channels = size_of(x[1])
    if groups > 1:
        group = new_dim(groups, "groups of a group norm" if groups < channels else "")
        unify(x[1], [*group, *new_dim(channels // groups)])
        run.sized(operation, groups, group)
    run.set(operation, [resolve(dim) for dim in x])


@rule("prelu")
def _prelu(run: Propagation, operation: Operation) -> None:
    x, weight = run.of(operation.args[0]), run.of(operation.argument(1, "weight"))
    if len(x) > 1:
        run.unify(operation, weight[0], x[1])
    run.set(operation, x)


@rule("embedding")
def _embedding(run: Propagation, operation: Operation) -> None:
    indices, weight = (
        run.of(operation.argument(0, "input")),
        run.of(operation.argument(1, "weight")),
    )
    fix(weight[0], f"rows of the embedding in layer {operation.layer!r}")
    run.set(operation, [*indices, weight[1]])


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(run: Propagation, operation: Operation) -> None:
    x_ref, hidden, weights, has_biases, layers, _, _, bidirectional, _ = operation.args
    if not isinstance(weights, list | tuple):
        _unknown(run, operation)  # a packed sequence
        return
    x = run.of(x_ref)
    gates = {"lstm": 4, "gru": 3}.get(operation.name, 1)
    directions = 2 if bidirectional else 1
    per_cell = 4 if has_biases else 2
    if len(weights) != layers * directions * per_cell:  # projections
        _unknown(run, operation)
        return
    states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
    read: Dim = x[2]
    width = run.shape(weights[1].value)[1]
    for layer in range(int(layers)):
        # Both directions keep the same channels: their outputs are concatenated.
        channels = new_dim(width)
        for direction in range(directions):
            start = (layer * directions + direction) * per_cell
            # The weights for the input and for the state, and the biases if there are any.
            cell = weights[start : start + per_cell]
            input_weight, state_weight = run.of(cell[0]), run.of(cell[1])
            run.unify(operation, input_weight[1], read)
            run.unify(operation, state_weight[1], channels)
            for ref in cell:
                unify(run.of(ref)[0], [*new_dim(gates, "gates of a recurrent cell"), *channels])
        # The states of all layers are one tensor, so all layers keep the same channels.
        for state in states:
            run.unify(operation, run.of(state)[2], channels)
        read = [*new_dim(directions, "directions of a recurrent layer"), *channels]
    state_dims = run.of(states[0])
    output = [x[0], x[1], resolve(read)]
    run.set(operation, output, *(list(state_dims) for _ in operation.outputs[1:]))


@rule("multi_head_attention_forward")
def _multi_head_attention(run: Propagation, operation: Operation) -> None:
    # In the order of torch.nn.functional.multi_head_attention_forward.
    query, key, value = (run.of(ref) for ref in operation.args[:3])
    embed_dim, heads = operation.args[3:5]
    in_weight, in_bias, bias_k, bias_v = operation.args[5:9]
    out_weight, out_bias = operation.args[11:13]
    width = size_of(query[-1])
    inner = [*new_dim(heads, "heads of an attention"), *new_dim(width // heads)]
    three = new_dim(3, "query, key and value")
    if in_weight is not None:
        unify(run.of(in_weight)[0], [*three, *inner])
        for read in (query, key, value):
            run.unify(operation, run.of(in_weight)[1], read[-1])
    for name, read in zip(("q", "k", "v"), (query, key, value), strict=True):
        weight = operation.kwargs.get(f"{name}_proj_weight")
        if weight is not None and in_weight is None:
            run.unify(operation, run.of(weight)[0], inner)
            run.unify(operation, run.of(weight)[1], read[-1])
    if in_bias is not None:
        unify(run.of(in_bias)[0], [*three, *inner])
    for bias in (bias_k, bias_v):
        if bias is not None:
            run.unify(operation, run.of(bias)[2], inner)
    written, read_from_heads = run.of(out_weight)
    run.unify(operation, read_from_heads, inner)
    _bias(run, operation, out_bias, written)
    # torch computes the width of a head from the width of the query.
    run.aligned.append((query[-1], inner))
    run.aligned.append((written, inner))
    run.sized(operation, embed_dim, query[-1])
    run.set(
        operation,
        [*query[:-1], written],
        *(run.new(value, "weights of an attention") for value in operation.outputs[1:]),
    )


# ---- products


@rule("matmul", "bmm", "mm", "rmatmul", "mv", "dot")
def _matmul(run: Propagation, operation: Operation) -> None:
    a, b = (run.of(ref) for ref in _tensors(operation)[:2])
    if operation.name == "rmatmul":
        a, b = b, a
    if len(a) == 1 or len(b) == 1:
        _unknown(run, operation)
        return
    run.unify(operation, a[-1], b[-2])
    run.set(operation, [*_batch(run, operation, a[:-2], b[:-2]), a[-2], b[-1]])


@rule("baddbmm", "addmm")
def _add_matmul(run: Propagation, operation: Operation) -> None:
    added, a, b = (run.of(ref) for ref in _tensors(operation)[:3])
    run.unify(operation, a[-1], b[-2])
    output = [*_batch(run, operation, a[:-2], b[:-2]), a[-2], b[-1]]
    run.set(operation, _batch(run, operation, output, added))


def _batch(run: Propagation, operation: Operation, a: Dims, b: Dims) -> Dims:
    """Return the broadcast dimensions of two tensors."""
    rank = max(len(a), len(b))
    padded_a: Dims = [[]] * (rank - len(a)) + a
    padded_b: Dims = [[]] * (rank - len(b)) + b
    dims: Dims = []
    for dim_a, dim_b in zip(padded_a, padded_b, strict=True):
        run.unify(operation, dim_a, dim_b)
        dims.append(dim_a or dim_b)
    return dims


@rule("scaled_dot_product_attention")
def _attention(run: Propagation, operation: Operation) -> None:
    query = run.of(operation.argument(0, "query"))
    key = run.of(operation.argument(1, "key"))
    value = run.of(operation.argument(2, "value"))
    run.unify(operation, query[-1], key[-1])
    run.unify(operation, key[-2], value[-2])
    batch = _batch(run, operation, query[:-2], key[:-2])
    batch = _batch(run, operation, batch, value[:-2])
    mask = operation.argument(3, "attn_mask")
    if mask is not None:
        _batch(run, operation, [*batch, query[-2], key[-2]], run.of(mask))
    run.set(operation, [*batch, query[-2], value[-1]])


@rule("einsum")
def _einsum(run: Propagation, operation: Operation) -> None:
    equation, tensors = operation.args[0], _tensors(operation)
    if not isinstance(equation, str) or "." in equation:
        _unknown(run, operation)
        return
    terms, _, result = equation.replace(" ", "").partition("->")
    dim_of: dict[str, Dim] = {}  # letter of the equation -> its dimension
    for term, ref in zip(terms.split(","), tensors, strict=True):
        for letter, dim in zip(term, run.of(ref), strict=True):
            run.unify(operation, dim_of.setdefault(letter, dim), dim)
            dim_of[letter] = dim_of[letter] or dim
    if not result:  # then torch sorts the letters that occur once
        result = "".join(sorted(letter for letter in dim_of if terms.count(letter) == 1))
    run.set(operation, [dim_of[letter] for letter in result])


# ---- maps and signals


POOLS = ("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")


@rule("interpolate", "upsample")
@rule(*(f"{pool}{n}d" for pool in POOLS for n in (1, 2, 3)))
@rule(*(f"{pool}{n}d_with_indices" for pool in POOLS for n in (1, 2, 3)))
def _pool(run: Propagation, operation: Operation) -> None:
    x = run.of(operation.argument(0, "input"))
    outputs = []
    for value in operation.outputs:
        shape = run.shape(value)
        spatial = [new_dim(size, POSITIONS) for size in shape[2:]]
        outputs.append([*x[:2], *spatial])
    run.set(operation, *outputs)


@rule("pad")
def _pad(run: Propagation, operation: Operation) -> None:
    x, sizes = run.of(operation.args[0]), list(operation.argument(1, "pad"))
    reason = run.recording.describe(operation)
    output: Dims = []
    # `sizes` has two numbers per dimension (before, after), of the last dimension first.
    for from_end, dim in enumerate(reversed(x)):
        if any(sizes[2 * from_end : 2 * from_end + 2]):
            fix(dim, reason)
            size = run.shape(operation.outputs[0])[-1 - from_end]
            output.insert(0, new_dim(size, reason))
        else:
            output.insert(0, dim)
    run.set(operation, output)


# ---- shapes


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as")
@rule("ravel", "atleast_1d", "atleast_2d", "atleast_3d")
def _reshape(run: Propagation, operation: Operation) -> None:
    shape = run.shape(operation.outputs[0])
    output = regroup(run.of(operation.argument(0, "input")), shape)
    if output is None:
        _unknown(run, operation)
        return
    if operation.name in ("view", "reshape"):
        _note_sizes(run, operation, operation.args[1:], output)
    elif operation.name == "unflatten":
        dim, sizes = operation.argument(1, "dim"), operation.argument(2, "sizes")
        rank = len(shape) - len(sizes) + 1
        first = int(dim) % rank
        _note_sizes(run, operation, sizes, output[first : first + len(sizes)])
    run.set(operation, output)


@rule(
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "adjoint"
)
def _permute(run: Propagation, operation: Operation) -> None:
    x = run.of(operation.argument(0, "input"))
    order = _new_order(operation, len(x))
    run.set(operation, [x[dim] for dim in order])


def _new_order(operation: Operation, rank: int) -> list[int]:
    """Return which dimension of the input each dimension of the output is.

    The function itself shows it: it is called with a tensor whose first dimension has length 2, its
    second one length 3, and so on.
    """
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    given, kwargs = operation.args[1:], dict(operation.kwargs)
    kwargs.pop("input", None)
    moved = operation.function(probe, *given, **kwargs)
    return [size - 2 for size in moved.shape]


@rule("expand", "expand_as", "broadcast_to")
def _expand(run: Propagation, operation: Operation) -> None:
    x, shape = run.of(operation.args[0]), run.shape(operation.outputs[0])
    output = [new_dim(size, "an expanded dimension") for size in shape]
    for from_end, dim in enumerate(reversed(x), 1):
        if dim:
            output[-from_end] = dim
    run.set(operation, output)


@rule("repeat", "tile")
def _repeat(run: Propagation, operation: Operation) -> None:
    x, shape = run.of(operation.args[0]), run.shape(operation.outputs[0])
    x = [[]] * (len(shape) - len(x)) + x
    output = []
    for dim, size in zip(x, shape, strict=True):
        output.append([*new_dim(size // size_of(dim), "repeats of a dimension"), *dim])
    run.set(operation, output)


@rule("repeat_interleave")
def _interleave(run: Propagation, operation: Operation) -> None:
    x, dim = run.of(operation.args[0]), operation.argument(2, "dim")
    repeats = operation.argument(1, "repeats")
    if dim is None or not isinstance(repeats, int):
        _unknown(run, operation)
        return
    output = list(x)
    output[dim] = [*x[dim], *new_dim(repeats, "repeats of a dimension")]
    run.set(operation, output)


@rule("cat", "concat", "concatenate")
def _cat(run: Propagation, operation: Operation) -> None:
    parts = operation.argument(0, "tensors")
    # torch leaves out tensors of shape (0,), which start an empty cache.
    tensors = [run.of(ref) for ref in parts if run.shape(ref.value) != (0,)]
    first, *others = tensors
    along = operation.argument(1, "dim", 0) % len(first)
    for other in others:
        for number, (dim, other_dim) in enumerate(zip(first, other, strict=True)):
            if number != along:
                run.unify(operation, dim, other_dim)
    output: Dims = []
    for number in range(len(first)):
        dims = [tensor[number] for tensor in tensors]
        if number == along:
            length = run.shape(operation.outputs[0])[along]
            output.append(_joined(dims, length, run.recording.describe(operation)))
        else:
            output.append(next((dim for dim in dims if dim), []))
    run.set(operation, output)


def _joined(dims: Sequence[Dim], length: int, operation: str) -> Dim:
    """Return the dimension that concatenated dimensions become; it has this length."""
    if len(dims) == 1:
        return dims[0]
    if all(dims):
        _, block = blocks_of(dims)
        return [*new_dim(length // size_of(block), "concatenated blocks"), *block]
    # A dimension of length 1, such as a class token before others.
    for dim in dims:
        fix(dim, operation)
    return new_dim(length, "concatenated")


@rule("stack")
def _stack(run: Propagation, operation: Operation) -> None:
    tensors = [run.of(ref) for ref in operation.argument(0, "tensors")]
    first, *others = tensors
    for other in others:
        for dim, other_dim in zip(first, other, strict=True):
            run.unify(operation, dim, other_dim)
    position = operation.argument(1, "dim", 0) % (len(first) + 1)
    output = list(first)
    output.insert(position, new_dim(len(tensors), "stacked tensors"))
    run.set(operation, output)


@rule("chunk", "split", "tensor_split", "split_with_sizes")
def _split(run: Propagation, operation: Operation) -> None:
    x, along = run.of(operation.argument(0, "input")), operation.argument(2, "dim", 0)
    lengths = [run.shape(value)[along] for value in operation.outputs]
    # The longest block that all pieces are multiples of: they keep the same channels of it.
    block_length = math.gcd(*lengths)
    block = new_dim(block_length)
    num_blocks = new_dim(sum(lengths) // block_length, "split in blocks")
    unify(x[along], [*num_blocks, *block])
    pieces = []
    for length in lengths:
        piece = list(x)
        piece[along] = [*new_dim(length // block_length, "split in blocks"), *resolve(block)]
        pieces.append(piece)
    if operation.name in ("split", "split_with_sizes"):
        given = operation.argument(1, "split_size_or_sections")
        sizes = given if isinstance(given, list | tuple) else [given]
        for piece, size in zip(pieces, sizes, strict=False):
            run.sized(operation, size, piece[along])
    run.set(operation, *pieces)


@rule("unbind")
def _unbind(run: Propagation, operation: Operation) -> None:
    x = run.of(operation.argument(0, "input"))
    removed = operation.argument(1, "dim", 0) % len(x)
    fix(x[removed], run.recording.describe(operation))
    rest = [*x[:removed], *x[removed + 1 :]]
    run.set(operation, *(list(rest) for _ in operation.outputs))


@rule("select", "narrow", "index_select", "gather", "roll", "flip")
def _select(run: Propagation, operation: Operation) -> None:
    """Fix the dimension whose positions are chosen, and keep the others."""
    x = run.of(operation.argument(0, "input"))
    if operation.name == "roll":
        dims = operation.argument(2, "dims")
    elif operation.name == "flip":
        dims = operation.argument(1, "dims")
    else:
        dims = operation.argument(1, "dim")
    chosen = _dim_numbers(dims, len(x))
    if not chosen or operation.name == "gather":
        _unknown(run, operation)
        return
    output = list(x)
    shape = run.shape(operation.outputs[0])
    for number in chosen:
        fix(x[number], run.recording.describe(operation))
        if operation.name != "select":
            output[number] = new_dim(shape[number], "chosen positions")
    if operation.name == "select":
        del output[chosen[0]]
    run.set(operation, output)


def _dim_numbers(dims: Any, rank: int) -> list[int]:
    """Return an argument for one or several dimensions as numbers from 0 on; None is left out."""
    given = dims if isinstance(dims, list | tuple) else [dims]
    return [dim % rank for dim in given if dim is not None]


@rule("getitem")
def _getitem(run: Propagation, operation: Operation) -> None:
    output = _indexed(run, operation)
    if output is None:
        _unknown(run, operation)
    else:
        run.set(operation, output)


@rule("setitem")
def _setitem(run: Propagation, operation: Operation) -> None:
    x, region = run.of(operation.args[0]), _indexed(run, operation)
    written = operation.args[2]
    if region is None:
        _unknown(run, operation)
        return
    if isinstance(written, Ref):
        _batch(run, operation, region, run.of(written))
    run.set(operation, x)


def _indexed(run: Propagation, operation: Operation) -> Dims | None:
    """Return the dimensions of x[index], or None if the index is too complicated."""
    x, shape = run.of(operation.args[0]), run.shape(operation.args[0].value)
    items = _without_ellipsis(operation.args[1], len(shape))
    if sum(isinstance(item, Ref) for item in items) > 1:
        return None
    reason = run.recording.describe(operation)
    output: Dims = []
    number = 0  # the dimension of x that the next item is for
    for item in items:
        if item is None:  # adds a dimension of length 1
            output.append([])
            continue
        is_last = number + 1 == len(items)
        dims = _indexed_dim(run, item, x[number], shape[number], is_last, reason)
        if dims is None:
            return None
        output += dims
        number += 1
    if operation.name == "setitem":
        return output  # the output of the operation is the whole x
    has_right_shape = tuple(map(size_of, output)) == run.shape(operation.outputs[0])
    return output if has_right_shape else None


def _indexed_dim(
    run: Propagation, item: Any, dim: Dim, length: int, is_last: bool, reason: str
) -> Dims | None:
    """Return the dimensions that a dimension becomes by one item of an index.

    It is fixed if the item chooses some positions. None: the item is too complicated.
    """
    if item == slice(None):
        return [dim]
    if isinstance(item, slice):
        fix(dim, reason)
        return [new_dim(len(range(*item.indices(length))), reason)]
    if isinstance(item, Ref):
        if len(run.shape(item.value)) != 1 and not is_last:
            return None
        fix(dim, reason)
        return run.of(item)
    if isinstance(item, int):
        fix(dim, reason)
        return []
    return None


def _without_ellipsis(index: Any, rank: int) -> list[Any]:
    """Return the items of an index, with a full slice for each dimension that it does not name."""
    items = list(index) if isinstance(index, tuple) else [index]
    named = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    position = items.index(Ellipsis)
    full_slices = [slice(None)] * (rank - named)
    return [*items[:position], *full_slices, *items[position + 1 :]]


# ---- reductions


@rule("mean", "sum", "std", "var", "amax", "amin", "max", "min", "prod", "logsumexp", "norm")
@rule("any", "all", "argmax", "argmin", "var_mean", "std_mean", "median", "vector_norm")
def _reduce(run: Propagation, operation: Operation) -> None:
    tensors = _tensors(operation)
    if len(tensors) > 1:  # torch.max(a, b)
        _default(run, operation)
        return
    x = run.of(tensors[0])
    rank = len(x)
    reduced = _reduced_dims(operation, rank)
    if operation.name in ("argmax", "argmin"):
        for number in reduced:
            fix(x[number], run.recording.describe(operation))
    outputs = []
    for value in operation.outputs:
        keeps_rank = len(run.shape(value)) == rank
        output: Dims = []
        for number, dim in enumerate(x):
            if number not in reduced:
                output.append(dim)
            elif keeps_rank:
                output.append([])
        outputs.append(output)
    run.set(operation, *outputs)


def _reduced_dims(operation: Operation, rank: int) -> list[int]:
    """Return the numbers of the dimensions that a reduction is over."""
    # Norms have their order before the dimensions.
    position = 2 if operation.name in ("norm", "vector_norm") else 1
    dims = operation.argument(position, "dim")
    if dims is None:
        dims = operation.kwargs.get("axis")  # NumPy's name, which torch accepts too
    if dims is None or isinstance(dims, bool):  # x.var(False): not a dimension, but `unbiased`
        return list(range(rank))
    return _dim_numbers(dims, rank)
