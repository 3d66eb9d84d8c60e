"""Attacks by some of the simulated clients, to measure how well the server withstands them.

An attack changes a client's update at the upload boundary (`Clients.update`), after its training
and whatever the method did. Flipped labels are the exception: these clients train honestly on wrong
labels (`flip_labels`). Buffers are sent unchanged, because a server that checks them would reject
the whole update. Nothing here is visible to methods, and deployed nodes refuse the table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from motley.core.async_copy import to_device
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator
from motley.core.tensors import norm
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.settings import Choice, Settings


class AttackSettings(Settings):
    """An attack by some of the simulated clients, to test defences (`server.merge`,
    `server.max_norm`). Not for deployments.
    """

    lasting = ()

    name: str = "none"
    """The attack. sign-flip: attackers send their delta with the opposite sign, times `factor`.
    scale: times `factor`. noise: normal noise is added. label-flip: attackers train on wrong
    labels, class k becoming the k-th from the end.
    """

    @property
    def active(self) -> bool:
        """Whether some clients attack."""
        return self.name != "none"


class ActiveAttackSettings(AttackSettings):
    """Who attacks."""

    clients: tuple[int, ...] = ()
    """The ids of the attackers; or give `fraction`."""
    fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the clients that attack. They are drawn by the run's seed."""

    @model_validator(mode="after")
    def _somebody_attacks(self) -> ActiveAttackSettings:
        if bool(self.clients) == bool(self.fraction):
            raise ValueError("either clients or fraction should be given")
        if len(set(self.clients)) != len(self.clients) or min(self.clients, default=0) < 0:
            raise ValueError(f"clients = {list(self.clients)}: should be different client ids")
        return self


class UploadAttackSettings(ActiveAttackSettings):
    """Attacks that change the delta."""

    from_round: int = Field(default=1, ge=1)
    """The first round in which attackers attack."""

    def changed(self, delta: Mapping[str, Tensor], rng: np.random.Generator) -> State:
        """Return the delta that an attacker sends instead of its delta of parameters."""
        raise NotImplementedError


class SignFlipSettings(UploadAttackSettings):
    """The opposite delta."""

    name: Literal["sign-flip"] = "sign-flip"
    factor: float = Field(default=1.0, gt=0)
    """Factor on the delta."""

    def changed(self, delta: Mapping[str, Tensor], rng: np.random.Generator) -> State:
        """Return the delta times -factor."""
        return {name: tensor * -self.factor for name, tensor in delta.items()}


class ScaleSettings(UploadAttackSettings):
    """A delta that is too large."""

    name: Literal["scale"] = "scale"
    factor: float = Field(default=10.0)
    """Factor on the delta; it may be negative."""

    def changed(self, delta: Mapping[str, Tensor], rng: np.random.Generator) -> State:
        """Return the delta times factor."""
        return {name: tensor * self.factor for name, tensor in delta.items()}


class NoiseSettings(UploadAttackSettings):
    """Noise on the delta."""

    name: Literal["noise"] = "noise"
    factor: float = Field(default=1.0, gt=0)
    """Standard deviation of the noise, as a multiple of the delta's root mean square."""

    def changed(self, delta: Mapping[str, Tensor], rng: np.random.Generator) -> State:
        """Return the delta with noise."""
        count = sum(tensor.numel() for tensor in delta.values())
        scale = norm(delta) * (self.factor / math.sqrt(count))
        noisy = {}
        for name in sorted(delta):
            tensor = delta[name]
            # np.asarray, because NumPy returns a plain float for the shape ().
            draws = np.asarray(rng.standard_normal(tuple(tensor.shape), dtype=np.float32))
            noisy[name] = tensor + scale * to_device(torch.from_numpy(draws), tensor.device)
        return noisy


class LabelFlipSettings(ActiveAttackSettings):
    """Wrong labels."""

    name: Literal["label-flip"] = "label-flip"


#: Chosen by attack.name.
ATTACKS = Choice(
    "none",
    {
        "none": AttackSettings,
        "sign-flip": SignFlipSettings,
        "scale": ScaleSettings,
        "label-flip": LabelFlipSettings,
        "noise": NoiseSettings,
    },
)


def attackers(settings: AttackSettings, num_clients: int, seed: int) -> frozenset[int]:
    """Return the ids of the clients that attack."""
    if not isinstance(settings, ActiveAttackSettings):
        return frozenset()
    if settings.clients:
        return frozenset(settings.clients)
    number = round(settings.fraction * num_clients)
    drawn = generator(seed, "attackers").choice(num_clients, number, replace=False)
    return frozenset(drawn.tolist())


class UploadAttack:
    """Changes the deltas of attackers before they leave the client."""

    def __init__(self, settings: UploadAttackSettings, clients: Collection[int], seed: int) -> None:
        self.settings, self.clients, self.seed = settings, clients, seed

    def sent(
        self, delta: State, parameters: Collection[str], round_number: int, client: int
    ) -> State:
        """Return the delta that a client sends: an attacker's is changed."""
        if client not in self.clients or round_number < self.settings.from_round:
            return delta
        trained = {name: tensor for name, tensor in delta.items() if name in parameters}
        rng = generator(self.seed, "attack", round_number, client)
        return {**delta, **self.settings.changed(trained, rng)}


def flip_labels(
    copies: Sequence[DeviceData], partition: Partition, clients: Collection[int], classes: int
) -> None:
    """Replace class k of the clients' training examples by the k-th from the end, on every device.

    The data set itself is not changed, only its copies for training.
    """
    if not clients:
        return
    is_attacker = np.zeros(len(partition), dtype=bool)
    is_attacker[list(clients)] = True
    is_flipped = np.repeat(is_attacker, partition.sizes)
    flipped = partition.indices[is_flipped]
    shared = ~is_flipped & np.isin(partition.indices, flipped)
    if shared.any():
        client = int(np.searchsorted(partition.offsets, np.argmax(shared), side="right")) - 1
        raise MotleyError(
            f"attack.name = 'label-flip': client {client} holds examples of an attacker too, "
            "which would change its labels. Use a partition in which clients share no examples."
        )
    for data in copies:
        targets = data.targets.clone()
        chosen = torch.as_tensor(flipped, device=targets.device)
        targets[chosen] = classes - 1 - targets[chosen]
        data.targets = targets
