"""Transformers for tokens: a decoder that predicts the next token, and an encoder that classifies.

Both are stacks of pre-norm blocks of attention and MLP with learned position embeddings, like GPT-2
(Radford et al., 2019) and, with a class token, like a vision transformer for text. A size is a
depth, and each size has the first blocks of the next one.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from motley.models.channels import Axis, Channels, of_head
from motley.models.inputs import InputShape, TokenShape, expect
from motley.models.spec import MODELS, CrossLayer, ModelSpec, Stage
from motley.settings import Settings


class TransformerSettings(Settings):
    """Settings of decoders and encoders."""

    dim: int = Field(128, ge=1)
    """Embedding dimension."""
    heads: int = Field(4, ge=1)
    """Number of attention heads. A narrower size keeps all of them and makes each one narrower."""
    mlp_ratio: float = Field(4.0, gt=0, allow_inf_nan=False)
    """Hidden width of the MLPs as a multiple of `dim`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability of the embedded tokens, and of the outputs of attention and MLP."""

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


class DecoderSettings(TransformerSettings):
    """Settings of all decoders."""

    output: Literal["every", "last"] = "every"
    """The head's input. every: each position, for one target per position. last: the last
    position, for one target per sequence.
    """


class EncoderSettings(TransformerSettings):
    """Settings of all encoders."""


class Attention(nn.Module):
    """Attention between tokens; if it is causal, only to tokens before and to the token itself."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear maps with GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, settings: TransformerSettings, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(settings.dim)
        self.attn = Attention(settings.dim, settings.heads, causal)
        self.norm2 = nn.LayerNorm(settings.dim)
        self.mlp = MLP(settings.dim, settings.hidden)
        self.drop = _dropout(settings)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Embedded tokens, blocks, a norm, and a head. The base class of decoders and encoders."""

    causal: bool
    #: Positions before the first token.
    extra_positions = 0

    def __init__(
        self, depth: int, settings: TransformerSettings, shape: InputShape, classes: int
    ) -> None:
        super().__init__()
        shape = expect(shape, TokenShape, f"{type(self).__name__.lower()}{depth}")
        positions = shape.length + self.extra_positions
        self.token_embed = nn.Embedding(shape.vocabulary, settings.dim)
        self.pos_embed = nn.Parameter(torch.empty(1, positions, settings.dim))
        self.drop = _dropout(settings)
        self.blocks = nn.Sequential(*(Block(settings, self.causal) for _ in range(depth)))
        self.norm = nn.LayerNorm(settings.dim)
        self.head = nn.Linear(settings.dim, classes)
        _initialize(self)

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of block 0: tokens plus position embeddings."""
        return self.drop(self.token_embed(x) + self.pos_embed)

    def summary(self, x: Tensor) -> Tensor:
        """Return the input of the head."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.summary(self.blocks(self.embed(x))))


class Decoder(Transformer):
    """A causal transformer: each position sees only the tokens up to it."""

    causal = True

    def __init__(
        self, depth: int, settings: DecoderSettings, shape: InputShape, classes: int
    ) -> None:
        super().__init__(depth, settings, shape, classes)
        self.output = settings.output

    def summary(self, x: Tensor) -> Tensor:
        return self.norm(x[:, -1] if self.output == "last" else x)


class Encoder(Transformer):
    """A transformer over the whole sequence, with a class token that the head reads.

    Padding is a token like any other: the model learns to ignore it.
    """

    causal = False
    extra_positions = 1

    def __init__(
        self, depth: int, settings: EncoderSettings, shape: InputShape, classes: int
    ) -> None:
        super().__init__(depth, settings, shape, classes)
        self.cls_token = nn.Parameter(torch.empty(1, 1, settings.dim))
        nn.init.normal_(self.cls_token, std=0.02)

    def embed(self, x: Tensor) -> Tensor:
        """Return the input of block 0: class token and tokens, plus position embeddings."""
        # Not len(x): torch.export would take it for a constant.
        class_tokens = self.cls_token.expand(x.shape[0], -1, -1)
        tokens = torch.cat([class_tokens, self.token_embed(x)], dim=1)
        return self.drop(tokens + self.pos_embed)

    def summary(self, x: Tensor) -> Tensor:
        return self.norm(x[:, 0])


def _dropout(settings: TransformerSettings) -> nn.Module:
    # A dropout of probability 0 would still draw random numbers.
    return nn.Dropout(settings.dropout) if settings.dropout else nn.Identity()


def _initialize(model: Transformer) -> None:
    """Initialize as GPT-2 does: normal weights of deviation 0.02, and biases of zero.

    GPT-2 also scales the last layer of each residual branch by the depth. Here all depths start
    from the same blocks, so this is left out.
    """
    nn.init.normal_(model.pos_embed, std=0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


#: The paired layers of a block, and of how many tensors of one shape each weight consists: the
#: first is query, key and value.
PAIRED = {"attn.qkv": 3, "attn.proj": 1, "mlp.fc1": 1, "mlp.fc2": 1, "norm1": 1, "norm2": 1}


def cross_layers(model: nn.Module) -> list[CrossLayer]:
    """Pair the weights of the first block with the weights of every later block.

    Blocks have one shape, so each layer is paired with the same layer of the first block: the
    reading of "layers with matching shapes" (InCo, Section 3.2) for a transformer.
    """
    assert isinstance(model, Transformer)
    pairs = []
    for number in range(1, len(model.blocks)):
        for layer, chunks in PAIRED.items():
            source, target = f"blocks.0.{layer}.weight", f"blocks.{number}.{layer}.weight"
            pairs.append(CrossLayer(source, target, chunks))
    return pairs


def channels(model: nn.Module) -> Channels:
    """Return the streams: the tokens through all blocks, and two per block, for attention and MLP.

    The attention's stream has the width of one head: all heads keep the same channels of their
    query, key and value.
    """
    assert isinstance(model, Transformer)
    token = Axis("token", model.pos_embed.shape[-1])
    layer_channels: dict[str, tuple[Axis | None, ...]] = {
        "token_embed": (None, token),
        "pos_embed": (None, None, token),
        "cls_token": (None, None, token),
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


#: The registered depths.
SIZES = (1, 2, 3, 4, 6)
#: Numbers of parameters for the default settings and sequences of 80 of 80 tokens; a decoder has 80
#: classes, and an encoder 2.
PARAMETERS_PER_BLOCK = 198_272
PARAMETERS_OUTSIDE_BLOCKS = {"decoder": 31_056, "encoder": 21_250}


def _register(family: str, build: type[Transformer], depth: int) -> None:
    parameters = PARAMETERS_OUTSIDE_BLOCKS[family] + PARAMETERS_PER_BLOCK * depth
    classes = 80 if family == "decoder" else 2
    attention = "causal transformer" if family == "decoder" else "transformer with a class token"
    summary = (
        f"{attention} of depth {depth}, {parameters:,} parameters "
        f"(80 positions, 80 tokens, {classes} classes)"
    )
    blocks = tuple(f"blocks.{number}" for number in range(depth))
    embeddings = ("token_embed", "pos_embed", "cls_token")
    stages = (
        Stage("embed", members=embeddings),
        *(Stage(f"block{number}", block) for number, block in enumerate(blocks)),
        Stage("summary", members=("norm",)),
        Stage("head"),
    )
    spec = ModelSpec(
        partial(build, depth), family, stages, blocks, channels, cross_layers, head="head"
    )
    paper = "Radford et al., 2019" if family == "decoder" else "Vaswani et al., NeurIPS 2017"
    MODELS.register(f"{family}{depth}", summary, paper=paper)(spec)


for _depth in SIZES:
    _register("decoder", Decoder, _depth)
for _depth in SIZES:
    _register("encoder", Encoder, _depth)
