"""Compile many kernels side by side.

Triton compiles a kernel when it is first launched, one after the other, on one core: the
kernels of five ResNets took 19 s. Inside `compiling_ahead()` kernels are not run. Each one
that a pass through the model would launch is compiled instead, on all cores. What the pass computes
there is meaningless, so nothing may read it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Ahead:
    """The kernels that are being compiled. Backward passes launch theirs from another thread."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._lock = pool, threading.Lock()
        self._futures: dict[object, Future[Any]] = {}

    def compile(self, kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> None:
        """Compile a kernel for arguments like these, if that has not begun."""
        variant = (kernel, *_specializations(kernel, args), *sorted(options.items()))
        with self._lock:
            if variant not in self._futures:
                device = next(argument.device for argument in args if isinstance(argument, Tensor))
                described = tuple(map(_description, args))
                self._futures[variant] = self._pool.submit(
                    _compile, kernel, grid, device, described, options
                )

    def wait(self) -> None:
        """Wait for all kernels. A compilation that failed raises its error here."""
        for future in self._futures.values():
            future.result()


#: Where kernels are compiled at the moment, instead of launched; None: they are launched.
_ahead: _Ahead | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel on a grid of programs, or only compile it inside `compiling_ahead()`."""
    if _ahead is None:
        kernel[grid](*args, **options)
    else:
        _ahead.compile(kernel, grid, args, options)


@contextmanager
def compiling_ahead(threads: int) -> Iterator[None]:
    """Compile the kernels that the block would launch, without running any.

    This holds for the whole process, because backward passes launch kernels from another thread.
    So no other thread may compute with these kernels meanwhile.
    """
    global _ahead
    with ThreadPoolExecutor(threads) as pool:
        _ahead = _Ahead(pool)
        try:
            yield
            _ahead.wait()
        finally:
            _ahead = None


def _compile(
    kernel: Any, grid: Any, device: torch.device, args: tuple[Any, ...], options: Any
) -> None:
    with torch.cuda.device(device):
        compiled = kernel.warmup(*args, grid=grid, **options)
        # Triton 3.6 also lets a C compiler make a launcher for each kernel's types of arguments,
        # which takes a few tenths of a second. `run` makes it, and loads the kernel.
        _ = compiled.run


def _description(argument: Any) -> Any:
    """Return what `warmup` takes for an argument: for a tensor, its type.

    The tensor itself would keep its memory until the kernel is compiled. Compiling is slower than
    the pass, which would then need memory for the tensors of almost all of its kernels at once.
    Triton takes a type for an aligned address, so the few tensors at other addresses are kept.
    """
    if isinstance(argument, Tensor) and argument.data_ptr() % 16 == 0:
        return argument.dtype
    return argument


def _specializations(kernel: Any, args: tuple[Any, ...]) -> list[object]:
    """Return what Triton compiles a kernel for, for each of its arguments.

    It may tell more arguments apart than Triton does. Then Triton compiles one kernel twice if the
    first of them is not ready, so numbers that the kernel is not specialized for
    (`do_not_specialize`) are told apart by their type only.
    """
    return [
        _specialization(argument, plain=parameter.do_not_specialize)
        for parameter, argument in zip(kernel.params, args, strict=False)
    ]


def _specialization(argument: Any, plain: bool) -> object:
    """Return an argument's type, alignment, and unless it is `plain`, whether a number is 1."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        kind = "int", argument.bit_length() > 31
        return kind if plain else (*kind, argument == 1, argument % 16 == 0)
    return type(argument)
