"""The initial weights that `model.init` chooses, and those that models choose themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.config import load_config
from motley.core.part import State
from motley.core.randomness import torch_seed
from motley.federation import Federation
from motley.models import MODELS, ImageShape
from motley.models.initialization import Initialization
from motley.models.resnet import ResNetSettings
from motley.models.vgg import VGGSettings
from tests.conftest import refused, tiny_config

IMAGE = ImageShape(3, 32, 32)
CIFAR = ResNetSettings(stem="cifar", width=0.25)


def resnet(init: Initialization, settings: ResNetSettings = CIFAR) -> nn.Module:
    with torch_seed(1, "test"):
        return MODELS["resnet18"].make(settings, IMAGE, 10, init=init)


def deviation(model: nn.Module, name: str) -> float:
    return float(model.get_parameter(name).detach().std())


def initial(*overrides: str) -> State:
    return Federation(tiny_config(*overrides)).initial_state().state


def test_resnets_start_as_torchvisions_unless_told_otherwise() -> None:
    """conv2 of layer2.0 has 32 inputs and outputs: fan_in = fan_out = 288."""
    for init in ("model", "kaiming"):
        model = resnet(init)
        assert deviation(model, "layer2.0.conv2.weight") == pytest.approx(
            (2 / 288) ** 0.5, rel=0.05
        )
    torchs = resnet("torch")
    bound = 288**-0.5
    weight = torchs.get_parameter("layer2.0.conv2.weight").detach()
    assert float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    ratio = deviation(resnet("model"), "layer2.0.conv2.weight") / float(weight.std())
    assert ratio == pytest.approx(6**0.5, rel=0.05)


def test_trimming_comes_after_the_initialization() -> None:
    """A tap that is left after trimming starts with the variance of the whole kernel."""
    whole = resnet("torch", ResNetSettings())
    trimmed = resnet("torch", ResNetSettings(trim_dead_taps=True))
    name = "layer4.1.conv1.weight"
    center = whole.get_parameter(name)[:, :, 1:2, 1:2]
    assert torch.equal(trimmed.get_parameter(name), center)


def test_vgg9_starts_as_torch_creates_it_and_vgg11_as_torchvision_does() -> None:
    nine = MODELS["vgg9"].make(VGGSettings(), IMAGE, 10).get_submodule("blocks.1.2")
    assert isinstance(nine, nn.Conv2d) and nine.bias is not None
    assert float(nine.weight.detach().abs().max()) <= (9 * 128) ** -0.5 and nine.bias.any()
    eleven = MODELS["vgg11"].make(VGGSettings(), IMAGE, 10).get_submodule("blocks.2.2")
    assert isinstance(eleven, nn.Conv2d) and eleven.bias is not None
    assert float(eleven.weight.detach().std()) == pytest.approx((2 / (9 * 256)) ** 0.5, rel=0.05)
    assert not eleven.bias.any()


def test_the_setting_reaches_the_initial_state_and_every_family() -> None:
    name = "layer4.0.conv2.weight"
    kaiming, torchs = initial(), initial("model.init=torch")
    assert float(kaiming[name].std() / torchs[name].std()) == pytest.approx(6**0.5, rel=0.2)
    vits = (
        "model.sizes=['vit1']",
        "model.vit={dim=32, heads=2, patch=4}",
        "split.name=homogeneous",
    )
    small = (*vits, "federation.size_assignment=blocks")
    assert float(initial(*small)["blocks.0.mlp.fc1.weight"].abs().max()) < 0.1
    assert float(initial(*small, "model.init=torch")["blocks.0.mlp.fc1.weight"].abs().max()) > 0.1


def test_fedimpros_preset_starts_as_its_authors_network() -> None:
    assert load_config(preset="fedimpro-cifar10").model.init == "torch"
    assert load_config(preset="inco-cifar10").model.init == "model"


def test_an_unknown_rule_is_refused() -> None:
    assert "model.init = 'zeros'" in refused("model.init=zeros")
