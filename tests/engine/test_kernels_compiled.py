"""Motley's kernels compiled for an H100 or H200 without one, by Triton and ptxas.

    make test-kernels

That leaves out the slow tests, which compile whole networks (`pytest -m ''`, with Triton installed).
They show that every kernel compiles, that its values fit into registers, and that a slot compiles
all kernels before its first step. The tensors are on torch's meta device: they have no memory, and
no kernel runs.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.client.fused import apply_kernels
from motley.client.training import TrainingSettings
from motley.client.weights import Weights, working_type
from motley.engine.slots import lengths_to_compile
from motley.kernels import AVAILABLE
from motley.kernels.compiling import compiling_ahead
from motley.models import MODELS, ImageShape
from motley.models.resnet import ResNetSettings

if AVAILABLE:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from motley.kernels import augment, convolve, optimizers, pool, stem
    from motley.kernels import norm as norm_kernels
    from motley.kernels.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.skipif(
    not AVAILABLE or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, and not its interpreter",
)
#: Bytes per thread that may be outside of registers: now and then ptxas needs a few.
MOST_SPILLED = 64
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


class CompilerOnly:
    """Stands for a GPU's driver: Triton compiles for it, and launches are dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.utils = folder, self
        #: Kernel -> bytes per thread that are not in registers, for each of its variants.
        self.spilled: dict[str, list[int]] = {}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def launcher_cls(self, *_: Any) -> Any:
        return lambda *arguments: None

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        file = self.folder / f"{name}-{len(self.spilled.get(name, []))}.cubin"
        file.write_bytes(binary)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [str(tool), "-res-usage", str(file)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        stack, local = (int(re.findall(rf"{what}:(\d+)", output)[0]) for what in ("STACK", "LOCAL"))
        self.spilled.setdefault(name, []).append(stack + local)
        return object(), object(), 0, stack + local, 1024


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CompilerOnly]:
    """Let Triton compile for a GPU that is not there, with an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    stand_in = CompilerOnly(tmp_path)
    for kernel in kernels():
        kernel.device_caches.clear()
    monkeypatch.setattr(driver, "_active", stand_in)
    yield stand_in
    for kernel in kernels():
        kernel.device_caches.clear()


def kernels() -> list[Any]:
    """Return all kernels, and the functions that they call."""
    found = []
    for module in (augment, convolve, norm_kernels, optimizers, pool, stem):
        for item in vars(module).values():
            if isinstance(item, triton.runtime.JITFunction):
                found.append(item)
    return found


def num_compiled() -> int:
    """Return how many kernels have been compiled since the test began."""
    return sum(len(cache[0]) for kernel in kernels() for cache in kernel.device_caches.values())


class Training:
    """A model with all kernels, and its optimizer, in training."""

    def __init__(self, size: str, precision: str) -> None:
        with torch.device("meta"):
            model = MODELS[size].make(ResNetSettings(), ImageShape(3, 32, 32), 10)
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = apply_kernels(model.train())
        self.weights = Weights(self.model, precision)
        self.dtype = working_type(precision)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        weights = self.weights
        lr = torch.tensor(1e-3, device="meta")
        masters = list(weights.masters.values())
        return FusedAdam(masters, lr, (0.9, 0.999), 0, weights, weights.scale, decoupled=False)

    def step(self, length: int) -> None:
        loss = F.cross_entropy(
            self.model(images(length, self.dtype)).float(),
            torch.empty(length, dtype=torch.long, device="meta"),
        )
        self.weights.backward(loss)
        self.optimizer.step()


def images(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(count, 32, 32, 3, dtype=dtype, device="meta").permute(0, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_slots_of_five_resnets_compile_all_kernels_before_their_first_step(
    precision: str, compiler: CompilerOnly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the setting of the preset inco-cifar10, and with short last batches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "fp32")
    training = TrainingSettings(batch_size=64)
    for size in ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26"):
        model = Training(size, precision)
        with compiling_ahead(2):
            for length in lengths_to_compile(training):
                model.step(length)
        ahead = num_compiled()
        for length in (64, 63, 50, 37, 21, 17, 9, 5):
            model.step(length)
        assert ahead > 0 and num_compiled() == ahead, size
        model.model.eval()
        with torch.no_grad(), compiling_ahead(2):
            model.model(images(64, model.dtype))
    assert compiler.spilled.keys() >= {"_forward", "_backward"}
    assert len(compiler.spilled["_step"]) == 1, "one kernel for all sizes"
    assert ("_convolve" in compiler.spilled) == (precision != "fp32")
    most = {name: max(spilled) for name, spilled in compiler.spilled.items()}
    assert not {name: spilled for name, spilled in most.items() if spilled > MOST_SPILLED}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "momentum"])
def test_optimizers_fit_into_registers(name: str, precision: str, compiler: CompilerOnly) -> None:
    layers = (nn.Conv2d(64, 64, 3, bias=False), nn.Flatten(), nn.Linear(64, 10))
    model = nn.Sequential(*layers).to("meta")
    weights = Weights(model, precision)
    masters, lr = list(weights.masters.values()), torch.tensor(1e-3, device="meta")
    optimizer: Any
    if name in ("adam", "adamw"):
        decoupled = name == "adamw"
        optimizer = FusedAdam(
            masters, lr, (0.9, 0.999), 0.1, weights, weights.scale, decoupled=decoupled
        )
    else:
        momentum = 0.9 if name == "momentum" else 0.0
        optimizer = FusedSGD(masters, lr, momentum, 0.1, weights, weights.scale)
    for pulled in (False, True):
        x = torch.empty(8, 64, 3, 3, device="meta", dtype=working_type(precision))
        weights.backward(model(x).float().sum())
        if pulled:
            optimizer.pull(masters, [0.1] * len(masters))
        optimizer.step()
    assert len(compiler.spilled["_step"]) == 2
    assert max(compiler.spilled["_step"]) <= MOST_SPILLED


@pytest.mark.parametrize("shape", [(28, 1), (32, 3), (64, 3)], ids=str)
@pytest.mark.parametrize("stored", [torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_prepared_images_fit_into_registers(
    shape: tuple[int, int], stored: torch.dtype, dtype: torch.dtype, compiler: CompilerOnly
) -> None:
    side, channels = shape
    with torch.device("meta"):
        augment.augment(
            torch.empty(9, side + 8, side + 8, channels, dtype=stored),
            torch.empty(64, dtype=torch.long),
            torch.empty(64, 7),
            torch.empty(channels),
            torch.empty(channels),
            torch.empty(64, side, side, channels, dtype=dtype),
            padding=4,
            flip=True,
            cutout=16,
        )
    assert max(compiler.spilled["_augment"]) <= MOST_SPILLED
