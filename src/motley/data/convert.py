"""Data sets from PyTorch's `Dataset`s, tensors and arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.data.arrays import shaped_inputs, to_numpy
from motley.data.assemble import Records, assemble
from motley.data.dataset import Dataset
from motley.data.files.columns import common_shape
from motley.limits import check_fits
from motley.models.inputs import InputShape, TokenShape

INPUT_KEYS = ("inputs", "input", "image", "img", "x", "features", "pixel_values", "input_ids")
TARGET_KEYS = ("targets", "target", "label", "labels", "y", "class")

#: The largest side to which images are scaled, so that an image has at most 50,000,000 pixels.
MAX_SIDE = 7_000

#: A map-style Dataset, a pair (inputs, targets) of arrays or tensors, or a list of items.
Source: TypeAlias = Any
#: A key of the items, one name per example, or a function of an item.
Clients: TypeAlias = str | Sequence[Any] | np.ndarray | Callable[[Any], Any] | None


def from_datasets(
    train: Source,
    test: Source | None = None,
    *,
    clients: Clients = None,
    test_clients: Clients = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    task: str = "auto",
    inputs: str = "auto",
    classes: int | Sequence[str] | None = None,
    input_key: str = "",
    target_key: str = "",
    resize: int = 0,
    pad: bool = False,
    name: str = "own",
) -> Dataset:
    """Return a data set from PyTorch's data sets, tensors or arrays.

    All examples are copied to memory. Transforms of a Dataset are applied once, so random
    augmentation belongs to `data.transform` instead.

    Args:
        train: A map-style `Dataset` or a list, whose items are (input, target) or dictionaries, a
            `TensorDataset`, or a tuple (inputs, targets) of arrays or tensors.
        test: The test part in any of these forms, or None.
        clients: The natural client of each example: a key of the items, one name or number per
            example, or a function of an item.
        test_clients: The same for `test`, if it differs; needed if `clients` is a list.
        test_fraction: Without `test`, this fraction of every client is held out, or of every class
            if there are no clients.
        seed: Draws the held-out examples.
        task: A name of `motley.tasks`; auto: regression for floats, classification for whole
            numbers and texts, next-token for tokens with one target per token.
        inputs: image, signal, tokens, table or array; auto: by shape and type (`shaped_inputs`).
        classes: Their number, or their names in the order of their numbers; None: those that occur.
        input_key: The key of the inputs, if items are dictionaries; empty: a usual name.
        target_key: The key of the targets.
        resize: The side in pixels to which images are scaled; 0: they keep their size.
        pad: Fill inputs of different sizes with zeros at the end, to the largest size.
        name: The data set's name in messages.
    """
    if not isinstance(test_fraction, Real) or not 0 < test_fraction < 1:
        raise MotleyError(f"test_fraction = {test_fraction!r}: should be above 0 and below 1.")
    if not _is_whole(resize) or not 0 <= resize <= MAX_SIDE:
        raise MotleyError(
            f"resize = {resize!r}: should be the side in pixels, up to {MAX_SIDE:,}, or 0."
        )
    if test is None and test_clients is not None:
        raise MotleyError("test_clients: has no effect without `test`.")
    names, outputs = _named_classes(classes)
    keys = (input_key, target_key)
    parts = [_collect(train, "train", keys, clients, resize)]
    if test is not None:
        clients_of_test = _clients_of_test(clients, test_clients)
        parts.append(_collect(test, "test", keys, clients_of_test, resize))
    # Both parts together, because padding is to the largest input of either.
    arrays = _stack(parts, pad)
    train_inputs, shape = shaped_inputs(arrays[0], inputs, "train")
    train_records = parts[0].records(train_inputs)
    test_records = None
    if test is not None:
        test_inputs, test_shape = shaped_inputs(arrays[1], inputs, "test")
        shape = common_shape(shape, test_shape, "test")
        test_records = parts[1].records(test_inputs)
    if task == "auto":
        task = _task_of(parts[0].targets, shape)
    if names and task == "regression":
        raise MotleyError(
            f"classes = {list(names)}: the targets are numbers (task = 'regression'), which have "
            "no classes. Classes are whole numbers or texts."
        )
    are_texts = not isinstance(parts[0].targets, np.ndarray)
    if outputs and are_texts:
        raise MotleyError(
            f"classes = {outputs}: the labels are texts; give all their names instead, or None."
        )
    if test is not None:
        _check_same_kind(parts[0], parts[1])
    return assemble(
        name,
        train_records,
        test_records,
        shape,
        task=task,
        classes=names,
        outputs=outputs,
        test_fraction=test_fraction,
        test_seed=seed,
    ).dataset


def _named_classes(classes: Any) -> tuple[tuple[str, ...], int]:
    """Return the names of the classes, if they were given, and else their number, or 0."""
    if classes is None:
        return (), 0
    if _is_whole(classes) and classes > 0:
        return (), int(classes)
    is_sequence = isinstance(classes, Sequence | np.ndarray) and not isinstance(classes, str)
    if not is_sequence or not all(isinstance(name, str) for name in classes) or not len(classes):
        raise MotleyError(
            f"classes = {classes!r}: should be the number of classes, or a list of their names."
        )
    names = tuple(map(str, classes))
    for name in names:
        if names.count(name) > 1:
            raise MotleyError(f"classes = {list(names)}: {name!r} is named twice.")
    return names, 0


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_same_kind(train: _Part, test: _Part) -> None:
    """Refuse labels that are texts in one part and numbers in the other."""
    kinds = []
    for part in (train, test):
        kinds.append("numbers" if isinstance(part.targets, np.ndarray) else "texts")
    if kinds[0] != kinds[1]:
        raise MotleyError(
            f"the targets of train are {kinds[0]}, and those of test are {kinds[1]}. Both parts "
            "need targets of one kind."
        )


def _clients_of_test(clients: Clients, test_clients: Clients) -> Clients:
    """Return how to find the clients of the test part."""
    if test_clients is not None or clients is None:
        return test_clients
    if isinstance(clients, str) or callable(clients):
        return clients
    raise MotleyError("clients has one name per training example; give test_clients too.")


def _task_of(targets: Sequence[str] | np.ndarray, shape: InputShape) -> str:
    if not isinstance(targets, np.ndarray):
        return "classification"
    if targets.dtype.kind == "f":
        return "regression"
    if isinstance(shape, TokenShape) and targets.ndim == 2:
        return "next-token"
    return "classification"


# ---- examples of one part


@dataclass(frozen=True, eq=False)
class _Part:
    """The examples of `train` or `test`, before their inputs are one array."""

    name: str
    #: One array for all, or one array per example.
    inputs: np.ndarray | list[np.ndarray]
    targets: Sequence[str] | np.ndarray
    clients: list[str] | None

    def records(self, inputs: np.ndarray) -> Records:
        return Records(inputs, self.targets, self.clients, lambda row: f"{self.name}[{row}]")


def _collect(
    source: Source, part: str, keys: tuple[str, str], clients: Clients, resize: int
) -> _Part:
    """Read all examples of a source."""
    if isinstance(source, TensorDataset):
        if len(source.tensors) != 2:
            raise MotleyError(
                f"{part}: a TensorDataset needs two tensors, inputs and targets, "
                f"not {len(source.tensors)}."
            )
        source = source.tensors
    if isinstance(source, tuple):
        return _pair(source, part, keys, clients, resize)
    if isinstance(source, DataLoader):
        raise MotleyError(f"{part}: is a DataLoader; give its data set: loader.dataset.")
    is_array = isinstance(source, np.ndarray | torch.Tensor)
    is_list_of_arrays = isinstance(source, list) and len(source) == 2 and _are_rows(*source)
    if is_array or is_list_of_arrays:
        raise MotleyError(
            f"{part}: is {describe(source)}; a pair of arrays is given as one tuple: "
            "(inputs, targets)."
        )
    is_map_style = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if isinstance(source, IterableDataset | Mapping | str) or not is_map_style:
        raise MotleyError(
            f"{part}: should be a Dataset with a length and items, a list of items, or a pair "
            f"(inputs, targets), not {type(source).__name__}."
        )
    return _items(source, part, keys, clients, resize)


def _are_rows(inputs: Any, targets: Any) -> bool:
    """Tell whether these are inputs and targets of many examples, rather than two items."""
    arrays = np.ndarray | torch.Tensor
    if not isinstance(inputs, arrays) or not isinstance(targets, arrays):
        return False
    return inputs.ndim > 0 and targets.ndim > 0 and len(inputs) == len(targets)


def _pair(
    pair: tuple[Any, ...], part: str, keys: tuple[str, str], clients: Clients, resize: int
) -> _Part:
    if len(pair) != 2:
        raise MotleyError(f"{part}: a tuple should be (inputs, targets), not of {len(pair)}.")
    inputs = _as_array(pair[0], f"{part}: inputs")
    targets = _as_array(pair[1], f"{part}: targets")
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise MotleyError(
            f"{part}: inputs have the shape {inputs.shape} and targets {targets.shape}; both need "
            "one row per example."
        )
    if not len(inputs):
        raise MotleyError(f"{part}: there are no examples in it.")
    if isinstance(clients, str):
        raise MotleyError(f"{part}: clients = {clients!r}: a pair of arrays has no keys.")
    for argument, key in zip(("input_key", "target_key"), keys, strict=True):
        if key:
            raise MotleyError(f"{part}: {argument} = {key!r}: a pair of arrays has no keys.")
    names = None
    if callable(clients):
        names = []
        for row, item in enumerate(zip(inputs, targets, strict=True)):
            names.append(_client_of(clients, item, f"{part}[{row}]"))
    elif clients is not None:
        names = _names(clients, len(inputs), part)
    if resize:
        images = [_resized(image, resize, f"{part}[{row}]") for row, image in enumerate(inputs)]
        return _Part(part, images, _targets(list(targets), part), names)
    return _Part(part, inputs, _targets(list(targets), part), names)


def _items(source: Any, part: str, keys: tuple[str, str], clients: Clients, resize: int) -> _Part:
    """Read a map-style data set item by item."""
    count = len(source)
    if not count:
        raise MotleyError(f"{part}: there are no examples in it.")
    inputs: list[np.ndarray] = []
    targets: list[Any] = []
    names: list[str] = []
    for row in range(count):
        where = f"{part}[{row}]"
        try:
            item = source[row]
        except Exception as error:
            # The user's own code: whatever it raises, the index helps to find the reason.
            raise MotleyError(f"{where}: {type(error).__name__}: {error}") from error
        value, target = _input_and_target(item, keys, where)
        array = _as_array(value, where)
        inputs.append(_resized(array, resize, where) if resize else array)
        targets.append(target)
        if row == 0:
            # The other inputs are taken to be as large as the first one.
            all_inputs = f"{part}: {count} examples of shape {array.shape}"
            check_fits(all_inputs, count * array.nbytes, torch.device("cpu"))
        if isinstance(clients, str):
            names.append(_client_name(_value(item, clients, where, "clients"), where))
        elif callable(clients):
            names.append(_client_of(clients, item, where))
    if clients is None:
        return _Part(part, inputs, _targets(targets, part), None)
    if not isinstance(clients, str) and not callable(clients):
        names = _names(clients, count, part)
    return _Part(part, inputs, _targets(targets, part), names)


def _input_and_target(item: Any, keys: tuple[str, str], where: str) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        input_key = keys[0] or _usual_key(item, INPUT_KEYS, where, "input_key")
        target_key = keys[1] or _usual_key(item, TARGET_KEYS, where, "target_key")
        value = _value(item, input_key, where, "input_key")
        return value, _value(item, target_key, where, "target_key")
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise MotleyError(
        f"{where}: an item should be (input, target) or a dictionary, not {_described(item)}."
    )


def _described(item: Any) -> str:
    if isinstance(item, tuple | list):
        return f"a {type(item).__name__} of {len(item)}"
    return type(item).__name__


def _usual_key(item: Mapping[str, Any], usual: Sequence[str], where: str, argument: str) -> str:
    present = [key for key in usual if key in item]
    if len(present) != 1:
        raise MotleyError(
            f"{where}: {argument} is needed: which of the keys {', '.join(map(repr, item))} is it?"
        )
    return present[0]


def _value(item: Any, key: str, where: str, argument: str) -> Any:
    if not isinstance(item, Mapping):
        raise MotleyError(f"{where}: {argument} = {key!r}: the item is not a dictionary.")
    if key not in item:
        raise MotleyError(
            f"{where}: {argument} = {key!r}: the item has the keys {', '.join(map(repr, item))}."
        )
    return item[key]


def _as_array(value: Any, where: str) -> np.ndarray:
    """Return an input as an array. Images of Pillow with a palette become colours."""
    mode = getattr(value, "mode", None)
    if isinstance(mode, str) and hasattr(value, "convert") and mode not in ("L", "RGB"):
        # Pillow would cut 16-bit values off at 255. These modes are I, I;16, I;16B and F.
        if mode.startswith(("I", "F")):
            raise MotleyError(
                f"{where}: is an image with pixels of the type {mode!r}. Scale it to 8 bits per "
                "channel, or give an array of floats."
            )
        value = value.convert("RGB")
    try:
        array = to_numpy(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise MotleyError(
            f"{where}: cannot be made an array of numbers: {str(error).rstrip('.')}."
        ) from None
    if array.dtype == object:
        raise MotleyError(f"{where}: is not an array of numbers but of Python objects.")
    return array


def _client_of(clients: Callable[[Any], Any], item: Any, where: str) -> str:
    """Return the client of an item by the user's function."""
    try:
        name = clients(item)
    except Exception as error:
        # The user's own code: whatever it raises, the index helps to find the reason.
        raise MotleyError(f"{where}: clients: {type(error).__name__}: {error}") from error
    return _client_name(name, where)


