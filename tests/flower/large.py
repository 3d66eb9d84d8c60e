"""The app of a real node whose client 1 sends answers that are much too large."""

from __future__ import annotations

import os

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from motley.flower.arrays import pack
from motley.flower.client import build, settings_of

MIB = int(os.environ.get("MOTLEY_TEST_MIB", "400"))
"""The size of an answer."""

honest = build()
app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Say who this is."""
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as asked. Client 1 sends random numbers in round 1, and zeros in round 2.

    Flower sends equal pieces once: the zeros are one piece that the answer names many times.
    """
    reply = honest(message, context)
    if settings_of(context, None).client == 1:
        if message.metadata.group_id == "1":
            values = torch.randint(2**31 - 1, (MIB * 2**18,), dtype=torch.int32)
            reply.content["arrays"] = pack(delta={"x": values})
        elif message.metadata.group_id == "2":
            reply.content["arrays"] = pack(delta={"x": torch.zeros(MIB * 2**18)})
    return reply
