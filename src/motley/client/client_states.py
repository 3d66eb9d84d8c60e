"""What clients keep between rounds, and the jobs that are completed with it.

A stored client state has up to three kinds of tensors: the state of the method, tensors of a model
of the client's own (`own_model.py`), and the rounding error of a 16-bit upload (`encoding.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from motley.client.encoding import Encoding, without_residual
from motley.client.job import CLIENT_SCORES, Job
from motley.client.own_model import (
    MODEL,
    PERSONAL,
    PRIVATE,
    prefixed,
    state_of_method,
    stored_under,
)
from motley.client.state_store import ClientStateStore
from motley.core.device import on_device
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.results import require_tensors
from motley.methods.base import Method


class ClientStates:
    """The stored states of the clients of one process."""

    def __init__(
        self,
        method: Method,
        store: ClientStateStore,
        *,
        encoding: Encoding,
        seed: int,
        device: torch.device,
        drops_received: bool,
    ) -> None:
        """`drops_received`: a job may lose its state once its client has a copy."""
        #: A worker process has a store of its own for each client.
        self.store = store
        self._method, self._encoding, self._seed = method, encoding, seed
        self._device, self._drops_received = device, drops_received
        self._initial_private: dict[str, State] = {}

    def are_kept(self, size: str) -> bool:
        """Whether clients of a size have a stored state after an accepted update."""
        return self._has_own_tensors(size) or self._encoding != "fp32"

    def _has_own_tensors(self, size: str) -> bool:
        """Whether a stored state has more than the rounding error of an upload."""
        needs = self._method.requirements
        return bool(needs.client_state or not needs.exchanges_weights or self._private_names(size))

    def _private_names(self, size: str) -> frozenset[str]:
        return self._method.info.split.private[size]

    def check(self, rounds: Mapping[int, int]) -> None:
        """Raise if the stored state of one of these clients (client -> round) cannot be read."""
        info = self._method.info
        kept_sizes = [size for size in info.split.sizes if self.are_kept(size)]
        if not kept_sizes:
            return
        expected: Mapping[int, int] = rounds
        if len(kept_sizes) < len(info.split.sizes):
            of_kept_sizes = {}
            for client, round_number in rounds.items():
                if info.size_of(client, round_number) in kept_sizes:
                    of_kept_sizes[client] = round_number
            expected = of_kept_sizes
        self.store.check(expected)

    # ---- before a client trains

    def stored(self, job: Job) -> State:
        """Return the stored state that a job's client starts from; empty if it has none."""
        if job.client_state_round is None or not self.are_kept(job.size):
            return {}
        return self.store.load(job.client, job.client_state_round)

    def resume(self, job: Job) -> tuple[Job, State]:
        """Return a job with the weights that its client starts from, and the method's client state.

        The job carries the client's part of the global state. Where a client has a model of its
        own, or private tensors, these take the place of what the job carries.
        """
        if job.client_state_round is None or not self._has_own_tensors(job.size):
            return self._first_time(job)
        needs = self._method.requirements
        stored = without_residual(self.store.load(job.client, job.client_state_round))
        client_state = state_of_method(stored)
        if not needs.exchanges_weights:
            return replace(job, state=stored_under(MODEL, stored)), client_state
        if self._private_names(job.size):
            return self._with_private(job, stored_under(PRIVATE, stored)), client_state
        if needs.personal_model:
            client_state = stored_under(PERSONAL, stored)
            if job.collection in ("evaluation", *CLIENT_SCORES):
                job = replace(job, state=self._method.client.personal_model(client_state))
        return job, client_state

    def _first_time(self, job: Job) -> tuple[Job, State]:
        """Return the job and the state of a client that has no stored tensors.

        Before its first accepted update, a client with a model of its own starts from the weights
        in the job, which are then the initial ones of its size.
        """
        if self._private_names(job.size):
            job = self._with_private(job, self.initial_private(job.size))
        if not self._method.requirements.client_state:
            return job, {}
        client = self._method.client
        state: object = client.initial_client_state(job.size, job.state)
        return job, require_tensors(state, f"initial_client_state of {type(client).__name__}")

    def _with_private(self, job: Job, private: State) -> Job:
        """Return a job with the client's private tensors beside those that the server sent.

        They must be all that are private now and no others: a tensor that is not private any more
        would leave the client with its next delta.
        """
        if private.keys() != self._private_names(job.size):
            raise MotleyError(
                f"the private tensors of client {job.client} after round {job.client_state_round} "
                f"are not those that split.private = "
                f"{list(self._method.info.split.settings.private)} names."
            )
        state = {**job.state, **private}
        if self._drops_received:
            job.state.clear()
        return replace(job, state=state)

    def initial_private(self, size: str) -> State:
        """Return the private tensors of a client of a size before its first training."""
        if size not in self._initial_private:
            tensors = self._method.info.split.initial_private(size, self._seed)
            self._initial_private[size] = {
                name: on_device(tensor, self._device) for name, tensor in tensors.items()
            }
        return self._initial_private[size]

    # ---- after a client has trained

    def own_tensors(self, size: str, state: State) -> State:
        """Return those tensors of a trained model that stay with the client."""
        if not self._method.requirements.exchanges_weights:
            return state
        private = self._private_names(size)
        return {name: tensor for name, tensor in state.items() if name in private}

    def to_store(self, client_state: State, own_tensors: State) -> State:
        """Return what a client stores: the method's client state, and the client's own tensors."""
        needs = self._method.requirements
        if needs.personal_model:
            client_state = prefixed(PERSONAL, client_state)
        prefix = PRIVATE if needs.exchanges_weights else MODEL
        return {**client_state, **prefixed(prefix, own_tensors)}

    def own_model(self, client: int, size: str, round_number: int, part: State) -> State:
        """Return a client's model after a round: `part`, completed by the client's private tensors.

        If the whole model is the client's own, `part` is not used.
        """
        if not self._has_own_tensors(size):
            # Its size has none of the private tensors that split.private names.
            return part
        stored = self.store.get(client, round_number)
        needs = self._method.requirements
        if not needs.exchanges_weights:
            return stored_under(MODEL, stored)
        if needs.personal_model:
            return self._method.client.personal_model(stored_under(PERSONAL, stored))
        return {**part, **stored_under(PRIVATE, stored)}