def _client_name(value: Any, where: str) -> str:
    """Return a client's name. A missing one is no client called None or nan."""
    is_missing = value is None or (isinstance(value, float) and math.isnan(value))
    if is_missing:
        raise MotleyError(f"{where}: clients: {value!r} is the name of no client.")
    return str(value)


def _names(clients: Any, count: int, part: str) -> list[str]:
    if not isinstance(clients, Iterable):
        raise MotleyError(
            f"{part}: clients = {clients!r}: should be a key of the items, one name per example, "
            "or a function of an item."
        )
    values = to_numpy(clients).tolist() if isinstance(clients, torch.Tensor) else list(clients)
    if len(values) != count:
        raise MotleyError(
            f"{part}: there are {count} examples and {len(values)} entries in clients."
        )
    return [_client_name(value, f"{part}[{row}]") for row, value in enumerate(values)]


def _targets(values: list[Any], part: str) -> Sequence[str] | np.ndarray:
    """Return texts as a list and numbers as an array."""
    if isinstance(values[0], str):
        for row, value in enumerate(values):
            if not isinstance(value, str):
                raise MotleyError(
                    f"{part}[{row}]: the target is {value!r}, and the target of {part}[0] is the "
                    f"text {values[0]!r}."
                )
        return [str(value) for value in values]
    arrays = [_as_array(value, f"{part}[{row}]: the target") for row, value in enumerate(values)]
    for row, array in enumerate(arrays):
        if array.dtype.kind not in "biuf":
            raise MotleyError(f"{part}[{row}]: the target {values[row]!r} is not a number.")
        if array.shape != arrays[0].shape:
            raise MotleyError(
                f"{part}[{row}]: the target has the shape {array.shape}, and the target of "
                f"{part}[0] has {arrays[0].shape}."
            )
    return np.stack(arrays)


