"""Initial weights by a rule of the configuration (`model.init`), instead of the model's own.

The initialization is part of a published result. With batch norm the scale of a weight does not
change the function, but the effective step of SGD shrinks with the square of it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

#: model: as the model itself does it. kaiming: convolutions as in torchvision's ResNets and VGGs.
#: torch: every layer as torch creates it.
Initialization: TypeAlias = Literal["model", "kaiming", "torch"]


def initialize(model: nn.Module, rule: Initialization) -> None:
    """Initialize a model again, by a rule. Draws from torch's global random generator.

    Parameters that belong to no layer, such as the class token of a ViT, keep their values.
    """
    if rule == "kaiming":
        initialize_convolutions(model)
    elif rule == "torch":
        for module in model.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()


def initialize_convolutions(model: nn.Module) -> None:
    """Draw the weights of convolutions with variance 2 / fan_out, and set their biases to 0.

    He et al., ICCV 2015, as in torchvision. The other layers keep their initialization, so the last
    norm of a residual block also starts with weight 1.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
