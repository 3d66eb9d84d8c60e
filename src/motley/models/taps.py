"""Leave out kernel taps that only ever see padding.

Where a convolution's map is smaller than its kernel, some taps meet nothing but zeros: a padded 3x3 convolution of
stride 1 on a 1x1 map is a matrix product with its centre tap. Such taps get no gradient and change no output. A model
without them is the same function, trained the same way, with fewer weights to send, to step and to keep. On 32x32
images, 64 % of a ResNet26's weights (imagenet stem) are of this kind.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from motley.models.spec import ImageShape


def crop_taps(model: nn.Module, image: ImageShape) -> None:
    """Crop the kernels of a model's convolutions that put out a 1x1 map to the taps that meet the input."""
    shapes: dict[nn.Conv2d, tuple[torch.Size, torch.Size]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        shapes[module] = inputs[0].shape[2:], output.shape[2:]

    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    hooks = [module.register_forward_hook(note) for module in convolutions]
    training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, *image, device=next(model.parameters()).device))
    model.train(training)
    for hook in hooks:
        hook.remove()
    for convolution, (entered, left) in shapes.items():
        if tuple(left) == (1, 1):
            _crop(convolution, entered)


def _crop(convolution: nn.Conv2d, entered: torch.Size) -> None:
    """Keep the taps [padding, padding + length) of each dimension, which then need no padding."""
    padding = convolution.padding
    assert not isinstance(padding, str) and convolution.dilation == (1, 1)
    kept = [
        slice(before, min(kernel, before + length))
        for before, kernel, length in zip(padding, convolution.kernel_size, entered, strict=True)
    ]
    weight = convolution.weight.detach()[:, :, kept[0], kept[1]].clone()
    convolution.weight = nn.Parameter(weight)
    convolution.kernel_size = (weight.shape[2], weight.shape[3])
    convolution.padding = (0, 0)