# ---- inputs of one shape


def _resized(image: np.ndarray, side: int, where: str) -> np.ndarray:
    """Return an image with `side` pixels on each side."""
    first_may_be_channels = image.ndim == 3 and image.shape[0] in (1, 3, 4)
    channels_first = first_may_be_channels and image.shape[2] not in (1, 3, 4)
    if image.ndim == 2:
        image = image[..., np.newaxis]
    if image.ndim != 3 or image.dtype.kind not in "uf" or not image.size:
        raise MotleyError(
            f"{where}: resize is for images of bytes or floats, not for {image.dtype} of shape "
            f"{image.shape}."
        )
    pixels = torch.from_numpy(np.ascontiguousarray(image)).float()
    pixels = pixels if channels_first else pixels.permute(2, 0, 1)
    shrinks = side < max(pixels.shape[1:])
    scaled = F.interpolate(pixels[None], size=(side, side), mode="bilinear", antialias=shrinks)[0]
    if image.dtype == np.uint8:
        scaled = scaled.round().clamp(0, 255).to(torch.uint8)
    return scaled.permute(1, 2, 0).numpy()


def _stack(parts: list[_Part], pad: bool) -> list[np.ndarray]:
    """Return the inputs of each part as one array."""
    if not pad:
        return [_stacked(part) for part in parts]
    shapes = []
    for part in parts:
        shapes += [array.shape for array in part.inputs]
    ranks = {len(shape) for shape in shapes}
    if len(ranks) > 1:
        raise MotleyError(f"pad: inputs have {' and '.join(map(str, sorted(ranks)))} dimensions.")
    largest = tuple(np.max(shapes, axis=0).tolist())
    return [_padded(part, largest) for part in parts]


def _stacked(part: _Part) -> np.ndarray:
    if isinstance(part.inputs, np.ndarray):
        return part.inputs
    first = part.inputs[0]
    for row, array in enumerate(part.inputs):
        if array.shape != first.shape:
            raise MotleyError(
                f"{part.name}[{row}] has the shape {array.shape} and {part.name}[0] {first.shape}. "
                "Scale images with resize, or fill other inputs with pad=True."
            )
    return np.stack(part.inputs)


def _padded(part: _Part, shape: tuple[int, ...]) -> np.ndarray:
    """Return inputs with zeros at their ends."""
    dtype = np.result_type(*{array.dtype for array in part.inputs})
    count = len(part.inputs)
    needed = count * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    check_fits(f"{part.name}: {count} examples padded to {shape}", needed, torch.device("cpu"))
    result = np.zeros((count, *shape), dtype=dtype)
    for row, array in enumerate(part.inputs):
        place = tuple(slice(length) for length in array.shape)
        result[row][place] = array
    return result
