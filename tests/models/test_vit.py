"""Vision transformers: sizes, names, attention against its formula, and which layers help which."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models import MODELS, CrossLayer, ImageShape
from motley.models.stages import features
from motley.models.vit import SIZES, Attention, Block, ViT, ViTSettings, cross_layers
from motley.settings import validate

LARGE = ImageShape(3, 224, 224)
SMALL = ImageShape(3, 8, 8)
TINY = ViTSettings(patch=4, dim=12, heads=3, mlp_ratio=2.0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def build(
    depth: int, settings: ViTSettings = TINY, image: ImageShape = SMALL, classes: int = 10
) -> ViT:
    model = MODELS[f"vit{depth}"].make(settings, image, classes)
    assert isinstance(model, ViT)
    return model


def on_paper(depth: int, image: ImageShape = LARGE) -> ViT:
    """Build at full size without memory: for tests that read only names and shapes."""
    with torch.device("meta"):
        return build(depth, ViTSettings(), image)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def counted_by_hand(
    depth: int, dim: int, patch: int, side: int, channels: int, classes: int
) -> int:
    """Weights and biases by the paper's equations, for an MLP of four times the width."""
    attention = (3 * dim * dim + 3 * dim) + (dim * dim + dim)
    mlp = (4 * dim * dim + 4 * dim) + (4 * dim * dim + dim)
    tokens = (side // patch) ** 2 + 1
    embedding = channels * patch * patch * dim + dim
    return (
        embedding
        + dim
        + tokens * dim
        + depth * (attention + mlp + 4 * dim)
        + 2 * dim
        + dim * classes
        + classes
    )


@pytest.mark.parametrize("depth", SIZES)
def test_parameters_follow_the_formula_and_the_summary_states_them(depth: int) -> None:
    parameters = count(on_paper(depth))
    assert parameters == counted_by_hand(depth, 384, 16, 224, 3, 10)
    entry = MODELS.entry(f"vit{depth}")
    assert f"{parameters:,} parameters" in entry.summary
    assert entry.item.family == "vit"


def test_the_inco_sizes_have_the_published_millions_of_parameters() -> None:
    millions = [round(count(on_paper(depth)) / 1e6, 2) for depth in (8, 9, 10, 11, 12)]
    assert millions == [14.57, 16.35, 18.12, 19.90, 21.67]


def test_registered_sizes() -> None:
    names = [entry.name for entry in MODELS if entry.item.family == "vit"]
    assert names == [
        "vit1",
        "vit2",
        "vit3",
        "vit4",
        "vit6",
        "vit8",
        "vit9",
        "vit10",
        "vit11",
        "vit12",
    ]


def test_names_and_order_are_those_of_timm() -> None:
    layers = ["norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"]
    both = ("weight", "bias")
    expected = ["cls_token", "pos_embed", *(f"patch_embed.proj.{kind}" for kind in both)]
    expected += [f"blocks.{j}.{layer}.{kind}" for j in (0, 1) for layer in layers for kind in both]
    expected += [f"{layer}.{kind}" for layer in ("norm", "head") for kind in both]
    assert list(build(2).state_dict()) == expected


def test_shapes_are_those_of_timm() -> None:
    state = on_paper(1).state_dict()
    assert state["cls_token"].shape == (1, 1, 384) and state["pos_embed"].shape == (1, 197, 384)
    assert state["patch_embed.proj.weight"].shape == (384, 3, 16, 16)
    assert state["blocks.0.attn.qkv.weight"].shape == (1152, 384)
    assert state["blocks.0.mlp.fc1.weight"].shape == (1536, 384)


@pytest.mark.parametrize(("shallow", "deep"), [(1, 2), (8, 9), (9, 10), (10, 11), (11, 12)])
def test_a_shallow_size_lies_inside_a_deeper_one(shallow: int, deep: int) -> None:
    inner, outer = (
        {(name, tensor.shape) for name, tensor in on_paper(depth).state_dict().items()}
        for depth in (shallow, deep)
    )
    assert inner < outer


def test_attention_is_the_softmax_formula() -> None:
    """One head and one query at a time, against the fused call."""
    attention, x = Attention(dim=6, heads=2).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    q, k, v = attention.qkv(x).split(6, dim=-1)
    mixed = torch.zeros_like(x)
    for image in range(2):
        for head in (slice(0, 3), slice(3, 6)):
            for token in range(5):
                weights = (k[image, :, head] @ q[image, token, head] / math.sqrt(3)).exp()
                mixed[image, token, head] = (weights / weights.sum()) @ v[image, :, head]
    torch.testing.assert_close(attention(x), mixed @ attention.proj.weight.T + attention.proj.bias)


def test_a_block_is_pre_norm_with_exact_gelu() -> None:
    block, x = Block(TINY), torch.randn(2, 5, 12)

    def normalise(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, unbiased=False) + 1e-6
        ).sqrt()

    half = x + block.attn(normalise(x))
    hidden = block.mlp.fc1(normalise(half))
    gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(block(x), half + block.mlp.fc2(gelu))


