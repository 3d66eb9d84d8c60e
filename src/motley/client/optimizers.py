"""Adam, AdamW and SGD on a CPU, with the kernels of `torch.optim` and without its imports.

The first step of any `torch.optim.Optimizer` imports torch's compiler: more than a second, and
70 MB, which is as much as a small client needs altogether. These classes call the same fused
kernels with the same arguments, so the results are the same bits
(tests/engine/test_optimizers.py). They have the attributes of torch's class that Motley uses:
`param_groups`, `state`, `step` and `zero_grad`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor


class CpuOptimizer(ABC):
    """The base of both: one group of parameters, and the tensors that belong to each of them."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), "lr": lr}]
        self.weight_decay = weight_decay
        #: The moments of every parameter that has had a gradient.
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.param_groups[0]["lr"])

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with all parameters that have gradients."""
        parameters = [
            parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None
        ]
        if parameters:
            self.update(parameters, [parameter.grad for parameter in parameters])

    @abstractmethod
    def update(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change some parameters by one step."""

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


class CpuAdam(CpuOptimizer):
    """Adam; with decoupled weight decay, AdamW."""

    EPS = 1e-8

    def __init__(
        self,
        parameters: Sequence[Tensor],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        *,
        decoupled: bool = False,
    ) -> None:
        super().__init__(parameters, lr, weight_decay)
        self.betas = betas
        self.decoupled = decoupled

    def update(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change some parameters by one step."""
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        kernel(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=self.lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.EPS,
            amsgrad=False,
            maximize=False,
        )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        return self.state[parameter]


class CpuSGD(CpuOptimizer):
    """SGD, with or without momentum."""

    def __init__(
        self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(parameters, lr, weight_decay)
        self.momentum = momentum

    def update(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change some parameters by one step."""
        buffers: list[Tensor] = []
        if self.momentum:
            # From zero, the first step leaves the gradient itself in the buffer, as torch's does.
            buffers = [self._buffer_of(parameter) for parameter in parameters]
        torch._fused_sgd_(
            parameters,
            gradients,
            buffers,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def _buffer_of(self, parameter: Tensor) -> Tensor:
        if parameter not in self.state:
            buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            self.state[parameter] = {"momentum_buffer": buffer}
        return self.state[parameter]["momentum_buffer"]


Optimizer: TypeAlias = torch.optim.Optimizer | CpuOptimizer
