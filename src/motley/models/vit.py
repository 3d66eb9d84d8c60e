"""Vision transformers, Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021).

An image is cut into square patches, which become tokens. A class token is prepended, learned
position embeddings are added, and `depth` pre-norm blocks of attention and MLP follow. The
normalized class token after the last block is the feature. A size is a depth: InCo's "ViT-S/8" to
"ViT-S/12" are depths 8 to 12 with patches of 16 pixels, and each has the first blocks of the next
one. Parameters have the names and shapes of timm's, so its weights can be loaded.
"""

from __future__ import annotations

from functools import partial

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from motley.core.errors import MotleyError
from motley.models.channels import Axis, Channels, of_head
from motley.models.inputs import ImageShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings


class ViTSettings(Settings):
    """Settings of all vision transformers. The defaults describe ViT-S/16."""

    patch: int = Field(16, ge=1)
    """Side of a patch in pixels; it must divide the image's height and width."""
    dim: int = Field(384, ge=1)
    """Embedding dimension."""
    heads: int = Field(6, ge=1)
    """Number of attention heads."""
    mlp_ratio: float = Field(4.0, gt=0, allow_inf_nan=False)
    """Hidden width of the MLPs as a multiple of `dim`."""

    @field_validator("heads")
    @classmethod
    def _heads_divide_dim(cls, heads: int, info: ValidationInfo) -> int:
        dim = info.data.get("dim")
        if dim is not None and dim % heads:
            raise ValueError(f"must divide dim = {dim}")
        return heads

    @property
    def hidden(self) -> int:
        """Return the hidden width of an MLP, at least 1."""
        return max(1, int(self.dim * self.mlp_ratio))


class PatchEmbed(nn.Module):
    """A linear map of every patch, computed as a convolution with stride = kernel size."""

    def __init__(self, channels: int, patch: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """(images, channels, height, width) -> (images, patches, dim), row by row."""
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """softmax(q k' / sqrt(dim / heads)) v per head, and a linear map of the concatenated heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear maps with the exact GELU, x Phi(x), between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, settings: ViTSettings) -> None:
        super().__init__()
        self.norm1 = _norm(settings.dim)
        self.attn = Attention(settings.dim, settings.heads)
        self.norm2 = _norm(settings.dim)
        self.mlp = MLP(settings.dim, settings.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Embedded patches, blocks, the normalized class token, and a head. There is no dropout."""

    def __init__(self, depth: int, settings: ViTSettings, image: ImageShape, classes: int) -> None:
        super().__init__()
        image = expect(image, ImageShape, f"vit{depth}")
        tokens = 1 + _patches(image, settings.patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, settings.dim))
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, settings.dim))
        self.patch_embed = PatchEmbed(image.channels, settings.patch, settings.dim)
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(depth)))
        self.norm = _norm(settings.dim)
        self.head = nn.Linear(settings.dim, classes)
        _initialize(self)

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of block 0: class token and patches, plus position embeddings."""
        patches = self.patch_embed(x)
        # torch.export takes len() for a constant, so an exported model would have one batch size.
        class_tokens = self.cls_token.expand(patches.shape[0], -1, -1)
        return torch.cat([class_tokens, patches], dim=1) + self.pos_embed

    def class_token(self, x: Tensor) -> Tensor:
        """Return the normalized class token: one vector per image."""
        return self.norm(x)[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.class_token(self.blocks(self.embed(x))))


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair the weights of each block's two layer norms, as InCo's published code does.

    The paper speaks of layers of the same shape "such as layer norm". Attention, MLP and biases
    have no pairs.
    """
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    return [CrossLayer(f"{name}.norm1.weight", f"{name}.norm2.weight") for name in blocks]


def channels(model: nn.Module) -> Channels:
    """Return the streams: the tokens through all blocks, and two per block, for attention and MLP.

    The attention's stream has the width of one head: all heads keep the same channels of their
    query, key and value.
    """
    assert isinstance(model, ViT)
    token = Axis("token", model.cls_token.shape[-1])
    layer_channels: dict[str, tuple[Axis | None, ...]] = {
        "cls_token": (None, None, token),
        "pos_embed": (None, None, token),
        "patch_embed.proj": (token, None),
        "norm": (token,),
        **of_head("head", model.head, token),
    }
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        name, heads = f"blocks.{number}", block.attn.heads
        head = Axis(f"{name}.attn", block.attn.proj.in_features // heads, heads)
        hidden = Axis(f"{name}.mlp", block.mlp.fc1.out_features)
        layer_channels |= {
            f"{name}.norm1": (token,),
            f"{name}.norm2": (token,),
            f"{name}.attn.qkv": (head._replace(repeats=3 * heads), token),
            f"{name}.attn.proj": (token, head),
            f"{name}.mlp.fc1": (hidden, token),
            f"{name}.mlp.fc2": (token, hidden),
        }
    return layer_channels


def _norm(dim: int) -> nn.LayerNorm:
    return nn.LayerNorm(dim, eps=1e-6)


def _patches(image: ImageShape, patch: int) -> int:
    if image.height % patch or image.width % patch:
        sides = []
        for side in range(1, min(image.height, image.width) + 1):
            if image.height % side == image.width % side == 0:
                sides.append(str(side))
        raise MotleyError(
            f"patch = {patch}: does not divide an image of {image.height}x{image.width} pixels."
            f" Allowed: {', '.join(sides)}."
        )
    return (image.height // patch) * (image.width // patch)


def _initialize(model: ViT) -> None:
    """Initialize as timm does by default (`weight_init=''`).

    Linear weights, including the head's, and position embeddings are drawn from a truncated normal
    distribution of standard deviation 0.02, linear biases are zero, and the class token is nearly
    zero. The patch projection is a convolution and keeps torch's initialization.
    """
    nn.init.normal_(model.cls_token, std=1e-6)
    nn.init.trunc_normal_(model.pos_embed, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


#: The registered depths.
SIZES = (1, 2, 3, 4, 6, 8, 9, 10, 11, 12)
#: Numbers of parameters for the default settings, 3x224x224 images and 10 classes.
PARAMETERS_PER_BLOCK = 1_774_464
PARAMETERS_OUTSIDE_BLOCKS = 375_946


def _register(depth: int) -> None:
    parameters = PARAMETERS_OUTSIDE_BLOCKS + PARAMETERS_PER_BLOCK * depth
    summary = f"ViT-S of depth {depth}, {parameters:,} parameters (3x224x224 images, 10 classes)"
    register = MODELS.register(f"vit{depth}", summary, paper="Dosovitskiy et al., ICLR 2021")
    blocks = tuple(f"blocks.{number}" for number in range(depth))
    stages = (
        Stage("embed", members=("cls_token", "pos_embed", "patch_embed")),
        *(Stage(f"block{number}", block) for number, block in enumerate(blocks)),
        Stage("token", "class_token", ("norm",)),
        Stage("head"),
    )
    register(
        ModelSpec(partial(ViT, depth), "vit", stages, blocks, channels, cross_layers, head="head")
    )


for _depth in SIZES:
    _register(_depth)
