"""Answers from a SuperLink are pulled piece by piece, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("flwr")

import httpx
import torch
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from motley.flower.answers import PiecewiseAnswers, Refused
from motley.flower.arrays import pack, unpack
from motley.flower.client import check_reply_size
from motley.flower.failures import NodeError, error_text

MIB = 2**20


@dataclass
class SuperLink:
    """Takes the place of a SuperLink and of Flower's connection to it."""

    #: What is announced, and the pieces that have arrived; None: refused by the gate.
    announced: list[Message] = field(default_factory=list)
    pieces: dict[str, bytes | None] = field(default_factory=dict)
    pulled: list[str] = field(default_factory=list)
    confirmed: list[str] = field(default_factory=list)

    node = Node(node_id=1)

    @property
    def run(self) -> Any:
        @dataclass
        class Run:
            run_id: int = 1

        return Run()

    @property
    def _runtime_client(self) -> SuperLink:
        return self

    def announce(self, message: Message) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        self.announced.append(message)

    def send(self, message: Message, pieces: slice = slice(None)) -> None:
        objects = list(get_all_nested_objects(message).items())[pieces]
        self.pieces.update({number: piece.deflate() for number, piece in objects})

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:  # noqa: N802
        messages = [
            message
            for message in self.announced
            if message.metadata.reply_to_message_id in request.message_ids
        ]
        self.announced = [message for message in self.announced if message not in messages]
        return PullAppMessagesResponse(
            messages_list=[message_to_proto(remove_content_from_message(m)) for m in messages],
            message_object_trees=[get_object_tree(m) for m in messages],
        )

    def PullObject(self, request: Any) -> PullObjectResponse:  # noqa: N802
        self.pulled.append(request.object_id)
        piece = self.pieces.get(request.object_id, b"")
        if piece is None:
            response = httpx.Response(413, text="it is too large.\n")
            raise httpx.HTTPStatusError("", request=None, response=response)  # type: ignore[arg-type]
        return PullObjectResponse(
            object_found=True, object_available=bool(piece), object_content=piece
        )

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.confirmed.append(request.message_object_id)


def answer_of(values: torch.Tensor, number: str = "sent") -> Message:
    """Return an answer to a message, with one tensor."""
    message = Message(RecordDict(), 7, "train")
    message.metadata.__dict__["_message_id"] = number
    return Message(RecordDict({"arrays": pack(delta={"x": values})}), reply_to=message)


@pytest.fixture
def link(grid: object) -> SuperLink:
    """Return a SuperLink; `grid` sets Flower's identity of this process."""
    return SuperLink()


def answers_of(link: SuperLink, max_bytes: float = MIB) -> PiecewiseAnswers:
    return PiecewiseAnswers(link, max_bytes)  # type: ignore[arg-type]


def test_an_answer_counts_when_all_of_it_is_there(link: SuperLink) -> None:
    """Until then nothing is read, because the message itself comes last."""
    answers, reply = answers_of(link), answer_of(torch.arange(5.0))
    assert list(answers.pull(["sent"])) == []
    link.announce(reply)
    link.send(reply, slice(-1))
    assert list(answers.pull(["sent"])) == []
    assert list(answers.pull(["sent"])) == []
    assert link.pulled == [reply.object_id] * 2
    link.send(reply)
    (received,) = answers.pull(["sent"])
    assert isinstance(received, Message)
    assert torch.equal(unpack(received.content["arrays"], "delta")["x"], torch.arange(5.0))
    assert link.confirmed == [reply.object_id]
    assert not answers.give_up("sent")


def test_an_incomplete_answer_delays_no_other(link: SuperLink) -> None:
    answers = answers_of(link)
    half, whole = answer_of(torch.zeros(1), "first"), answer_of(torch.ones(1), "second")
    for reply in (half, whole):
        link.announce(reply)
    link.send(half, slice(-1, None))
    link.send(whole)
    (received,) = answers.pull(["first", "second"])
    assert isinstance(received, Message)
    assert received.metadata.reply_to_message_id == "second"
    assert answers.give_up("first")
    assert link.confirmed == [whole.object_id, half.object_id]


def test_an_answer_is_dropped_at_the_piece_that_exceeds_the_limit(link: SuperLink) -> None:
    answers = answers_of(link, 12 * MIB)
    reply = answer_of(torch.randint(99, (40 * MIB,), dtype=torch.uint8))
    link.announce(reply)
    link.send(reply)
    assert list(answers.pull(["sent"])) == [
        Refused("sent", "it has more than 12 MiB; engine.flower.max_reply_mib = 12.")
    ]
    arrays = [number for number in link.pulled if len(link.pieces[number] or b"") > MIB]
    assert len(arrays) == 3  # of eight, with 5 MiB each
    assert link.confirmed == [reply.object_id]


def test_an_answer_that_names_one_piece_many_times_is_refused(link: SuperLink) -> None:
    """Eight equal pieces travel once, and would fill the memory eight times."""
    answers = answers_of(link, 12 * MIB)
    reply = answer_of(torch.zeros(40 * MIB, dtype=torch.uint8))
    link.announce(reply)
    link.send(reply)
    assert sum(len(piece or b"") for piece in link.pieces.values()) < 12 * MIB
    (refused,) = answers.pull(["sent"])
    assert isinstance(refused, Refused) and "more than 12 MiB" in refused.reason


def test_a_refusal_of_the_gate_has_its_reason(link: SuperLink) -> None:
    answers, reply = answers_of(link), answer_of(torch.zeros(1))
    link.announce(reply)
    link.pieces[reply.object_id] = None
    assert list(answers.pull(["sent"])) == [Refused("sent", "it is too large.")]


def test_damaged_and_exchanged_pieces_are_refused(link: SuperLink) -> None:
    answers = answers_of(link)
    damaged, other = answer_of(torch.zeros(1), "first"), answer_of(torch.ones(1), "third")
    link.announce(damaged)
    link.send(damaged)
    link.pieces[damaged.object_id] = b"not Flower's format"
    link.announce(other)
    link.announced[-1].metadata.__dict__["_reply_to_message_id"] = "second"
    link.send(other)
    refused = list(answers.pull(["first", "second"]))
    assert [type(answer) for answer in refused] == [Refused, Refused]


def test_a_node_does_not_send_an_answer_that_the_server_would_refuse() -> None:
    content = RecordDict({"arrays": pack(delta={"x": torch.zeros(2**19)})})
    check_reply_size(content, 3.0)
    with pytest.raises(
        NodeError, match=r"has 2\.0 MiB; engine\.flower\.max_reply_mib = 1\."
    ) as error:
        check_reply_size(content, 1.0)
    assert error.value.kind == "too-large"
    assert "engine.flower.max_reply_mib" in error_text("too-large 0123abcd")
