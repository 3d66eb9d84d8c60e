"""How users' factories are called, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from motley.core.errors import MotleyError
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
