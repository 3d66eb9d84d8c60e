"""One rule per torch function: how the channels of its inputs become those of its outputs.

A rule gets the factors of an operation's inputs (`factors.py`), unifies those that must be the same
channels, and returns the factors of its outputs. A function without a rule whose output has the
shape of its inputs is taken to work on every element by itself; the check with permuted channels
(`check.py`) shows if it does not. Any other function without a rule fixes all channels it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
RULES: dict[str, Rule] = {}


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
            for at, dim in enumerate(reversed(run.of(ref)), 1):
                if dims[-at]:
                    run.unify(operation, dims[-at], dim)
                elif dim:
                    dims[-at] = dim
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
    _any_convolution(run, operation, operation.argument(6, "groups", 1), transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed_convolution(run: Propagation, operation: Operation) -> None:
    _any_convolution(run, operation, operation.argument(6, "groups", 1), transposed=True)


def _any_convolution(run: Propagation, operation: Operation, groups: int, transposed: bool) -> None:
    x, weight = run.of(operation.argument(0, "input")), operation.argument(1, "weight")
    fixed = "positions of a map or signal"
    for dim in (*run.of(weight)[2:], *x[2:]):
        fix(dim, fixed)
    first, second = run.of(weight)[:2]
    channels = size_of(x[1])
    if groups == 1:
        read, written = (first, second) if transposed else (second, first)
        run.unify(operation, x[1], read)
    else:
        read_in_group = channels // groups
        # One dimension of the weight counts (group, channel), the other the channels of a group.
        whole, inside = (x[1], resolve(second)) if transposed else (resolve(first), x[1])
        # All groups are kept, and some channels inside of each. A depthwise convolution has one
        # channel per group, so there the groups themselves are the channels.
        shared = f"groups of {run.recording.describe(operation)}" if read_in_group > 1 else ""
        group = new_dim(groups, shared)
        if transposed:
            run.unify(operation, x[1], first)
            written_in_group = size_of(second)
            unify(whole, [*group, *new_dim(read_in_group)])
            written = [*group, *resolve(second)]
        else:
            written_in_group = size_of(first) // groups
            unify(inside, [*group, *(resolve(second) or new_dim(read_in_group))])
            multiplier = "outputs per channel of a depthwise convolution"
            fixed_inside = multiplier if not shared else ""
            unify(whole, [*group, *new_dim(written_in_group, fixed_inside)])
            written = resolve(first)
        run.sized(operation, groups, group)
    bias = operation.argument(2, "bias")
    if bias is not None:
        unify(run.of(bias)[0], written)
    spatial = [new_dim(size, fixed) for size in run.shape(operation.outputs[0])[2:]]
    run.set(operation, [x[0], resolve(written), *spatial])


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
        dims = run.of(ref)
        for own, dim in zip(dims, x[-len(dims) :], strict=True):
            run.unify(operation, own, dim)
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
            cell = weights[start : start + per_cell]
            run.unify(operation, run.of(cell[0])[1], read)
            run.unify(operation, run.of(cell[1])[1], channels)
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
    query, key, value = (run.of(ref) for ref in operation.args[:3])
    heads = operation.args[4]
    width = size_of(query[-1])
    in_weight, in_bias = operation.args[5], operation.args[6]
    bias_k, bias_v = operation.args[7], operation.args[8]
    out_weight, out_bias = operation.args[11], operation.args[12]
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
    written, own = run.of(out_weight)
    run.unify(operation, own, inner)
    _bias(run, operation, out_bias, written)
    # torch computes the width of a head from that of the query.
    run.aligned.append((query[-1], inner))
    run.aligned.append((written, inner))
    run.sized(operation, operation.args[3], query[-1])
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
    dims: Dims = []
    for x, y in zip([[]] * (rank - len(a)) + a, [[]] * (rank - len(b)) + b, strict=True):
        run.unify(operation, x, y)
        dims.append(x or y)
    return dims


@rule("scaled_dot_product_attention")
def _attention(run: Propagation, operation: Operation) -> None:
    names = ("query", "key", "value")
    query, key, value = (run.of(operation.argument(at, n)) for at, n in enumerate(names))
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
    letters: dict[str, Dim] = {}
    for term, ref in zip(terms.split(","), tensors, strict=True):
        for letter, dim in zip(term, run.of(ref), strict=True):
            run.unify(operation, letters.setdefault(letter, dim), dim)
            letters[letter] = letters[letter] or dim
    if not result:
        result = "".join(sorted(x for x in letters if terms.count(x) == 1))
    run.set(operation, [letters[letter] for letter in result])


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
        spatial = [new_dim(size, "positions of a map or signal") for size in shape[2:]]
        outputs.append([*x[:2], *spatial])
    run.set(operation, *outputs)


@rule("pad")
def _pad(run: Propagation, operation: Operation) -> None:
    x, sizes = run.of(operation.args[0]), list(operation.argument(1, "pad"))
    output: Dims = []
    for at, dim in enumerate(reversed(x)):
        if any(sizes[2 * at : 2 * at + 2]):
            fix(dim, f"{run.recording.describe(operation)}")
            size = run.shape(operation.outputs[0])[-1 - at]
            output.insert(0, new_dim(size, f"{run.recording.describe(operation)}"))
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
    """Return which dimension of the input each dimension of the output is."""
    # The function itself says it, for a tensor whose sizes are the numbers of its dimensions.
    probe = torch.empty(tuple(range(2, rank + 2)), device="meta")
    given, kwargs = operation.args[1:], dict(operation.kwargs)
    kwargs.pop("input", None)
    moved = operation.function(probe, *given, **kwargs)
    return [size - 2 for size in moved.shape]


@rule("expand", "expand_as", "broadcast_to")
def _expand(run: Propagation, operation: Operation) -> None:
    x, shape = run.of(operation.args[0]), run.shape(operation.outputs[0])
    output = [new_dim(size, "an expanded dimension") for size in shape]
    for at, dim in enumerate(reversed(x), 1):
        if dim:
            output[-at] = dim
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
    x, at = run.of(operation.args[0]), operation.argument(2, "dim")
    if at is None or not isinstance(operation.argument(1, "repeats"), int):
        _unknown(run, operation)
        return
    output = list(x)
    repeats = operation.argument(1, "repeats")
    output[at] = [*x[at], *new_dim(repeats, "repeats of a dimension")]
    run.set(operation, output)


@rule("cat", "concat", "concatenate")
def _cat(run: Propagation, operation: Operation) -> None:
    parts = operation.argument(0, "tensors")
    # torch leaves out tensors of shape (0,), which start an empty cache.
    tensors = [run.of(ref) for ref in parts if run.shape(ref.value) != (0,)]
    at = operation.argument(1, "dim", 0)
    first, *others = tensors
    for other in others:
        for number, (x, y) in enumerate(zip(first, other, strict=True)):
            if number != at % len(first):
                run.unify(operation, x, y)
    joined = [tensor[at] for tensor in tensors]
    dims = [next((t[number] for t in tensors if t[number]), []) for number in range(len(first))]
    if len(joined) == 1:
        dims[at] = joined[0]
    elif all(joined):
        _, block = blocks_of(joined)
        total = sum(size_of(dim) for dim in joined)
        count = total // size_of(block)
        dims[at] = [*new_dim(count, "concatenated blocks"), *block]
    else:  # a dimension of size 1, such as a class token before others
        for dim in joined:
            fix(dim, f"{run.recording.describe(operation)}")
        dims[at] = new_dim(run.shape(operation.outputs[0])[at], "concatenated")
    run.set(operation, dims)


@rule("stack")
def _stack(run: Propagation, operation: Operation) -> None:
    tensors = [run.of(ref) for ref in operation.argument(0, "tensors")]
    for other in tensors[1:]:
        for x, y in zip(tensors[0], other, strict=True):
            run.unify(operation, x, y)
    at = operation.argument(1, "dim", 0) % (len(tensors[0]) + 1)
    output = list(tensors[0])
    output.insert(at, new_dim(len(tensors), "stacked tensors"))
    run.set(operation, output)


@rule("chunk", "split", "tensor_split", "split_with_sizes")
def _split(run: Propagation, operation: Operation) -> None:
    x, at = run.of(operation.argument(0, "input")), operation.argument(2, "dim", 0)
    lengths = [run.shape(value)[at] for value in operation.outputs]
    length = math.gcd(*lengths)
    block = new_dim(length)
    outer = new_dim(sum(lengths) // length, "split in blocks")
    unify(x[at], [*outer, *block])
    pieces = []
    for size in lengths:
        piece = list(x)
        piece[at] = [*new_dim(size // length, "split in blocks"), *resolve(block)]
        pieces.append(piece)
    sizes = operation.argument(1, "split_size_or_sections")
    if operation.name in ("split", "split_with_sizes"):
        for number, size in enumerate(sizes if isinstance(sizes, list | tuple) else [sizes]):
            run.sized(operation, size, pieces[number][at])
    run.set(operation, *pieces)


@rule("unbind")
def _unbind(run: Propagation, operation: Operation) -> None:
    x, at = run.of(operation.argument(0, "input")), operation.argument(1, "dim", 0)
    fix(x[at], f"{run.recording.describe(operation)}")
    at %= len(x)
    rest = [dim for number, dim in enumerate(x) if number != at]
    run.set(operation, *(list(rest) for _ in operation.outputs))


@rule("select", "narrow", "index_select", "gather", "roll", "flip")
def _select(run: Propagation, operation: Operation) -> None:
    """Fix the dimension whose positions are chosen, and keep the others."""
    x = run.of(operation.argument(0, "input"))
    at = operation.argument(
        2 if operation.name == "roll" else 1,
        "dims" if operation.name in ("roll", "flip") else "dim",
    )
    chosen = [a % len(x) for a in (at if isinstance(at, list | tuple) else [at]) if a is not None]
    if not chosen or operation.name == "gather":
        _unknown(run, operation)
        return
    output = list(x)
    shape = run.shape(operation.outputs[0])
    for number in chosen:
        fix(x[number], f"{run.recording.describe(operation)}")
        if operation.name != "select":
            output[number] = new_dim(shape[number], "chosen positions")
    if operation.name == "select":
        del output[chosen[0]]
    run.set(operation, output)


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
    index = operation.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (len(shape) - used)
    if sum(isinstance(item, Ref) for item in items) > 1:
        return None
    reason = run.recording.describe(operation)
    output: Dims = []
    number = 0
    for item in items:
        if item is None:
            output.append([])
            continue
        if item == slice(None):
            output.append(x[number])
        elif isinstance(item, slice):
            fix(x[number], reason)
            output.append(new_dim(len(range(*item.indices(shape[number]))), reason))
        elif isinstance(item, Ref):
            if len(run.shape(item.value)) != 1 and number + 1 != len(items) and len(items) > 1:
                return None
            fix(x[number], reason)
            output += run.of(item)
        elif isinstance(item, int):
            fix(x[number], reason)
        else:
            return None
        number += 1
    if tuple(size_of(dim) for dim in output) != run.shape(operation.outputs[0]):
        return output if operation.name == "setitem" else None
    return output


# ---- reductions


@rule("mean", "sum", "std", "var", "amax", "amin", "max", "min", "prod", "logsumexp", "norm")
@rule("any", "all", "argmax", "argmin", "var_mean", "std_mean", "median", "vector_norm")
def _reduce(run: Propagation, operation: Operation) -> None:
    tensors = _tensors(operation)
    if len(tensors) > 1:  # torch.max(a, b)
        _default(run, operation)
        return
    x, shape = run.of(tensors[0]), run.shape(tensors[0].value)
    at = operation.argument(2 if operation.name == "norm" else 1, "dim")
    if at is None and "axis" in operation.kwargs:
        at = operation.kwargs["axis"]
    if at is None or isinstance(at, bool):
        reduced = set(range(len(shape)))
    else:
        reduced = {a % len(shape) for a in (at if isinstance(at, list | tuple) else [at])}
    if operation.name in ("argmax", "argmin"):
        for number in reduced:
            fix(x[number], run.recording.describe(operation))
    outputs = []
    for value in operation.outputs:
        if len(run.shape(value)) == len(shape):
            outputs.append([[] if n in reduced else dim for n, dim in enumerate(x)])
        else:
            outputs.append([dim for n, dim in enumerate(x) if n not in reduced])
    run.set(operation, *outputs)
