"""Exported programs compute what the model computes: every family, width and exit."""

from __future__ import annotations

import copy
import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motley.assembly import build_split
from motley.core.errors import MotleyError
from motley.export.export import drop_unused
from motley.export.formats import open_program, open_runner, trace, write_model
from motley.models import MODELS
from motley.models.inputs import (
    ImageShape,
    InputShape,
    SignalShape,
    TableShape,
    TokenShape,
    dims_of,
)
from motley.splits import Split
from motley.splits.early_exit import AtExit
from motley.splits.exits import WithExits
from motley.splits.trained import trained_model
from tests.conftest import tiny_config

#: Settings that make a family small. A family without an entry has its defaults.
SETTINGS = {
    "resnet": ("model.resnet.width=0.0625",),
    "vit": ("model.vit.dim=16", "model.vit.heads=2", "model.vit.patch=4"),
    "preact": ("model.preact.width=0.0625",),
}
SHAPES: tuple[InputShape, ...] = (
    ImageShape(1, 16, 16),
    SignalShape(3, 32),
    TokenShape(12, 20),
    TableShape(5, (3, 4)),
)
CLASSES = 10
#: One size of every family that is registered: new families are covered without a change here.
FAMILIES = {entry.item.family: entry.name for entry in reversed(list(MODELS))}


def tiny_split(name: str, shape: InputShape, *overrides: str) -> Split:
    family = MODELS[name].family
    settings = [*SETTINGS.get(family, ()), f"model.sizes=['{name}']", *overrides]
    # The model is built for `shape`, whatever the data set of the configuration is.
    config = tiny_config("model.sizes=['mlp1']", *settings)
    return build_split(config, shape, CLASSES)


def built(name: str, width: float) -> tuple[nn.Module, InputShape]:
    """Return a small model of a size with random weights, and the shape of its inputs."""
    overrides = () if width == 1 else ("split.name=width", f"split.rates=[{width}]")
    for shape in SHAPES:
        try:
            split = tiny_split(name, shape, *overrides)
        except MotleyError as error:
            last = error
            continue
        return trained_model(split, lively(split), split.sizes[0]), shape
    raise last


def lively(split: Split) -> dict[str, Tensor]:
    """Return an initial state in which no bias and no statistic is trivial."""
    generator = torch.Generator().manual_seed(0)
    state = split.initial(0)
    for name, tensor in state.items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator) * 0.1
            state[name] = tensor + noise
    return state


