"""Residual networks: sizes, names, where they can be cut, and which layers help which."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.models import MODELS, CrossLayer, ImageShape
from motley.models.resnet import SIZES, ResNet, ResNetSettings, cross_layers
from motley.models.same_shape import same_shape_layers
from motley.models.stages import features
from motley.settings import validate

SMALL = ImageShape(3, 32, 32)
TINY = ResNetSettings(width=1 / 16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def build(
    depth: int, settings: ResNetSettings | None = None, image: ImageShape = SMALL, classes: int = 10
) -> ResNet:
    model = MODELS[f"resnet{depth}"].make(settings or ResNetSettings(), image, classes)
    assert isinstance(model, ResNet)
    return model


def on_paper(depth: int, settings: ResNetSettings | None = None, classes: int = 10) -> ResNet:
    """Build without memory: for tests that read only names and shapes."""
    with torch.device("meta"):
        return build(depth, settings, classes=classes)


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def shapes(model: nn.Module) -> set[tuple[str, torch.Size]]:
    return {(name, tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(10, 4_910_922), (14, 10_812_234), (18, 11_181_642), (22, 17_082_954), (26, 17_452_362)],
)
def test_parameters_of_the_inco_sizes(depth: int, parameters: int) -> None:
    assert count(on_paper(depth)) == parameters


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_parameters_with_1000_classes_are_those_torchvision_publishes(
    depth: int, parameters: int
) -> None:
    assert count(on_paper(depth, classes=1000)) == parameters


@pytest.mark.parametrize("depth", SIZES)
def test_the_summary_states_the_true_number_of_parameters(depth: int) -> None:
    entry = MODELS.entry(f"resnet{depth}")
    assert f"{count(on_paper(depth)):,} parameters" in entry.summary
    assert entry.item.family == "resnet"


def test_names_and_order_are_those_of_torchvision() -> None:
    names = list(on_paper(10).state_dict())
    norm = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    block = [
        "conv1.weight",
        *(f"bn1.{n}" for n in norm),
        "conv2.weight",
        *(f"bn2.{n}" for n in norm),
    ]
    downsample = ["downsample.0.weight", *(f"downsample.1.{n}" for n in norm)]
    expected = ["conv1.weight", *(f"bn1.{n}" for n in norm)]
    for stage in (1, 2, 3, 4):
        expected += [f"layer{stage}.0.{n}" for n in block + (downsample if stage > 1 else [])]
    assert names == [*expected, "fc.weight", "fc.bias"]


def test_the_stride_of_a_bottleneck_is_on_its_3x3_convolution() -> None:
    block = on_paper(50).layer2[0]
    convs = [block.get_submodule(name) for name in ("conv1", "conv2", "conv3", "downsample.0")]
    assert [(conv.kernel_size, conv.stride) for conv in convs] == [
        ((1, 1), (1, 1)),
        ((3, 3), (2, 2)),
        ((1, 1), (1, 1)),
        ((1, 1), (2, 2)),
    ]


def test_a_bottleneck_widens_fourfold_from_stage_1_on() -> None:
    model = on_paper(50)
    assert model.get_parameter("layer1.0.downsample.0.weight").shape == (256, 64, 1, 1)
    assert model.fc.in_features == 2048


@pytest.mark.parametrize(("shallow", "deep"), [(10, 14), (14, 22), (22, 26), (10, 18), (18, 22)])
def test_a_shallow_size_lies_inside_a_deeper_one(shallow: int, deep: int) -> None:
    assert shapes(on_paper(shallow)) < shapes(on_paper(deep))


def test_14_is_18_without_the_second_blocks_of_the_first_two_stages() -> None:
    names14, names18 = (set(on_paper(depth).state_dict()) for depth in (14, 18))
    assert names18 - names14 == {n for n in names18 if n.startswith(("layer1.1.", "layer2.1."))}


@pytest.mark.parametrize(
    ("stem", "sides"), [("imagenet", [8, 8, 4, 2, 1]), ("cifar", [32, 32, 16, 8, 4])]
)
def test_map_sizes_at_32x32(stem: str, sides: list[int]) -> None:
    model = build(10, ResNetSettings.model_validate({"stem": stem, "width": 1 / 16}))
    x = model.stem(torch.randn(2, *SMALL))
    maps = [x]
    for stage in model.stages:
        maps.append(stage(maps[-1]))
    assert [tuple(m.shape) for m in maps] == [
        (2, c, s, s) for c, s in zip((4, 4, 8, 16, 32), sides, strict=True)
    ]


def test_forward_is_stem_stages_mean_and_fc() -> None:
    model = build(14, ResNetSettings(stem="cifar", width=1 / 16)).eval()
    x = torch.randn(2, *SMALL)
    cut = model.stem(x)
    for stage in model.stages:
        cut = stage(cut)
    feature = cut.mean(dim=(2, 3))
    torch.testing.assert_close(features(model, x), feature)
    torch.testing.assert_close(model(x), feature @ model.fc.weight.T + model.fc.bias)


def test_a_basic_block_is_relu_of_residual_and_shortcut() -> None:
    """The second block of a stage, written out with functional calls, against the module."""
    block = build(18, TINY).layer1[1].eval()
    state = block.state_dict()
    x = torch.randn(2, 4, 5, 5)

    def conv_norm(x: torch.Tensor, i: int) -> torch.Tensor:
        x = nn.functional.conv2d(x, state[f"conv{i}.weight"], padding=1)
        return x / (1 + 1e-5) ** 0.5  # a fresh norm in eval mode: mean 0, variance 1

    torch.testing.assert_close(block(x), (conv_norm(conv_norm(x, 1).relu(), 2) + x).relu())


def test_the_last_stage_trains_only_centre_taps_at_32x32() -> None:
    """A padded 3x3 convolution on a 1x1 map meets zeros everywhere but in its middle."""
    model = build(18, TINY)
    model(torch.randn(8, *SMALL)).square().sum().backward()
    gradient = model.get_parameter("layer4.1.conv2.weight").grad
    assert gradient is not None
    moved = gradient.abs().sum(dim=(0, 1)) > 0
    assert moved.sum() == 1 and moved[1, 1]
    earlier = model.get_parameter("layer3.1.conv2.weight").grad
    assert earlier is not None and (earlier.abs().sum(dim=(0, 1)) > 0).all()


def test_the_cifar_stem_is_one_3x3_convolution_of_stride_1() -> None:
    model = on_paper(18, ResNetSettings(stem="cifar"))
    assert model.conv1.weight.shape == (64, 3, 3, 3)
    assert model.conv1.stride == (1, 1) and isinstance(model.maxpool, nn.Identity)
    assert count(on_paper(18)) - count(model) == 64 * 3 * (49 - 9)


@pytest.mark.parametrize(
    ("width", "channels"),
    [(2.0, (128, 256, 512, 1024)), (0.3, (19, 38, 77, 154)), (0.001, (1, 1, 1, 1))],
)
def test_width_scales_every_stage(width: float, channels: tuple[int, ...]) -> None:
    model = on_paper(18, ResNetSettings(width=width))
    assert (
        tuple(model.get_parameter(f"layer{s}.1.conv2.weight").shape[0] for s in (1, 2, 3, 4))
        == channels
    )
    assert (model.conv1.out_channels, model.fc.in_features) == (channels[0], channels[-1])


def test_group_norm_has_the_names_of_batch_norm_and_no_buffers() -> None:
    batch = on_paper(18)
    group = on_paper(18, ResNetSettings(norm="group", groups=4))
    assert list(batch.buffers()) and not list(group.buffers())
    assert dict(batch.named_parameters()).keys() == dict(group.named_parameters()).keys()
    norms = [module for module in group.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 20 and {norm.num_groups for norm in norms} == {4}


def test_group_norm_treats_each_image_by_itself() -> None:
    model = build(10, ResNetSettings(stem="cifar", width=1 / 16, norm="group"))
    x = torch.randn(3, *SMALL)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_initial_weights() -> None:
    model = build(10)
    conv = model.get_parameter("layer2.0.conv1.weight")
    fan_out = 128 * 9
    assert conv.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.02)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (
                (module.weight == 1).all() and (module.bias == 0).all() and module.momentum == 0.1
            )
    assert model.fc.weight.abs().max() <= 512**-0.5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("depth", [depth for depth in SIZES if depth < 100])
def test_every_parameter_gets_a_gradient(depth: int, channels: int) -> None:
    image = ImageShape(channels, 32, 32)
    model = build(depth, ResNetSettings(width=1 / 32), image, classes=7)
    logits = model(torch.randn(4, *image))
    assert logits.shape == (4, 7)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("depth", [101, 152])
def test_the_deepest_sizes_run(depth: int) -> None:
    model = build(depth, ResNetSettings(width=1 / 64))
    model(torch.randn(2, *SMALL)).sum().backward()
    assert model.conv1.weight.grad is not None


def test_cross_layers_of_resnet26() -> None:
    expected = {
        CrossLayer("layer1.0.conv2.weight", "layer1.1.conv1.weight"),
        CrossLayer("layer1.0.conv2.weight", "layer1.1.conv2.weight"),
        CrossLayer("layer1.0.conv2.weight", "layer1.2.conv1.weight"),
        CrossLayer("layer1.0.conv2.weight", "layer1.2.conv2.weight"),
        CrossLayer("layer2.0.conv2.weight", "layer2.1.conv1.weight"),
        CrossLayer("layer2.0.conv2.weight", "layer2.1.conv2.weight"),
        CrossLayer("layer2.0.conv2.weight", "layer2.2.conv1.weight"),
        CrossLayer("layer2.0.conv2.weight", "layer2.2.conv2.weight"),
        CrossLayer("layer3.0.conv2.weight", "layer3.1.conv1.weight"),
        CrossLayer("layer3.0.conv2.weight", "layer3.1.conv2.weight"),
        CrossLayer("layer3.0.conv2.weight", "layer3.2.conv1.weight"),
        CrossLayer("layer3.0.conv2.weight", "layer3.2.conv2.weight"),
        CrossLayer("layer4.0.conv2.weight", "layer4.1.conv1.weight"),
        CrossLayer("layer4.0.conv2.weight", "layer4.1.conv2.weight"),
        CrossLayer("layer4.0.conv2.weight", "layer4.2.conv1.weight"),
        CrossLayer("layer4.0.conv2.weight", "layer4.2.conv2.weight"),
    }
    pairs = MODELS["resnet26"].cross_layers(on_paper(26))
    assert len(pairs) == 16
    assert set(pairs) == expected


@pytest.mark.parametrize(
    ("depth", "targets"), [(10, 0), (14, 4), (18, 8), (22, 12), (34, 24), (50, 24), (152, 92)]
)
def test_cross_layers_pair_equal_shapes_and_name_each_target_once(depth: int, targets: int) -> None:
    model = on_paper(depth)
    pairs = cross_layers(model)
    assert len({pair.target for pair in pairs}) == len(pairs) == targets
    for source, target, _ in pairs:
        assert model.get_parameter(source).shape == model.get_parameter(target).shape


def test_cross_layers_of_a_bottleneck_keep_the_position_and_skip_conv1() -> None:
    pairs = [pair for pair in cross_layers(on_paper(50)) if pair.target.startswith("layer4.")]
    assert pairs == [
        CrossLayer("layer4.0.conv2.weight", "layer4.1.conv2.weight"),
        CrossLayer("layer4.0.conv3.weight", "layer4.1.conv3.weight"),
        CrossLayer("layer4.0.conv2.weight", "layer4.2.conv2.weight"),
        CrossLayer("layer4.0.conv3.weight", "layer4.2.conv3.weight"),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stem": "tiny"}, r"model\.stem = 'tiny'.*'imagenet' or 'cifar'"),
        ({"width": 0}, r"model\.width = 0: .*greater than 0"),
        ({"width": float("inf")}, r"model\.width = inf: .*finite"),
        ({"norm": "layer"}, r"model\.norm = 'layer'.*'batch' or 'group'"),
        (
            {"norm": "group", "groups": 3},
            r"model\.groups = 3: must divide .*width 1\.0 gives 64, 128, 256, 512",
        ),
        ({"norm": "group", "width": 0.015}, r"model\.groups = 2: .*width 0\.015 gives 1, 2, 4, 8"),
        ({"groups": 0}, r"model\.groups = 0"),
        ({"widht": 1}, r"model\.widht.*Did you mean 'width'"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        validate(ResNetSettings, values, "model")


def test_groups_are_free_with_batch_norm() -> None:
    assert ResNetSettings(groups=3).groups == 3


def test_a_wrong_width_is_reported_alone() -> None:
    with pytest.raises(MotleyError) as error:
        validate(ResNetSettings, {"norm": "group", "groups": 3, "width": -1})
    assert str(error.value).count("\n") == 0 and "width = -1" in str(error.value)


def test_layers_of_one_shape_as_the_inco_papers_text_pairs_them() -> None:
    """The first layer of a shape helps all later ones of its stage: convolutions and norms."""
    pairs = same_shape_layers(on_paper(14))
    first_stage = [pair for pair in pairs if pair.target.startswith("layer1.")]
    assert first_stage == [
        CrossLayer("layer1.0.conv1.weight", "layer1.0.conv2.weight"),
        CrossLayer("layer1.0.bn1.weight", "layer1.0.bn2.weight"),
        CrossLayer("layer1.0.bn1.bias", "layer1.0.bn2.bias"),
    ]
    last_stage = {pair.target: pair.source for pair in pairs if pair.target.startswith("layer4.")}
    assert last_stage == {
        "layer4.1.conv1.weight": "layer4.0.conv2.weight",
        "layer4.1.conv2.weight": "layer4.0.conv2.weight",
        **{
            f"layer4.{norm}.{key}": f"layer4.0.bn1.{key}"
            for norm in ("0.bn2", "0.downsample.1", "1.bn1", "1.bn2")
            for key in ("weight", "bias")
        },
    }
    outside = ("conv1.", "bn1.", "fc.")
    assert not any(name.startswith(outside) for pair in pairs for name in pair[:2])


def test_all_pairs_of_one_shape_have_one_shape_with_bottlenecks_too() -> None:
    model = on_paper(50)
    pairs = same_shape_layers(model)
    for pair in pairs:
        assert model.get_parameter(pair.source).shape == model.get_parameter(pair.target).shape
        assert pair.source.split(".")[0] == pair.target.split(".")[0], "both are in one stage"
    assert len(pairs) == len({pair.target for pair in pairs}) > 100
