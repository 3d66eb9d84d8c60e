"""How users' factories are called, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motley
from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.models import ImageShape, ModelSpec, TokenShape
from motley.models.user import build_user_model, spec_of_factory


def test_factories_get_the_arguments_they_name() -> None:
    calls: list[Any] = []

    def both(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        calls.append((input_shape, num_classes))
        return nn.Identity()

    def classes_only(hidden: int = 3, *, num_classes: int) -> nn.Module:
        calls.append((hidden, num_classes))
        return nn.Identity()

    shape = ImageShape(3, 8, 9)
    build_user_model(both, shape, 10)
    build_user_model(classes_only, shape, 10)
    build_user_model(partial(both, num_classes=2), TokenShape(7, 50), 10)
    assert build_user_model(nn.Identity, shape, 10).__class__ is nn.Identity
    assert calls == [((3, 8, 9), 10), (3, 10), ((7,), 10)]
    assert all(type(dims) is tuple for dims, _ in (calls[0], calls[2]))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (nn.Identity(), "is a module, and every client needs one"),
        ("net", "is a str"),
        (lambda hidden: nn.Identity(), "needs an argument 'hidden'"),
    ],
)
def test_what_is_no_factory_is_refused(factory: Any, words: str) -> None:
    with pytest.raises(MotleyError, match=words):
        spec_of_factory(factory)


def test_a_declaration_stays_as_it_is() -> None:
    spec = ModelSpec(lambda settings, shape, classes: nn.Identity(), head="fc")
    assert spec_of_factory(spec) is spec


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8))
        self.fc = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.fc(self.blocks(images.flatten(1)))
        return out


class ChangesItsInput(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.mul_(0.5))


class Rectifies(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(nn.functional.relu(images, inplace=True))


class Complex(Net):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class Scalar(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).mean()


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (ChangesItsInput, "model.sizes: 'net' changes its input in place, and the same test exam"),
        (Rectifies, "model.sizes: 'net' changes its input in place"),
        (
            Complex,
            "model.sizes: 'net' has the tensor 'phase' of type torch.complex64; real numbers",
        ),
        (Scalar, r"returns shape \(\) for 2 examples; a model returns one row of 10 logits"),
    ],
)
def test_models_that_would_give_wrong_numbers_are_refused(net: Any, words: str) -> None:
    with pytest.raises(MotleyError, match=words):
        motley.Federation(models={"net": net}, data=load_dataset("digits"), clients=4)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"blocks": ("block.0",)}, "ModelSpec.blocks: unknown module 'block.0'. Did you mean 'bl"),
        ({"blocks": "blocks.0"}, "ModelSpec.blocks = 'blocks.0': should be a tuple of paths."),
        ({"head": "fcc"}, "ModelSpec.head: unknown module 'fcc'. Did you mean 'fc'?"),
        ({"head": ["fc"]}, "ModelSpec.head = ['fc']: should be the path of a module."),
        ({"classifiers": ("last",)}, "ModelSpec.classifiers: unknown module 'last'."),
    ],
)
def test_declared_paths_lead_to_modules(declared: dict[str, Any], words: str) -> None:
    spec = ModelSpec(lambda settings, shape, classes: Net(), **declared)
    with pytest.raises(MotleyError) as raised:
        motley.Federation(models={"net": spec}, data=load_dataset("digits"), clients=4)
    assert words in str(raised.value)


def test_a_factory_may_load_weights(recwarn: pytest.WarningsRecorder) -> None:
    weights = Net().state_dict()

    def trained() -> nn.Module:
        net = Net()
        net.load_state_dict(weights)
        return net

    federation = motley.Federation(
        models={"net": trained}, data=load_dataset("digits"), clients=4, engine="debug"
    )
    assert torch.equal(federation.initial_state().state["fc.weight"], weights["fc.weight"])
    assert not [str(one.message) for one in recwarn if "non-meta" in str(one.message)]
