"""`motley model check`: what is inferred, what applies, and the exit status."""

from __future__ import annotations

import pytest

from motley.cli.model import parse_shape
from motley.core.errors import MotleyError
from motley.models import ArrayShape, ImageShape, SignalShape, TokenShape
from tests.cli.conftest import Command

FOREIGN = "tests.models.foreign"


def test_the_sizes_of_a_users_model_are_described(motley: Command) -> None:
    sizes = f"{FOREIGN}:vit", "--size", f"{FOREIGN}:vit_small"
    answer = motley("model", "check", *sizes, "--shape", "1,8,8", "--classes", "5")
    assert answer.code == 0, answer.err
    for text in (
        "share 2,709 parameters by name and shape, 100% of the smaller one",
        "head: head",
        "blocks: blocks.0, blocks.1",
        "InCo pairs: 2, the first blocks.0.norm1.weight -> blocks.0.norm2.weight",
    ):
        assert text in answer.out
    rows = {}
    for line in answer.out.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        rows[cells[0]] = cells[1:]
    assert rows["stem"] == ["368"] and rows["blocks.1.mlp.fc1"] == ["32"]
    assert rows["split width, FedRolex (rate 0.5)"][0] == "yes"
    assert rows["split ordered (FjORD)"][0] == "no"
    assert "LayerNorm sees all channels at once" in rows["split ordered (FjORD)"][1]


def test_a_model_that_cannot_be_trained_is_an_error(motley: Command) -> None:
    answer = motley("model", "check", f"{FOREIGN}:two_heads", "--shape", "1,8,8")
    assert answer.code != 0 and "TwoHeads returns a tuple of 2" in answer.err
    unknown = motley("model", "check", "resnet99")
    assert unknown.code != 0 and "resnet99" in unknown.err


def test_a_model_of_tokens_is_described(motley: Command) -> None:
    answer = motley("model", "check", f"{FOREIGN}:lstm", "--shape", "6", "--vocabulary", "20")
    assert answer.code == 0 and "lstm.weight_hh_l0 -> lstm.weight_hh_l1" in answer.out


def test_shapes_of_the_command_line() -> None:
    assert parse_shape("3,32,32", 0) == ImageShape(3, 32, 32)
    assert parse_shape("9,128", 0) == SignalShape(9, 128)
    assert parse_shape("13", 0) == ArrayShape((13,))
    assert parse_shape("64", 100) == TokenShape(64, 100)
    for text in ("", "3,x", "0,2"):
        with pytest.raises(MotleyError, match="--shape"):
            parse_shape(text, 0)
    with pytest.raises(MotleyError, match="one length"):
        parse_shape("3,4", 100)
