"""Differential privacy of what leaves a client (docs/privacy.md).

settings.py     how strong: `[privacy]`
guard.py        the client's side: clip the change, add noise; and what cannot be guarded
accounting.py   the server's side: what the rounds so far have cost, with an accountant library
"""

from motley.privacy.accounting import Accountant, Spent
from motley.privacy.guard import Guard, refuse_leaks
from motley.privacy.settings import PrivacySettings

__all__ = ["Accountant", "Guard", "PrivacySettings", "Spent", "refuse_leaks"]
