"""Partitions of the training samples among the clients.

Every partition except the user's own file is computed as a vector that names one owner per sample,
so it is disjoint and complete by construction. Each client gets at least one sample. All random
numbers come from a generator keyed by the seed and the partition's name, never from NumPy's global
state. The work is vectorised over clients, because federations of a million clients are supported.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from motley.core.dotted import check_arguments, subclass_of
from motley.core.errors import MotleyError
from motley.core.randomness import generator
from motley.core.registry import Registry
from motley.data.files.archive import DAMAGED, check_archive
from motley.limits import bounded, check_data
from motley.settings import NamesFile, Settings

#: How often a Dirichlet partition is drawn again when a client has too few samples.
TRIES = 50
#: Limit on the random numbers drawn for that. With 10 classes it takes effect before TRIES does if
#: there are more than 40,000 clients.
DRAWS = 20_000_000


@dataclass(frozen=True, eq=False)
class Partition:
    """Client i has the samples indices[offsets[i] : offsets[i + 1]], in no particular order."""

    indices: np.ndarray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        for array in (self.indices, self.offsets):
            if array.dtype != np.int64 or array.ndim != 1:
                raise MotleyError("a partition's indices and offsets must be flat int64 arrays.")
        offsets = self.offsets
        has_bounds = len(offsets) >= 2 and offsets[0] == 0 and offsets[-1] == len(self.indices)
        if not has_bounds or (np.diff(offsets) < 0).any():
            raise MotleyError(
                "a partition's offsets must rise from 0 to the number of its indices."
            )

    @classmethod
    def from_owners(cls, owners: np.ndarray, clients: int) -> Partition:
        """Return the partition in which sample i belongs to client `owners[i]`.

        A client's samples are in ascending order.
        """
        owners = np.asarray(owners)
        if owners.ndim != 1 or owners.dtype.kind not in "iu":
            raise MotleyError(
                "Partition.from_owners: owners: should be one client number per sample, not "
                f"{owners.dtype} of shape {owners.shape}."
            )
        if not isinstance(clients, Integral) or clients < 1:
            raise MotleyError(
                f"Partition.from_owners: clients = {clients!r}: should be a whole number, 1 or "
                "more."
            )
        outside = (owners < 0) | (owners >= clients)
        if outside.any():
            row = int(outside.argmax())
            raise MotleyError(
                f"Partition.from_owners: owners[{row}] = {owners[row]}: with clients = {clients}, "
                f"owners are 0 to {clients - 1}."
            )
        sizes = np.bincount(owners, minlength=clients)
        indices = np.argsort(owners, kind="stable").astype(np.int64, copy=False)
        return cls(indices, _offsets(sizes))

    def of(self, client: int) -> np.ndarray:
        """Return the samples of one client. This is a view: copy it before you shuffle it."""
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """The number of samples of each client."""
        return np.diff(self.offsets)

    def label_counts(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """Return the number of samples per client and class, with shape (clients, classes)."""
        cell_count = len(self) * classes
        check_data(f"a table of {len(self):,} clients and {classes:,} classes", 8 * cell_count)
        owners = np.repeat(np.arange(len(self)), self.sizes)
        cells = owners * classes + labels[self.indices]
        return np.bincount(cells, minlength=cell_count).reshape(len(self), classes)


class PartitionSettings(Settings):
    """The partition of a labelled data set among the clients."""

    lasting = ()
    #: Whether it distributes examples by their class, which only a classification has.
    by_label: ClassVar[bool] = False

    name: str = "dirichlet"
    """How samples are distributed to clients (`motley list partitions`), or the dotted path of your
    own partition.
    """

    @abstractmethod
    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Return the partition among `clients` clients, determined by the arguments alone."""

    def split_by_clients(
        self, labels: np.ndarray, owners: np.ndarray | None, clients: int, seed: int
    ) -> Partition:
        """Like `split`, for partitions that depend on the natural client of each example.

        `owners` are `Examples.clients`. Most partitions do not use them.
        """
        return self.split(labels, clients, seed)


