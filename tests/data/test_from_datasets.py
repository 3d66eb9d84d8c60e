"""`motley.data.from_datasets`: data sets of PyTorch, tensors and arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from motley.core.errors import MotleyError
from motley.data import Dataset, from_datasets
from motley.data.convert import Source
from motley.models.inputs import ArrayShape, ImageShape, SignalShape, TableShape, TokenShape

RNG = np.random.default_rng(0)
LABELS = torch.arange(20) % 4


class Items(TorchDataset[Any]):
    """A map-style data set over a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def refused(train: Source, test: Source | None = None, **options: Any) -> str:
    with pytest.raises(MotleyError) as caught:
        from_datasets(train, test, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "options", "shape", "dtype"),
    [
        (torch.zeros(20, 3, 8, 6), {}, ImageShape(3, 8, 6), np.float32),
        (torch.zeros(20, 8, 6, 3, dtype=torch.uint8), {}, ImageShape(3, 8, 6), np.uint8),
        (torch.zeros(20, 8, 6, dtype=torch.uint8), {}, ImageShape(1, 8, 6), np.uint8),
        (torch.zeros(20, 9, 128, dtype=torch.bfloat16), {}, SignalShape(9, 128), np.float32),
        (np.zeros((20, 5)), {}, TableShape(5), np.float32),
        (torch.zeros(20, 5, dtype=torch.int32), {"inputs": "tokens"}, TokenShape(5, 1), np.int64),
        (np.zeros((20, 2, 2, 2, 2)), {}, ArrayShape((2, 2, 2, 2)), np.float32),
    ],
)
def test_arrays_and_tensors_of_any_kind(
    inputs: Any, options: dict[str, Any], shape: object, dtype: type
) -> None:
    for source in ((inputs, LABELS), TensorDataset(torch.as_tensor(inputs), LABELS)):
        data = from_datasets(source, **options)
        assert isinstance(data, Dataset)
        assert (data.shape, data.train.inputs.dtype) == (shape, dtype)
        assert (len(data.train), len(data.test), data.classes) == (16, 4, 4)


def test_items_keep_their_order_and_their_labels() -> None:
    pixels = RNG.integers(0, 256, (20, 4, 5, 3), dtype=np.uint8)
    pairs = [(Image.fromarray(image), "ab"[i % 2]) for i, image in enumerate(pixels)]
    records = [
        {"image": image, "label": label, "who": i % 3} for i, (image, label) in enumerate(pairs)
    ]
    test = Subset(Items(pairs), [0, 1, 2])
    data = from_datasets(Items(pairs), test)
    assert np.array_equal(data.train.inputs, pixels)
    assert data.train.targets.tolist() == [0, 1] * 10 and data.class_names == ("a", "b")
    assert len(data.test) == 3 and data.train.clients is None
    for clients in ("who", lambda item: item["who"]):
        same = from_datasets(Items(records), Items(records[:2]), clients=clients)
        assert np.array_equal(same.train.inputs, pixels)
        assert same.train.clients is not None and same.test.clients is not None
        assert same.train.clients.tolist() == [i % 3 for i in range(20)]
        assert same.test.clients.tolist() == [0, 1]


def test_images_of_pillow_with_more_than_8_bits_are_refused() -> None:
    """Pillow cuts them off at 255, so the data set would be of white images."""
    pixels = np.arange(0, 64 * 1024, 1024, dtype=np.uint16).reshape(8, 8)
    for values, mode in ((pixels, "I;16"), (pixels / np.float32(65535), "F")):
        pairs = [(Image.fromarray(values), "ab"[i % 2]) for i in range(20)]
        assert refused(pairs) == (
            f"train[0]: is an image with pixels of the type '{mode}'. Scale it to 8 bits per "
            "channel, or give an array of floats."
        )


