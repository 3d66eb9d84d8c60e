"""The privacy cost of the rounds so far, computed with Google's dp-accounting.

Two federations are neighbours if one client's data set is replaced by any other. The number of
clients and the size of each client are public. Replacing a client's data moves its clipped delta by
at most 2 clip, and the noise on it has the standard deviation noise * clip, so one upload is a
Gaussian mechanism with noise multiplier noise / 2. Two values of epsilon follow:

`upload`    The adversary sees individual updates, as the server does. Other clients' noise does not
            help, and sampling is no secret. The uploads of the client that was sampled most often
            are composed.
`model`     The adversary sees only the global models and does not know who took part. A coordinate
            of the mean delta carries the noise of all its owners, so with k owners the multiplier
            is sqrt(k) noise / 2; k is the smallest number of owners over the coordinates of a size.
            If a round samples m_s of the n_s clients of a size, each of them is equally likely:
            sampling m_s of n_s without replacement. Each size's rounds are composed, and the
            largest epsilon of all sizes is reported.

Whatever the server computes from the mean delta (InCo, optimisers, averages) is post-processing and
costs nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from motley.core.client_numbers import ClientNumbers, client_numbers
from motley.core.part import add_at, select
from motley.extras import require
from motley.privacy.settings import PrivacySettings
from motley.splits.base import Split

#: Rényi orders to minimize over. These are a third of the library's default orders and take a fifth
#: of the time, for the same three digits.
ORDERS = (1.1, 1.25, 1.5, 1.75, *range(2, 33), 40, 48, 64, 128, 256)


class SampledMechanism(NamedTuple):
    """The mechanism of one round for the clients of one size; equal rounds are counted together."""

    #: Number of clients of this size.
    clients: int
    #: How many of them were sampled.
    sampled: int
    #: The smallest number of owners over the coordinates of this size. A fraction if the same
    #: clients were averaged twice (`releases.py`).
    owners: float


@dataclass(frozen=True)
class PrivacyLedger:
    """A record of the rounds so far, from which epsilon follows for any delta."""

    #: By size: the number of rounds with each mechanism.
    rounds: Mapping[str, Mapping[SampledMechanism, int]] = field(default_factory=dict)
    #: By client: how often it was asked for an update.
    uploads: Mapping[int, int] = field(default_factory=ClientNumbers)

    def rounds_to_json(self) -> dict[str, list[list[float]]]:
        """Return the rounds as plain values."""
        rounds = {}
        for size, counts in self.rounds.items():
            rounds[size] = [[*mechanism, count] for mechanism, count in sorted(counts.items())]
        return rounds

    def to_json(self) -> dict[str, object]:
        """Return plain values. Checkpoints hold the uploads as arrays instead."""
        return {"rounds": self.rounds_to_json(), "uploads": dict(self.uploads)}

    @classmethod
    def from_json(cls, values: Mapping[str, Mapping]) -> PrivacyLedger:
        """Restore a ledger from `to_json`'s values; without uploads, nobody has sent one."""
        rounds: dict[str, dict[SampledMechanism, int]] = {}
        for size, rows in values.get("rounds", {}).items():
            counts = rounds.setdefault(size, {})
            for clients, sampled, owners, count in rows:
                counts[SampledMechanism(int(clients), int(sampled), float(owners))] = int(count)
        saved_uploads = values.get("uploads", {})
        uploads = {int(client): int(count) for client, count in saved_uploads.items()}
        return cls(rounds, ClientNumbers(uploads))


