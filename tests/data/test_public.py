"""Public images: where they come from, that no client has them, and which settings are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from motley.core.errors import MotleyError
from motley.data import load_dataset
from motley.data.dataset import DATASETS, Dataset, DataSource, Examples
from motley.data.partition import Partition
from motley.data.public import NoiseSettings, PublicData, fit_images, public_images
from motley.federation import Federation
from motley.methods import METHODS, Method, Requirements
from tests.conftest import tiny_config

MLP = ("model.sizes=['mlp1','mlp2']", "model.mlp.hidden=8")
TRAIN = load_dataset("digits").train


class Distiller(Method):
    """A method that needs public images, at the server and at the clients."""

    requirements = Requirements(public_data=True, client_public_data=True)


@pytest.fixture(autouse=True)
def distiller() -> Iterator[None]:
    """Register the toy method for one test."""
    METHODS.register("distiller", "a toy")(Distiller)
    yield
    del METHODS._entries["distiller"]


def federation_of(*overrides: str, partition: Partition | None = None) -> Federation:
    config = tiny_config(*MLP, "method.name=distiller", *overrides)
    return Federation(config, partition=partition)


def public_of(federation: Federation) -> PublicData:
    public = federation.method.info.public
    assert public is not None and federation.method.client.info.public is public
    return public


# ---- held-out examples


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "shards"])
def test_held_out_and_clients_rows_are_disjoint_and_together_everything(partition: str) -> None:
    chosen = ("public.name=held-out", "public.samples=137", f"data.partition.name={partition}")
    federation = federation_of(*chosen)
    public = public_of(federation).raw
    held_out = find_rows(public, TRAIN.inputs)
    clients = federation.partition.indices
    assert len(held_out) == 137
    assert len(np.unique(clients)) == len(clients)
    assert not set(held_out) & set(clients.tolist())
    assert set(held_out) | set(clients.tolist()) == set(range(len(TRAIN)))


def find_rows(images: np.ndarray, among: np.ndarray) -> list[int]:
    """Return the row of every image; the digits have no two equal images."""
    row_of = {image.tobytes(): row for row, image in enumerate(among)}
    assert len(row_of) == len(among)
    return [row_of[image.tobytes()] for image in images]


def test_the_seed_decides_which_examples_are_held_out() -> None:
    held_out = ("public.name=held-out", "public.samples=50")
    first, again, other = (
        public_of(federation_of(*held_out, f"seed={seed}")).raw for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_with_a_given_partition_examples_of_nobody_are_held_out() -> None:
    owners = np.arange(len(TRAIN) - 60, dtype=np.int64) % 6
    given = Partition.from_owners(owners, 6)
    federation = federation_of("public.name=held-out", "public.samples=40", partition=given)
    rows = find_rows(public_of(federation).raw, TRAIN.inputs)
    assert min(rows) >= len(TRAIN) - 60
    with pytest.raises(MotleyError, match=r"public.samples = 61: .* leaves only 60 of 1438 "):
        federation_of("public.name=held-out", "public.samples=61", partition=given)


def test_index_lists_in_a_file_keep_their_meaning(tmp_path: Path) -> None:
    lists = tmp_path / "lists.npz"
    rows = np.arange(len(TRAIN) - 100)
    np.savez(lists, *[rows[client::6] for client in range(6)])
    source = ("data.partition.name=file", f"data.partition.path={lists}")
    federation = federation_of("public.name=held-out", "public.samples=100", *source)
    held_out = find_rows(public_of(federation).raw, TRAIN.inputs)
    assert held_out == list(range(len(TRAIN) - 100, len(TRAIN)))
    assert np.array_equal(np.sort(federation.partition.indices), rows)


# ---- other sources


def test_noise_is_drawn_by_the_seed_in_the_clients_shape() -> None:
    first, again = (
        public_of(federation_of("public.name=noise", "public.samples=30")).raw for _ in range(2)
    )
    assert first.shape == (30, 8, 8, 1) and np.array_equal(first, again)
    assert first.min() < 10 and first.max() > 245


def test_images_are_normalized_as_the_clients_are() -> None:
    transform = ("data.transform.mean=[0.5]", "data.transform.std=[0.25]")
    public = public_of(federation_of("public.name=noise", "public.samples=30", *transform))
    images = public.images(torch.tensor([3, 7]))
    expected = (public.raw[[3, 7]].transpose(0, 3, 1, 2) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-5)


@pytest.fixture
def colours() -> Iterator[Examples]:
    """Register a data set of other images, larger and coloured, for one test."""
    images = np.random.default_rng(3).integers(0, 256, (50, 16, 16, 3), dtype=np.uint8)
    examples = Examples(images, np.zeros(50, dtype=np.int64))

    def load(source: DataSource) -> Dataset:
        return Dataset("colours", examples, examples, classes=7)

    DATASETS.register("colours", "a toy")(load)
    yield examples
    del DATASETS._entries["colours"]


def test_another_data_sets_images_are_fitted_to_the_clients(colours: Examples) -> None:
    everything = public_of(federation_of("public.name=colours"))
    assert everything.raw.shape == (50, 8, 8, 1)
    grey = colours.inputs.mean()
    assert abs(everything.raw.mean() - grey) < 3
    some = public_of(federation_of("public.name=colours", "public.samples=20")).raw
    everywhere = {image.tobytes() for image in everything.raw}
    assert len(some) == 20 and all(image.tobytes() in everywhere for image in some)
    with pytest.raises(MotleyError, match=r"public.samples = 51: there are only 50 images"):
        federation_of("public.name=colours", "public.samples=51")


def test_sizes_and_channels_are_converted() -> None:
    grey = np.arange(0, 256, 4, dtype=np.uint8).reshape(1, 8, 8, 1)
    coloured = fit_images(grey, (8, 8, 3), "x")
    assert coloured.shape == (1, 8, 8, 3) and (coloured == grey).all()
    assert np.array_equal(fit_images(coloured, (8, 8, 1), "x"), grey)
    assert fit_images(coloured, (4, 16, 3), "x").shape == (1, 4, 16, 3)
    constant = np.full((2, 5, 5, 1), 77, dtype=np.uint8)
    assert (fit_images(constant, (9, 3, 1), "x") == 77).all()
    with pytest.raises(MotleyError, match=r"public.name = 'x': its images have 2 channels and the"):
        fit_images(np.zeros((1, 8, 8, 2), dtype=np.uint8), (8, 8, 3), "public.name = 'x'")


def test_bytes_are_not_public_for_images_of_other_numbers() -> None:
    """Bytes become 0 to 1, and the clients' models were trained on another range."""
    floats = np.random.default_rng(3).random((4, 8, 8, 1), dtype=np.float32)
    nothing = np.zeros(0, dtype=np.int64)
    noise = NoiseSettings(name="noise", samples=3)
    train = Examples(floats, np.zeros(4, dtype=np.int64))
    assert len(public_images(noise, train, nothing, 0, None)) == 3
    train = Examples(floats * 2 - 1, np.zeros(4, dtype=np.int64))
    with pytest.raises(MotleyError, match="the clients' images are numbers beyond 0 to 1"):
        public_images(noise, train, nothing, 0, None)


