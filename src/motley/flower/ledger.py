"""A node's own privacy ledger, and the limit on the epsilon of its updates.

The server chooses a run's noise, which every message states, and how often it asks. A node need
not rely on either. It counts for itself: it writes a line to its memory folder before each update
is sent, across runs and restarts of the server. From the node's point of view, each update is a
Gaussian mechanism of its own. The server sees it, so neither the sampling of clients nor the noise
of others counts in the node's favour. The updates of all runs compose, even with different noise.

Updates of different data sets are counted apart. A data set is identified by its name and its path
in node.toml, so a file that is edited keeps its count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from motley.client.job import Job
from motley.core.errors import MotleyError
from motley.extras import require
from motley.flower.failures import NodeError, failing_as
from motley.flower.request import Request
from motley.flower.settings import NodeSettings
from motley.privacy.accounting import uploads_epsilon
from motley.privacy.ledger_file import Entry, LedgerFile

NAME = "privacy-ledger.jsonl"
ADVICE = (
    "It says how much privacy this node has spent, and the node sends no private update without "
    "it. Restore the file from a backup. If there is none, count from zero only if you accept that "
    f"earlier updates are forgotten: remove {NAME} and {NAME}.head from this folder."
)
#: The number of remaining updates is counted up to this one.
MANY = 1_000_000


class NodeLedger:
    """The updates that have left a node."""

    def __init__(self, node: NodeSettings) -> None:
        self.node, self.limit = node, node.privacy.max_epsilon
        self.file = LedgerFile(Path(node.memory) / NAME, ADVICE)
        self.data = data_set_of(node)
        if self.limit is not None:
            require("dp_accounting", f"privacy.max_epsilon = {self.limit:g}: computing epsilon")

    def uploads(self, entries: Iterable[Entry] | None = None) -> Counter[float]:
        """Return how many updates of this data set have left the node, by their noise."""
        counts: Counter[float] = Counter()
        for entry in self.file.read() if entries is None else entries:
            if entry["data"] == self.data:
                counts[entry["noise"]] += 1
        return counts

    def epsilon(self, uploads: Mapping[float, int]) -> float:
        """Return the epsilon of some updates, at the node's own delta."""
        return uploads_epsilon(uploads, self.node.privacy.delta)

    def require_room(self, noise: float, entries: Iterable[Entry] | None = None) -> None:
        """Raise if one more update with this noise would exceed the node's limit."""
        uploads = self.uploads(entries)
        if self.limit is None:
            return
        limit = f"privacy.max_epsilon = {self.limit:g}"
        after = self.epsilon(uploads + Counter([noise]))
        if after <= self.limit:
            return
        if not noise:
            reason = "the run has privacy.noise = 0, and without noise epsilon is infinite."
            raise NodeError("privacy-limit", f"{limit}: {reason}")
        raise NodeError(
            "privacy-limit",
            f"{limit}: this node has sent {uploads.total()} updates of {self.data}, which is "
            f"epsilon {self.epsilon(uploads):.2f} at delta {self.node.privacy.delta:g}. One more "
            f"with privacy.noise = {noise:g} would make it {after:.2f}.",
        )

    def add(self, noise: float, run: int, job: Job) -> None:
        """Count an update that is about to be sent. When this returns, the count is on disk."""
        entry = {
            "data": self.data,
            "noise": noise,
            "run": str(run),  # Flower's number: too large for readers of JSON that use doubles
            "round": job.round_number,
        }
        Path(self.node.memory).mkdir(parents=True, exist_ok=True)
        self.file.append(entry, partial(self.require_room, noise))

    def updates_left(self, noise: float) -> int:
        """Return how many more updates with this noise are within the limit, up to `MANY`."""
        assert self.limit is not None
        uploads = self.uploads()
        fits, too_many = 0, 1
        while too_many <= MANY and self._fits(uploads, noise, too_many):
            fits, too_many = too_many, 2 * too_many
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._fits(uploads, noise, middle):
                fits = middle
            else:
                too_many = middle
        return min(fits, MANY)

    def _fits(self, uploads: Counter[float], noise: float, more: int) -> bool:
        assert self.limit is not None
        return self.epsilon(uploads + Counter({noise: more})) <= self.limit

    def describe(self) -> str:
        """Say how much is spent and left; empty if there is no limit and nothing was sent."""
        uploads = self.uploads()
        if self.limit is None and not uploads:
            return ""
        sent = f"privacy: {uploads.total()} updates of {self.data} have left this node"
        try:
            spent = f", epsilon {_text(self.epsilon(uploads))}"
        except ModuleNotFoundError:
            spent = ""  # without a limit, nothing depends on the accountant
        delta = f" at delta {self.node.privacy.delta:g}"
        if self.limit is None:
            return f"{sent}{spent}{delta}; there is no limit (privacy.max_epsilon)"
        left = ""
        noise = self.node.privacy.noise
        if noise:
            count = self.updates_left(noise)
            number = f"more than {MANY}" if count == MANY else str(count)
            left = f"; with privacy.noise = {noise:g}, {number} more are within the limit"
        return f"{sent}{spent} of {self.limit:g}{delta}{left}"


def _text(epsilon: float) -> str:
    return f"{epsilon:.2f}" if math.isfinite(epsilon) else "infinite"


def data_set_of(node: NodeSettings) -> str:
    """Return the name of a node's data set, and where it is stored."""
    place = node.data.path or node.data.root
    return f"{node.data.name} ({place})" if place else node.data.name


def counts_updates(node: NodeSettings, request: Request) -> bool:
    """Tell whether a node counts its updates in a run.

    It does in private runs, and in all runs if it has a limit. A node that draws its noise from the
    run's seed (`repeatable`) is an experiment, and protects nothing.
    """
    limited = node.privacy.max_epsilon is not None
    return (limited or request.config.privacy.active) and not node.repeatable


def require_room(node: NodeSettings, request: Request) -> None:
    """Refuse a job whose answer the node's limit does not allow, before anything is computed."""
    if counts_updates(node, request):
        with failing_as("privacy-limit"):
            NodeLedger(node).require_room(noise_of(request))


def count_update(node: NodeSettings, request: Request, job: Job) -> None:
    """Count an update that is about to be sent, or refuse to send it."""
    if counts_updates(node, request):
        with failing_as("privacy-limit"):
            NodeLedger(node).add(noise_of(request), request.run, job)


def noise_of(request: Request) -> float:
    """Return the noise of a run's updates, in units of its clip; 0 if they are not private."""
    privacy = request.config.privacy
    return privacy.noise if privacy.active else 0.0


def describe_ledger(node: NodeSettings) -> str:
    """Return a line about a node's ledger for its terminal. Raise if the ledger is damaged."""
    try:
        return NodeLedger(node).describe()
    except (KeyError, TypeError) as error:
        raise MotleyError(
            f"{Path(node.memory) / NAME}: is no ledger: {error!r}. {ADVICE}"
        ) from None
