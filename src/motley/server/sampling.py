"""Which clients take part in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from motley.core.randomness import generator


class Sampler(Protocol):
    """Chooses the clients of a round."""

    def __call__(self, round_number: int, attempt: int = 0, /) -> list[int]:
        """Return different client ids in ascending order.

        A repeated round samples anew, with attempt 1, 2, ... The answer must depend on these two
        numbers only: it may be asked for twice, and before the round before has ended
        (`speculation.py`).
        """
        ...


@dataclass(frozen=True)
class ClientSampler:
    """Samples uniformly without replacement.

    rule: "uniform" is keyed by seed and round. "fedml" is keyed by the round alone, as in FedML's
        code; repeated attempts are keyed by the seed there too.
    """

    num_clients: int
    clients_per_round: int
    seed: int
    rule: Literal["uniform", "fedml"] = "uniform"

    def __call__(self, round_number: int, attempt: int = 0, /) -> list[int]:
        """Return the clients of a round, in the order of their ids."""
        rng: np.random.Generator | np.random.RandomState
        if self.rule == "fedml" and attempt == 0:
            rng = np.random.RandomState(round_number - 1)
        elif attempt == 0:
            rng = generator(self.seed, "clients", round_number)
        else:
            rng = generator(self.seed, "clients", round_number, attempt)
        clients = rng.choice(self.num_clients, self.clients_per_round, replace=False)
        return sorted(clients.tolist())
