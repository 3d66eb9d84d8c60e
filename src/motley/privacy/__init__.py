"""Differential privacy of the clients' updates (docs/privacy.md).

settings.py     the `[privacy]` table
mechanism.py    on the client: clip the delta and add noise
checks.py       reject configurations in which a client would send something unprotected
accounting.py   on the server: the epsilon of the rounds so far, by an accountant library
releases.py     which releases a run is charged for, also for rounds that a crash took back
ledger_file.py  the file that ledgers are kept in: sealed lines, on disk before anything is sent
"""

from motley.privacy.accounting import Accountant, PrivacyLedger
from motley.privacy.checks import refuse_leaks, refuse_stage, why_no_scores
from motley.privacy.mechanism import DPMechanism
from motley.privacy.settings import PrivacySettings

__all__ = [
    "Accountant",
    "DPMechanism",
    "PrivacyLedger",
    "PrivacySettings",
    "refuse_leaks",
    "refuse_stage",
    "why_no_scores",
]
