"""Memory and operations, counted on a CPU and without values, against numbers by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.counting import LiveBytes, LSTMsOfCPUs, flop_counter


class Recurrent(nn.Module):
    """An LSTM of torch's own; the result is its outputs."""

    def __init__(self, **settings: bool | int | float) -> None:
        super().__init__()
        self.layers = nn.LSTM(6, 32, batch_first=True, **settings)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)[0]
        return outputs


def counted(build: Callable[[], nn.Module], device: str) -> tuple[int, int, int]:
    """Return the operations of a step, the bytes kept for its backward pass, and its peak."""
    model = build().to(device)
    inputs = torch.zeros(4, 10, 6, device=device, requires_grad=True)
    with (
        LSTMsOfCPUs(),
        LiveBytes([inputs, *model.parameters()]) as live,
        flop_counter() as counter,
    ):
        loss = model(inputs).square().mean()
        kept = live.now
        loss.backward()
    return counter.get_total_flops(), kept, live.peak


def test_the_operations_of_an_lstm() -> None:
    """Per position: the weights of the four gates, on the inputs and on the last outputs."""
    positions, gates, units = 4 * 10, 4 * 32, 32
    first, second = gates * (6 + units), gates * (units + units)
    forward = 2 * positions * (first + second)
    for device in ("cpu", "meta"):
        flops, _, _ = counted(lambda: Recurrent(num_layers=2), device)
        assert flops == 3 * forward, device


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_layers": 3, "dropout": 0.5}, {"bidirectional": True, "bias": False}],
    ids=str,
)
def test_an_lstm_without_values_costs_what_it_costs_a_cpu(
    settings: dict[str, bool | int | float],
) -> None:
    cpu = counted(lambda: Recurrent(**settings), "cpu")
    meta = counted(lambda: Recurrent(**settings), "meta")
    assert meta[0] == cpu[0] > 0
    assert meta[1:] == pytest.approx(cpu[1:], rel=0.05)


def test_an_lstm_without_values_has_torchs_shapes() -> None:
    layers = nn.LSTM(6, 32, num_layers=2, bidirectional=True, batch_first=True)
    expected, (output, cell) = layers(torch.zeros(4, 10, 6))
    with LSTMsOfCPUs():
        outputs, (last, last_cell) = layers.to("meta")(torch.zeros(4, 10, 6, device="meta"))
    assert outputs.shape == expected.shape
    assert last.shape == output.shape and last_cell.shape == cell.shape
    with LSTMsOfCPUs():  # projections are left to torch
        projected = nn.LSTM(6, 32, proj_size=8, device="meta")(torch.zeros(5, 6, device="meta"))[0]
    assert projected.shape == (5, 8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_operations_of_attention(device: str) -> None:
    """Scores and their products with the values, forward; twice as many backward."""
    query, key, value = torch.zeros(3, 2, 4, 10, 8, device=device).unbind()
    for tensor in (query, key, value):
        tensor.requires_grad_()
    with flop_counter() as counter:
        F.scaled_dot_product_attention(query, key, value).sum().backward()
    forward = 2 * (2 * 2 * 4 * 10 * 10 * 8)
    assert counter.get_total_flops() == 3 * forward
