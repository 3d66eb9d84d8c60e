"""Reject federations in which a client would send something that is neither clipped nor noised."""

from __future__ import annotations

from motley.core.errors import MotleyError
from motley.methods.base import Method
from motley.privacy.settings import PrivacySettings
from motley.splits import Split

#: Requirements of methods that send more than the delta, or use it other than in a mean over
#: owners.
LEAKS = ("payload", "own_aggregation", "collection")


def refuse_leaks(
    privacy: PrivacySettings,
    split: Split,
    method: Method,
    *,
    statistics: str,
    dynamic_sizes: bool,
    per_client: str = "off",
) -> None:
    """Raise an error if the accounting of `accounting.py` would not cover all that clients send.

    `statistics` is `server.statistics.name`, and `per_client` is `evaluation.per_client`.
    `dynamic_sizes` says whether clients are given a new size in every round.
    """
    if not privacy.active:
        return
    setting = f"privacy.clip = {privacy.clip:g}"
    leaks = [leak for leak in LEAKS if getattr(method.requirements, leak)]
    if leaks:
        raise MotleyError(
            f"method.name = {method.settings.name!r}: {setting} protects deltas that are averaged, "
            f"and this method does more with its clients than that ({', '.join(leaks)}). Use a "
            "method that does not, such as 'fedavg' or 'fedprox'."
        )
    if statistics == "recalibrate":
        raise MotleyError(
            f"server.statistics.name = 'recalibrate': {setting} protects deltas, and the sums of "
            "activations that clients would report are neither clipped nor noised. Use "
            "server.statistics.name = 'averaged'."
        )
    if per_client != "off" and privacy.withholds_scores:
        raise MotleyError(
            f"evaluation.per_client = {per_client!r}: {setting} protects deltas, and the scores "
            "that clients would report are not noised. Use evaluation.per_client = 'off', or "
            "privacy.reveal_scores = true if epsilon need not cover them."
        )
    buffers = sorted(name for name in split.meta_state if name not in split.parameters)
    if buffers:
        normalization = split.settings.normalization_statistics
        batch = "" if normalization == "batch" else "'batch', which keeps no statistics, or "
        raise MotleyError(
            f"split.normalization_statistics = {normalization!r}: {setting} protects parameters, "
            f"and clients would send their buffers unprotected ({buffers[0]!r} is one of "
            f"{len(buffers)}). Use {batch}models without batch norm."
        )
    if split.parts_change or dynamic_sizes:
        raise MotleyError(
            f"{setting}: epsilon is known only if every client keeps its part. split.channels and "
            "federation.size_assignment must not change parts from round to round."
        )


def refuse_stage(privacy: PrivacySettings, key: str, name: str) -> None:
    """Raise if clients' deltas are protected: the stage `key` = `name` sees the single updates.

    What it computes with them, such as a median, need not be as private as the mean delta.
    """
    if privacy.active:
        raise MotleyError(
            f"{key} = {name!r}: epsilon for privacy.clip = {privacy.clip:g} is computed for the "
            "mean of noised deltas, and this stage is given the updates of single clients. Stages "
            "whose class has sees_updates = False are allowed: they are called with the mean delta "
            "and no updates."
        )


def why_no_scores(privacy: PrivacySettings, has_own_models: bool) -> str:
    """Say why a run has no scores although it evaluates; empty if it has scores.

    If clients have models of their own, only they can score them, and no noise protects a score.
    The global model is scored by the server, which costs nothing.
    """
    if not (has_own_models and privacy.withholds_scores):
        return ""
    return (
        "clients would have to report the scores of their own models, and no noise protects these "
        "(privacy.reveal_scores = false)"
    )
