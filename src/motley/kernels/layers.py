"""Layers that use Motley's kernels, with the parameters, buffers and names of torch's layers.

Each is made from a plain layer (`of`), takes over its tensors and computes the same function. If
its kernel does not apply to an input, it falls back to torch's operations. This module needs
Triton.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from motley.kernels import convolve, pool, stem
from motley.kernels import norm as norm_kernels

#: One result for two uses: two tensors that share memory. Their gradients arrive separately and are
#: added inside a kernel.
Pair: TypeAlias = tuple[Tensor, Tensor]


class FusedBatchNorm(nn.BatchNorm2d):
    """relu(batch_norm(x) + add) in one kernel."""

    @classmethod
    def of(cls, norm: nn.BatchNorm2d) -> FusedBatchNorm:
        """Take over the tensors of a norm that keeps running statistics."""
        fused = cls(norm.num_features, norm.eps, norm.momentum, device="meta")
        fused.weight, fused.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            setattr(fused, name, buffer)
        return fused.train(norm.training)

    def forward(
        self, x: Tensor, add: Tensor | None = None, relu: bool = False, twice: bool = False
    ) -> Any:
        """Return the result, or a pair if it is used `twice`.

        `add` and `relu` are arguments of the module's call, so that forward hooks on its inputs
        still run.
        """
        if norm_kernels.applies(x, self.training):
            if self.training:
                pair = norm_kernels.norm_add_relu(x, add, self, relu)
                return pair if twice else pair[0]
            y = norm_kernels.scale_add_relu(x, add, self, relu)
        else:
            y = super().forward(x)
            if add is not None:
                y = y + add
            if relu:
                y = F.relu(y)
        return (y, y) if twice else y


class FusedBatchNormReLU(FusedBatchNorm):
    """relu(batch_norm(x)), for norms that a model always follows with a ReLU."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = super().forward(x, relu=True)
        return y


class FusedConv2d(nn.Conv2d):
    """A convolution. In training, small maps use Motley's kernels (`convolve.applies`)."""

    @classmethod
    def of(cls, convolution: nn.Conv2d) -> FusedConv2d:
        """Take over the weight of a convolution without a bias."""
        assert not isinstance(convolution.padding, str)
        fused = cls(
            convolution.in_channels,
            convolution.out_channels,
            convolution.kernel_size,  # type: ignore[arg-type]
            convolution.stride,  # type: ignore[arg-type]
            convolution.padding,  # type: ignore[arg-type]
            convolution.dilation,  # type: ignore[arg-type]
            convolution.groups,
            bias=False,
            device="meta",
        )
        fused.weight = convolution.weight
        return fused

    def forward(self, x: Tensor) -> Tensor:
        return convolve.convolve(x, self) if convolve.applies(x, self) else super().forward(x)


class FusedStem(FusedConv2d):
    """The first convolution of a network, whose input needs no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return stem.convolve(x, self) if stem.applies(x, self) else nn.Conv2d.forward(self, x)


class FusedMaxPool2d(nn.MaxPool2d):
    """Max pooling."""

    @classmethod
    def of(cls, layer: nn.MaxPool2d) -> FusedMaxPool2d:
        """Make a layer with the same windows."""
        return cls(
            layer.kernel_size,
            layer.stride,
            layer.padding,
            layer.dilation,
            ceil_mode=layer.ceil_mode,
        )

    def forward(self, x: Tensor, twice: bool = False) -> Any:
        """Return the result, or a pair if it is used `twice`."""
        if pool.applies(x, self):
            pair = pool.max_pool(x)
            return pair if twice else pair[0]
        y = super().forward(x)
        return (y, y) if twice else y
