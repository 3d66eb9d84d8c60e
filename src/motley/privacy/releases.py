"""Counts the releases of a run: the updates that clients were asked for, and the global models.

Only this module decides the cost of a round that was abandoned, interrupted or run twice.

Updates (`epsilon.upload`). A client that is asked may have answered, whether or not its answer
arrived, was accepted, or led to a round that was kept. So every request counts, in every attempt,
of a round that a crash took back as well as of the same round when it is run again. The second
answer is not the first one again: a node draws new noise for every answer
(`mechanism.py`). In a simulation on a CPU it would be, because noise follows from the seed there;
it is counted nevertheless, so that epsilon is the same as for these rounds on nodes.

Global models (`epsilon.model`). A mean of accepted updates counts, also if the round that it
belonged to was lost: others may have received the model before. If the same round and attempt is
run twice, it has the same clients, since these follow from the seed. It is then wrong to count two
rounds with independent sampling, for which the amplification by sampling would be applied twice.
Instead, it is one sampling that is followed by two means. Two Gaussian mechanisms with the
multipliers s sqrt(a) and s sqrt(b) on the same data are one with the multiplier s sqrt(k),
1 / k = 1 / a + 1 / b. So the two are counted as one round with k owners.

If updates were chosen by their effect on the global state (`server/state_check.py`), the model is
not a mean that depends on each of them only through its noised sum. It is still computed from the
noised updates, so each client's own noise protects it, as if it were the only owner (`alone`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from motley.core.client_numbers import client_numbers
from motley.privacy.accounting import Accountant, PrivacyLedger, SampledMechanism


class ReleaseCounter:
    """Counts releases one by one, on top of the releases in a ledger."""

    def __init__(self, accountant: Accountant, before: PrivacyLedger | None = None) -> None:
        self.accountant = accountant
        before = before or PrivacyLedger()
        self._uploads = client_numbers(before.uploads)
        self._rounds = {size: Counter(counts) for size, counts in before.rounds.items()}
        #: (round, attempt) -> the releases counted for it, by size.
        self._merged: dict[tuple[int, int], dict[str, SampledMechanism]] = {}

    @property
    def ledger(self) -> PrivacyLedger:
        """All that was counted so far."""
        rounds = {size: dict(+counts) for size, counts in self._rounds.items()}
        return PrivacyLedger(rounds, self._uploads)

    def add_request(self, round_number: int, attempt: int, clients: Iterable[int]) -> None:
        """Count that clients are asked for updates."""
        self._uploads = self._uploads.counted(clients)

    def add_mean(
        self,
        round_number: int,
        attempt: int,
        sampled: Iterable[int],
        accepted: Iterable[int],
        alone: bool = False,
    ) -> PrivacyLedger:
        """Count a mean of updates; return all that was counted so far.

        `sampled` are all clients that were asked for one.
        """
        counted = self._merged.setdefault((round_number, attempt), {})
        mechanisms = self.accountant.mechanisms(sampled, accepted, alone=alone)
        for size, mechanism in mechanisms.items():
            counts = self._rounds.setdefault(size, Counter())
            earlier = counted.get(size)
            if earlier is not None:
                counts[earlier] -= 1
                owners = 1 / (1 / earlier.owners + 1 / mechanism.owners)
                # A run without a checkpoint may be resumed with other settings of the sampling. The
                # larger sample then counts: the smaller one may be a part of it.
                most_sampled = max(earlier.sampled, mechanism.sampled)
                mechanism = mechanism._replace(sampled=most_sampled, owners=owners)
            counts[mechanism] += 1
            counted[size] = mechanism
        return self.ledger
