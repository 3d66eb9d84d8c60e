"""The objects and settings that a round works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from motley.engine.base import Engine
from motley.evaluate import Evaluator
from motley.methods.base import ServerAlgorithm
from motley.privacy import Accountant, PrivacyLedger
from motley.server.bounds import UpdateBounds
from motley.server.client_scores import ScoreClients
from motley.server.collection import CollectionStage
from motley.server.pipeline import Stage
from motley.server.sampling import Sampler
from motley.server.uplink import Uplink
from motley.splits.base import Split


class ReleaseLog(Protocol):
    """Keeps a record of releases that outlives the process (`runs/privacy_ledger.py`).

    Both methods return only once the record is on disk.
    """

    def add_request(self, round_number: int, attempt: int, clients: Sequence[int], /) -> None:
        """Note that clients are about to be asked for updates."""
        ...

    def add_mean(
        self,
        round_number: int,
        attempt: int,
        sampled: Sequence[int],
        accepted: Sequence[int],
        alone: bool = False,
        /,
    ) -> PrivacyLedger:
        """Note a mean of accepted updates; return the ledger of all releases so far.

        `alone`: they were chosen by their effect on the state (`motley.privacy.releases`).
        """
        ...


@dataclass(frozen=True)
class RoundContext:
    """The objects and numbers that a round works with. They stay the same from round to round.

    size_of: (client, round) -> the client's size.
    weigh_by_examples: whether a client counts by its number of examples in the mean; otherwise all
        count equally.
    accountant: computes the privacy spent; None if the run is not private. Private clients do not
        report their loss.
    release_log: records requests to clients before they are sent; None if the run is not private or
        has no folder.
    why_no_scores: why evaluated rounds have no scores; empty if they have.
    device: the server's device.
    min_fraction: fraction of a round's clients whose updates must be accepted; with fewer, the
        round is repeated with other clients, up to `attempts` times in all.
    batch_size: the clients' batch size, for error messages.
    exchanges_weights: whether there is a global state, whose parts travel. If not, clients train
        models of their own.
    has_own_models: whether clients' own models are evaluated, by a collection, and not the
        global model.
    score_clients: asks clients for scores on their own test examples; None if the run has none.
    bounds: limits the norms of updates; None if they are not limited.
    max_step_factor: the global state's step is at most this many times as long as it usually is; 0:
        any step.
    max_loss: largest absolute loss that a node elsewhere may report; None: any.
    max_examples: largest number of examples that a node elsewhere may report; None: any.
    max_steps: number of examples -> the most local steps that a job allows; None: any.
    """

    engine: Engine
    algorithm: ServerAlgorithm
    split: Split
    size_of: Callable[[int, int], str]
    sample: Sampler
    pipeline: Sequence[Stage]
    collections: Sequence[CollectionStage]
    evaluator: Evaluator
    uplink: Uplink
    weigh_by_examples: bool
    accountant: Accountant | None
    device: torch.device
    min_fraction: float
    attempts: int
    batch_size: int
    exchanges_weights: bool = True
    has_own_models: bool = False
    score_clients: ScoreClients | None = None
    release_log: ReleaseLog | None = None
    why_no_scores: str = ""
    bounds: UpdateBounds | None = None
    max_step_factor: float = 0.0
    max_loss: float | None = None
    max_examples: int | None = None
    max_steps: Callable[[int], int] | None = None
