"""The kernels of our own, each against torch's own operations: on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from motley.client.fused import apply_kernels
from motley.client.training import AdamSettings, OptimizerSettings, SGDSettings, reset
from motley.client.weights import Weights, working_type
from motley.data import Examples
from motley.data.device import DRAWS, ImageData, device_data
from motley.data.transforms import TransformSettings
from motley.engine.device import numerics
from motley.engine.slots import Slot
from motley.federation import Federation
from motley.kernels import AVAILABLE
from motley.kernels.compiling import compiling_ahead
from motley.models import MODELS, ImageShape
from motley.models.preact import PreActSettings
from motley.models.resnet import ResNetSettings
from motley.splits.width import Scaler
from tests.conftest import tiny_config

if AVAILABLE:
    import triton

    from motley.kernels import convolve, pool, stem
    from motley.kernels import norm as norm_kernels
    from motley.kernels.layers import FusedBatchNorm, FusedConv2d, FusedMaxPool2d, FusedStem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's own operations give the same bits every time."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 16, 16),
        (64, 64, 8, 8),
        (64, 256, 2, 2),
        (64, 512, 1, 1),
        (37, 24, 5, 3),
        (128, 64, 32, 32),
    ],
)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norm_equals_torchs(
    shape: tuple[int, ...], add: bool, relu: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(shape[1]).cuda()
    torch.nn.init.uniform_(plain.weight)
    torch.nn.init.uniform_(plain.bias)
    fused = FusedBatchNorm.of(deepcopy(plain))

    def drawn() -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * 2 + 1).to(
            dtype=dtype, memory_format=torch.channels_last
        )

    def torchs(x: torch.Tensor, other: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        y = plain(x)
        y = y if other is None else y + other
        y = F.relu(y) if relu else y
        return y, y

    x, other, weight = drawn(), drawn(), drawn()
    results = []
    if dtype == torch.float32:
        plain = plain.double()
    for norm in (plain, fused):
        exact = norm.weight.dtype if dtype == torch.float32 else dtype
        inputs = [x.to(exact).detach().requires_grad_(), other.to(exact).detach().requires_grad_()]
        added = inputs[1] if add else None
        y, again = (
            torchs(inputs[0], added) if norm is plain else fused(inputs[0], added, relu, twice=True)
        )
        (y * weight + again * other).sum().backward()
        tracked = norm.num_batches_tracked.float()
        gradients = [i.grad for i in inputs[: 1 + add]]
        results.append(
            [
                y.detach(),
                norm.weight.grad,
                norm.bias.grad,
                norm.running_mean,
                norm.running_var,
                tracked,
                *gradients,
            ]
        )
    exact_limit = (
        1e-5 if shape[0] * shape[2] * shape[3] < 2**16 else 1e-4
    )  # a mean's last bit, summed over all rows
    limit = (
        exact_limit if dtype == torch.float32 else 6e-2
    )  # torch rounds before it adds: some signs differ
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert mine is not None and theirs is not None and mine.dtype in (dtype, torch.float32)
        assert float((mine.double() - theirs.double()).norm() / theirs.double().norm()) < limit


def test_another_length_compiles_no_kernel_anew() -> None:
    """The last batch of every client has a length of its own; powers of two may be compiled for."""

    def step(length: int) -> int:
        x = (
            torch.randn(length, 64, 16, 16, device="cuda")
            .to(memory_format=torch.channels_last)
            .requires_grad_()
        )
        norm_kernels.norm_add_relu(x, None, norm, True)[0].sum().backward()
        torch.cuda.synchronize()
        kernels = [
            norm_kernels._block_moments,
            norm_kernels._apply_forward,
            norm_kernels._apply_backward,
        ]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    norm = nn.BatchNorm2d(64).cuda()
    first = step(127)
    assert first and [step(length) for length in (120, 101, 65, 33)] == [first] * 4
    assert step(128) > first


@pytest.fixture
def single_precision() -> Iterator[None]:
    """Keep torch's own operations from using tf32."""
    with numerics("fp32", torch.get_num_threads()):
        yield


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("shape", [(64, 3, 32, 7, 2), (50, 1, 28, 7, 2), (64, 3, 32, 3, 1)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_first_convolution_equals_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, limit: float
) -> None:
    torch.manual_seed(0)
    count, channels, side, kernel, stride = shape
    plain = nn.Conv2d(channels, 64, kernel, stride=stride, padding=kernel // 2, bias=False).to(
        "cuda", dtype
    )
    plain = plain.to(memory_format=torch.channels_last)
    fused = FusedStem.of(deepcopy(plain))
    x = torch.randn(count, channels, side, side, device="cuda", dtype=dtype).to(
        memory_format=torch.channels_last
    )
    wanted, given = plain(x), fused(x)
    g = torch.randn_like(wanted)
    wanted.backward(g)
    given.backward(g)
    assert given.stride() == wanted.stride() and given.dtype == dtype
    for mine, theirs in ((given, wanted), (fused.weight.grad, plain.weight.grad)):
        assert mine is not None and theirs is not None
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < limit


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("gathered", [False, True], ids=["raw_gradients", "gathered"])
@pytest.mark.parametrize("pulled", [False, True], ids=["", "pulled"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        AdamSettings(name="adam", lr=1e-2, weight_decay=0.1),
        AdamSettings(name="adamw", lr=1e-2, weight_decay=0.1),
        SGDSettings(lr=1e-2),
        SGDSettings(lr=1e-2, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adam", "adamw", "sgd", "momentum"],
)
def test_fused_optimizers_equal_torchs(
    settings: OptimizerSettings, precision: str, gathered: bool, captured: bool, pulled: bool
) -> None:
    """With gradients where backward leaves them, or gathered in single precision; with a pull to other weights."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(33, 64, 3),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 71, 1),
        nn.Flatten(),
        nn.Linear(71 * 36, 10),
    )
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    theirs = list(deepcopy(model).parameters())
    weights = Weights(model, precision)
    mine = list(weights.masters.values())
    plain = settings.build(theirs, torch.device("cuda"))
    fused: Any = settings.build(mine, torch.device("cuda"), True, weights, weights.scale)
    towards = [torch.randn_like(tensor) for tensor in mine]
    strengths = [0.1 * number for number in range(len(mine))]
    images = torch.randn(8, 33, 8, 8, device="cuda", dtype=working_type(precision))

    def step() -> list[torch.Tensor]:
        weights.backward(model(images).float().square().mean())
        factor = 1 if weights.scale is None else 1 / weights.scale.value
        seen = [
            gradient.float() * factor for gradient in weights.raw_gradients if gradient is not None
        ]
        if gathered:
            weights.gather()
        if pulled:
            fused.pull(towards, strengths)
        fused.step()
        return seen

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        before = [tensor.detach().clone() for tensor in mine]
        step()  # warms up
        with torch.no_grad():
            torch._foreach_copy_(mine, before)
        reset(fused, settings.lr)
        weights.sync()
        graph = torch.cuda.CUDAGraph()
        if captured:
            fused.reserve(1)
            with torch.cuda.graph(graph, stream=stream):
                seen = step()
            fused.settle()
        for _ in range(5):
            if captured:
                graph.replay()
            else:
                seen = step()
            for tensor, gradient, goal, strength in zip(
                theirs, seen, towards, strengths, strict=True
            ):
                tensor.grad = gradient + pulled * strength * (tensor.detach() - goal)
            plain.step()
    torch.cuda.synchronize()
    for one, other, copy in zip(mine, theirs, weights.copies, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # of five steps of up to 1e-2
        assert copy is None or torch.equal(copy, one.detach().to(copy.dtype))


@pytest.mark.parametrize("gathered", [False, True], ids=["raw_gradients", "gathered"])
@pytest.mark.parametrize("settings", [AdamSettings(lr=1e-2), SGDSettings(lr=1e-2, momentum=0.9)])
def test_optimizers_leave_out_the_steps_that_torchs_leave_out(
    settings: OptimizerSettings, gathered: bool
) -> None:
    """With gradients that are not finite in one tensor or another, once and again."""
    torch.manual_seed(0)
    layers = nn.Conv2d(33, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 36, 10)
    plain = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    both = [Weights(model, "fp16") for model in (deepcopy(plain), plain)]
    masters = [list(weights.masters.values()) for weights in both]
    optimizers = [
        settings.build(own, torch.device("cuda"), fused, weights, weights.scale)
        for own, fused, weights in zip(masters, (True, False), both, strict=True)
    ]
    scales = []
    for step in range(120):
        bad = step in (3, 4, 70) or 90 <= step < 110
        numbers = torch.Generator("cuda").manual_seed(step)
        for place in range(len(masters[0])):
            drawn = torch.randn(masters[0][place].shape, device="cuda", generator=numbers)
            if bad and place == step % len(masters[0]):
                drawn[(-1,) * drawn.dim()] = (torch.inf, -torch.inf, torch.nan)[step % 3]
            for weights, own in zip(both, masters, strict=True):
                assert weights.scale is not None
                copy = weights.copies[place]
                tensor = own[place] if copy is None else copy
                tensor.grad = torch.empty_like(tensor).copy_(drawn * weights.scale.value)
        for weights, optimizer in zip(both, optimizers, strict=True):
            weights.scaled = True
            if gathered or weights is both[1]:
                weights.gather()
            optimizer.step()
        scales.append([float(weights.scale.value) for weights in both if weights.scale is not None])
    assert all(mine == theirs for mine, theirs in scales)
    assert {64.0, 512.0, 1024.0, 4096.0} <= {mine for mine, _ in scales}
    torch.testing.assert_close(masters[0], masters[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_a_pass_leaves_no_memory_behind(backward: bool) -> None:
    """A result for two uses must not keep itself alive: not even Python's collector would find it."""
    norm = FusedBatchNorm.of(nn.BatchNorm2d(64).cuda())
    norm.weight.grad, norm.bias.grad = torch.zeros(2, 64, device="cuda").unbind()
    x = torch.randn(8, 64, 16, 16, device="cuda").to(memory_format=torch.channels_last)

    def once() -> None:
        with torch.set_grad_enabled(backward):
            given = x.detach().requires_grad_(backward)
            y, again = norm(given, add=given, relu=True, twice=True)
            if backward:
                (y * again).sum().backward()

    once()
    before = torch.cuda.memory_allocated()
    once()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("shape", [(64, 64, 16, 16), (7, 70, 9, 11)])
@pytest.mark.parametrize("twice", [False, True])
def test_max_pooling_equals_torchs(shape: tuple[int, ...], twice: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda").relu().to(memory_format=torch.channels_last)
    plain = nn.MaxPool2d(3, 2, 1)
    fused = FusedMaxPool2d.of(plain)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    wanted, given = plain(inputs[0]), fused(inputs[1], twice=twice)
    weight = torch.randn_like(wanted)
    if twice:
        given, again = given
        (wanted * weight * 2).sum().backward()
        (given * weight + again * weight).sum().backward()
    else:
        (wanted * weight).sum().backward()
        (given * weight).sum().backward()
    assert torch.equal(given, wanted)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    with torch.no_grad():
        assert torch.equal(fused(x), wanted)


@pytest.mark.parametrize(
    "shape",
    [
        (64, 64, 64, 8, 1, 3, 1),
        (64, 64, 128, 8, 2, 3, 1),
        (64, 64, 128, 8, 2, 1, 0),
        (64, 128, 256, 4, 2, 3, 1),
        (64, 256, 256, 2, 1, 3, 1),
        (64, 256, 512, 2, 2, 2, 0),
        (64, 512, 512, 1, 1, 1, 0),
        (9, 96, 32, 5, 2, 3, 1),
        (130, 32, 64, 7, 3, 5, 2),
        (16, 64, 96, 1, 2, 3, 1),
        (3, 64, 64, 6, 1, 3, 0),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float16, 2e-3), (torch.bfloat16, 1e-2), (torch.float32, 2e-3)]
)
def test_convolutions_equal_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's in double precision, on the CPU; single precision is multiplied in tf32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.manual_seed(0)
    count, inputs, outputs, side, stride, kernel, padding = shape
    plain = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
    fused = FusedConv2d.of(
        deepcopy(plain).to("cuda", dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    )
    plain.weight.data = fused.weight.detach().double().cpu()
    x = torch.randn(count, inputs, side, side, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    assert convolve.applies(x, fused)
    exact_x = x.detach().double().cpu().requires_grad_()
    wanted, given = plain(exact_x), fused(x)
    g = torch.randn_like(wanted).to(dtype)
    wanted.backward(g.double())
    given.backward(g.cuda())
    assert fused.weight.grad is not None and plain.weight.grad is not None
    assert x.grad is not None and exact_x.grad is not None
    assert fused.weight.grad.stride() == fused.weight.stride()
    for mine, exact in (
        (given, wanted),
        (fused.weight.grad, plain.weight.grad),
        (x.grad, exact_x.grad),
    ):
        mine = mine.double().cpu()
        assert float((mine - exact).norm() / exact.norm()) < limit


def test_large_convolutions_and_fp32_are_left_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    layer = FusedConv2d.of(nn.Conv2d(64, 64, 3, padding=1, bias=False)).cuda()
    layer = layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def images(side: int) -> torch.Tensor:
        x = torch.zeros(128, 64, side, side, device="cuda")
        return x.to(memory_format=torch.channels_last)

    assert convolve.applies(images(8), layer)
    assert not convolve.applies(images(32), layer)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not convolve.applies(images(8), layer)


@pytest.mark.parametrize(
    "change", [{}, {"crop_padding": 4, "flip": True, "cutout": 16}, {"cutout": 5}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prepared_batches_are_those_of_torchs_operations(
    change: dict[str, Any], dtype: torch.dtype
) -> None:
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8)
    examples = Examples(images, np.zeros(50, dtype=np.int64))
    transform = TransformSettings(mean=(0.4,) * 3, std=(0.2,) * 3, **{"flip": True, **change})
    rows = torch.from_numpy(numbers.integers(0, 50, 70)).cuda()
    draws = torch.from_numpy(numbers.random((70, DRAWS), dtype=np.float32)).cuda()
    batches = []
    for kernel in (False, True):
        data = device_data(examples, transform, torch.device("cuda"), augment=True, kernel=kernel)
        assert isinstance(data, ImageData) and data._kernel == kernel
        into = torch.zeros(70, 32, 32, 3, device="cuda", dtype=dtype)
        data.fill(into, rows, draws)
        batches.append(into)
    assert torch.equal(*batches)


def test_large_images_and_other_transforms_are_prepared_by_torch() -> None:
    def has_kernel(side: int, **change: Any) -> bool:
        images = np.zeros((2, side, side, 3), dtype=np.uint8)
        transform = TransformSettings(flip=True, **change)
        examples = Examples(images, np.zeros(2, dtype=np.int64))
        data = device_data(examples, transform, torch.device("cuda"), augment=True, kernel=True)
        assert isinstance(data, ImageData)
        return data._kernel

    assert has_kernel(64)
    assert not has_kernel(128)
    assert not has_kernel(64, rotate=10)
    assert not has_kernel(64, resize=32)


def test_kernels_that_were_compiled_ahead_are_not_compiled_again() -> None:
    """All of a convolution's: the pass computes nothing, and the real one finds them."""
    kernels = (convolve._convolve, convolve._gradient)
    for kernel in kernels:
        kernel.device_caches.clear()  # tests before this one may have compiled them

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    layer = FusedConv2d.of(nn.Conv2d(160, 160, 3, padding=1, bias=False))
    layer = layer.cuda().half().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(8, 160, 4, 4, device="cuda", dtype=torch.float16)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    with compiling_ahead(2):
        layer(x).sum().backward()
    ahead = compiled()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    assert ahead > 0 and compiled() == ahead


def test_short_batches_find_the_kernels_that_a_slot_has_compiled() -> None:
    federation = Federation(
        tiny_config("engine.device=cuda", "engine.precision=fp16", "training.batch_size=64")
    )
    (job, *_) = federation.jobs(federation.initial_state())
    clients = federation.engine.clients  # type: ignore[attr-defined]
    slot = Slot(clients, job.size)
    clients.seat(slot.learner, job, clients.plan(job), {})
    kernels = [
        kernel
        for module in (convolve, norm_kernels, pool, stem)
        for kernel in vars(module).values()
        if isinstance(kernel, triton.runtime.JITFunction)
    ]
    for kernel in kernels:
        kernel.device_caches.clear()

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    slot._compile_kernels()
    ahead = compiled()
    for length in (64, 63, 50, 37, 21, 17, 9, 5):
        slot.learner.batches.rewind()
        slot.learner.step(length)
    torch.cuda.synchronize()
    assert ahead > 0 and compiled() == ahead


def test_bf16_results_are_rounded_to_the_nearest() -> None:
    """Cut off instead, every value would shrink by a fifth of a percent on average."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(64).cuda()
    exact = deepcopy(plain).double()
    norm = FusedBatchNorm.of(plain)
    for shape in ((64, 64, 1, 1), (64, 64, 16, 16)):
        x = torch.randn(shape, device="cuda").bfloat16().to(memory_format=torch.channels_last)
        given, wanted = norm(x).double(), exact(x.double())
        assert abs(float(((given - wanted) * wanted.sign()).sum() / wanted.abs().sum())) < 2e-4


FAMILIES: dict[str, Any] = {
    "resnet14": ResNetSettings(width=0.25),
    "resnet50": ResNetSettings(width=0.25, stem="cifar"),
    "resnet10": ResNetSettings(width=0.25, norm="group"),
    "heterofl-resnet18": PreActSettings(width=0.25),
}


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_kernels_is_the_same_function_under_the_same_names(name: str) -> None:
    torch.manual_seed(0)
    plain = (
        MODELS[name]
        .make(FAMILIES[name], ImageShape(3, 32, 32), 10)
        .cuda()
        .to(memory_format=torch.channels_last)
    )
    fused = apply_kernels(deepcopy(plain))
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert type(fused.conv1) is FusedStem
    exact = deepcopy(plain).double()
    images = torch.randn(16, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            wanted, given = exact.train(training)(images.double()), fused.train(training)(images)
            torchs = plain.train(training)(images)
        torch.testing.assert_close(given.double(), wanted, rtol=1e-3, atol=1e-3)
        if training:
            for logits in (wanted, given, torchs):
                logits.square().mean().backward()
    exact_gradients = dict(exact.named_parameters())
    torchs_gradients = dict(plain.named_parameters())
    for label, parameter in fused.named_parameters():
        exact_gradient = exact_gradients[label].grad

        def error(gradient: torch.Tensor, exact_gradient: torch.Tensor = exact_gradient) -> float:
            return float((gradient.double() - exact_gradient).norm() / exact_gradient.norm())

        # Behind fifty layers even torch's own gradients in single precision are off by some percent.
        allowed = max(1e-2, 3 * error(torchs_gradients[label].grad))
        assert error(parameter.grad) < allowed, label
    for mine, theirs in zip(fused.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("single_precision")
def test_a_layer_with_a_hook_keeps_it() -> None:
    """HeteroFL's scaler is a hook on a convolution, and a replacement would not have it."""
    torch.manual_seed(0)
    plain = (
        MODELS["resnet10"].make(ResNetSettings(width=0.25), ImageShape(3, 32, 32), 10).cuda().eval()
    )
    for layer in (plain.conv1, plain.layer1[0].conv1):
        layer.register_forward_hook(Scaler(0.5))
    plain = plain.to(memory_format=torch.channels_last)
    fused = apply_kernels(deepcopy(plain))
    images = torch.randn(4, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(fused(images), plain(images), rtol=1e-4, atol=1e-4)
