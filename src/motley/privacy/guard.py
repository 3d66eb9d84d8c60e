"""What a client does to its change before it leaves: clip its norm, and add noise.

What leaves a client is then a function of its data whose values lie in a ball of radius `clip`, plus normal noise: the
Gaussian mechanism, with a client's whole data set for the unit of privacy. Everything else that would leave it (running
statistics, what a method sends beside the change, the number of examples, the loss) is refused or kept at home.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator
from motley.methods.base import Method
from motley.privacy.settings import PrivacySettings

if TYPE_CHECKING:
    from motley.config import Config
    from motley.splits import Split

LEAKS = ("payload", "aggregate", "update", "post_process", "collection_clients", "collect", "apply_collection")
"""Hooks of a method that send more than the change, or make more of it than its mean over owners."""


@dataclass(frozen=True)
class Guard:
    """The last thing that a change passes at its client."""

    settings: PrivacySettings
    seed: int
    secret: bytes | None = None
    """What only the client knows. Without one, noise is keyed by the run's seed, like everything else: repeatable, but
    whoever knows the seed can take it off again.
    """

    def guarded(self, change: Mapping[str, Tensor], round_number: int, client: int) -> State:
        """Return a change as it may leave the client."""
        bounded = clipped(change, self.settings.clip)
        if not self.settings.noise:
            return bounded
        numbers = self._numbers(bounded, round_number, client)
        scale = self.settings.noise * self.settings.clip
        for name in sorted(bounded):
            noise = numbers.standard_normal(tuple(bounded[name].shape), dtype=np.float32)
            bounded[name] = bounded[name] + scale * torch.from_numpy(np.asarray(noise)).to(bounded[name].device)
        return bounded

    def _numbers(self, bounded: State, round_number: int, client: int) -> np.random.Generator:
        """Return where the noise comes from: for one change always the same, for another one nothing alike.

        With a secret, the noise is keyed by the change itself too. A server that asks twice, with different states for
        one round, would otherwise see the same noise twice, and could subtract it.
        """
        if self.secret is None:
            return generator(self.seed, "privacy", round_number, client)
        digest = hashlib.blake2b(f"{round_number}/{client}".encode(), key=self.secret, digest_size=16)
        for name in sorted(bounded):
            digest.update(bounded[name].detach().cpu().contiguous().numpy().tobytes())
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "big")))


def clipped(change: Mapping[str, Tensor], most: float) -> State:
    """Return a change scaled down to a norm of at most `most`; one that is not finite becomes zero, and tells nothing.

    The norm is summed in double precision: in single precision that of a large model may come out too small.
    """
    square = torch.stack([tensor.double().square().sum() for tensor in change.values()]).sum()
    factor = torch.where(square.isfinite(), (most / square.sqrt()).clamp(max=1.0), 0.0)
    return {
        name: torch.where(factor > 0, tensor, torch.zeros_like(tensor)) * factor.to(tensor.dtype)
        for name, tensor in change.items()
    }


def refuse_leaks(config: Config, split: Split, method: Method) -> None:
    """Refuse a federation in which something unguarded would leave a client."""
    if not config.privacy.active:
        return
    on = f"privacy.clip = {config.privacy.clip:g}"
    if hooks := [hook for hook in LEAKS if getattr(type(method), hook) is not getattr(Method, hook)]:
        raise MotleyError(
            f"method.name = {config.method.name!r}: {on} guards changes that are averaged, and this method does more "
            f"with clients than that ({', '.join(hooks)}). Use a method that does not, such as 'fedavg' or 'fedprox'."
        )
    if config.server.statistics.name == "recalibrate":
        raise MotleyError(
            f"server.statistics.name = 'recalibrate': {on} guards changes, and the sums of activations that clients "
            "would report are neither clipped nor noised. Use server.statistics.name = 'averaged'."
        )
    if buffers := sorted(name for name in split.frame if name not in split.parameters):
        statistics = config.split.normalization_statistics
        instead = "" if statistics == "batch" else "'batch', which keeps no statistics, or "
        raise MotleyError(
            f"split.normalization_statistics = {statistics!r}: {on} guards parameters, and clients would send buffers "
            f"as they are ({buffers[0]!r} is one of {len(buffers)}). Use {instead}models without batch norm."
        )
    if split.moves or config.federation.size_assignment == "dynamic":
        raise MotleyError(
            f"{on}: what it costs is known for parts that stay; split.channels and federation.size_assignment must not "
            "change a client's part from round to round."
        )
