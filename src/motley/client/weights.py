"""The weights of a step: in single precision, or as 16-bit copies of single-precision masters.

In bf16 and fp16 the model computes with 16-bit copies of all parameters but those of batch norms.
Motley's own optimizer (`kernels/optimizers.py`) reads the copies' gradients where backward leaves
them, and writes the copies. For any other optimizer, and for a method that reads gradients, the
gradients are copied to the masters in one grouped call, and after the step the masters are copied
to the copies in another. Casting weights one by one, as autocast does, would cost a small network a
quarter of its kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from motley.core.part import State

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def working_type(precision: str) -> torch.dtype:
    """Return the type of images and activations."""
    return TYPES.get(precision, torch.float32)


def lower(model: nn.Module, precision: str) -> dict[str, nn.Parameter]:
    """Put a model's parameters into the working precision, in place; return those that changed."""
    if precision not in TYPES:
        return {}
    of_norms: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            of_norms.update(module.parameters())
    lowered = {name: p for name, p in model.named_parameters() if p not in of_norms}
    for parameter in lowered.values():
        parameter.data = parameter.data.to(TYPES[precision])
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            # cuDNN computes with weights in one block of memory, and would copy them in each call.
            module.flatten_parameters()
    return lowered


class LossScale:
    """The factor on the loss in fp16, which changes on the device.

    A step with a gradient that is not finite is skipped, and the scale is halved for the next one.
    """

    #: The initial and the smallest scale. All scales are powers of two, so scaling changes no
    #: digit.
    HIGHEST, LOWEST = 2.0**12, 1.0
    #: Steps after which a scale that was halved is doubled again.
    PATIENCE = 50

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), self.HIGHEST, device=device)
        #: Steps since the scale was last changed.
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        #: 1 if this step's gradients hold a number that is not finite, else 0.
        self.found_inf = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)

    def reset(self) -> None:
        """Start anew: a client does not depend on the clients before it."""
        self.value.fill_(self.HIGHEST)
        self.good.zero_()
        self.found_inf.zero_()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let one of torch's fused optimizers skip such steps. Motley's kernels do so already."""
        optimizer.register_step_pre_hook(self._check_gradients)
        optimizer.register_step_post_hook(self._adjust)
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        if optimizer.defaults.get("momentum"):
            # torch would create the buffer in the first step, with unset memory if it is skipped.
            for parameter in _parameters(optimizer):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _check_gradients(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [
            parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None
        ]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self._one)

    def _adjust(self, *_: object) -> None:
        torch._amp_update_scale_(self.value, self.good, self.found_inf, 2.0, 0.5, self.PATIENCE)
        self.value.clamp_(self.LOWEST, self.HIGHEST)
        self.found_inf.zero_()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


class Weights:
    """The parameters that are trained (`masters`), and the copies the model computes with."""

    def __init__(self, model: nn.Module, precision: str) -> None:
        whole: State = dict(model.named_parameters())
        masters = {name: parameter.detach().clone() for name, parameter in whole.items()}
        copies = lower(model, precision)
        self.masters: State = {
            name: masters[name].requires_grad_() if name in copies else parameter
            for name, parameter in whole.items()
        }
        #: The 16-bit copy of each master, or None if the model computes with the master itself.
        self.copies: list[Tensor | None] = [copies.get(name) for name in whole]
        self._pairs = [(self.masters[name], copy) for name, copy in copies.items()]
        #: The parameters that the model computes with: the copies, and masters without a copy.
        self._computing = whole
        device = next(iter(whole.values())).device
        self.scale = LossScale(device) if precision == "fp16" else None
        #: Whether the gradients that `backward` left still contain the loss scale.
        self.scaled = False
        #: The names that the last loss reached. Others may still have the gradients of an earlier
        #: one.
        self._reached: list[str] = []

    def backward(self, loss: Tensor, names: Collection[str] | None = None) -> None:
        """Compute gradients, and leave them on the tensors that the model computes with
        (`raw_gradients`).

        With `names`, autograd computes the gradients of these parameters only.
        """
        for tensor in self._computing.values():
            tensor.grad = None
        inputs = None if names is None else [self._computing[name] for name in names]
        (loss if self.scale is None else loss * self.scale.value).backward(inputs=inputs)
        self.scaled = self.scale is not None
        self._reached = [
            name for name, tensor in self._computing.items() if tensor.grad is not None
        ]

    def gradients(self) -> State:
        """Return the gradients of the last `backward` by name, as `gather` leaves them."""
        self.gather()
        gradients = {}
        for name in self._reached:
            gradient = self.masters[name].grad
            assert gradient is not None
            gradients[name] = gradient
        return gradients

    @property
    def raw_gradients(self) -> list[Tensor | None]:
        """The gradients in the order of `masters`: those of the copies, or the masters' once
        gathered.
        """
        pairs = zip(self.masters.values(), self.copies, strict=True)
        return [
            copy.grad if copy is not None and copy.grad is not None else master.grad
            for master, copy in pairs
        ]

    def gather(self) -> None:
        """Copy the gradients to the masters, in single precision and without the loss's scale."""
        master_gradients, gradients = [], []
        for master, copy in self._pairs:
            if copy.grad is not None:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                master_gradients.append(master.grad)
                gradients.append(copy.grad)
                copy.grad = None
        if master_gradients:
            torch._foreach_copy_(master_gradients, gradients)
        if self.scaled and self.scale is not None:
            scaled = [master.grad for master in self.masters.values() if master.grad is not None]
            torch._foreach_div_(scaled, self.scale.value)
            self.scaled = False

    def sync(self) -> None:
        """Let the model compute with the masters as they are now."""
        if not self._pairs:
            return
        with torch.no_grad():
            masters, copies = zip(*self._pairs, strict=True)
            torch._foreach_copy_([copy.detach() for copy in copies], masters)

    @contextmanager
    def single_precision(self) -> Iterator[None]:
        """Let the model compute with the masters themselves inside the block.

        For passes whose results are evaluated, such as statistics for batch norms: taken from the
        rounded copies, they would not be those of the weights that they are used with. Captured
        steps are not affected, because they address the copies' memory, which comes back unchanged.
        """
        copies_data = [copy.data for _, copy in self._pairs]
        for master, copy in self._pairs:
            copy.data = master.data
        try:
            yield
        finally:
            for (_, copy), data in zip(self._pairs, copies_data, strict=True):
                copy.data = data
