"""The app of a real node whose client 1 does not finish the first round."""

from __future__ import annotations

import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from motley.flower.client import build, settings_of

honest = build()
app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Say who this is."""
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as asked; client 1 sleeps in round 1."""
    if settings_of(context, None).client == 1 and message.metadata.group_id == "1":
        print("falling asleep", flush=True)
        time.sleep(3600)
    return honest(message, context)
