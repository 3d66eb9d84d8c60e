"""Networks of torchvision and timm, where the packages can be imported."""

from __future__ import annotations

import pytest

from tests.models.foreign_gpu import describe, timm_net, torchvision_net


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_torchvision_networks_are_inferred(name: str) -> None:
    pytest.importorskip("torchvision")
    result = describe(lambda num_classes: torchvision_net(name, num_classes))
    assert "REFUSED" not in result and "fixed=0" in result


@pytest.mark.slow
def test_timms_vision_transformers_are_inferred() -> None:
    pytest.importorskip("timm")
    result = describe(lambda num_classes: timm_net("vit_tiny_patch16_224", num_classes))
    assert "REFUSED" not in result and "blocks=12" in result
