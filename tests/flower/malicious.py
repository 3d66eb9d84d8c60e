"""The app of a real node that misbehaves: client 1 does another wrong thing in every round."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from motley.core.part import State
from motley.flower.arrays import pack, unpack
from motley.flower.client import build, settings_of

LATE_S = 45.0
"""How long the server waits for an answer; the late one takes longer."""

honest = build()
app = ClientApp()


def changed(**more: torch.Tensor) -> Callable[[RecordDict], None]:
    """Return a misdeed that replaces tensors of the delta or adds some."""

    def act(content: RecordDict) -> None:
        delta: State = unpack(content["arrays"], "delta")
        for name, tensor in more.items():
            delta[name.replace("__", ".")] = tensor
        content["arrays"] = pack(delta=delta)

    return act


def earlier(content: RecordDict) -> None:
    """Answer for the round before."""
    about = content["update"]
    content["update"] = ConfigRecord({**about, "round": int(about["round"]) - 1})  # type: ignore[dict-item, arg-type]


def late(content: RecordDict) -> None:
    """Answer after the server has given up."""
    time.sleep(LATE_S + 5)


def garbled(content: RecordDict) -> None:
    """Answer with something that a careless server would unpickle."""
    content["arrays"]["delta"].data = b"\x80\x04\x95 a pickle, say"  # type: ignore[index, union-attr]


MISDEEDS: list[tuple[Callable[[RecordDict], None], str]] = [
    (changed(fc__bias=torch.full((10,), torch.nan)), "it holds a number that is not finite."),
    (changed(fc__bias=torch.zeros(9)), "'fc.bias' has shape (9,); (10,) was sent out."),
    (changed(fc__bios=torch.zeros(10)), "unknown name 'fc.bios'"),
    (changed(x=torch.zeros(2**19)), "MiB; engine.flower.max_reply_mib = 1."),
    (earlier, "it is for round 4; round 5 was asked."),
    (garbled, "delta is not in the format safetensors"),
    (late, f"it did not answer within {LATE_S:g} s (engine.flower.timeout_s)."),
]
"""What client 1 does in rounds 1, 2, ..., and the reason in the metrics."""


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Say who this is."""
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as asked; client 1 then spoils its answer."""
    reply = honest(message, context)
    if settings_of(context, None).client == 1:
        MISDEEDS[int(message.metadata.group_id) - 1][0](reply.content)
    return reply
