"""Which samples each client holds.

Every partition but the user's own file is a vector of owners, one for each sample, so it is disjoint and complete by
construction and gives every client at least one sample. All are drawn from a generator keyed by the seed and the
partition's name; none reads NumPy's global state. Work is vectorised over clients: 100,000 of them are ordinary.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from motley.core.errors import MotleyError
from motley.core.randomness import generator
from motley.core.registry import Registry
from motley.settings import NamesFile, Settings

TRIES = 50
DRAWS = 20_000_000
"""Most random numbers spent on repeating a Dirichlet partition: past some 40,000 clients it bites before TRIES does."""


@dataclass(frozen=True, eq=False)
class Partition:
    """Client i holds samples indices[offsets[i] : offsets[i + 1]]; their order carries no meaning."""

    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        ends = self.offsets
        if self.indices.dtype != np.int64 or ends.dtype != np.int64 or self.indices.ndim != 1 or ends.ndim != 1:
            raise MotleyError("a partition's indices and offsets must be flat int64 arrays.")
        if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(self.indices) or (np.diff(ends) < 0).any():
            raise MotleyError("a partition's offsets must rise from 0 to the number of its indices.")

    @classmethod
    def from_owners(cls, owners: np.ndarray, clients: int) -> Partition:
        """Build from the client of each sample; a client's samples then come in ascending order."""
        sizes = np.bincount(owners, minlength=clients)
        return cls(np.argsort(owners, kind="stable").astype(np.int64, copy=False), _offsets(sizes))

    def of(self, client: int) -> np.ndarray:
        """Return the samples of one client: a view, which whoever shuffles it copies first."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """How many samples each client holds."""
        return np.diff(self.offsets)

    def label_counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Return how many samples of each class each client holds, as (clients, classes)."""
        owners = np.repeat(np.arange(len(self)), self.sizes)
        cells = owners * classes + labels[self.indices]
        return np.bincount(cells, minlength=len(self) * classes).reshape(len(self), classes)


