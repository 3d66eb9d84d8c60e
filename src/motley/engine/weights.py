"""A model's weights as a step sees them.

`masters` are the parameters that are trained: single precision, whatever the model computes in. In bf16 the model
computes with low-precision copies of all parameters but those of batch norms; casting them one by one, as autocast
does, would cost a small network a quarter of its kernels.

`FlatWeights` keeps all masters in one piece of memory, and their gradients in another. The optimiser then sees a single
tensor: one kernel that fills the GPU instead of several that do not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.splits.part import State


def working_type(precision: str) -> torch.dtype:
    """Return the type of images and activations."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def lower(model: nn.Module, precision: str) -> dict[str, nn.Parameter]:
    """Put a model's parameters into the working precision, in place; return those that changed."""
    if precision != "bf16":
        return {}
    kept = {p for module in model.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
    lowered = {name: p for name, p in model.named_parameters() if p not in kept}
    for parameter in lowered.values():
        parameter.data = parameter.data.to(torch.bfloat16)
    return lowered


class Weights:
    """Masters beside the copies that the model computes with; where it computes in fp32, both are the same tensors."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        computing: dict[str, nn.Parameter] = dict(model.named_parameters())
        whole = {name: parameter.detach().clone() for name, parameter in computing.items()}
        copies = lower(model, precision)
        self.masters: State = {
            name: whole[name].requires_grad_() if name in copies else parameter for name, parameter in computing.items()
        }
        self.trained: list[Tensor] = list(self.masters.values())
        """What the optimiser steps."""
        self._computing: list[Tensor] = list(computing.values())
        self._copies: list[Tensor] = [copy.detach() for copy in copies.values()]
        self._copied = [self.masters[name] for name in copies]
        self._gradients = [torch.zeros_like(master) for master in self._copied]

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the masters, in place of those of the step before."""
        for tensor in self._computing:
            tensor.grad = None
        loss.backward()
        if self._copies:
            copies = [t.grad for t, m in zip(self._computing, self.masters.values(), strict=True) if t is not m]
            torch._foreach_copy_(self._gradients, [gradient for gradient in copies if gradient is not None])
            for master, gradient in zip(self._copied, self._gradients, strict=True):
                master.grad = gradient

    @torch.no_grad()
    def publish(self) -> None:
        """Let the model compute with the masters as they are now."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._copied)


class FlatWeights(Weights):
    """All masters in one tensor, each a view of it; so are their gradients, and the low-precision copies."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__(model, precision)
        lowered = [t is not m for t, m in zip(self._computing, self.masters.values(), strict=True)]
        order = sorted(range(len(lowered)), key=lambda i: not lowered[i])  # copies first: they are one piece too
        names = [list(self.masters)[i] for i in order]
        self._computing = [self._computing[i] for i in order]
        sizes = [self.masters[name].numel() for name in names]
        example = self.masters[names[0]]
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=example.device)
        gradient = torch.zeros_like(flat)
        count = sum(size for size, i in zip(sizes, order, strict=True) if lowered[i])
        self._low = torch.zeros(count, dtype=working_type(precision), device=example.device)
        self._high = flat[:count]
        masters, self._views = {}, []
        offset = 0
        for name, tensor, size in zip(names, self._computing, sizes, strict=True):
            shape, stride = tensor.shape, tensor.stride()
            view = flat.as_strided(shape, stride, offset)
            view.copy_(self.masters[name].detach())
            if tensor is self.masters[name]:
                tensor.data = view
                masters[name] = tensor
            else:
                tensor.data = self._low.as_strided(shape, stride, offset)
                masters[name] = view.requires_grad_()
            self._views.append(gradient.as_strided(shape, stride, offset))
            offset += size
        self.masters = {name: masters[name] for name in self.masters}
        self._ordered = [self.masters[name] for name in names]
        self.trained = [nn.Parameter(flat)]
        self.trained[0].grad = gradient
        self.publish()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the masters, in place of those of the step before."""
        for tensor in self._computing:
            tensor.grad = None
        loss.backward()
        gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in self._computing]
        torch._foreach_copy_(self._views, gradients)
        for master, view in zip(self._ordered, self._views, strict=True):
            master.grad = view

    @torch.no_grad()
    def publish(self) -> None:
        """Let the model compute with the masters as they are now."""
        if len(self._low):
            self._low.copy_(self._high)
