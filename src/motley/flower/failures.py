"""A node's failures: the server receives a kind and a reference; the text stays at the node.

An exception's text can quote a line of a file, a path or an example ("row 17 of my data"), and none
of these may leave the node. So the server receives one of a few fixed words and a random reference,
under which the node's operator finds the text in the node's log.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from motley.core.errors import MotleyError
from motley.limits import is_out_of_memory

#: bad-message: the server's message cannot be read. bad-config: its configuration is invalid.
#: node-settings: node.toml cannot be used. refused-by-node: the job does not match the node's
#: settings (client, size, budget, privacy). privacy-limit: the answer would exceed the node's limit
#: on epsilon, or its ledger cannot be used. data: the node's data cannot be used. no-test-data: its
#: data has no usable test part. out-of-memory: on the node or its GPU. worker-died: the training
#: process was killed, crashed or froze. stalled: it computed nothing for a long time, or the server
#: no longer waits for its answer. too-large: the answer is larger than the run allows. training:
#: everything else.
Kind = Literal[
    "bad-message",
    "bad-config",
    "node-settings",
    "refused-by-node",
    "privacy-limit",
    "data",
    "no-test-data",
    "training",
    "out-of-memory",
    "worker-died",
    "stalled",
    "too-large",
]

#: The server's advice beside the kind, if the node's operator can do something about it.
REMEDIES = {
    "privacy-limit": (
        " The privacy that the node may spend is spent (privacy.max_epsilon in its node.toml), or "
        "its ledger cannot be used. Only its operator can change that."
    ),
    "no-test-data": (
        " The files that data.path or data.root in its node.toml name should have a test part "
        "(x_test and y_test in a .npz file), because the run evaluates clients on their own data."
    ),
    "too-large": " Its answer is larger than the run's engine.flower.max_reply_mib.",
}

#: The file for the texts, beside node.toml.
LOG = "node.log"
#: A log of this size is renamed to .old: a server that makes a node fail again and again must not
#: fill the node's disk.
LOG_BYTES = 1_000_000

_REASON = re.compile(rf"({'|'.join(get_args(Kind))}) ([0-9a-f]{{8}})")


class NodeError(MotleyError):
    """A failure of a known kind. If `text` is empty, the text of its cause is used."""

    def __init__(self, kind: Kind, text: str = "") -> None:
        super().__init__(text)
        self.kind = kind


@contextmanager
def failing_as(kind: Kind) -> Iterator[None]:
    """Give exceptions in the block this kind, unless they have a kind or memory ran out."""
    try:
        yield
    except NodeError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        raise NodeError(kind) from error


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an exception or one of its causes says that memory ran out."""
    while error is not None:
        if is_out_of_memory(error):
            return True
        error = error.__cause__
    return False


def kind_of(error: Exception) -> Kind:
    """Return the kind of a failure."""
    if isinstance(error, NodeError):
        return error.kind
    return "out-of-memory" if ran_out_of_memory(error) else "training"


def keep_text(error: Exception, log: Path | None) -> str:
    """Write a failure's text to the node's terminal and log; return the text for the server."""
    kind, reference = kind_of(error), secrets.token_hex(4)
    text = f"failure {reference} ({kind}): {text_of(error)}\n"
    print(f"motley: {text}", end="", file=sys.stderr, flush=True)
    if log is not None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError):  # a full disk: the terminal has the text
            _append(log, f"{stamp} {text}")
    return f"{kind} {reference}"


def text_of(error: Exception) -> str:
    """Return the text for the node's operator: Motley's message, or a whole traceback."""
    cause = error.__cause__ if isinstance(error, NodeError) and not str(error) else error
    if isinstance(cause, MotleyError):
        return str(cause)
    return "".join(traceback.format_exception(cause)).rstrip()


def _append(log: Path, text: str) -> None:
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_name(log.name + ".old"))
    with log.open("a", encoding="utf-8") as file:
        file.write(text)


def is_nodes_own(reason: str | None) -> bool:
    """Tell whether an error comes from a Motley node, and not from Flower."""
    return _REASON.fullmatch(reason or "") is not None


def error_text(reason: str | None) -> str:
    """Return the server's wording of an error from a node or from Flower, which may be anything."""
    match = _REASON.fullmatch(reason or "")
    if match:
        remedy = REMEDIES.get(match[1], "")
        return f"failed ({match[1]}), see reference {match[2]} in the node's log.{remedy}"
    lines = (reason or "").strip().splitlines() or ["no reason was given"]
    # Escape sequences would reach the terminal of the server's operator.
    readable = "".join(character for character in lines[-1] if character.isprintable())
    return f"failed: {readable[:500]}"
