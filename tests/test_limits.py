"""Settings that need too much memory, and data sets, models and files of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from motley.cli.plan import costs_in
from motley.core.errors import MotleyError
from motley.data import Dataset, Examples, Partition
from motley.federation import Federation
from motley.limits import allocating, check_fits, is_out_of_memory, memory_of
from motley.models import MODELS, ImageShape, ModelSpec
from tests.conftest import tiny_config

CPU = torch.device("cpu")


# --- too large


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "training.batch_size=1000000000000",
            r"training\.batch_size = 1000000000000.*one batch of 1x8x8 inputs takes",
        ),
        (
            "data.transform.resize=1000000",
            r"data\.transform\.resize = 1000000: one batch of 1x1000000x1000000 inputs takes",
        ),
        (
            "federation.clients=1000000000000",
            r"federation\.clients = 1000000000000: should be 1 to 1438",
        ),
        ("model.resnet.width=1e9", r"model\.sizes: 'resnet10': there is not enough memory"),
        (
            "model.resnet.width=10000",
            r"model\.sizes: three copies of the weights of 'resnet10' .* takes? [\d,.]+ GB",
        ),
        ("model.projection=100000000000", r"model\.sizes: .* 'resnet10'"),
        (
            "data.transform.crop_padding=1000000000",
            r"1438 images .* data\.transform\.crop_padding = 1000000000: there is",
        ),
        (
            "training.epochs=1e13",
            r"round 1: training with batches of 32: there is not enough memory",
        ),
    ],
)
def test_a_setting_that_needs_too_much_memory_is_named(override: str, said: str) -> None:
    with pytest.raises(MotleyError, match=said):
        federation = Federation(tiny_config(override))
        federation.run_round(federation.initial_state())


def test_a_plan_that_is_too_large_is_rejected() -> None:
    with pytest.raises(
        MotleyError,
        match=r"'resnet10' with training\.batch_size = 100000000000000000: there is not",
    ):
        costs_in(tiny_config("training.batch_size=100000000000000000"))


def test_only_failed_allocations_are_turned_into_messages() -> None:
    with (
        pytest.raises(
            MotleyError, match=r"a big array: there is not enough memory for this \(.*\)\."
        ),
        allocating("a big array"),
    ):
        np.zeros(2**60, np.uint8)
    with (
        pytest.raises(MotleyError, match="a big tensor: there is not enough memory"),
        allocating("a big tensor"),
    ):
        torch.zeros(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes"), allocating("a product"):
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert is_out_of_memory(
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    )
    assert not is_out_of_memory(ValueError("out of memory"))


def test_sizes_that_fit_are_accepted() -> None:
    memory = memory_of(CPU)
    assert memory is not None and memory > 2**28
    check_fits("half of it", memory // 2, CPU)
    with pytest.raises(
        MotleyError, match=r"twice takes [\d,.]+ GB; this machine has [\d,.]+ GB of memory\."
    ):
        check_fits("twice", 2 * memory, CPU)


# --- the caller's own data


class TorchDataset(torch.utils.data.Dataset[int]):
    """A data set of another library."""

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("dataset", [TorchDataset(), [1, 2], (np.zeros(3), np.zeros(3))])
def test_a_data_set_of_another_library_is_refused_with_what_is_expected(dataset: Any) -> None:
    with pytest.raises(MotleyError) as raised:
        Federation(tiny_config(), dataset=dataset)
    message = str(raised.value)
    assert message.startswith("dataset: a motley.data.Dataset is expected, not a ")
    assert type(dataset).__qualname__ in message and "Examples(images, labels)" in message


def test_a_partition_of_another_kind_is_refused_with_what_is_expected() -> None:
    with pytest.raises(
        MotleyError, match=r"partition: a motley\.data\.Partition is expected, not a list\."
    ):
        Federation(tiny_config(), partition=[[0, 1], [2, 3]])  # type: ignore[arg-type]
    owners = np.arange(1437) % 6
    assert len(Federation(tiny_config(), partition=Partition.from_owners(owners, 6)).partition) == 6


# --- the caller's own models


class Mine(nn.Module):
    """A small model that can be wrong in several ways."""

    def __init__(self, image: ImageShape, classes: int, wrong: str) -> None:
        super().__init__()
        pixels = image.channels * image.height * image.width
        if wrong == "unbuildable":
            raise ValueError("no such width")
        self.wrong = wrong
        self.layer = (
            nn.LazyLinear(classes)
            if wrong == "lazy"
            else nn.Linear(pixels, classes - (wrong == "few"))
        )

    def forward(self, images: Tensor) -> Any:
        if self.wrong == "raises":
            raise KeyError("no such thing")
        logits = self.layer(images.flatten(1))
        if self.wrong == "aux" and self.training:
            return logits, logits
        return {"tuple": (logits,), "classes": logits.argmax(1), "integers": logits.long()}.get(
            self.wrong, logits
        )


@contextmanager
def registered(build: Callable[[Any, ImageShape, int], nn.Module]) -> Iterator[str]:
    """Register a model for one test; its family is that of the perceptrons, whose settings it is given."""
    MODELS.register("mine", "a toy")(ModelSpec(build, "mlp"))
    try:
        yield "mine"
    finally:
        del MODELS._entries["mine"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "tuple",
            r"'mine' returns a tuple; a model returns one row of 10 logits per example\.",
        ),
        ("aux", "'mine' returns a tuple"),
        ("few", r"'mine' returns shape \(2, 9\) for 2 examples; .* 10 logits"),
        ("classes", r"'mine' returns shape \(2,\) for 2 examples"),
        ("integers", r"'mine' returns torch\.int64"),
        (
            "raises",
            r"'mine' cannot be fed a batch of shape \(2, 1, 8, 8\): KeyError: 'no such thing'",
        ),
        ("lazy", r"'mine' has a lazy layer, whose 'layer\.weight' has no shape yet\."),
        ("unbuildable", r"'mine' cannot be built: ValueError: no such width"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_its_name(wrong: str, said: str) -> None:
    with (
        registered(lambda settings, image, classes: Mine(image, classes, wrong)) as name,
        pytest.raises(MotleyError, match=rf"^model\.sizes: {said}"),
    ):
        Federation(tiny_config(f"model.sizes=['{name}']"))


def with_computed_width(settings: Any, image: ImageShape, classes: int) -> nn.Module:
    """Build a model that computes a width with tensors, as the RegNets of torchvision do."""
    width = int(torch.full((), 4.0).mul(2).item())
    pixels = image.channels * image.height * image.width
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, classes)
    )


@pytest.mark.parametrize("split", ["depth", "width"])
def test_a_model_may_compute_its_widths_with_tensors(split: str) -> None:
    """There are no values on torch's meta device, so it is built in memory first."""
    settings = (f"split.name={split}", "federation.clients=5", "federation.clients_per_round=1")
    with registered(with_computed_width) as name:
        config = tiny_config(f"model.sizes=['{name}']", *settings)
        federation = Federation(config)
        federation.run_round(federation.initial_state())
        assert costs_in(config)


