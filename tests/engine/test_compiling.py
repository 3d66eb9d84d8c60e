"""Kernels are compiled side by side before they are first launched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from motley.kernels import compiling
from motley.kernels.compiling import compiling_ahead, launch


@dataclass
class Parameter:
    """What Triton tells of a kernel's parameter."""

    do_not_specialize: bool


class Compiled:
    """A compiled kernel. Asking for its `run` loads it, as the first launch does."""

    loaded = False

    @property
    def run(self) -> None:
        self.loaded = True


class Kernel:
    """Has the interface of Triton's kernels: `kernel[grid](...)` and `kernel.warmup(...)`."""

    def __init__(self, error: Exception | None = None, plain: tuple[int, ...] = ()) -> None:
        """`plain`: numbers of the parameters whose values are not compiled in."""
        self.launched: list[Any] = []
        self.compiled: list[Any] = []
        self.results: list[Compiled] = []
        self.error = error
        self.params = [Parameter(number in plain) for number in range(8)]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, args, options))

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Compiled:
        if self.error is not None:
            raise self.error
        self.compiled.append((args, options))
        self.results.append(Compiled())
        return self.results[-1]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def device(_: torch.device) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "device", device)


def test_a_launch_is_a_launch() -> None:
    kernel, x = Kernel(), torch.zeros(3)
    launch(kernel, (4, 2), x, 7, ROWS=64)
    assert kernel.launched == [((4, 2), (x, 7), {"ROWS": 64})] and not kernel.compiled


def test_each_kind_of_arguments_is_compiled_once() -> None:
    kernel, x = Kernel(), torch.zeros(3)
    with compiling_ahead(2):
        launch(kernel, (1,), x, 7, ROWS=64)
        launch(kernel, (9,), torch.ones(5), 9, ROWS=64)  # another tensor and number of that kind
        launch(kernel, (1,), x, 1, ROWS=64)
        launch(kernel, (1,), x, 32, ROWS=64)
        launch(kernel, (1,), x, 7, ROWS=32)
        launch(kernel, (1,), x.half(), 7, ROWS=64)
        launch(kernel, (1,), x, 2**40 + 1, ROWS=64)
    assert len(kernel.compiled) == 6 and not kernel.launched
    launch(kernel, (1,), x, 7, ROWS=64)
    assert len(kernel.launched) == 1


def test_numbers_that_are_not_compiled_in_need_no_kernel_of_their_own() -> None:
    """Otherwise the same kernel would be compiled several times at once."""
    kernel, x = Kernel(plain=(1,)), torch.zeros(3)
    with compiling_ahead(2):
        for number in (7, 1, 32, 0):
            launch(kernel, (1,), x, number, 5, ROWS=64)
        launch(kernel, (1,), x, 2**40, 5, ROWS=64)  # another type
        launch(kernel, (1,), x, 7, 1, ROWS=64)
    assert len(kernel.compiled) == 3


def test_kernels_are_loaded_as_well() -> None:
    """Making a launcher for each of them takes Triton's C compiler longer than many launches."""
    kernel = Kernel()
    with compiling_ahead(1):
        launch(kernel, (1,), torch.zeros(3))
    assert [compiled.loaded for compiled in kernel.results] == [True]


def test_launches_of_another_thread_are_compiled_too() -> None:
    """Autograd runs backward passes on a GPU in a thread of its own."""
    kernel = Kernel()
    with compiling_ahead(1):
        thread = threading.Thread(target=launch, args=(kernel, (1,), torch.zeros(3)))
        thread.start()
        thread.join()
    assert len(kernel.compiled) == 1 and not kernel.launched


def test_tensors_do_not_wait_for_the_compiler() -> None:
    """A pass would need memory for the tensors of all kernels that are not compiled yet."""
    compiler_may_run = threading.Event()

    class Slow(Kernel):
        def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Compiled:
            compiler_may_run.wait(60)
            return super().warmup(*args, grid=grid, **options)

    kernel, x = Slow(), torch.zeros(64)
    unaligned = torch.zeros(64)[1:]
    with compiling_ahead(1):
        launch(kernel, (1,), x, unaligned, 7, ROWS=64)
        alive = weakref.ref(x)
        del x
        freed_at_once = alive() is None
        compiler_may_run.set()
    assert freed_at_once
    # Triton takes a type for a tensor at an aligned address.
    (((kind, other, number), options),) = kernel.compiled
    assert kind == torch.float32 and other is unaligned and (number, options) == (7, {"ROWS": 64})


def test_an_error_of_the_compiler_is_raised_and_launches_work_afterwards() -> None:
    kernel = Kernel(RuntimeError("out of registers"))
    with pytest.raises(RuntimeError, match="out of registers"), compiling_ahead(1):
        launch(kernel, (1,), torch.zeros(3))
    assert compiling._ahead is None
    with pytest.raises(KeyError), compiling_ahead(1):
        raise KeyError
    launch(kernel, (1,), torch.zeros(3))
    assert len(kernel.launched) == 1
