"""Remove kernel taps that only ever see padding.

If a convolution's input map is smaller than its kernel, some taps are only multiplied with zeros: a
padded 3x3 convolution of stride 1 on a 1x1 map is a matrix product with its center tap. Such taps
get no gradient and do not affect the output. A model without them is the same function, trained the
same way, with fewer weights to send, update and store. On 32x32 images this concerns 64 % of the
weights of a ResNet26 with the imagenet stem.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from motley.models.spec import ImageShape


def crop_taps(model: nn.Module, image: ImageShape) -> None:
    """Crop the kernels of convolutions with a 1x1 output map to the taps that see the input."""
    shapes: dict[nn.Conv2d, tuple[torch.Size, torch.Size]] = {}

    def record_shapes(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        shapes[module] = inputs[0].shape[2:], output.shape[2:]

    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    hooks = [module.register_forward_hook(record_shapes) for module in convolutions]
    training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, *image, device=next(model.parameters()).device))
    model.train(training)
    for hook in hooks:
        hook.remove()
    for convolution, (input_shape, output_shape) in shapes.items():
        if tuple(output_shape) == (1, 1):
            _crop(convolution, input_shape)


def _crop(convolution: nn.Conv2d, input_shape: torch.Size) -> None:
    """Keep the taps [padding, padding + length) of each dimension, which then need no padding."""
    padding = convolution.padding
    assert not isinstance(padding, str) and convolution.dilation == (1, 1)
    kept = []
    for before, kernel, length in zip(padding, convolution.kernel_size, input_shape, strict=True):
        kept.append(slice(before, min(kernel, before + length)))
    weight = convolution.weight.detach()[:, :, kept[0], kept[1]].clone()
    convolution.weight = nn.Parameter(weight)
    convolution.kernel_size = (weight.shape[2], weight.shape[3])
    convolution.padding = (0, 0)