@pytest.mark.parametrize(
    ("wrong", "said"), [("tuple", "returns a tuple"), ("raises", "cannot be counted.*KeyError")]
)
def test_a_plan_names_a_model_that_cannot_be_counted(wrong: str, said: str) -> None:
    with (
        registered(lambda settings, image, classes: Mine(image, classes, wrong)) as name,
        pytest.raises(MotleyError, match=rf"^model\.sizes: 'mine' {said}"),
    ):
        costs_in(tiny_config(f"model.sizes=['{name}']"))


def test_something_that_is_no_model_is_refused() -> None:
    with (
        registered(lambda settings, image, classes: "a model") as name,  # type: ignore[arg-type, return-value]
        pytest.raises(MotleyError, match=r"'mine' is built as a str, not as a torch\.nn\.Module"),
    ):
        Federation(tiny_config(f"model.sizes=['{name}']"))


def test_a_model_of_the_callers_own_is_trained_and_the_try_leaves_no_trace() -> None:
    with registered(lambda settings, image, classes: Mine(image, classes, "")) as name:
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        federation = Federation(tiny_config(f"model.sizes=['{name}']"))
        assert torch.equal(torch.rand(1), expected)
        _, record = federation.run_round(federation.initial_state())
        assert set(record.scores) == {"mine"} and not record.refused


# --- weights


def test_a_file_of_weights_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    contents = {
        b"": "header too small",
        b"hello": "header too small",
        b"\xff" * 100: "header too large",
    }
    for content, reason in contents.items():
        file.write_bytes(content)
        with pytest.raises(
            MotleyError, match=rf"model\.weights = '.*': is not a safetensors file: .*{reason}"
        ):
            Federation(tiny_config(f"model.weights={file}")).initial_state()
    with pytest.raises(MotleyError, match=r"model\.weights = '.*': cannot be read"):
        Federation(tiny_config(f"model.weights={tmp_path}")).initial_state()
    save_file({"other": torch.zeros(1)}, file)
    with pytest.raises(MotleyError, match="has no tensor that fits"):
        Federation(tiny_config(f"model.weights={file}")).initial_state()


def test_a_data_set_from_arrays_still_works() -> None:
    numbers = np.random.default_rng(0)
    images = numbers.integers(0, 256, (60, 8, 8, 1), dtype=np.uint8)
    part = Examples(images, np.arange(60) % 10)
    assert Federation(tiny_config(), dataset=Dataset("mine", part, part, 10)).dataset.name == "mine"
