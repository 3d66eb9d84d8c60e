"""The memory and the floating-point operations of a computation, counted from its operations.

Both can be counted on torch's meta device, where tensors have no values, and are then those that a
CPU needs.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

#: Convolutions: the place of the weight among their arguments, and how many copies of it they make
#: on a CPU while they run. Images have their channels last and a model's weights do not, so torch
#: copies the weight to that layout, and oneDNN once more to its own. The backward pass copies the
#: weight in the same way, and makes a copy of its gradient.
CONVOLUTIONS = {
    torch.ops.aten.convolution.default: (1, 2),
    torch.ops.aten.convolution_backward.default: (2, 3),
}

#: A layer of an LSTM on a CPU: one operation of oneDNN, forward and backward.
LSTM_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
LSTM_LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
#: The memory of an LSTM's layer on a CPU, in sizes of its output: what the forward pass leaves for
#: the backward pass beside the output, and what the backward pass takes while it runs. Both are in
#: one workspace of 16 outputs, most of whose pages are not touched before the backward pass.
#: Measured with torch 2.13 on an x86 CPU, 64 to 512 units: 5.1 and 8.3.
LSTM_KEPT, LSTM_SCRATCH = 5, 8
#: Copies of a layer's weights that its backward pass makes.
LSTM_WEIGHT_COPIES = 2
#: torch's number of the kind of layer, among its recurrent ones.
LSTM_MODE = 2


class LiveBytes(TorchDispatchMode):
    """Tracks the memory that a computation allocates and frees.

    `now` is the number of bytes that are allocated, `peak` its maximum so far. Tensors in
    `existing` are not counted. The peak has the copies of their weights that convolutions make, and
    the scratch space of LSTMs.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        for tensor in existing:
            self._seen.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is LSTM_LAYER:
            output, workspace = results[0], results[3]
            self._follow(workspace.untyped_storage(), LSTM_KEPT * output.nbytes)
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._follow(storage, storage.nbytes())
        self.peak = max(self.peak, self.now + _scratch_bytes(func, args))
        return results

    def _follow(self, storage: Any, num_bytes: int) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, num_bytes)

    def _free(self, count: int) -> None:
        self.now -= count


def _scratch_bytes(func: Any, args: Any) -> int:
    """Return the bytes that an operation takes only while it runs, beside its results."""
    if func in CONVOLUTIONS:
        place, copies = CONVOLUTIONS[func]
        return int(copies * args[place].nbytes)
    if func is LSTM_LAYER_BACKWARD:
        inputs, weights, units = args[0], args[1:3], args[2].shape[1]
        output_bytes = inputs.shape[0] * inputs.shape[1] * units * inputs.element_size()
        return int(
            LSTM_SCRATCH * output_bytes
            + LSTM_WEIGHT_COPIES * sum(weight.nbytes for weight in weights)
        )
    return 0


class LSTMsOfCPUs(TorchFunctionMode):
    """Computes LSTMs on the meta device layer by layer, with the operations that a CPU uses.

    torch would compute them position by position there, which takes other memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm and not kwargs and _is_plain_lstm(*args):
            return _lstm(*args)
        return func(*args, **(kwargs or {}))


def _is_plain_lstm(inputs: Tensor, states: Any, *_: Any) -> bool:
    """Tell whether an LSTM has no packed sequences and no projections, which oneDNN lacks."""
    return isinstance(states, tuple | list) and states[0].shape == states[1].shape


def _lstm(
    inputs: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `torch.lstm` returns. It does the same on a CPU."""
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    x = (inputs.transpose(0, 1) if batch_first else inputs).contiguous()
    last_outputs, last_cells = [], []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            own = list(weights[place * per_layer : (place + 1) * per_layer])
            if not has_biases:
                own += [own[0].new_zeros(len(own[0]))] * 2
            output, cell = states[0][place], states[1][place]
            reverse, units = direction > 0, output.shape[-1]
            shape = (LSTM_MODE, units, num_layers, has_biases, bidirectional, batch_first, train)
            y, output, cell, _ = LSTM_LAYER(x, *own, output, cell, reverse, [], *shape)
            outputs.append(y)
            last_outputs.append(output)
            last_cells.append(cell)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack(last_outputs), torch.stack(last_cells)


def flop_counter() -> FlopCounterMode:
    """Return a counter of floating-point operations: a multiplication and an addition are two.

    torch's own counter does not know the operations of a CPU for LSTMs and for attention, and
    would count none for them. Their backward passes count as two forward passes. (The one of
    attention also computes its scores again, which is not counted.)
    """
    aten = torch.ops.aten
    formulas = {
        aten.mkldnn_rnn_layer: _lstm_flops,
        aten.mkldnn_rnn_layer_backward: _lstm_backward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


# The counter passes shapes in place of tensors.


def _lstm_flops(inputs: Any, input_weight: Any, hidden_weight: Any, *_: Any, **__: Any) -> int:
    positions = inputs[0] * inputs[1]  # of all sequences
    return int(2 * positions * (math.prod(input_weight) + math.prod(hidden_weight)))


def _lstm_backward_flops(*args: Any, **__: Any) -> int:
    return 2 * _lstm_flops(*args)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return 2 * _attention_flops(query, key, value)
