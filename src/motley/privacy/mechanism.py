"""The client's side of differential privacy: clip the delta and add Gaussian noise.

After that, a client's upload is a function of its data with values in a ball of radius `clip`, plus
Gaussian noise. This is the Gaussian mechanism, with a client's whole data set as the unit of
privacy. Everything else that a client would send (running statistics, a method's payload, the
number of examples, the loss) is either withheld or rejected by `checks.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from motley.core.async_copy import to_device
from motley.core.part import State
from motley.core.randomness import generator
from motley.privacy.settings import PrivacySettings


@dataclass(frozen=True)
class DPMechanism:
    """Clips and noises deltas at the upload boundary, as the last step on the client."""

    settings: PrivacySettings
    seed: int
    #: Draw new noise for every delta, which nobody can know or repeat. Otherwise the noise is keyed
    #: by the run's seed, like all other randomness. It is then repeatable, but anyone who knows the
    #: seed can subtract it.
    fresh: bool = False

    def privatize(self, delta: Mapping[str, Tensor], round_number: int, client: int) -> State:
        """Return the clipped delta with noise."""
        bounded = clip_by_norm(delta, self.settings.clip)
        if not self.settings.noise:
            return bounded
        rng = self._noise_generator(round_number, client)
        scale = self.settings.noise * self.settings.clip
        noisy = {}
        # Sorted, so that the noise does not depend on the order of the mapping.
        for name in sorted(bounded):
            tensor = bounded[name]
            # np.asarray, because NumPy returns a plain float for the shape ().
            draws = np.asarray(rng.standard_normal(tuple(tensor.shape), dtype=np.float32))
            noisy[name] = tensor + scale * to_device(torch.from_numpy(draws), tensor.device)
        return {name: noisy[name] for name in bounded}

    def _noise_generator(self, round_number: int, client: int) -> np.random.Generator:
        """Return the generator of the noise of one delta.

        Fresh noise must not be a function of anything that can occur twice. Keyed by the round, two
        answers in one round would have the same noise, and their difference none. Keyed by the
        delta as well, two answers would be equal exactly if their deltas are, which tells a server
        that asks with two different states something about the data, without any noise.
        """
        if not self.fresh:
            return generator(self.seed, "privacy", round_number, client)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(os.urandom(16), "big")))


def clip_by_norm(delta: Mapping[str, Tensor], max_norm: float) -> State:
    """Scale a delta down to a norm of at most `max_norm`.

    A delta with infinite or NaN values becomes zero, so that it reveals nothing. The norm is summed
    in double precision: in single precision, a large model's norm may come out too small.
    """
    squares = [tensor.double().square().sum() for tensor in delta.values()]
    squared_norm = torch.stack(squares).sum()
    factor = (max_norm / squared_norm.sqrt()).clamp(max=1.0)
    factor = torch.where(squared_norm.isfinite(), factor, 0.0)
    clipped = {}
    for name, tensor in delta.items():
        # Zeroed before the multiplication, because NaN * 0 is NaN.
        usable = torch.where(factor > 0, tensor, torch.zeros_like(tensor))
        clipped[name] = usable * factor.to(tensor.dtype)
    return clipped
