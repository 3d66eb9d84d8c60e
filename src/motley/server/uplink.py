"""How updates reach the server: decoding, and the channel noise of a robustness study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motley.client.encoding import Encoding, decoded
from motley.core.device import on_device
from motley.core.part import State
from motley.core.randomness import key
from motley.core.update import ClientUpdate
from motley.engine.base import Job


@dataclass(frozen=True)
class Uplink:
    """How clients' updates reach the server.

    dtype: the type in which deltas are sent.
    noise: factor on each tensor's standard deviation for normal noise that is added to parameters
        (the InCo paper's Figure 7); 0 for none.
    seed: keys the noise.
    """

    dtype: Encoding = "fp32"
    noise: float = 0.0
    seed: int = 0

    def decode(self, job: Job, update: ClientUpdate) -> ClientUpdate:
        """Decode the update's delta to the types of the state that was sent out."""
        return replace(update, delta=decoded(update.delta, job.state, self.dtype))

    def add_noise(self, job: Job, update: ClientUpdate, parameters: Iterable[str]) -> ClientUpdate:
        """Add channel noise to the parameters' deltas."""
        if not self.noise:
            return update
        noise_key = key(self.seed, "noise", job.round_number, job.client)
        return replace(update, delta=perturbed(update.delta, parameters, self.noise, noise_key))


def on_servers_device(update: ClientUpdate, device: torch.device) -> ClientUpdate:
    """Move everything that a node sent to the server's device."""
    return replace(
        update,
        delta={name: on_device(tensor, device) for name, tensor in update.delta.items()},
        payload={name: on_device(tensor, device) for name, tensor in update.payload.items()},
        loss=update.loss.to(device),
    )


def perturbed(delta: Mapping[str, Tensor], names: Iterable[str], factor: float, seed: int) -> State:
    """Add normal noise of `factor` times a tensor's standard deviation to the named tensors."""
    noisy = dict(delta)
    numbers: torch.Generator | None = None
    for name in names:
        tensor = delta[name]
        if numbers is None:
            numbers = torch.Generator(tensor.device).manual_seed(seed)
        noise = torch.empty_like(tensor).normal_(generator=numbers)
        noisy[name] = tensor + factor * tensor.std(correction=0) * noise
    return noisy
