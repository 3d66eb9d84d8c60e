"""The layers of a model that have one shape, as the text of the InCo paper pairs them."""

from __future__ import annotations

from torch import nn

from motley.models.chunks import chunks_of
from motley.models.facts import blocks_of
from motley.models.spec import CrossLayer
from motley.models.stages import is_within


def same_shape_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair the first layer of each shape in a stage with all later ones (InCo, Section 3.2).

    "We focus on layers with matching shapes, indicating that they belong to the same stage of the
    entire model, such as the layer norm layer in Transformer. [...] The first layer satisfying the
    mentioned conditions is referred to as Layer 0." So all layers inside of blocks take part, with
    each of their parameters: convolutions, linear layers and norms. The blocks of a stage are those
    with one parent: `layer3.0` and `layer3.1` of a ResNet, all blocks of a ViT.
    """
    blocks = blocks_of(model)
    first_layers: dict[object, str] = {}
    pairs = []
    for name, layer in model.named_modules():
        stage = _stage_of(blocks, name)
        shapes = [(key, value.shape) for key, value in layer.named_parameters(recurse=False)]
        if stage is None or not shapes:
            continue
        first = first_layers.setdefault((stage, type(layer), tuple(shapes)), name)
        if first != name:
            for key, _ in shapes:
                target = f"{name}.{key}"
                pairs.append(CrossLayer(f"{first}.{key}", target, chunks_of(model, target)))
    return pairs


def _stage_of(blocks: tuple[str, ...], name: str) -> str | None:
    """Return the parent of the block that a module is in, or None if it is in no block."""
    for block in blocks:
        if is_within(name, block):
            return block.rpartition(".")[0]
    return None
