"""A job: the server's request to one client in a round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from motley.core.part import State

#: A method's own collection; BatchNorm statistics (`motley.server.recalibration`); the scores of
#: clients' own models on the test set (`motley.server.own_models`); scores on clients' own test
#: examples, and those after local training too (`motley.server.client_scores`).
CollectionName: TypeAlias = Literal[
    "method", "statistics", "evaluation", "client-score", "personalized-score"
]

#: The collections that score a client on its own test examples.
CLIENT_SCORES = ("client-score", "personalized-score")


@dataclass(frozen=True)
class Job:
    """One client's task: to train in a round, or to answer a collection."""

    round_number: int
    client: int
    size: str
    #: The client's part of the global state under its own names. These are views, which the client
    #: copies and never changes. It is empty if the client has a model of its own, because the
    #: method exchanges no weights.
    state: State
    #: The method's broadcast to the client, beside its part.
    broadcast: State = field(default_factory=dict)
    #: The round of the client's last accepted update, which is the round of the client state to
    #: use. None: no such round yet.
    client_state_round: int | None = None
    #: For `Engine.collect`: the kind of collection.
    collection: CollectionName = "method"