def test_clients_as_an_array_and_held_out_examples() -> None:
    inputs = torch.arange(20.0)[:, None]
    names = ["x", "y"] * 10
    data = from_datasets((inputs, LABELS), clients=names, test_fraction=0.3, seed=3)
    clients = data.test.clients
    assert clients is not None and np.bincount(clients).tolist() == [3, 3]
    everything = np.concatenate([data.train.inputs, data.test.inputs])
    assert sorted(everything[:, 0]) == list(range(20))
    again = from_datasets((inputs, LABELS), clients=names, test_fraction=0.3, seed=3)
    assert np.array_equal(again.test.inputs, data.test.inputs)
    tested = from_datasets(
        (inputs, LABELS), (inputs, LABELS), clients=torch.arange(20), test_clients=np.arange(20)
    )
    assert tested.test.clients is not None and tested.test.clients.tolist() == list(range(20))


def test_tasks_and_classes() -> None:
    inputs = torch.zeros(20, 3)
    assert from_datasets((inputs, torch.rand(20))).task == "regression"
    assert from_datasets((inputs, torch.rand(20, 2))).classes == 2
    assert from_datasets((inputs, LABELS), classes=10).classes == 10
    assert from_datasets((inputs, LABELS)).classes_inferred
    named = from_datasets((inputs, LABELS), classes=["a", "b", "c", "d"])
    assert (named.classes, named.class_names) == (4, ("a", "b", "c", "d"))
    tokens = torch.arange(60).view(20, 3)
    data = from_datasets((tokens, tokens), inputs="tokens")
    assert (data.task, data.classes) == ("next-token", 60)


def test_sizes_that_differ() -> None:
    images = [(np.zeros((4 + i, 6, 3), np.uint8), i % 2) for i in range(20)]
    message = refused(Items(images))
    assert "train[1] has the shape (5, 6, 3) and train[0] (4, 6, 3)" in message
    assert "resize" in message and "pad" in message
    assert from_datasets(images, resize=8).shape == ImageShape(3, 8, 8)
    sequences = [(torch.arange(1, 2 + i), i % 2) for i in range(20)]
    longer = [(torch.ones(30, dtype=torch.int64), 1)]
    data = from_datasets(sequences, longer, pad=True, inputs="tokens")
    assert data.shape == TokenShape(30, 21)
    assert data.train.inputs[2].tolist() == [1, 2, 3] + [0] * 27
    first = torch.rand(3, 4, 5)
    scaled = from_datasets([(first, 0), (first, 1)] * 5, resize=4).train.inputs
    assert scaled.shape[1:] == (4, 4, 3) and scaled.dtype == np.float32


class Broken(Items):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("no such file")
        return super().__getitem__(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PAIRS)


