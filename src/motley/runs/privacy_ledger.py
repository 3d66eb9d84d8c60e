"""The file privacy-ledger.jsonl of a run with [privacy]: every request to its clients.

Checkpoints cannot hold this. A run that is killed goes back to its last checkpoint, but the updates
that clients have sent since then cannot be taken back. So one line is on disk before clients are
asked, in every attempt at a round, and one before a new global model leaves the server. Resuming
counts all lines, also of rounds that are run again (`motley.privacy.releases`). Within one
run folder, epsilon therefore never decreases.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from motley.core.errors import MotleyError
from motley.federation import Federation
from motley.privacy import Accountant, PrivacyLedger
from motley.privacy.ledger_file import Entry, LedgerFile
from motley.privacy.releases import ReleaseCounter
from motley.runs.folder import RunFolder
from motley.runs.metrics import MetricsLog
from motley.server.sampling import Sampler
from motley.server.state import ServerState

ADVICE = (
    "Without it the privacy that the run has spent is not known. Restore this file from a backup, "
    "or start a new run."
)
#: The settings that epsilon depends on. They cannot change in a run.
FIXED = ("clip", "noise", "delta")
#: Metrics are rounded to six digits.
ROUNDING = 1e-5


class RunLedger:
    """The ledger of a run in its folder. Each written line is counted."""

    def __init__(
        self,
        path: Path,
        accountant: Accountant,
        saved: PrivacyLedger,
        reported: Sequence[Entry] = (),
    ) -> None:
        """Open a ledger and count its lines.

        A new one begins with `saved` and `reported`: earlier versions of Motley kept the ledger in
        checkpoints only, and `reported` are the releases after the last one (`_reported`).
        """
        self.accountant = accountant
        self.file = LedgerFile(path, ADVICE)
        self.counter = ReleaseCounter(accountant)
        if not self.file.read():
            settings = {name: getattr(accountant.settings, name) for name in FIXED}
            self._append({**settings, "before": saved.to_json(), "reported": [*reported]}, saved)
        header, *releases = self.file.read()
        self._require_same_settings(header)
        try:
            self.counter = ReleaseCounter(accountant, PrivacyLedger.from_json(header["before"]))
            for entry in (*header["reported"], *releases):
                self._count(entry)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise MotleyError(
                f"{path}: does not belong to this run ({error!r}). {ADVICE}"
            ) from None

    def add_request(self, round_number: int, attempt: int, clients: Sequence[int]) -> None:
        """Count that clients are about to be asked for updates."""
        self._add(_asked(round_number, attempt, clients))

    def add_mean(
        self,
        round_number: int,
        attempt: int,
        sampled: Sequence[int],
        accepted: Sequence[int],
        alone: bool = False,
    ) -> PrivacyLedger:
        """Count a mean of accepted updates; return all that was counted so far.

        `sampled` are all clients that were asked. `alone`: see `motley.privacy.releases`.
        """
        self._add(_merged(round_number, attempt, sampled, accepted, alone))
        return self.ledger

    @property
    def ledger(self) -> PrivacyLedger:
        """All that was counted so far."""
        return self.counter.ledger

    def _add(self, entry: Mapping[str, Any]) -> None:
        self._count(entry)
        self._append(entry, self.ledger)

    def _append(self, entry: Mapping[str, Any], ledger: PrivacyLedger) -> None:
        """Write an entry, with the epsilon after it; null stands for infinity."""
        epsilon = {}
        for adversary, value in self.accountant.epsilon(ledger).items():
            epsilon[adversary] = value if math.isfinite(value) else None
        self.file.append({**entry, "epsilon": epsilon}, lambda entries: None)

    def _count(self, entry: Mapping[str, Any]) -> None:
        if "asked" in entry:
            self.counter.add_request(entry["round"], entry["attempt"], entry["asked"])
        else:
            self.counter.add_mean(
                entry["round"],
                entry["attempt"],
                entry["sampled"],
                entry["merged"],
                entry["alone"],
            )

    def _require_same_settings(self, header: Entry) -> None:
        for name in FIXED:
            now = getattr(self.accountant.settings, name)
            if header.get(name) != now:
                raise MotleyError(
                    f"privacy.{name} = {now!r}: the run began with {header.get(name)!r} "
                    f"({self.file.path.name}), and its epsilon is known for that value only. Undo "
                    "the change, or start a new run."
                )


def keep_ledger(folder: RunFolder, federation: Federation, server: ServerState) -> ServerState:
    """Have a run with [privacy] write its ledger; return the server with all that was ever spent.

    Nothing is written if the run has no [privacy].
    """
    path = folder.privacy_ledger
    if federation.accountant is None:
        if LedgerFile(path, ADVICE).exists:
            raise MotleyError(
                f"privacy.clip = 0: the run began with [privacy] ({path.name}), and clients would "
                "send unprotected updates from now on. Undo the change, or start a new run."
            )
        return server
    lines = MetricsLog(folder.metrics).read()
    is_new = not LedgerFile(path, ADVICE).read()
    if is_new and server.round_number and not server.ledger.uploads:
        clip = federation.accountant.settings.clip
        raise MotleyError(
            f"privacy.clip = {clip:g}: the first {server.round_number} rounds of the run had no "
            "[privacy], and epsilon cannot cover them. Undo the change, or start a new run."
        )
    reported = _reported(federation.sample, server.round_number, lines)
    log = RunLedger(path, federation.accountant, server.ledger, reported)
    _require_no_less(log, lines)
    federation.release_log = log
    return replace(server, ledger=log.ledger)


def _asked(round_number: int, attempt: int, clients: Sequence[int]) -> Entry:
    return {"round": round_number, "attempt": attempt, "asked": list(clients)}


def _merged(
    round_number: int,
    attempt: int,
    sampled: Sequence[int],
    accepted: Sequence[int],
    alone: bool = False,
) -> Entry:
    about = {"round": round_number, "attempt": attempt}
    return {**about, "sampled": list(sampled), "merged": list(accepted), "alone": alone}


def _reported(sample: Sampler, saved_round: int, lines: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Return the releases of the rounds after the last checkpoint, according to the metrics.

    These rounds are run again now. A run that an earlier version began has no other record of them.
    The metrics say which clients were accepted, and who was asked follows from the seed.
    """
    entries: list[Entry] = []
    for line in lines:
        number = line["round"]
        if number <= saved_round:
            continue
        last = len(line.get("repeated") or ())
        for attempt in range(last + 1):
            entries.append(_asked(number, attempt, sample(number, attempt)))
        missing = {*map(int, line.get("refused") or {}), *(line.get("idle") or ())}
        clients = line.get("clients") or []
        accepted = [client for client in clients if client not in missing]
        entries.append(_merged(number, last, clients, accepted))
    return entries


def _require_no_less(log: RunLedger, lines: Iterable[Mapping[str, Any]]) -> None:
    """Raise if the metrics report a larger epsilon than the ledger accounts for."""
    counted = log.accountant.epsilon(log.ledger)
    for line in lines:
        for adversary, reported in (line.get("epsilon") or {}).items():
            reported = math.inf if reported is None else reported
            if counted.get(adversary, math.inf) < reported * (1 - ROUNDING):
                raise MotleyError(
                    f"{log.file.path}: accounts for an epsilon of {counted[adversary]:.2f} "
                    f"({adversary}), but metrics.jsonl reported {reported:.2f} in round "
                    f"{line['round']}. {ADVICE}"
                )


def spent_epsilon(folder: RunFolder) -> dict[str, float | None]:
    """Return the epsilon of all releases of a run; empty if it has no ledger. None: infinite.

    The metrics say less after a crash: they end with the last round that was kept.
    """
    entries = LedgerFile(folder.privacy_ledger, ADVICE).read()
    return dict(entries[-1].get("epsilon") or {}) if entries else {}