class PartitionSettings(Settings):
    """Which samples of a labelled data set each client holds."""

    lasting = ()

    name: str = "dirichlet"
    """How samples are dealt to clients (`motley list partitions`)."""

    @abstractmethod
    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Return what each of `clients` clients holds; the same arguments give the same partition."""


class Dealt(PartitionSettings):
    """A partition that deals every sample to exactly one client, and to every client at least one."""

    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Deal all samples, by a generator keyed by the seed and the partition's name."""
        labels = np.asarray(labels)
        if labels.ndim != 1:
            raise MotleyError(f"labels must have shape (N,), not {labels.shape}.")
        if not 1 <= clients <= len(labels):
            raise MotleyError(
                f"federation.clients = {clients}: should be 1 to {len(labels)}, the number of training samples; "
                f"partition {self.name!r} gives every client at least one."
            )
        return Partition.from_owners(self._owners(labels, clients, generator(seed, "partition", self.name)), clients)

    @abstractmethod
    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client of each sample."""


PARTITIONS: Registry[type[PartitionSettings]] = Registry("partition")


@PARTITIONS.register("iid", "a random permutation in equal chunks")
class Iid(Dealt):
    """Every client draws from the same distribution, and sizes differ by at most one."""

    name: Literal["iid"] = "iid"

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        return _scatter(rng.permutation(len(labels)), _equal_sizes(len(labels), clients))


@PARTITIONS.register(
    "dirichlet",
    "each class is shared out by Dir(alpha): unlike labels and unlike sizes",
    paper="Li, Diao, Chen, He 2022 (NIID-Bench), arXiv:2102.02079",
)
class Dirichlet(Dealt):
    """NIID-Bench's label skew.

    For each class k of n_k samples: p ~ Dir(alpha) over clients; p_j = 0 where client j already holds N / clients
    samples or more; p is renormalised and the shuffled class is cut at floor(n_k * cumsum(p)). Some client is always
    below N / clients while samples are left, so p never vanishes.

    The benchmark repeats this until the smallest client holds `min_size`, which for many clients or a small alpha is
    never. Here it is repeated at most TRIES times; then the try that lacked fewest samples is kept, and its largest
    clients give samples, drawn at random from their own, to those below the minimum until none is.
    """

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration. Small values give each client few classes, large values approach iid."""
    min_size: int = Field(10, ge=1)
    """Minimum number of samples per client, or N // clients if there are too few samples for that."""
    numpy_seed: int = Field(-1, ge=-1, lt=2**32)
    """Reproduce NIID-Bench's own partition sample by sample, as its code draws it after numpy.random.seed(numpy_seed),
    independent of the run's seed. -1: use the run's seed.
    """

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        groups = _by_class(labels)
        minimum = min(self.min_size, len(labels) // clients)
        if self.numpy_seed >= 0:
            return self._benchmark(groups, clients, minimum)
        counts = self._counts([len(group) for group in groups], clients, minimum, rng)
        return _raise_smallest(_deal(groups, counts, rng), clients, minimum, rng)

    def _counts(self, sizes: list[int], clients: int, minimum: int, rng: np.random.Generator) -> np.ndarray:
        """Return (classes, clients) counts: the first try that meets the minimum, or the one nearest to it."""
        best, least = np.empty(0), np.inf
        for _ in range(max(1, min(TRIES, DRAWS // (clients * len(sizes))))):
            counts = self._try(sizes, clients, rng)
            lacking = np.maximum(minimum - counts.sum(axis=0), 0).sum()
            if lacking < least:
                best, least = counts, lacking
            if not lacking:
                break
        return best

    def _benchmark(self, groups: list[np.ndarray], clients: int, minimum: int) -> np.ndarray:
        """Return the owners that the benchmark draws, in its order: each class is shuffled, then shared out."""
        draws = np.random.RandomState(self.numpy_seed)
        samples = sum(map(len, groups))
        owners = np.empty(samples, dtype=np.int64)
        for _ in range(TRIES):
            held = np.zeros(clients, dtype=np.int64)
            for group in groups:
                order = group.copy()
                draws.shuffle(order)
                shares = draws.dirichlet(np.full(clients, self.alpha)) * (held < samples / clients)
                if not shares.sum() > 0:  # a tiny alpha, and all to a client that is full: begin anew
                    held[:] = 0
                    break
                ends = (np.cumsum(shares / shares.sum()) * len(order)).astype(np.int64)[:-1]
                counts = np.diff(ends, prepend=0, append=len(order))
                owners[order] = np.repeat(np.arange(clients), counts)
                held += counts
            if held.min() >= minimum:
                return owners
        raise MotleyError(
            f"data.partition.numpy_seed = {self.numpy_seed}: in {TRIES} tries some client of {clients} has fewer than "
            f"{minimum} samples at alpha = {self.alpha}; fewer clients, a larger alpha or a smaller min_size would do."
        )

    def _try(self, sizes: list[int], clients: int, rng: np.random.Generator) -> np.ndarray:
        counts = np.empty((len(sizes), clients), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for row, size in zip(counts, sizes, strict=True):
            log_shares = _log_gamma(self.alpha, clients, rng)
            log_shares[held * clients >= sum(sizes)] = -np.inf
            row[:] = _cut(size, log_shares)
            held += row
        return counts


@PARTITIONS.register("dirichlet-equal", "every client has its own class mix from Dir(alpha), and all the same size")
class DirichletEqual(Dealt):
    """Label skew without size skew.

    Client i draws a class mix q_i ~ Dir(alpha) and then its N / clients samples (one more or less) from that mix,
    without replacement. All clients draw at once. A class that is asked for more than it has serves them in a random
    order and closes; who is left short draws again from its mix, renormalised over the open classes. Each pass closes a
    class or is the last.
    """

    name: Literal["dirichlet-equal"] = "dirichlet-equal"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration. Small values give each client few classes (while classes last), large values approach iid."""

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        groups = _by_class(labels)
        left = np.array([len(group) for group in groups])
        short = _equal_sizes(len(labels), clients)
        log_mix = _log_gamma(self.alpha, (clients, len(groups)), rng)
        counts = np.zeros((clients, len(groups)), dtype=np.int64)
        while short.any():
            waiting, still_open = np.flatnonzero(short), np.flatnonzero(left)
            cells = np.ix_(waiting, still_open)
            asked = rng.multinomial(short[waiting], _softmax(log_mix[cells]))
            served = np.diff(np.minimum(np.cumsum(asked, axis=0), left[still_open]), axis=0, prepend=0)
            counts[cells] += served
            short[waiting] -= served.sum(axis=1)
            left[still_open] -= served.sum(axis=0)
        return _deal(groups, rng.permutation(counts).T, rng)


@PARTITIONS.register(
    "shards",
    "sorted by label and cut in shards, a few for each client",
    paper="McMahan et al. 2017, arXiv:1602.05629",
)
class Shards(Dealt):
    """The pathological split of FedAvg's paper: most clients see as many classes as they get shards."""

    name: Literal["shards"] = "shards"
    shards_per_client: int = Field(2, ge=1)
    """Shards of label-sorted samples that each client gets."""

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        shards = clients * self.shards_per_client
        if shards > len(labels):
            raise MotleyError(
                f"partition 'shards': {clients} clients with {self.shards_per_client} shards each need {shards} "
                f"samples, but there are {len(labels)}."
            )
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shard_of = _scatter(by_label, _equal_sizes(len(labels), shards))
        return rng.permutation(np.repeat(np.arange(clients), self.shards_per_client))[shard_of]


@PARTITIONS.register(
    "quantity",
    "iid labels, but sizes from Dir(alpha)",
    paper="Li, Diao, Chen, He 2022 (NIID-Bench), arXiv:2102.02079",
)
class Quantity(Dealt):
    """Size skew without label skew: shares ~ Dir(alpha) of a random permutation, the smallest raised to the minimum."""

    name: Literal["quantity"] = "quantity"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration. Small values give a few large clients, large values give equal sizes."""
    min_size: int = Field(10, ge=1)
    """Minimum number of samples per client, or N // clients if there are too few samples for that."""

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        sizes = _cut(len(labels), _log_gamma(self.alpha, clients, rng))
        given, taken = _transfers(sizes, min(self.min_size, len(labels) // clients))
        return _scatter(rng.permutation(len(labels)), sizes - given + taken)


@PARTITIONS.register("file", "your own lists of sample indices, from a .json or .npz file")
class FromFile(PartitionSettings):
    """Index lists from a file, in which samples may be left out.

    JSON: a list of lists, or an object with the keys "0", "1", ... A .npz file: arrays named "0", "1", ..., or "arr_0",
    "arr_1", ... as `np.savez(path, first, second)` names them.
    """

    name: Literal["file"] = "file"
    path: Annotated[Path, NamesFile()]
    """The .json or .npz file with one list of sample indices per client."""
    allow_shared: bool = False
    """Allow two clients to hold the same sample. One client never holds a sample twice."""

    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Read the lists and check them against the data set and the number of clients; the seed plays no part."""
        lists = _read_lists(self.path.expanduser())
        if len(lists) != clients:
            raise MotleyError(f"{self.path} holds {len(lists)} clients, but {clients} are wanted.")
        arrays = [_whole_numbers(values, f"{self.path}: client {client}") for client, values in enumerate(lists)]
        partition = Partition(np.concatenate(arrays), _offsets(np.array([len(array) for array in arrays])))
        self._check(partition, len(labels))
        return partition

    def _check(self, partition: Partition, samples: int) -> None:
        owners = np.repeat(np.arange(len(partition)), partition.sizes)
        outside = (partition.indices < 0) | (partition.indices >= samples)
        if outside.any():
            at = int(np.argmax(outside))
            raise MotleyError(
                f"{self.path}: client {owners[at]} holds sample {partition.indices[at]}, "
                f"but samples are numbered 0..{samples - 1}."
            )
        order = np.lexsort((owners, partition.indices))
        index, owner = partition.indices[order], owners[order]
        again = index[1:] == index[:-1]
        twice = again & (owner[1:] == owner[:-1])
        if twice.any():
            at = int(np.argmax(twice))
            raise MotleyError(f"{self.path}: client {owner[at]} holds sample {index[at]} twice.")
        if again.any() and not self.allow_shared:
            at = int(np.argmax(again))
            raise MotleyError(
                f"{self.path}: clients {owner[at]} and {owner[at + 1]} both hold sample {index[at]}. "
                "Set allow_shared = true if that is meant."
            )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _equal_sizes(samples: int, chunks: int) -> np.ndarray:
    return samples // chunks + (np.arange(chunks) < samples % chunks).astype(np.int64)


def _by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return the samples of each class that occurs."""
    _, sizes = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])


def _scatter(order: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return each sample's owner when the samples in this order are cut in chunks of these sizes."""
    owners = np.empty(len(order), dtype=np.int64)
    owners[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owners


def _deal(groups: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return each sample's owner when client j gets counts[k, j] random samples of class k."""
    owners = np.empty(sum(map(len, groups)), dtype=np.int64)
    for group, row in zip(groups, counts, strict=True):
        owners[rng.permutation(group)] = np.repeat(np.arange(len(row)), row)
    return owners


def _log_gamma(alpha: float, shape: int | tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return logarithms of Gamma(alpha) draws, whose softmax is Dir(alpha).

    Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha), and log U is minus an exponential draw. In logarithms no alpha
    underflows, where plain draws at a small alpha are all zero and their shares NaN. Leaving clients out and
    renormalising is a softmax over the rest.
    """
    alpha = min(max(alpha, 1e-300), 1e300)
    return np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha


def _softmax(logs: np.ndarray) -> np.ndarray:
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def _cut(samples: int, log_shares: np.ndarray) -> np.ndarray:
    """Return whole numbers that add up to `samples`: the steps of floor(samples * cumsum(shares))."""
    shares = np.cumsum(_softmax(log_shares))
    return np.diff((shares / shares[-1] * samples).astype(np.int64), prepend=0)


def _transfers(sizes: np.ndarray, minimum: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what each client gives and takes so that none is below the minimum.

    The result is that of taking one sample after another from the client that is largest at the time: all givers come
    down to one level, which bisection finds, and the first of them stay one above it.
    """
    taken = np.maximum(minimum - sizes, 0)
    low, high = minimum, int(sizes.max()) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if np.maximum(sizes - middle, 0).sum() >= taken.sum() else (low, middle)
    given = np.maximum(sizes - low, 0)
    too_many = int(given.sum() - taken.sum())
    given[np.flatnonzero(given)[:too_many]] -= 1
    return given, taken


def _raise_smallest(owners: np.ndarray, clients: int, minimum: int, rng: np.random.Generator) -> np.ndarray:
    """Move samples from the largest clients to those below the minimum; who takes from one giver keeps its skew."""
    given, taken = _transfers(np.bincount(owners, minlength=clients), minimum)
    if not taken.any():
        return owners
    shuffled = rng.permutation(len(owners))
    by_owner = shuffled[np.argsort(owners[shuffled], kind="stable")]
    giver = owners[by_owner]
    place = np.arange(len(owners)) - np.searchsorted(giver, np.arange(clients))[giver]
    moved = owners.copy()
    moved[by_owner[place < given[giver]]] = np.repeat(np.arange(clients), taken)
    return moved


def _read_lists(path: Path) -> list[Any]:
    if not path.is_file():
        raise MotleyError(f"there is no partition file {path}.")
    if path.suffix not in (".json", ".npz"):
        raise MotleyError(f"partition file {path} must end in .json or .npz.")
    try:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
        else:
            with np.load(path, allow_pickle=False) as archive:
                # savez names arrays that were given no name arr_0, arr_1, ...
                content = {name.removeprefix("arr_"): archive[name] for name in archive.files}
    except (ValueError, TypeError, EOFError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise MotleyError(f"partition file {path} cannot be read: {error}") from error
    if isinstance(content, Mapping):
        content = _in_order(content, path)
    if not isinstance(content, list) or not content:
        raise MotleyError(f"partition file {path} must hold a list of index lists, or one list for each client number.")
    return content


def _in_order(lists: Mapping[str, Any], path: Path) -> list[Any]:
    missing = [str(client) for client in range(len(lists)) if str(client) not in lists]
    if missing:
        raise MotleyError(
            f"partition file {path} must name its {len(lists)} clients 0..{len(lists) - 1}; it has no {missing[0]!r}."
        )
    return [lists[str(client)] for client in range(len(lists))]


def _whole_numbers(values: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise MotleyError(f"{where} must be a flat list of whole numbers.") from error
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise MotleyError(f"{where} must be a flat list of at least one whole number.")
    return array.astype(np.int64)