PAIRS = [(torch.zeros(2), i % 2) for i in range(10)]


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        (Broken(PAIRS), {}, "train[7]: OSError: no such file"),
        (Stream(), {}, "train: should be a Dataset with a length and items"),
        (3, {}, "not int"),
        ([], {}, "train: there are no examples"),
        ([*PAIRS, torch.zeros(2)], {}, "train[10]: an item should be (input, target)"),
        ([*PAIRS, (1, 2, 3)], {}, "not a tuple of 3"),
        ([*PAIRS, ("text", 1)], {}, "train[10] has the shape ()"),
        ([*PAIRS, (torch.zeros(2), "a")], {}, "train[10]: the target 'a' is not a number"),
        ([*PAIRS, (torch.zeros(2), [1, 2])], {}, "train[10]: the target has the shape (2,)"),
        ([(torch.zeros(2), "a"), (torch.zeros(2), 1)], {}, "train[1]: the target is 1"),
        ([{"x": 1, "z": 2}], {}, "train[0]: target_key is needed"),
        ([{"x": 1, "y": 2}], {"clients": "who"}, "clients = 'who': the item has the keys"),
        (PAIRS, {"clients": "who"}, "the item is not a dictionary"),
        (PAIRS, {"clients": [1, 2]}, "10 examples and 2 entries in clients"),
        ((torch.zeros(3, 2), torch.zeros(4)), {}, "inputs have the shape (3, 2) and targets (4,)"),
        ((torch.zeros(3, 2), torch.tensor([0, 1, -1])), {}, "train[2]: the label -1 is outside"),
        ((torch.full((20, 2), torch.nan), LABELS), {}, "example 0: the value nan"),
        ((np.array([{}] * 3), np.zeros(3)), {}, "Python objects"),
        (PAIRS, {"test_fraction": 1.5}, "test_fraction = 1.5"),
        (PAIRS, {"inputs": "sound"}, "inputs = 'sound': should be auto"),
        (TensorDataset(torch.zeros(3)), {}, "needs two tensors"),
        ((torch.zeros(20, 4), LABELS), {"resize": 3}, "resize is for images"),
        (PAIRS[:1] * 2, {"pad": True, "test_fraction": 0.1}, "leaves no example for testing"),
        (PAIRS, {"test_fraction": "half"}, "test_fraction = 'half': should be above 0 and below 1"),
        ((torch.zeros(0, 2), torch.zeros(0)), {}, "train: there are no examples in it."),
        (torch.zeros(3, 2), {}, "train: is a Tensor; a pair of arrays is given as one tuple"),
        ([torch.zeros(20, 2), LABELS], {}, "train: is a list; a pair of arrays is given as one tu"),
        (DataLoader(PAIRS), {}, "train: is a DataLoader; give its data set: loader.dataset."),  # type: ignore[arg-type]
        (PAIRS, {"classes": 0}, "classes = 0: should be the number of classes, or a list of their"),
        (PAIRS, {"classes": 2.5}, "classes = 2.5: should be"),
        (PAIRS, {"classes": "ab"}, "classes = 'ab': should be the number of classes"),
        (PAIRS, {"classes": ["a", "a"]}, "classes = ['a', 'a']: 'a' is named twice."),
        ([(torch.zeros(2), "ab"[i % 2]) for i in range(9)], {"classes": 3}, "the labels are texts"),
        ([(torch.zeros(2), i / 2) for i in range(9)], {"classes": ["a", "b"]}, "have no classes"),
        (PAIRS, {"clients": 4}, "train: clients = 4: should be a key of the items"),
        (PAIRS, {"clients": [None] * 10}, "train[0]: clients: None is the name of no client."),
        (PAIRS, {"clients": [1.0, float("nan")] * 5}, "train[1]: clients: nan is the name of no"),
        (PAIRS, {"clients": lambda item: item["who"]}, "train[0]: clients: TypeError: "),
        ((torch.zeros(20, 2), LABELS), {"clients": lambda item: {}[0]}, "clients: KeyError: 0"),
        (PAIRS, {"test_clients": [1]}, "test_clients: has no effect without `test`."),
        (PAIRS, {"resize": -1}, "resize = -1: should be the side in pixels"),
        (PAIRS, {"resize": (8, 8)}, "resize = (8, 8): should be the side in pixels"),
        (PAIRS, {"resize": 100_000}, "resize = 100000: should be the side in pixels, up to 7,000"),
        ((torch.zeros(20, 2), LABELS), {"input_key": "x"}, "train: input_key = 'x': a pair of arr"),
    ],
)
def test_bad_items_are_named(train: Any, options: dict[str, Any], message: str) -> None:
    assert message in refused(train, **options)


def test_parts_that_do_not_fit_are_refused() -> None:
    train = (torch.zeros(20, 3), LABELS)
    said = "test inputs are rows of a table, 4 numbers, and training inputs are rows of a table, 3"
    assert said in refused(train, (torch.zeros(2, 4), LABELS[:2]))
    assert "give test_clients too" in refused(train, train, clients=np.arange(20))
    names = [(torch.zeros(3), "a")]
    assert "train are numbers, and those of test are texts" in refused(train, names)
    texts = ([[0.0]] * 4, np.array(["a", "b", "a", "b"]))
    other = ([[0.0]], np.array(["c"]))
    assert "test[0]: the label 'c' of the test part" in refused(texts, other)
