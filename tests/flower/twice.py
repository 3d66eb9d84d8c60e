"""The apps of a real node that answers twice: after its answer, client 1 sends another to the same message.

Flower's client sends once what the app returns. So the app goes past it, to the SuperLink, with the node's own key.
With the app `half`, client 1 sends nothing of the answers that it announces in round 1.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_push_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import push_objects
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from motley.flower.arrays import pack, unpack
from motley.flower.client import build, settings_of
from motley.flower.settings import read_node

TWICE = "answered {} twice: the SuperLink wants {} objects of the first answer, {} of the second"
"""The line that client 1 prints in every round."""

honest = build()


def connect(file: Path) -> FleetHttpClient:
    """Reach the server as the node with that file does."""
    key = load_ssh_private_key((file.parent / "key").read_bytes(), None)
    proof = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
    ]
    return FleetHttpClient.from_server_address(
        read_node(file).superlink, False, str(file.parent / "ca.crt"), interceptors=proof
    )


def announce(link: FleetHttpClient, reply: Message) -> PushMessagesResponse:
    """Send an answer without its arrays; return which of them the SuperLink wants."""
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return link.PushMessages(
        PushMessagesRequest(
            node=Node(node_id=reply.metadata.src_node_id),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )
    )


def complete(link: FleetHttpClient, reply: Message, wanted: PushMessagesResponse) -> None:
    """Send an answer's arrays."""
    node, run = Node(node_id=reply.metadata.src_node_id), reply.metadata.run_id
    push = make_push_object_fn_protobuf(link.PushObject, node, run, wanted.session_id)
    push_objects(
        get_all_nested_objects(reply), push, object_ids_to_push=set(wanted.objects_to_push)
    )


def opposite(reply: Message, message: Message) -> Message:
    """Return a valid answer with the negated delta."""
    arrays = reply.content["arrays"]
    delta = {name: -tensor for name, tensor in unpack(arrays, "delta").items()}
    content = {
        "update": reply.content["update"],
        "arrays": pack(delta=delta, payload=unpack(arrays, "payload")),
    }
    return Message(RecordDict(content), reply_to=message)


def train(half: bool, message: Message, context: Context) -> Message:
    """Train as asked; client 1 sends its answer and the opposite, and has Flower send the opposite once more."""
    reply = honest(message, context)
    if settings_of(context, None).client != 1:
        return reply
    second = opposite(reply, message)
    with connect(Path(str(context.node_config["motley"]))) as link:
        wanted, more = announce(link, reply), announce(link, second)
        counts = len(wanted.objects_to_push), len(more.objects_to_push)
        print(TWICE.format(message.metadata.message_id, *counts), flush=True)
        if not half or message.metadata.group_id != "1":
            complete(link, reply, wanted)
    return second


def misbehaving(half: bool) -> ClientApp:
    """Return an app of which only the training is not Motley's."""
    client_app = ClientApp()
    client_app.query()(honest)
    client_app.train()(partial(train, half))
    return client_app


app = misbehaving(half=False)
half = misbehaving(half=True)
