"""What the rounds so far have cost in privacy, by Google's accountant (dp-accounting).

Two clients' data sets are neighbours if one client's is replaced by any other: the number of clients, and who has
which size, are public. Replacing a client's data moves its clipped change by at most 2 clip, and its own noise has a
standard deviation of noise x clip, so one upload is a Gaussian mechanism with multiplier noise / 2. Two numbers follow.

`upload`    For whoever sees the uploads, the server first of all: no other client's noise helps, and being sampled is
            no secret. The uploads of the client that was asked most often, composed.
`model`     For whoever sees models only, and does not know who took part. A coordinate of the mean change carries the
            noise of every owner, so with k owners the multiplier is sqrt(k) noise / 2; k is the fewest owners that any
            coordinate of a size had. In a round that happens to ask m_s clients of a size that n_s have, each of them
            is as likely as the others: fixed-size sampling without replacement, m_s of n_s. Each size's rounds are
            composed, and the size that is worst off is stated.

What the server makes of the mean change (InCo, optimisers, averages) costs nothing more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from motley.core.part import add_at, select
from motley.extras import require
from motley.privacy.settings import PrivacySettings
from motley.splits.base import Split

ORDERS = (1.1, 1.25, 1.5, 1.75, *range(2, 33), 40, 48, 64, 128, 256)
"""Rényi orders that are tried: a third of the library's own, in a fifth of the time, for the same three digits."""
Mechanism = tuple[int, int, int]
"""Clients of a size, how many of them were asked, and the fewest owners of a coordinate of theirs."""


@dataclass(frozen=True)
class Spent:
    """What the rounds so far did: enough to state epsilon for any delta."""

    rounds: Mapping[str, Mapping[Mechanism, int]] = field(default_factory=dict)
    """Size -> in how many rounds its clients' changes went through which mechanism."""
    uploads: Mapping[int, int] = field(default_factory=dict)
    """Client -> how often it was asked."""

    def to_json(self) -> dict[str, object]:
        """Return plain values, for a checkpoint."""
        rounds = {size: [[*how, count] for how, count in sorted(seen.items())] for size, seen in self.rounds.items()}
        return {"rounds": rounds, "uploads": dict(self.uploads)}

    @classmethod
    def from_json(cls, values: Mapping[str, Mapping]) -> Spent:
        """Return what was saved."""
        rounds = {
            size: {(int(n), int(m), int(k)): int(count) for n, m, k, count in rows}
            for size, rows in values.get("rounds", {}).items()
        }
        return cls(rounds, {int(client): int(count) for client, count in values.get("uploads", {}).items()})


class Accountant:
    """Keeps account of a run's privacy."""

    def __init__(self, settings: PrivacySettings, split: Split, sizes: Iterable[str]) -> None:
        self.settings, self.split = settings, split
        self.sizes = tuple(sizes)
        """The size of every client, by client id."""
        self._clients = Counter(self.sizes)
        self._owners: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        if settings.noise:
            require("dp_accounting", f"privacy.noise = {settings.noise:g}: computing epsilon")

    def after(self, spent: Spent, asked: Iterable[int], taken: Iterable[int], before: Iterable[int] = ()) -> Spent:
        """Return what is spent after a round that asked clients and took the changes of some of them.

        `before`: the clients that were asked when the round was played in vain.
        """
        asked = list(asked)
        sampled, present = (Counter(self.sizes[client] for client in clients) for clients in (asked, taken))
        owners = self.fewest_owners(present)
        rounds = {size: Counter(seen) for size, seen in spent.rounds.items()}
        for size in present:
            rounds.setdefault(size, Counter())[self._clients[size], sampled[size], owners[size]] += 1
        return Spent(rounds, Counter(spent.uploads) + Counter(asked) + Counter(before))

    def epsilon(self, spent: Spent) -> dict[str, float]:
        """Return epsilon for those who see models, and for those who see uploads."""
        if not self.settings.noise:
            return {"model": math.inf, "upload": math.inf}
        own = self.settings.noise / 2
        sizes = [
            _composed({(n, m, own * math.sqrt(k)): count for (n, m, k), count in seen.items()}, self.settings.delta)
            for seen in spent.rounds.values()
        ]
        uploads = {(1, 1, own): max(spent.uploads.values(), default=0)}
        return {"model": max(sizes, default=0.0), "upload": _composed(uploads, self.settings.delta)}

    def fewest_owners(self, present: Mapping[str, int]) -> dict[str, int]:
        """Return, for each size of which changes are present, how many of them hold its least held coordinate."""
        key = tuple(sorted(present.items()))
        if key not in self._owners:
            names = self.split.parameters
            held = {name: torch.zeros(self.split.frame[name].shape) for name in names}
            for size, count in present.items():
                for piece in self.split.part(size).values():
                    add_at(held[piece.name], piece.index, float(count))
            self._owners[key] = {
                size: int(min(select(held[piece.name], piece.index).min() for piece in self.split.part(size).values()))
                for size in present
            }
        return self._owners[key]


def _composed(mechanisms: Mapping[tuple[int, int, float], int], delta: float) -> float:
    """Return epsilon of sampled Gaussian mechanisms, each as often as it is counted."""
    import dp_accounting

    curves = [(count, *_curve(*how)) for how, count in mechanisms.items() if count]
    if not curves:
        return 0.0
    total = sum(count * curve for count, _, curve in curves)
    epsilon, _ = dp_accounting.rdp.compute_epsilon(curves[0][1], total, delta)
    return float(epsilon)


@cache
def _curve(clients: int, asked: int, multiplier: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the orders, and the Rényi divergence at each, of one round. It takes a while, so it is kept."""
    import dp_accounting

    replaced = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS, neighboring_relation=replaced)
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(clients, asked, gaussian))
    return accountant._orders, accountant._rdp
