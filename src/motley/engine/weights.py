"""A model's weights as a step sees them: in single precision, or as 16-bit copies of single-precision masters.

In bf16 and fp16 the model computes with low-precision copies of all parameters but those of batch norms. Their
gradients come back into the masters' in one grouped copy, and the masters go out to the copies in another after the
step. Casting weights one by one, as autocast does, would cost a small network a quarter of its kernels.
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
        self._masters = [self.masters[name] for name in copies]
        self._copies: list[Tensor] = list(copies.values())
        self._computing: list[Tensor] = list(whole.values())
        self._scale = SCALES.get(precision, 1.0)
        for master in self._masters:
            master.grad = torch.zeros_like(master)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the masters."""
        for tensor in self._computing:
            tensor.grad = None
        (loss if self._scale == 1 else loss * self._scale).backward()
        if self._copies:
            pairs = zip(self._masters, self._copies, strict=True)
            reached = [(m.grad, c.grad) for m, c in pairs if m.grad is not None and c.grad is not None]
            rooms, gradients = zip(*reached, strict=True)
            torch._foreach_copy_(rooms, gradients)
        if self._scale != 1:
            torch._foreach_mul_([m.grad for m in self.masters.values() if m.grad is not None], 1 / self._scale)

    def publish(self) -> None:
        """Let the model compute with the masters as they are now."""
        if not self._copies:
            return
        with torch.no_grad():
            torch._foreach_copy_([copy.detach() for copy in self._copies], self._masters)
