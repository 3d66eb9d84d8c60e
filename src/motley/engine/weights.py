"""A model's weights as a step sees them: in single precision, or as 16-bit copies of single-precision masters.

In bf16 and fp16 the model computes with low-precision copies of all parameters but those of batch norms. An optimiser
of our own (`kernels/optimizers.py`) reads their gradients where they lie, and writes the copies. For any other, and for
a method that wants to see gradients, they are gathered into the masters' in one grouped copy, and the masters go out
to the copies in another after the step. Casting weights one by one, as autocast does, would cost a small network a
quarter of its kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.splits.part import State

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = {"fp16": 2.0**12}
"""Factors on the loss: float16 has three more bits than bfloat16 and no room for small gradients."""


def working_type(precision: str) -> torch.dtype:
    """Return the type of images and activations."""
    return TYPES.get(precision, torch.float32)


def lower(model: nn.Module, precision: str) -> dict[str, nn.Parameter]:
    """Put a model's parameters into the working precision, in place; return those that changed."""
    kept = {p for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
    if precision not in TYPES:
        return {}
    lowered = {name: p for name, p in model.named_parameters() if p not in kept}
    for parameter in lowered.values():
        parameter.data = parameter.data.to(TYPES[precision])
    return lowered


class Weights:
    """The parameters that are trained (`masters`), and the copies the model computes with."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        whole: State = dict(model.named_parameters())
        masters = {name: parameter.detach().clone() for name, parameter in whole.items()}
        copies = lower(model, precision)
        self.masters: State = {
            name: masters[name].requires_grad_() if name in copies else parameter for name, parameter in whole.items()
        }
        self.copies: list[Tensor | None] = [copies.get(name) for name in whole]
        """What the model computes with in the place of each master; None where it is the master itself."""
        self._pairs = [(self.masters[name], copy) for name, copy in copies.items()]
        self._computing: list[Tensor] = list(whole.values())
        self._scale = SCALES.get(precision, 1.0)
        self.factor = 1.0
        """What a gradient, as it lies, is to be multiplied with."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients and leave them where they come up: see `lying`."""
        for tensor in self._computing:
            tensor.grad = None
        (loss if self._scale == 1 else loss * self._scale).backward()
        self.factor = 1 / self._scale

    @property
    def lying(self) -> list[Tensor | None]:
        """The gradients as they lie, in the order of `masters`: of copies, or the masters' own once gathered."""
        pairs = zip(self.masters.values(), self.copies, strict=True)
        return [copy.grad if copy is not None and copy.grad is not None else master.grad for master, copy in pairs]

    def gather(self) -> None:
        """Put the gradients, in single precision and without the loss's scale, into the masters."""
        rooms, gradients = [], []
        for master, copy in self._pairs:
            if copy.grad is not None:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                rooms.append(master.grad)
                gradients.append(copy.grad)
                copy.grad = None
        if rooms:
            torch._foreach_copy_(rooms, gradients)
        if self.factor != 1:
            own = [master.grad for master in self.masters.values() if master.grad is not None]
            torch._foreach_mul_(own, self.factor)
            self.factor = 1.0

    def publish(self) -> None:
        """Let the model compute with the masters as they are now."""
        if not self._pairs:
            return
        with torch.no_grad():
            masters, copies = zip(*self._pairs, strict=True)
            torch._foreach_copy_([copy.detach() for copy in copies], masters)
