"""The server's side of Flower: sends jobs to nodes as messages, and reads their answers as updates.

Which node acts as which client is decided in nodes.py. An answer counts if it arrives in time, from
the node that was asked, in reply to its message, and for the current round. Everything else is a
failure with a reason, and the round goes on without that client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from flwr.app import Message, MessageType, RecordDict

from motley.client.job import Job
from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Failure
from motley.flower.answers import Refused
from motley.flower.arrays import pack, size_in_bytes, unpack
from motley.flower.failures import error_text
from motley.flower.nodes import POLL_S, REVOKED, Nodes, number
from motley.methods.base import Collection

COLLECT = f"{MessageType.TRAIN}.collect"
#: The pause between two polls, as a fraction of the time that has passed, and the shortest pause:
#: an answer waits for this fraction of its own time at most, and simulated nodes answer at once.
PAUSE_FRACTION, FIRST_S = 0.05, 0.05
#: A message lives this many seconds longer than the server waits for its answer. Otherwise Flower
#: would report that it is too old, which says less than the server's own message.
GRACE_S = 10.0


class FlowerEngine:
    """Runs clients at their nodes."""

    trusted: ClassVar[bool] = False

    def __init__(self, nodes: Nodes) -> None:
        self.nodes, self.grid = nodes, nodes.grid
        self.answers, self.settings = nodes.answers, nodes.settings
        self._forget: Mapping[int, int] = {}

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[ClientUpdate | Failure]:
        """Send every job to its client's node; return updates and failures, ordered by client."""
        answers: list[ClientUpdate | Failure] = []
        for job, answer in self._ask(jobs, MessageType.TRAIN):
            if isinstance(answer, ClientUpdate) and answer.num_examples:
                answer = self._checked(answer)
            if isinstance(answer, Failure) or answer.num_examples:
                answers.append(answer)
            done(job.client)
        return sorted(answers, key=lambda answer: answer.client)

    def _checked(self, update: ClientUpdate) -> ClientUpdate | Failure:
        """Return an update with at most as many examples as its node has registered.

        A node may have got more since then. They count when it connects the next time: otherwise it
        could raise its weight at will. Absurd numbers are left to `server.max_examples`.
        """
        if not update.num_steps:
            return Failure(update.client, "it claims to have trained in no steps.")
        registered = self.nodes.num_examples.get(update.client)
        plausible = update.num_examples <= self.nodes.config.server.max_examples
        if registered is not None and plausible:
            return replace(update, num_examples=min(update.num_examples, registered))
        return update

    def collect(self, jobs: Sequence[Job]) -> list[Collection | Failure]:
        """Ask for collections; return collections and failures, ordered by client."""
        answers: list[Collection | Failure] = []
        for job, answer in self._ask(jobs, COLLECT):
            if isinstance(answer, Failure):
                answers.append(answer)
            elif answer.num_examples:
                collection = Collection(
                    job.client, answer.num_examples, answer.payload, job.size, job.round_number
                )
                answers.append(collection)
        return sorted(answers, key=lambda answer: answer.client)

    def save_client_states(self, rounds: Mapping[int, int]) -> None:
        """Do nothing: a node saves its client's state before it answers."""

    def forget_client_states(self, rounds: Mapping[int, int]) -> None:
        """Tell each node with its next job which client states are no longer needed."""
        self._forget = rounds

    def _ask(
        self, jobs: Sequence[Job], message_type: str
    ) -> Iterator[tuple[Job, ClientUpdate | Failure]]:
        """Send jobs; yield each with its answer as it arrives, or with the reason for a failure."""
        nodes = self.nodes.find([job.client for job in jobs])
        for job in jobs:
            if job.client not in nodes:
                yield job, Failure(job.client, self.nodes.why_absent(job.client))
        asked = [job for job in jobs if job.client in nodes]
        # Not kept in a variable: the messages have every client's part of the model in them.
        numbers = self.grid.push_messages(
            [self._message(job, nodes[job.client], message_type) for job in asked]
        )
        # Flower's id of a message -> its job, until the answer has arrived.
        waiting = dict(zip(numbers, asked, strict=True))
        begun = time.monotonic()
        while waiting:
            for reply in self.answers.pull(list(waiting)):
                if isinstance(reply, Refused):
                    job = waiting.pop(reply.sent)
                    yield job, Failure(job.client, f"its answer was refused: {reply.reason}")
                else:
                    job = waiting.pop(reply.metadata.reply_to_message_id)
                    yield job, self._answer(job, nodes[job.client], reply)
            passed = time.monotonic() - begun
            if passed > self.settings.timeout_s:
                break
            if waiting:
                time.sleep(min(max(FIRST_S, PAUSE_FRACTION * passed), POLL_S))
        for sent, job in waiting.items():
            yield job, self._no_answer(sent, job)

    def _no_answer(self, sent: str, job: Job) -> Failure:
        """Stop waiting for the answer to a message, and return the failure of its client."""
        has_begun = self.answers.give_up(sent)
        fault = "announced an answer that did not come whole" if has_begun else "did not answer"
        limit = f"{self.settings.timeout_s:g} s (engine.flower.timeout_s)"
        return Failure(job.client, f"it {fault} within {limit}.")

    def _message(self, job: Job, node: int, message_type: str) -> Message:
        about = self.nodes.content(
            round=job.round_number,
            client=job.client,
            size=job.size,
            client_state_round=-1 if job.client_state_round is None else job.client_state_round,
            forget=self._forget.get(job.client, 0),
            collection=job.collection,
        )
        content = RecordDict(
            {"job": about, "arrays": pack(state=job.state, broadcast=job.broadcast)}
        )
        return Message(
            content,
            node,
            message_type,
            ttl=self.settings.timeout_s + GRACE_S,
            group_id=str(job.round_number),
        )

    def _answer(self, job: Job, node: int, reply: Message) -> ClientUpdate | Failure:
        """Return the update in a reply of a node, or the reason why it cannot be used."""
        if job.client in self.nodes.revoked():  # since it was asked
            return Failure(job.client, REVOKED)
        if reply.has_error():
            return Failure(job.client, f"its node {error_text(reply.error.reason)}")
        # Flower's own errors come from the SuperLink, answers from the node alone.
        if reply.metadata.src_node_id != node:
            return Failure(job.client, "its answer was refused: it comes from another node.")
        try:
            return self._update(job, reply.content)
        except (MotleyError, KeyError, TypeError, ValueError) as error:
            return Failure(job.client, f"its answer was refused: {error}")

    def _update(self, job: Job, content: RecordDict) -> ClientUpdate:
        about: Any = content["update"]
        arrays: Any = content["arrays"]
        for name, asked in (("client", job.client), ("round", job.round_number)):
            answered = number(about, name)
            if answered != asked:
                raise MotleyError(f"it is for {name} {answered}; {name} {asked} was asked.")
        size = size_in_bytes(arrays) / 2**20
        limit = self.settings.max_reply_mib
        if size > limit:
            raise MotleyError(f"it has {size:.1f} MiB; engine.flower.max_reply_mib = {limit:g}.")
        return ClientUpdate(
            client=job.client,
            delta=unpack(arrays, "delta"),
            payload=unpack(arrays, "payload"),
            num_examples=number(about, "num_examples"),
            num_steps=number(about, "num_steps"),
            loss=torch.tensor(float(about["loss"])),
        )