class DisjointPartition(PartitionSettings):
    """A partition with exactly one owner per sample and at least one sample per client."""

    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Distribute all samples, using a generator keyed by the seed and the partition's name."""
        labels = np.asarray(labels)
        if labels.ndim == 0 or (self.by_label and labels.ndim != 1):
            raise MotleyError(f"labels must have shape (N,), not {labels.shape}.")
        if not 1 <= clients <= len(labels):
            raise MotleyError(
                f"federation.clients = {clients}: should be 1 to {len(labels)}, the number of "
                f"training samples; partition {self.name!r} gives every client at least one."
            )
        # A number behind "#" tells apart objects that exist in this process at once, such as two
        # versions of a notebook's class. It must not change results.
        rng = generator(seed, "partition", self.name.partition("#")[0])
        return Partition.from_owners(self._owners(labels, clients, rng), clients)

    @abstractmethod
    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return the client that owns each sample."""


def _accept(item: Any) -> type[PartitionSettings]:
    """Check a user's own partition."""
    partition: type[PartitionSettings]
    partition = subclass_of(PartitionSettings, "motley.PartitionSettings")(item)
    arguments = ("self", "labels", "clients", "seed")
    check_arguments(partition.split, arguments, f"{partition.__name__}.split")
    return partition


PARTITIONS: Registry[type[PartitionSettings]] = Registry(
    "partition",
    group="motley.partitions",
    accept=_accept,
)


@PARTITIONS.register("iid", "a random permutation in equal chunks")
class Iid(DisjointPartition):
    """All clients have the same distribution, and their sizes differ by at most one."""

    name: Literal["iid"] = "iid"

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        order = rng.permutation(len(labels))
        return _owners_of_chunks(order, _equal_sizes(len(labels), clients))


