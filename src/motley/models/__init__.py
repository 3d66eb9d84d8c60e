"""Model families: plain modules, and each family's declaration of its parts (`spec.py`).

A family registers one `ModelSpec` per size: how to build it, which layers cross-layer gradients may
pair, at which stages a method may cut it (`stages.py`), and which channels belong together. Nothing
here depends on clients or rounds.
"""

from motley.models import (
    cnn,
    cnn1d,
    factories,
    lstm,
    mlp,
    preact,
    resnet,
    table,
    transformer,
    vgg,
    vit,
)
from motley.models.inputs import (
    ArrayShape,
    ImageShape,
    InputShape,
    SignalShape,
    TableShape,
    TokenShape,
)
from motley.models.spec import MODELS, CrossLayer, ModelSpec

__all__ = [
    "MODELS",
    "ArrayShape",
    "CrossLayer",
    "ImageShape",
    "InputShape",
    "ModelSpec",
    "SignalShape",
    "TableShape",
    "TokenShape",
    "cnn",
    "cnn1d",
    "factories",
    "lstm",
    "mlp",
    "preact",
    "resnet",
    "table",
    "transformer",
    "vgg",
    "vit",
]
