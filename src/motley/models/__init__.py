"""Model families: plain modules, and what each family declares about itself (`spec.py`).

A family registers one `ModelSpec` per size: how to build it, which layers cross-layer gradients may
pair, at which stages a method may cut it (`stages.py`), and which channels belong together. Nothing
here depends on clients or rounds.
"""

from motley.models import cnn, factories, mlp, preact, resnet, vgg, vit
from motley.models.spec import MODELS, CrossLayer, ImageShape, ModelSpec

__all__ = [
    "MODELS",
    "CrossLayer",
    "ImageShape",
    "ModelSpec",
    "cnn",
    "factories",
    "mlp",
    "preact",
    "resnet",
    "vgg",
    "vit",
]