@PARTITIONS.register(
    "dirichlet",
    "each class is divided by Dir(alpha): skewed labels and different sizes",
    paper="Li, Diao, Chen, He 2022 (NIID-Bench), arXiv:2102.02079",
)
class Dirichlet(DisjointPartition):
    """NIID-Bench's label skew.

    For each class k of n_k samples, draw p ~ Dir(alpha) over the clients, set p_j = 0 if client j
    already has N / clients samples or more, renormalise p, and cut the shuffled class at
    floor(n_k * cumsum(p)). While samples are left, some client has fewer than N / clients, so p
    never becomes all zeros.

    The benchmark repeats this until the smallest client has `min_size` samples, which may never
    happen with many clients or a small alpha. Here it is repeated at most TRIES times. After that
    the attempt that came closest is kept, and the largest clients give random samples of theirs to
    the clients below the minimum.
    """

    by_label = True

    name: Literal["dirichlet"] = "dirichlet"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration. Small values give each client few classes, large values approach iid."""
    min_size: int = Field(10, ge=1)
    """Minimum number of samples per client, or N // clients if there are too few for that."""
    numpy_seed: int = Field(-1, ge=-1, lt=2**32)
    """Reproduce NIID-Bench's own partition sample by sample, as its code draws it after
    numpy.random.seed(numpy_seed), independent of the run's seed. -1: use the run's seed.
    """

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        groups = _samples_by_class(labels)
        minimum = min(self.min_size, len(labels) // clients)
        if self.numpy_seed >= 0:
            return self._niid_bench_owners(groups, clients, minimum)
        class_sizes = [len(group) for group in groups]
        counts = self._best_counts(class_sizes, clients, minimum, rng)
        owners = _owners_from_counts(groups, counts, rng)
        return _raise_to_minimum(owners, clients, minimum, rng)

    def _best_counts(
        self, class_sizes: list[int], clients: int, minimum: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw counts of shape (classes, clients) until every client has the minimum.

        If no try succeeds, the one with the smallest shortfall is returned.
        """
        best_counts, best_shortfall = np.empty(0), np.inf
        tries = max(1, min(TRIES, DRAWS // (clients * len(class_sizes))))
        for _ in range(tries):
            counts = self._draw_counts(class_sizes, clients, rng)
            shortfall = np.maximum(minimum - counts.sum(axis=0), 0).sum()
            if shortfall < best_shortfall:
                best_counts, best_shortfall = counts, shortfall
            if not shortfall:
                break
        return best_counts

    def _draw_counts(
        self, class_sizes: list[int], clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw counts of shape (classes, clients) once."""
        counts = np.empty((len(class_sizes), clients), dtype=np.int64)
        client_sizes = np.zeros(clients, dtype=np.int64)
        for row, size in zip(counts, class_sizes, strict=True):
            log_shares = _log_gamma(self.alpha, clients, rng)
            is_full = client_sizes * clients >= sum(class_sizes)
            log_shares[is_full] = -np.inf
            row[:] = _counts_from_shares(size, log_shares)
            client_sizes += row
        return counts

    def _niid_bench_owners(
        self, groups: list[np.ndarray], clients: int, minimum: int
    ) -> np.ndarray:
        """Return the owners that the benchmark's own code draws.

        The order of the random calls matters: each class is shuffled before its shares are drawn.
        """
        rng = np.random.RandomState(self.numpy_seed)
        samples = sum(map(len, groups))
        owners = np.empty(samples, dtype=np.int64)
        for _ in range(TRIES):
            client_sizes = np.zeros(clients, dtype=np.int64)
            for group in groups:
                order = group.copy()
                rng.shuffle(order)
                shares = rng.dirichlet(np.full(clients, self.alpha))
                shares = shares * (client_sizes < samples / clients)
                if not shares.sum() > 0:
                    # With a tiny alpha, a class can go entirely to a client that is full. Setting
                    # the sizes to zero fails the test for the minimum, so this try is abandoned.
                    client_sizes[:] = 0
                    break
                ends = (np.cumsum(shares / shares.sum()) * len(order)).astype(np.int64)[:-1]
                counts = np.diff(ends, prepend=0, append=len(order))
                owners[order] = np.repeat(np.arange(clients), counts)
                client_sizes += counts
            if client_sizes.min() >= minimum:
                return owners
        raise MotleyError(
            f"data.partition.numpy_seed = {self.numpy_seed}: in each of {TRIES} tries, one of the "
            f"{clients} clients had fewer than {minimum} samples (alpha = {self.alpha}). Use fewer "
            "clients, a larger alpha or a smaller min_size."
        )


@PARTITIONS.register(
    "dirichlet-equal", "a class mix per client from Dir(alpha), and equal sizes for all clients"
)
class DirichletEqual(DisjointPartition):
    """Label skew without size skew.

    Client i draws a class mix q_i ~ Dir(alpha) and then its N / clients samples (one more or less)
    from that mix, without replacement. All clients draw at once. If they request more of a class
    than is left, they are served in a random order and the class is exhausted; clients that are
    still short draw again from their mix, renormalised over the remaining classes. Each pass
    exhausts a class or is the last.
    """

    by_label = True

    name: Literal["dirichlet-equal"] = "dirichlet-equal"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration. Small values give each client few classes (while classes last), large values
    approach iid.
    """

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        groups = _samples_by_class(labels)
        remaining = np.array([len(group) for group in groups])
        needed = _equal_sizes(len(labels), clients)
        log_mix = _log_gamma(self.alpha, (clients, len(groups)), rng)
        counts = np.zeros((clients, len(groups)), dtype=np.int64)
        while needed.any():
            waiting = np.flatnonzero(needed)
            available = np.flatnonzero(remaining)
            cells = np.ix_(waiting, available)
            requested = rng.multinomial(needed[waiting], _softmax(log_mix[cells]))
            # Serve clients in order until a class is exhausted: cap the running total, then take
            # differences. The order is made random below, by permuting the rows of `counts`.
            total_served = np.minimum(np.cumsum(requested, axis=0), remaining[available])
            served = np.diff(total_served, axis=0, prepend=0)
            counts[cells] += served
            needed[waiting] -= served.sum(axis=1)
            remaining[available] -= served.sum(axis=0)
        return _owners_from_counts(groups, rng.permutation(counts).T, rng)


@PARTITIONS.register(
    "shards",
    "samples sorted by label and cut into shards, a few per client",
    paper="McMahan et al. 2017, arXiv:1602.05629",
)
class Shards(DisjointPartition):
    """The pathological partition of the FedAvg paper.

    Most clients see as many classes as they get shards.
    """

    by_label = True

    name: Literal["shards"] = "shards"
    shards_per_client: int = Field(2, ge=1)
    """Shards of label-sorted samples that each client gets."""

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        shards = clients * self.shards_per_client
        if shards > len(labels):
            raise MotleyError(
                f"partition 'shards': {clients} clients with {self.shards_per_client} shards each "
                f"need {shards} samples, but there are {len(labels)}."
            )
        shuffled = rng.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shard_of_sample = _owners_of_chunks(by_label, _equal_sizes(len(labels), shards))
        owner_of_shard = rng.permutation(np.repeat(np.arange(clients), self.shards_per_client))
        return owner_of_shard[shard_of_sample]


@PARTITIONS.register(
    "quantity",
    "iid labels, sizes from Dir(alpha)",
    paper="Li, Diao, Chen, He 2022 (NIID-Bench), arXiv:2102.02079",
)
class Quantity(DisjointPartition):
    """Size skew without label skew.

    Shares ~ Dir(alpha) of a random permutation; clients below the minimum are raised to it.
    """

    name: Literal["quantity"] = "quantity"
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    """Concentration. Small values give a few large clients, large values give equal sizes."""
    min_size: int = Field(10, ge=1)
    """Minimum number of samples per client, or N // clients if there are too few for that."""

    def _owners(self, labels: np.ndarray, clients: int, rng: np.random.Generator) -> np.ndarray:
        sizes = _counts_from_shares(len(labels), _log_gamma(self.alpha, clients, rng))
        given, taken = _transfers(sizes, min(self.min_size, len(labels) // clients))
        return _owners_of_chunks(rng.permutation(len(labels)), sizes - given + taken)


@PARTITIONS.register("natural", "the data set's own clients, such as the writers of femnist")
class Natural(PartitionSettings):
    """The data set's own clients: people, writers, hospitals.

    Client i is the i-th of them if there are as many clients. With fewer clients, that many are
    drawn at random, and the examples of the others are not used.
    """

    name: Literal["natural"] = "natural"

    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Raise a MotleyError: labels do not tell whose example it is."""
        raise MotleyError(
            "data.partition.name = 'natural': the data set does not record whose examples they "
            "are. Use a data set that does, such as femnist, or another partition."
        )

    def split_by_clients(
        self, labels: np.ndarray, owners: np.ndarray | None, clients: int, seed: int
    ) -> Partition:
        """Return the examples of each natural client."""
        if owners is None:
            return self.split(labels, clients, seed)
        by_client = np.argsort(owners, kind="stable").astype(np.int64, copy=False)
        names, sizes = np.unique(owners[by_client], return_counts=True)
        if not 1 <= clients <= len(names):
            raise MotleyError(
                f"federation.clients = {clients}: should be 1 to {len(names)}, the number of "
                "natural clients in the data set."
            )
        if clients < len(names):
            rng = generator(seed, "partition", self.name)
            is_chosen = np.isin(names, rng.choice(names, clients, replace=False))
            by_client = by_client[np.repeat(is_chosen, sizes)]
            sizes = sizes[is_chosen]
        return Partition(by_client, _offsets(sizes))


@PARTITIONS.register("file", "your own lists of sample indices, from a .json or .npz file")
class FromFile(PartitionSettings):
    """Index lists from a file. They need not cover all samples.

    JSON: a list of lists, or an object with the keys "0", "1", ... A .npz file: arrays named "0",
    "1", ..., or "arr_0", "arr_1", ... as `np.savez(path, first, second)` names them.
    """

    name: Literal["file"] = "file"
    path: Annotated[Path, NamesFile()]
    """The .json or .npz file with one list of sample indices per client."""
    allow_shared: bool = False
    """Allow two clients to hold the same sample. No client may hold a sample twice."""

    def split(self, labels: np.ndarray, clients: int, seed: int) -> Partition:
        """Read the lists and check them. The seed is not used."""
        lists = _read_lists(self.path.expanduser())
        if len(lists) != clients:
            raise MotleyError(
                f"{self.path} holds {len(lists)} clients, but federation.clients = {clients}."
            )
        arrays = []
        for client, values in enumerate(lists):
            arrays.append(_index_array(values, f"{self.path}: client {client}"))
        sizes = np.array([len(array) for array in arrays])
        partition = Partition(np.concatenate(arrays), _offsets(sizes))
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
        # Sorted by sample and then by owner, repeated samples are neighbours.
        order = np.lexsort((owners, partition.indices))
        index, owner = partition.indices[order], owners[order]
        repeated = index[1:] == index[:-1]
        repeated_by_owner = repeated & (owner[1:] == owner[:-1])
        if repeated_by_owner.any():
            at = int(np.argmax(repeated_by_owner))
            raise MotleyError(f"{self.path}: client {owner[at]} holds sample {index[at]} twice.")
        if repeated.any() and not self.allow_shared:
            at = int(np.argmax(repeated))
            raise MotleyError(
                f"{self.path}: clients {owner[at]} and {owner[at + 1]} both hold "
                f"sample {index[at]}. Set data.partition.allow_shared = true if that is intended."
            )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _equal_sizes(samples: int, chunks: int) -> np.ndarray:
    return samples // chunks + (np.arange(chunks) < samples % chunks).astype(np.int64)


def _samples_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Return one array of sample indices per class that occurs."""
    _, sizes = np.unique(labels, return_counts=True)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])


def _owners_of_chunks(order: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Cut the samples, in this order, into chunks of these sizes; return each sample's chunk."""
    owners = np.empty(len(order), dtype=np.int64)
    owners[order] = np.repeat(np.arange(len(sizes)), sizes)
    return owners


def _owners_from_counts(
    groups: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Give client j counts[k, j] random samples of class k; return each sample's owner."""
    owners = np.empty(sum(map(len, groups)), dtype=np.int64)
    for group, row in zip(groups, counts, strict=True):
        owners[rng.permutation(group)] = np.repeat(np.arange(len(row)), row)
    return owners


def _log_gamma(alpha: float, shape: int | tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return logarithms of Gamma(alpha) draws, whose softmax is Dir(alpha).

    Gamma(alpha) = Gamma(alpha + 1) * U^(1 / alpha), and log U is minus an exponential draw. Working
    with logarithms avoids underflow: at a small alpha, plain Gamma draws are all zero and their
    normalised shares NaN. To leave out clients and renormalise, take the softmax over the others.
    """
    alpha = min(max(alpha, 1e-300), 1e300)
    return np.log(rng.standard_gamma(alpha + 1, shape)) - rng.standard_exponential(shape) / alpha


def _softmax(logs: np.ndarray) -> np.ndarray:
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def _counts_from_shares(samples: int, log_shares: np.ndarray) -> np.ndarray:
    """Return integers that add up to `samples`: the steps of floor(samples * cumsum(shares))."""
    cumulative = np.cumsum(_softmax(log_shares))
    # Divided by the last one, which rounding may leave just below 1: the total must be exact.
    ends = (cumulative / cumulative[-1] * samples).astype(np.int64)
    return np.diff(ends, prepend=0)


def _transfers(sizes: np.ndarray, minimum: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many samples each client gives and takes so that none is below the minimum.

    The result is the same as taking one sample at a time from the largest client, but without a
    loop over samples. All givers end at one level, which is found by bisection; the first few of
    them stay one sample above it, so that the totals match.
    """
    taken = np.maximum(minimum - sizes, 0)
    low, high = minimum, int(sizes.max()) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if np.maximum(sizes - middle, 0).sum() >= taken.sum():
            low = middle
        else:
            high = middle
    given = np.maximum(sizes - low, 0)
    surplus = int(given.sum() - taken.sum())
    given[np.flatnonzero(given)[:surplus]] -= 1
    return given, taken


def _raise_to_minimum(
    owners: np.ndarray, clients: int, minimum: int, rng: np.random.Generator
) -> np.ndarray:
    """Move random samples from the largest clients to those below the minimum.

    Samples are moved giver by giver, so a taker usually takes from one giver and stays skewed.
    """
    given, taken = _transfers(np.bincount(owners, minlength=clients), minimum)
    if not taken.any():
        return owners
    shuffled = rng.permutation(len(owners))
    by_owner = shuffled[np.argsort(owners[shuffled], kind="stable")]
    giver = owners[by_owner]
    first_of_client = np.searchsorted(giver, np.arange(clients))
    rank_in_client = np.arange(len(owners)) - first_of_client[giver]
    is_given = rank_in_client < given[giver]
    new_owners = owners.copy()
    new_owners[by_owner[is_given]] = np.repeat(np.arange(clients), taken)
    return new_owners


def _read_lists(path: Path) -> list[Any]:
    if not path.is_file():
        raise MotleyError(f"there is no partition file {path}.")
    if path.suffix not in (".json", ".npz"):
        raise MotleyError(f"partition file {path} must end in .json or .npz.")
    try:
        if path.suffix == ".json":
            # Empty lists take 20 times as much memory as text.
            with bounded(f"partition file {path}: its content"):
                content = json.loads(path.read_text(encoding="utf-8"))
        else:
            check_archive(path)
            with np.load(path, allow_pickle=False) as archive:
                # np.savez calls unnamed arrays arr_0, arr_1, ...
                content = {name.removeprefix("arr_"): archive[name] for name in archive.files}
    except DAMAGED as error:
        raise MotleyError(f"partition file {path} cannot be read: {error}") from error
    if isinstance(content, Mapping):
        content = _ordered_by_client(content, path)
    if not isinstance(content, list) or not content:
        raise MotleyError(
            f"partition file {path} must hold a list of index lists, or one list per client number."
        )
    return content


def _ordered_by_client(lists: Mapping[str, Any], path: Path) -> list[Any]:
    """Return the lists named "0", "1", ... in that order."""
    ordered = []
    for client in range(len(lists)):
        if str(client) not in lists:
            raise MotleyError(
                f"partition file {path} must name its {len(lists)} clients 0..{len(lists) - 1}; "
                f"it has no {str(client)!r}."
            )
        ordered.append(lists[str(client)])
    return ordered


def _index_array(values: Any, where: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise MotleyError(f"{where} must be a flat list of whole numbers.") from error
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise MotleyError(f"{where} must be a flat list of at least one whole number.")
    return array.astype(np.int64)
