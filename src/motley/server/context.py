"""The objects and settings that a round works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from motley.engine.base import Engine
from motley.evaluate import Evaluator
from motley.methods.base import ServerAlgorithm
from motley.privacy import Accountant
from motley.server.client_scores import ScoreClients
from motley.server.collection import CollectionStage
from motley.server.pipeline import Stage
from motley.server.sampling import Sampler
from motley.server.uplink import Uplink
from motley.splits.base import Split


@dataclass(frozen=True)
class RoundContext:
    """The objects and numbers that a round works with. They stay the same from round to round.

    size_of: (client, round) -> the client's size.
    weigh_by_examples: whether a client counts by its number of examples in the mean; otherwise all
        count equally.
    accountant: computes the privacy spent; None if the run is not private. Private clients do not
        report their loss.
    device: the server's device.
    min_fraction: fraction of a round's clients whose updates must be accepted; with fewer, the
        round is repeated with other clients, up to `attempts` times in all.
    batch_size: the clients' batch size, for error messages.
    exchanges_weights: whether there is a global state, whose parts travel. If not, clients train
        models of their own.
    has_own_models: whether clients' own models are evaluated, by a collection, and not the
        global model.
    score_clients: asks clients for scores on their own test examples; None if the run has none.
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
