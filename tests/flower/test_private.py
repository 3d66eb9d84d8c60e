"""Private tensors on nodes: they are in no message, and results are the local engine's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message

from motley.client.encoding import encoded
from motley.client.own_model import PRIVATE, stored_under
from motley.client.state_store import ClientStateStore
from motley.core.part import State, size_in_bytes
from motley.flower.server import serve
from motley.methods.evaluation import widths_of
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.runs.run import start_run
from tests.flower.grid import Grid, three_nodes

QUICK = ("training.steps=2", "training.rounds=2")
CASES = {
    "FedPer": ("method.name=FedPer",),
    "FedBN": ("method.name=FedBN",),
    "FedRep": ("method.name=FedRep", "method.head_epochs=0.2"),
    "Ditto": ("method.name=Ditto",),
    "scaffold": ("method.name=scaffold", "split.private=head", "uplink.dtype=fp16"),
}


@dataclass(frozen=True)
class Sent:
    """One message, to a node or from it: its arrays as bytes by name, and its other values."""

    message_type: str
    client: int | None
    is_reply: bool
    arrays: dict[str, bytes]
    text: str


class Wire:
    """Keeps all messages to and from the nodes of a grid."""

    def __init__(self, grid: Grid) -> None:
        self.sent: list[Sent] = []
        answer = grid.answer

        def recorded(message: Message) -> Message:
            self._keep(message, "job")
            reply = answer(message)
            self._keep(reply, "update")
            return reply

        grid.answer = recorded  # type: ignore[method-assign]

    def _keep(self, message: Message, about: str) -> None:
        assert not message.has_error()
        arrays: dict[str, bytes] = {}
        text = ""
        for record in message.content.values():
            if isinstance(record, ArrayRecord):
                arrays |= {name: array.data for name, array in record.items()}
            else:
                assert isinstance(record, ConfigRecord)
                text += str(dict(record))
        client = None
        if about in message.content:
            client = message.content[about].get("client")  # type: ignore[union-attr]
        message_type = message.metadata.message_type
        self.sent.append(Sent(message_type, client, about == "update", arrays, text))  # type: ignore[arg-type]


def tensor_bytes(data: bytes) -> int:
    """Return how many bytes of a safetensors file are tensors, and not its header."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def kept_by(grid: Grid, client: int, round_number: int) -> State:
    """Return the private tensors that a node has on its disk."""
    folder = sorted(grid.nodes.values())[client].parent / f"client-{client}"
    return stored_under(PRIVATE, ClientStateStore(folder).get(client, round_number))


@pytest.mark.parametrize("case", ["FedPer", "FedBN", "FedRep", "scaffold"])
def test_private_tensors_are_in_no_message(grid: Grid, tmp_path: Path, case: str) -> None:
    """Neither their names nor their values, in both directions, in training and in evaluation."""
    wire = Wire(grid)
    federation, server = serve(grid, three_nodes(*QUICK, *CASES[case]), tmp_path / "run")
    split = federation.split
    # 3 nodes introduce themselves, and train and are scored in 2 rounds; all messages are answered.
    types = Counter((sent.message_type, sent.is_reply) for sent in wire.sent)
    counts = {"query": 3, "train": 6, "train.collect": 6}
    assert types == {(kind, reply): n for kind, n in counts.items() for reply in (False, True)}
    everything = b"".join(data for sent in wire.sent for data in sent.arrays.values())
    texts = "".join(sent.text for sent in wire.sent)

    first = federation.initial_state().state["conv1.weight"].numpy().tobytes()[:32]
    assert b"conv1.weight" in everything and first in everything, "shared tensors are found there"
    for name in {name for names in split.private.values() for name in names}:
        assert name.encode() not in everything and name not in texts
    for client, size in enumerate(federation.sizes):
        assert server.client_state_rounds[client] == 2
        kept = kept_by(grid, client, 2)
        initial = split.initial_private(size, federation.config.seed)
        assert kept.keys() == split.private[size]
        for name, tensor in kept.items():
            for values in (tensor, tensor - initial[name]):
                content = values.contiguous().numpy().tobytes()[:32]
                if len(set(content)) > 16:  # not a few equal numbers, which may be anything's
                    assert content not in everything

    # Every message has the bytes of the shared tensors, and no others.
    for sent in wire.sent:
        if sent.message_type == "query":
            assert not sent.arrays
            continue
        assert sent.client is not None
        size = federation.sizes[sent.client]
        whole = split.blueprints[size].module.state_dict()
        shared = {name: t for name, t in whole.items() if name not in split.private[size]}
        controls = sum(shared[name].nbytes for name in split.parameters_of(size))
        numbers = {name: tensor_bytes(data) for name, data in sent.arrays.items()}
        if sent.message_type == "train.collect":
            scores = 8 * sum(widths_of(federation.method.info.task, 10).values())
            down = {"state": size_in_bytes(shared)}
            assert numbers == ({"payload": scores} if sent.is_reply else down)
            continue
        expected = {"delta" if sent.is_reply else "state": size_in_bytes(shared)}
        if case == "scaffold":
            expected["payload" if sent.is_reply else "broadcast"] = controls
        if case == "scaffold" and sent.is_reply:
            expected["delta"] = size_in_bytes(encoded(shared, {}, "fp16")[0])
        assert numbers == expected


@pytest.mark.parametrize("case", ["FedPer", "FedRep", "Ditto", "scaffold"])
def test_nodes_end_with_the_local_engines_bits_and_scores(
    grid: Grid, tmp_path: Path, case: str
) -> None:
    """Every message starts a new process, so private tensors come from the node's disk."""
    grid.keep_alive = False
    settings = (*QUICK, *CASES[case])
    _, server = serve(grid, three_nodes(*settings), tmp_path / "run")
    _, local = start_run(three_nodes(*settings, "engine.name=local"), tmp_path / "local")
    assert fingerprint(server.state) == fingerprint(local.state)
    assert fingerprint(server.method_state) == fingerprint(local.method_state)
    lines, expected = (
        MetricsLog(tmp_path / run / "metrics.jsonl").read() for run in ("run", "local")
    )
    for line, local_line in zip(lines, expected, strict=True):
        assert "refused" not in line
        for key in ("accuracy", "class_accuracy", "loss", "bytes", "metrics", "train_loss"):
            assert line.get(key) == local_line.get(key), key
