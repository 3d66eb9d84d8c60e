"""Motley's kernels in Triton's interpreter, which runs them on a CPU, value by value.

    make test-kernels

That installs Triton and sets TRITON_INTERPRET=1, which must be set before Triton is imported, so
these tests are skipped in other runs. They show that kernels compute the right values and read
nothing else. They show nothing about compiled code: how fast it is, whether tf32 is exact enough,
or how bf16 is rounded. Products of bf16 are left out, because the interpreter multiplies their
bits.
"""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from motley.client.fused import apply_kernels
from motley.data import Examples
from motley.data.device import DRAWS, device_data
from motley.data.transforms import TransformSettings
from motley.kernels import AVAILABLE

if AVAILABLE:
    from motley.kernels import augment, convolve, stem
    from motley.kernels.layers import FusedBatchNorm, FusedConv2d, FusedMaxPool2d, FusedStem
    from motley.kernels.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.skipif(
    not AVAILABLE or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)


@pytest.fixture(autouse=True)
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the convolution's kernels in single precision, which the interpreter does not round."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def channels_last(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype=dtype, memory_format=torch.channels_last)


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def convolution(inputs: int, outputs: int, kernel: int, **settings: Any) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, kernel, bias=False, **settings)
    return layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def check_equal(mine: torch.Tensor | None, exact: torch.Tensor | None, limit: float) -> None:
    assert mine is not None and exact is not None and mine.shape == exact.shape
    mine, exact = mine.detach().double(), exact.detach()
    assert float((mine - exact).norm()) <= limit * float(exact.norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize(
    "shape",
    [
        # images, inputs, outputs, height and width, stride, kernel, padding, layout of gradients
        (70, 32, 64, (1, 1), 1, 3, 1, "channels_last"),
        (33, 32, 96, (2, 2), 1, 3, 1, "channels_last"),
        (3, 64, 32, (4, 4), 2, 3, 1, "contiguous"),
        (9, 96, 32, (5, 3), 2, 1, 0, "contiguous"),
        (5, 32, 32, (4, 4), 1, 3, 0, "expanded"),
        (3, 32, 32, (3, 3), 5, 7, 3, "channels_last"),
    ],
)
def test_convolutions_equal_torchs(
    shape: tuple[Any, ...], dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    count, inputs, outputs, sides, stride, kernel, padding, layout = shape
    layer = convolution(inputs, outputs, kernel, stride=stride, padding=padding).to(dtype)
    fused = FusedConv2d.of(layer)
    x = channels_last(count, inputs, *sides, dtype=dtype).requires_grad_()
    exact_x, exact_weight = in_double(x), in_double(layer.weight)
    assert convolve.applies(x, fused)
    y = fused(x)
    exact = F.conv2d(exact_x, exact_weight, stride=stride, padding=padding)
    g = torch.randn(exact.shape).to(dtype)
    if layout == "channels_last":
        g = g.to(memory_format=torch.channels_last)
    elif layout == "expanded":
        g = torch.full((), 0.5, dtype=dtype).expand(exact.shape)
    y.backward(g)
    exact.backward(g.double())
    check_equal(y, exact, limit)
    check_equal(x.grad, exact_x.grad, limit)
    check_equal(fused.weight.grad, exact_weight.grad, limit)


def test_a_weight_in_another_layout_is_left_to_torch() -> None:
    """As `torch.func.functional_call` may lend it, for example one that was just computed."""
    torch.manual_seed(0)
    fused, first = FusedConv2d.of(convolution(32, 32, 3)), FusedStem.of(convolution(3, 32, 3))
    for layer, x in ((fused, channels_last(4, 32, 4, 4)), (first, channels_last(4, 3, 4, 4))):
        weight = torch.randn_like(layer.weight, memory_format=torch.contiguous_format)
        y = torch.func.functional_call(layer, {"weight": weight}, (x,))
        torch.testing.assert_close(y, F.conv2d(x, weight), rtol=1e-4, atol=1e-4)


def test_inputs_that_do_not_fit_are_refused_with_torchs_messages() -> None:
    layer = FusedConv2d.of(convolution(32, 32, 5))
    with pytest.raises(RuntimeError, match="to have 32 channels, but got 64"):
        layer(channels_last(4, 64, 8, 8))
    for side in (4, 3):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            layer(channels_last(4, 32, side, side))


def test_the_first_convolution_leaves_to_torch_what_it_cannot_address() -> None:
    """Places are 32-bit numbers. The tensors have no memory."""
    layer = FusedStem.of(convolution(3, 64, 3, padding=1).to("meta"))
    for count, applies in ((32767, True), (32768, False)):
        images = torch.empty(count, 3, 32, 32, device="meta").to(memory_format=torch.channels_last)
        assert stem.applies(images, layer) == applies
    small = FusedStem.of(convolution(3, 32, 5))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        small(channels_last(4, 3, 4, 4))


def test_padding_that_is_not_with_zeros_is_left_to_torch() -> None:
    """Only a user's own model has such layers."""
    torch.manual_seed(0)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolution(32, 32, 3, padding=1, padding_mode="circular")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.conv(x)
            return y

    plain, x = Own(), channels_last(4, 32, 4, 4)
    torch.testing.assert_close(apply_kernels(deepcopy(plain))(x), plain(x))


@pytest.mark.parametrize("name", ["conv", "stem", "norm", "pool"])
def test_second_derivatives_are_refused(name: str) -> None:
    """Kernels have first derivatives only. Without an error, a penalty on gradients would be lost."""
    layers: dict[str, nn.Module] = {
        "conv": FusedConv2d.of(convolution(32, 32, 3)),
        "stem": FusedStem.of(convolution(3, 32, 3)),
        "norm": FusedBatchNorm.of(nn.BatchNorm2d(32)),
        "pool": FusedMaxPool2d.of(nn.MaxPool2d(3, 2, 1)),
    }
    channels = 3 if name == "stem" else 32
    x = channels_last(4, channels, 4, 4).requires_grad_(name != "stem")
    towards = x if name == "pool" else next(layers[name].parameters())
    loss = layers[name](x).square().mean()
    (gradient,) = torch.autograd.grad(loss, towards, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + gradient.square().sum()).backward()


@pytest.mark.parametrize("shape", [(7, 6, 3, 5), (5, 3, 17, 16)], ids=["few rows", "many rows"])
@pytest.mark.parametrize("add", [False, True])
def test_norms_equal_torchs(shape: tuple[int, ...], add: bool) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(shape[1])
    nn.init.uniform_(plain.weight, 0.5, 1)
    exact, fused = deepcopy(plain).double(), FusedBatchNorm.of(plain)
    x, other, g = (channels_last(*shape) + 1 for _ in range(3))
    x.requires_grad_()
    exact_x = in_double(x)
    y, again = fused(x, other if add else None, relu=True, twice=True)
    wanted = F.relu(exact(exact_x) + other if add else exact(exact_x))
    (y * g + again * other).sum().backward()
    (wanted * (g + other)).sum().backward()
    check_equal(y, wanted, 1e-5)
    check_equal(x.grad, exact_x.grad, 1e-5)
    check_equal(fused.weight.grad, exact.weight.grad, 1e-5)
    check_equal(fused.bias.grad, exact.bias.grad, 1e-5)
    check_equal(fused.running_mean, exact.running_mean, 1e-5)
    check_equal(fused.running_var, exact.running_var, 1e-5)


def test_numbers_that_are_not_finite_stay_visible() -> None:
    """A diverged model must not look like one whose outputs are zero."""
    x = channels_last(4, 3, 5, 5)
    x[0, 0, 2, 2] = torch.nan
    norm = FusedBatchNorm.of(nn.BatchNorm2d(3))
    assert norm(x, relu=True)[:, 0].isnan().all()
    many = channels_last(4, 3, 17, 17)
    many[0, 0, 2, 2] = torch.nan
    assert norm(many, relu=True)[:, 0].isnan().all()
    norm.eval()
    with torch.no_grad():
        assert norm(x, relu=True)[:, 0].isnan().all()
        pooled = FusedMaxPool2d.of(nn.MaxPool2d(3, 2, 1))(x)
    assert torch.equal(pooled.isnan(), F.max_pool2d(x, 3, 2, 1).isnan())


@pytest.mark.parametrize("shape", [(3, 3, 9, 11), (2, 64, 8, 8), (5, 2, 1, 1)])
def test_max_pooling_equals_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = channels_last(*shape).relu().requires_grad_()
    exact_x = in_double(x)
    y, again = FusedMaxPool2d.of(nn.MaxPool2d(3, 2, 1))(x, twice=True)
    wanted = F.max_pool2d(exact_x, 3, 2, 1)
    g = torch.randn(y.shape)
    (y * g + again * g).sum().backward()
    (wanted * 2 * g).sum().backward()
    check_equal(y, wanted, 0)
    check_equal(x.grad, exact_x.grad, 1e-6)


@pytest.mark.parametrize("shape", [(5, 3, 70, 14, 7, 2), (3, 1, 16, 9, 3, 1)])
def test_the_first_convolution_equals_torchs(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    count, channels, outputs, side, kernel, stride = shape
    fused = FusedStem.of(convolution(channels, outputs, kernel, stride=stride, padding=kernel // 2))
    x = channels_last(count, channels, side, side)
    exact_weight = in_double(fused.weight)
    wanted = F.conv2d(x.double(), exact_weight, stride=stride, padding=kernel // 2)
    y = fused(x)
    g = torch.randn(y.shape)
    y.backward(g)
    wanted.backward(g.double())
    check_equal(y, wanted, 1e-6)
    check_equal(fused.weight.grad, exact_weight.grad, 1e-6)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("cutout", [0, 5])
@pytest.mark.parametrize("transposed", [False, True])
def test_prepared_batches_are_those_of_torchs_operations(
    padding: int, cutout: int, transposed: bool
) -> None:
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (11, 9, 14, 3), dtype=np.uint8)
    if transposed:
        images = numbers.integers(0, 256, (11, 3, 9, 14), dtype=np.uint8).transpose(0, 2, 3, 1)
    transform = TransformSettings(
        crop_padding=padding, flip=True, cutout=cutout, mean=(0.4,) * 3, std=(0.3,) * 3
    )
    examples = Examples(images, np.zeros(11, dtype=np.int64))
    data: Any = device_data(examples, transform, torch.device("cpu"), augment=True)
    rows = torch.from_numpy(numbers.integers(0, 11, 13))
    draws = torch.from_numpy(numbers.random((13, DRAWS), dtype=np.float32))
    draws[0], draws[1] = 0, 1 - 2**-24  # the smallest and the largest number that is drawn
    given, wanted = torch.zeros(2, 13, 9, 14, 3).unbind()
    data.fill(wanted, rows, draws)
    augment.augment(
        data.inputs, rows, draws, data.shift, data.scale, given,
        padding=padding, flip=True, cutout=cutout,
    )  # fmt: skip
    assert torch.equal(given, wanted)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "momentum"])
def test_optimizers_equal_torchs(name: str) -> None:
    torch.manual_seed(0)
    shapes = [(33,), (70, 65), (4096,), (8193,)]
    mine = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in mine]
    lr, betas, momentum = torch.tensor(1e-2), (0.9, 0.99), 0.9 if name == "momentum" else 0.0
    fused: torch.optim.Optimizer
    plain: torch.optim.Optimizer
    if name in ("adam", "adamw"):
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        fused = FusedAdam(mine, lr, betas, 0.1, decoupled=name == "adamw")
        plain = kind(theirs, lr=1e-2, betas=betas, weight_decay=0.1)
    else:
        fused = FusedSGD(mine, lr, momentum, 0.1)
        plain = torch.optim.SGD(theirs, lr=1e-2, momentum=momentum, weight_decay=0.1)
    for _ in range(3):
        for one, other in zip(mine, theirs, strict=True):
            one.grad = other.grad = torch.randn_like(one)
        fused.step()
        plain.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