class Accountant:
    """Derives each size's mechanism in a round, and computes epsilon from a ledger."""

    def __init__(self, settings: PrivacySettings, split: Split, sizes: Iterable[str]) -> None:
        """`sizes` are the sizes of all clients, by client id."""
        self.settings, self.split = settings, split
        self.sizes = tuple(sizes)
        self._clients_per_size = Counter(self.sizes)
        # Cache of `fewest_owners`: most rounds repeat an earlier combination of sizes.
        self._fewest_owners: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        if settings.noise:
            require("dp_accounting", f"privacy.noise = {settings.noise:g}: computing epsilon")

    def mechanisms(
        self, sampled: Iterable[int], accepted: Iterable[int], *, alone: bool = False
    ) -> dict[str, SampledMechanism]:
        """Return, by size, the mechanism that a mean of the accepted updates is for its clients.

        `sampled` are all clients that were asked. `alone`: the noise of others does not count.
        """
        sampled_per_size = Counter(self.sizes[client] for client in sampled)
        accepted_per_size = Counter(self.sizes[client] for client in accepted)
        owners = self.fewest_owners(accepted_per_size)
        mechanisms = {}
        for size in accepted_per_size:
            mechanisms[size] = SampledMechanism(
                self._clients_per_size[size],
                sampled_per_size[size],
                1 if alone else owners[size],
            )
        return mechanisms

    def epsilon(self, ledger: PrivacyLedger) -> dict[str, float]:
        """Return epsilon for an adversary who sees models, and for one who sees uploads."""
        if not self.settings.noise:
            return {"model": math.inf, "upload": math.inf}
        # Half of the noise, because replacing a client moves its delta by up to 2 clip.
        multiplier = self.settings.noise / 2
        model = 0.0
        for counts in ledger.rounds.values():
            mechanisms = {}
            for (clients, sampled, owners), count in counts.items():
                mechanisms[clients, sampled, multiplier * math.sqrt(owners)] = count
            model = max(model, _composed_epsilon(mechanisms, self.settings.delta))
        most_uploads = client_numbers(ledger.uploads).largest()
        upload = uploads_epsilon({self.settings.noise: most_uploads}, self.settings.delta)
        return {"model": model, "upload": upload}

    def fewest_owners(self, clients_per_size: Mapping[str, int]) -> dict[str, int]:
        """Return the smallest number of owners over the coordinates of each size.

        `clients_per_size` counts the clients whose updates are averaged.
        """
        key = tuple(sorted(clients_per_size.items()))
        if key not in self._fewest_owners:
            shapes = self.split.meta_state
            owners = {name: torch.zeros(shapes[name].shape) for name in self.split.parameters}
            for size, count in clients_per_size.items():
                for piece in self.split.part(size).values():
                    add_at(owners[piece.name], piece.index, float(count))
            fewest = {}
            for size in clients_per_size:
                pieces = self.split.part(size).values()
                fewest[size] = int(
                    min(select(owners[piece.name], piece.index).min() for piece in pieces)
                )
            self._fewest_owners[key] = fewest
        return self._fewest_owners[key]


def uploads_epsilon(uploads: Mapping[float, int], delta: float) -> float:
    """Return the epsilon of one client's uploads for an adversary who sees all of them.

    `uploads` counts them by their `noise`. No sampling and no other client's noise is relied on.
    The divergences of Gaussian mechanisms with different noise add up.
    """
    mechanisms: dict[tuple[int, int, float], int] = {}
    for noise, count in uploads.items():
        if count and not noise:
            return math.inf
        # Half of the noise, because replacing a client moves its delta by up to 2 clip.
        mechanisms[1, 1, noise / 2] = count
    return _composed_epsilon(mechanisms, delta)


def _composed_epsilon(mechanisms: Mapping[tuple[int, int, float], int], delta: float) -> float:
    """Return the epsilon of sampled Gaussian mechanisms, each applied `count` times.

    A mechanism is (clients, sampled clients, noise multiplier).
    """
    import dp_accounting

    orders: np.ndarray | None = None
    total: np.ndarray | float = 0.0
    for mechanism, count in mechanisms.items():
        if count:
            orders, divergence = _rdp(*mechanism)
            total = total + count * divergence
    if orders is None:
        return 0.0
    epsilon, _ = dp_accounting.rdp.compute_epsilon(orders, total, delta)
    return float(epsilon)


@cache
def _rdp(clients: int, sampled: int, multiplier: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the Rényi orders, and the Rényi divergence at each, of one round.

    Cached, because it takes a while: composing rounds then only adds up these vectors.
    """
    import dp_accounting

    replace_one = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS, neighboring_relation=replace_one)
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(clients, sampled, gaussian))
    # The library has no public access to the vectors (0.6).
    return accountant._orders, accountant._rdp