def test_images_of_the_clients_data_set_are_refused_by_content(tmp_path: Path) -> None:
    images = np.random.default_rng(3).integers(0, 256, (50, 8, 8, 1), dtype=np.uint8)
    images[7] = TRAIN.inputs[100]
    file = tmp_path / "public.npz"
    np.savez(file, x_train=images, y_train=np.zeros(50, dtype=np.int64))
    with pytest.raises(
        MotleyError, match=r"public.name = 'npz': 1 of its 50 images are also train"
    ):
        federation_of("public.name=npz", f"public.path={file}")
    images[7] = load_dataset("digits").test.inputs[5]
    np.savez(file, x_train=images, y_train=np.zeros(50, dtype=np.int64))
    with pytest.raises(
        MotleyError, match=r"public.name = 'npz': 1 of its 50 images are also test images"
    ):
        federation_of("public.name=npz", f"public.path={file}")
    images[7] = 0
    np.savez(file, x_train=images, y_train=np.zeros(50, dtype=np.int64))
    assert len(public_of(federation_of("public.name=npz", f"public.path={file}"))) == 50


# ---- settings that are refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (),
            r"method.name = 'distiller': needs public images. Set public.name to one of "
            r"'held-out', 'noise', .*'digits'",
        ),
        (
            ("method.name=fedavg", "public.name=noise"),
            r"public.name = 'noise': has no effect with method.name = 'fedavg'; it is for .*"
            r"'distiller'",
        ),
        (("public.name=digits",), r"public.name = 'digits': is the clients' own data set"),
        (
            ("public.name=here",),
            r"public.name = 'here': should be 'none', 'held-out', 'noise', .* or '.*'",
        ),
        (
            ("public.name=noise", "public.path=a"),
            r"public.path = '.*a': has no effect with public.name = 'noise'; it is for .*'npz'",
        ),
        (("public.name=held-out", "public.samples=0"), r"public.samples = 0: should be greater"),
    ],
)
def test_wrong_settings_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        tiny_config(*MLP, "method.name=distiller", *overrides)


def test_more_held_out_examples_than_there_are_training_examples_are_refused() -> None:
    with pytest.raises(MotleyError, match=r"public.samples = 5000: there are only 1438 images"):
        federation_of("public.name=held-out", "public.samples=5000")


def test_a_registered_name_is_not_the_users_own_file(tmp_path: Path) -> None:
    """Two npz files may be different data sets; one file may not be both."""
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=TRAIN.inputs, y_train=TRAIN.targets)
    own = ("data.name=npz", f"data.path={file}", "public.name=npz")
    tiny_config(*MLP, "method.name=distiller", *own, f"public.path={tmp_path / 'other.npz'}")
    with pytest.raises(MotleyError, match=r"public.name = 'npz': is the clients' own data set"):
        tiny_config(*MLP, "method.name=distiller", *own, f"public.path={file}")