def test_norms_use_the_small_epsilon() -> None:
    norms = [module for module in build(2).modules() if isinstance(module, nn.LayerNorm)]
    assert [norm.eps for norm in norms] == [1e-6] * 5


def test_embedding_cuts_patches_row_by_row() -> None:
    """With 2x2 patches of 4x4 pixels, token 2 is the upper right one."""
    model, x = build(1), torch.randn(2, *SMALL)
    tokens = model.embed(x)
    weight, bias = (model.get_parameter(f"patch_embed.proj.{kind}") for kind in ("weight", "bias"))
    upper_right = x[:, :, :4, 4:].flatten(1) @ weight.flatten(1).T + bias
    assert tokens.shape == (2, 5, 12)
    torch.testing.assert_close(tokens[:, 2], upper_right + model.pos_embed[0, 2])
    torch.testing.assert_close(
        tokens[:, 0], (model.cls_token[0] + model.pos_embed[0, 0]).expand(2, -1)
    )


def test_forward_is_embed_blocks_norm_of_the_class_token_and_head() -> None:
    model, x = build(3), torch.randn(2, *SMALL)
    tokens = model.embed(x)
    for block in model.blocks:
        tokens = block(tokens)
    feature = model.norm(tokens[:, 0])
    torch.testing.assert_close(features(model, x), feature)
    torch.testing.assert_close(model(x), model.head(feature))


def test_initial_weights_are_drawn_as_timm_draws_them() -> None:
    model = build(1, ViTSettings(patch=4, dim=192, heads=3), ImageShape(3, 32, 32), classes=100)
    for name, parameter in model.named_parameters():
        if name.startswith("patch_embed"):
            assert parameter.abs().max() <= (3 * 4 * 4) ** -0.5
        elif "norm" in name and name.endswith("weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            deviation, tolerance = (1e-6, 0.2) if name == "cls_token" else (0.02, 0.05)
            assert parameter.std().item() == pytest.approx(deviation, rel=tolerance), name


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("depth", SIZES)
def test_every_parameter_gets_a_gradient(depth: int, channels: int) -> None:
    image = ImageShape(channels, 8, 12)
    model = build(depth, image=image, classes=7)
    logits = model(torch.randn(4, *image))
    assert logits.shape == (4, 7) and model.pos_embed.shape == (1, 7, 12)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_cross_layers() -> None:
    assert MODELS["vit3"].cross_layers(build(3)) == [
        CrossLayer("blocks.0.norm1.weight", "blocks.0.norm2.weight"),
        CrossLayer("blocks.1.norm1.weight", "blocks.1.norm2.weight"),
        CrossLayer("blocks.2.norm1.weight", "blocks.2.norm2.weight"),
    ]


def test_cross_layers_name_parameters_of_one_shape() -> None:
    model = on_paper(12)
    pairs = cross_layers(model)
    assert len(pairs) == 12
    for source, target, _ in pairs:
        assert model.get_parameter(source).shape == model.get_parameter(target).shape == (384,)


@pytest.mark.parametrize("image", [ImageShape(1, 28, 32), ImageShape(1, 32, 28)])
def test_an_image_that_the_patch_does_not_divide_is_refused(image: ImageShape) -> None:
    with pytest.raises(
        MotleyError, match=rf"patch = 16: .*{image.height}x{image.width}.*Allowed: 1, 2, 4\."
    ):
        build(1, ViTSettings(), image)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heads": 5}, r"model\.heads = 5: must divide dim = 384"),
        ({"dim": 100}, r"model\.heads = 6: must divide dim = 100"),
        ({"patch": 0}, r"model\.patch = 0"),
        ({"dim": -4}, r"model\.dim = -4"),
        ({"mlp_ratio": 0}, r"model\.mlp_ratio = 0"),
        ({"head": 6}, r"model\.head = 6: .*Did you mean 'heads'"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        validate(ViTSettings, values, "model")