def random_inputs(shape: InputShape, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    if isinstance(shape, TokenShape):
        return torch.randint(shape.vocabulary, (count, shape.length), generator=generator)
    inputs = torch.randn((count, *dims_of(shape)), generator=generator)
    if isinstance(shape, TableShape):
        for number, categories in enumerate(shape.categories):
            column = torch.randint(categories, (count,), generator=generator)
            inputs[:, shape.numbers + number] = column.float()
    return inputs


def assert_same_outputs(model: nn.Module, run: Any, shape: InputShape) -> None:
    """Compare an exported program with its model, for batch sizes that it was not traced with."""
    for count in (1, 5):
        inputs = random_inputs(shape, count)
        with torch.no_grad():
            expected = model(inputs)
        torch.testing.assert_close(run(inputs), expected, rtol=1e-4, atol=1e-4)


def with_onnx(model: nn.Module, shape: InputShape, folder: Path) -> Any:
    pytest.importorskip("onnxruntime")
    write_model("onnx", model, random_inputs(shape, 2), folder / "model.onnx")
    return open_runner("onnx", folder / "model.onnx")


def with_exits(*overrides: str) -> WithExits:
    split = tiny_split("vit3", SHAPES[0], "split.name=grid", "split.cuts=[1,2,3]", *overrides)
    model = trained_model(split, lively(split), split.sizes[-1])
    assert isinstance(model, WithExits)
    return model


# ---- quick


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_traced(family: str) -> None:
    model, shape = built(FAMILIES[family], 1)
    assert_same_outputs(model, trace(model, random_inputs(shape, 2)).module(), shape)


def test_an_exit_is_a_model_of_its_own() -> None:
    whole = with_exits("split.rates=[1,1,1]")
    inputs = random_inputs(SHAPES[0], 2)
    with torch.no_grad():
        expected = AtExit(whole, 0)(inputs)
    model = AtExit(copy.deepcopy(whole), 0)
    drop_unused(model, inputs)
    program = trace(model, inputs)
    assert_same_outputs(AtExit(whole, 0), program.module(), SHAPES[0])
    torch.testing.assert_close(program.module()(inputs), expected)
    names = set(program.state_dict)
    assert any(name.startswith("model.blocks.0.") for name in names)
    assert not any(
        name.startswith(("model.blocks.1", "model.exits.1", "model.head")) for name in names
    )


class Stranger(nn.Module):
    """A model that depends on the batch size in a way that cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1, keepdim=True).expand(len(x), CLASSES).reshape(len(x), -1)


def test_an_exit_of_a_network_that_is_not_ours_can_be_traced() -> None:
    """Its stages are inferred: numbers that depend on the batch must not become constants."""
    grid = ("split.name=grid", "split.cuts=[1,2]", "split.rates=[1,1]")
    config = tiny_config("model.sizes=['tests.models.foreign:vit']", *grid)
    split = build_split(config, SHAPES[0], CLASSES)
    model = trained_model(split, lively(split), split.sizes[0])
    assert isinstance(model, WithExits)
    at_exit = AtExit(model, 0).eval()
    program = trace(at_exit, random_inputs(SHAPES[0], 2)).module()
    assert_same_outputs(at_exit, program, SHAPES[0])


def test_a_model_that_cannot_be_traced_is_named() -> None:
    with pytest.raises(MotleyError, match=r"^Stranger cannot be exported as a program: .*len\(x\)"):
        trace(Stranger(), torch.zeros(2, 3))


# ---- hostile files


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def hostile(file: Path, content: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return file


def test_pickled_objects_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    config = json.dumps({"config": {"a": {"path_name": "constant_0", "use_pickle": True}}})
    files = [
        {"m/data/constants/model_constants_config.json": config.encode()},
        {"m/data/sample_inputs/model.pt": pickle.dumps(Bomb())},
    ]
    for content in files:
        with pytest.raises(MotleyError, match=r"model.pt2"):
            open_program(hostile(tmp_path / "model.pt2", content))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", pickle.dumps(Bomb())])
def test_damaged_programs_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.pt2"
    file.write_bytes(content)
    with pytest.raises(MotleyError, match=r"model.pt2: is not a program of torch.export"):
        open_program(file)
    pytest.importorskip("onnxruntime")
    with pytest.raises(MotleyError, match=r"model.pt2: cannot be loaded by onnxruntime"):
        open_runner("onnx", file)


def test_the_bomb_is_one() -> None:
    with pytest.raises(SystemExit):
        torch.load(io.BytesIO(_saved_bomb()), weights_only=False)


def _saved_bomb() -> bytes:
    content = io.BytesIO()
    torch.save(Bomb(), content)
    return content.getvalue()


# ---- the full matrix


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_outputs_equal_torchs_for_every_family_and_width(
    tmp_path: Path, family: str, width: float
) -> None:
    name = FAMILIES[family]
    if width < 1 and MODELS[name].channels is None:
        pytest.skip(f"{family} has no widths")
    model, shape = built(name, width)
    assert_same_outputs(model, with_onnx(model, shape, tmp_path), shape)
    write_model("torch", model, random_inputs(shape, 2), tmp_path / "model.pt2")
    assert_same_outputs(model, open_program(tmp_path / "model.pt2"), shape)


EXITS = {
    "vit": ("vit3", "split.cuts=[1,2,3]", "split.rates=[0.5,0.5,1]"),
    "resnet": ("resnet10", "split.cuts=[1,2,4]", "split.rates=[0.5,0.75,1]"),
    "resnet, mean": ("resnet10", "split.cuts=[1,2,4]", "split.rates=[1,1,1]", "split.output=mean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("network", EXITS)
def test_onnx_outputs_equal_torchs_at_every_exit(tmp_path: Path, network: str, number: int) -> None:
    name, *overrides = EXITS[network]
    split = tiny_split(name, SHAPES[0], "split.name=grid", *overrides)
    model = trained_model(split, lively(split), split.sizes[-1])
    assert isinstance(model, WithExits)
    at_exit = AtExit(model, number)
    assert_same_outputs(at_exit, with_onnx(at_exit, SHAPES[0], tmp_path), SHAPES[0])


@pytest.mark.slow
@pytest.mark.parametrize("split", ["ordered", "batch", "rolling"])
def test_onnx_outputs_equal_torchs_for_other_kinds_of_parts(tmp_path: Path, split: str) -> None:
    overrides = {
        "ordered": ("split.name=ordered", "split.rates=[0.5,1]"),
        "batch": ("split.normalization_statistics=batch",),
        "rolling": ("split.name=width", "split.channels=rolling", "split.scaler=true"),
    }[split]
    parts = tiny_split("resnet10", SHAPES[0], *overrides)
    model = trained_model(parts, lively(parts), parts.sizes[0], 3)
    assert_same_outputs(model, with_onnx(model, SHAPES[0], tmp_path), SHAPES[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "blocks"),
    [("resnet", 4), ("mobilenet", 4), ("regnet", 4), ("resnext", 4), ("vit", 2)],
)
def test_onnx_outputs_equal_torchs_for_networks_that_are_not_ours(
    tmp_path: Path, network: str, blocks: int
) -> None:
    """Half as wide up to the first exit, and whole."""
    grid = ("split.name=grid", f"split.cuts=[1,{blocks}]", "split.rates=[0.5,1]")
    config = tiny_config(f"model.sizes=['tests.models.foreign:{network}']", *grid)
    split = build_split(config, SHAPES[0], CLASSES)
    state = lively(split)
    for size in split.sizes:
        model = trained_model(split, state, size)
        assert isinstance(model, WithExits)
        at_exit = AtExit(model, len(model.cuts) - 1)
        folder = tmp_path / str(len(model.cuts))
        folder.mkdir()
        assert_same_outputs(at_exit, with_onnx(at_exit, SHAPES[0], folder), SHAPES[0])
