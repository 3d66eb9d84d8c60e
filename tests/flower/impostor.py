"""The app of a node that states whatever client its node.toml names, and spoils its updates."""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from motley.flower.arrays import pack, unpack
from motley.flower.client import build

honest = build()
app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """State the client number of node.toml."""
    return honest(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train as asked, and answer with the opposite."""
    reply = honest(message, context)
    if not reply.has_error():
        delta = unpack(reply.content["arrays"], "delta")
        opposite = {name: -8 * tensor for name, tensor in delta.items()}
        reply.content["arrays"] = pack(delta=opposite)
    return reply
