"""Inputs that are not images: signals, tokens, tables and arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.data import Dataset
from motley.data.dataset import Examples
from motley.data.device import device_data
from motley.data.transforms import TransformSettings
from motley.federation import Federation
from motley.models import (
    MODELS,
    ArrayShape,
    ImageShape,
    InputShape,
    ModelSpec,
    SignalShape,
    TableShape,
    TokenShape,
)
from motley.models.inputs import (
    dims_of,
    example_inputs,
    expect,
    input_dtype,
    shape_from_json,
    shape_to_json,
)
from tests.conftest import tiny_config

CPU = torch.device("cpu")
SHAPES: list[InputShape] = [
    SignalShape(3, 8),
    TokenShape(6, 11),
    TableShape(2, (3, 5)),
    ArrayShape((2, 3, 4)),
]


def random_examples(shape: InputShape, count: int = 40, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    inputs: np.ndarray
    if isinstance(shape, TokenShape):
        inputs = rng.integers(0, shape.vocabulary, (count, shape.length)).astype(np.uint8)
    else:
        inputs = rng.random((count, *dims_of(shape)), dtype=np.float32)
    if isinstance(shape, TableShape):
        for column, categories in enumerate(shape.categories):
            inputs[:, shape.numbers + column] = rng.integers(0, categories, count)
    return Examples(inputs, rng.integers(0, 4, count), input_shape=shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_are_the_stored_rows(shape: InputShape) -> None:
    examples = random_examples(shape)
    data = device_data(examples, TransformSettings(), CPU, augment=True)
    rows = torch.tensor([3, 0, 7])
    inputs, targets = data.batch(rows)
    assert inputs.dtype == input_dtype(shape, torch.float32)
    assert np.array_equal(inputs.numpy(), examples.inputs[[3, 0, 7]])
    assert targets.tolist() == examples.targets[[3, 0, 7]].tolist()
    assert not data.random and example_inputs(shape, 3).shape == inputs.shape


def test_tokens_and_tables_are_not_rounded_to_16_bits() -> None:
    assert input_dtype(TokenShape(4, 50_000), torch.float16) == torch.int64
    assert input_dtype(TableShape(1, (50_000,)), torch.bfloat16) == torch.float32
    assert input_dtype(SignalShape(1, 4), torch.float16) == torch.float16


@pytest.mark.parametrize("shape", [*SHAPES, ImageShape(3, 4, 5)])
def test_shapes_survive_a_message(shape: InputShape) -> None:
    assert shape_from_json(shape_to_json(shape)) == shape
    with pytest.raises(MotleyError, match="input kind 'videos'"):
        shape_from_json('{"kind": "videos", "values": [1]}')


def test_a_model_for_images_rejects_tokens() -> None:
    assert expect(TokenShape(4, 9), TokenShape, "lstm2") == (4, 9)
    with pytest.raises(MotleyError, match="'lstm2' takes token sequences, and the data set has im"):
        expect(ImageShape(1, 4, 4), TokenShape, "lstm2")


@pytest.mark.parametrize(
    ("inputs", "shape", "message"),
    [
        (np.zeros((2, 4), np.float32), TokenShape(4, 9), "must be integers"),
        (np.zeros((2, 4), np.float64), TableShape(4), "must be float32"),
        (np.zeros((2, 4), np.float32), SignalShape(1, 4), r"shape \(N, 1, 4\)"),
        (np.zeros((2, 4, 5, 3), np.uint8), ImageShape(3, 5, 4), "do not have"),
    ],
)
def test_inputs_that_do_not_fit_their_shape(
    inputs: np.ndarray, shape: InputShape, message: str
) -> None:
    with pytest.raises(MotleyError, match=message):
        Examples(inputs, np.zeros(2, np.int64), input_shape=shape)


def test_float_images_are_used_as_0_to_1() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 1), dtype=np.uint8)
    targets = np.zeros(2, np.int64)
    transform = TransformSettings(mean=(0.5,), std=(0.25,))
    rows = torch.arange(2)
    batches = []
    for stored in (pixels, (pixels / 255).astype(np.float32)):
        data = device_data(Examples(stored, targets), transform, CPU, augment=False)
        batches.append(data.batch(rows)[0])
    assert torch.allclose(*batches, atol=1e-6)


def test_transforms_are_for_images() -> None:
    with pytest.raises(MotleyError, match=r"flip = True: the data set has signals"):
        device_data(
            random_examples(SignalShape(3, 8)), TransformSettings(flip=True), CPU, augment=True
        )


def test_labels_of_a_classification_are_numbers() -> None:
    examples = Examples(np.zeros((2, 3), np.float32), np.zeros(2, np.float32), None, TableShape(3))
    with pytest.raises(MotleyError, match="labels must be int64"):
        Dataset("mine", examples, examples, 4)


class Flat(nn.Module):
    """A model for any input: flattened, or embedded and averaged."""

    def __init__(self, shape: InputShape, classes: int) -> None:
        super().__init__()
        tokens = isinstance(shape, TokenShape)
        self.embed = nn.Embedding(shape.vocabulary, 5) if isinstance(shape, TokenShape) else None
        width = 5 if tokens else int(np.prod(dims_of(shape)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = x.flatten(1) if self.embed is None else self.embed(x).mean(1)
        logits: Tensor = self.head(features)
        return logits


@contextmanager
def flat_model() -> Iterator[None]:
    spec = ModelSpec(lambda settings, shape, classes: Flat(shape, classes), family="mlp")
    MODELS.register("flat", "a test")(spec)
    try:
        yield
    finally:
        del MODELS._entries["flat"]


@pytest.mark.parametrize("shape", SHAPES)
def test_both_engines_train_on_any_input(shape: InputShape) -> None:
    dataset = Dataset("mine", random_examples(shape), random_examples(shape, seed=1), 4)
    states: list[dict[str, Any]] = []
    with flat_model():
        for engine in ("debug", "local"):
            config = tiny_config(
                "model.sizes=[flat]", "data.transform.resize=0", f"engine.name={engine}"
            )
            federation = Federation(config, dataset=dataset)
            server = federation.initial_state()
            for _ in range(2):
                server, _ = federation.run_round(server)
            states.append({**server.state})
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["head.bias"], torch.zeros(4))


def test_images_of_both_parts_have_the_same_type() -> None:
    """Bytes are divided by 255 and floats are not, so the test pixels would be 255 times larger."""
    pixels = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)
    labels = np.array([0, 1])
    train, test = Examples(pixels, labels), Examples(pixels.astype(np.float32), labels)
    with pytest.raises(MotleyError, match="train images are of the type uint8 but test images"):
        Dataset("mine", train, test, 2)
