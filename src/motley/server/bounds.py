"""Bounds on clients' updates, so that one client cannot move the global state arbitrarily far.

`UpdateBounds` measures three groups of an update's tensors, each by its norm in double precision:

    parameters   the delta of the parameters
    buffers      the delta of floating-point buffers (BatchNorm's running statistics)
    payload      the method's tensors beside the delta, such as SCAFFOLD's control variates

A norm above its limit is scaled down to it ("clip"), or the update is rejected ("reject", and in
any case if it is beyond `ABSURD` times the limit). The limit is a number (`server.max_norm`, for
parameters), or follows accepted updates ("auto"):

    factor * median of the size's last accepted norms          once there are `ENOUGH` of them
    factor * median over this round's clients, relative to the square root of the number of
        coordinates, so that sizes can be compared             before, if three or more clients sent
                                                               something
    factor * max(norm of the received parameters, sqrt(n))     before, for parameters, in any case

Attackers below a half cannot move a median far, and an honest round always has some limit for its
parameters, even the first. The norms are kept in the server state, so a resumed run has them.

A `running_var` that would become negative is rejected, and so are counters beyond `MAX_COUNTER`.

With `[privacy]`, a client has promised a norm of at most `privacy.clip`, before noise. The server
checks that too: a delta beyond the norm that clipping and noise explain is rejected.

Everything is computed on the updates' device and read later, with the verdict (`validation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from motley.core.async_copy import AsyncCopy
from motley.core.part import State
from motley.core.robust import total_norm
from motley.core.update import ClientUpdate
from motley.methods.base import REPORTED
from motley.privacy.settings import PrivacySettings
from motley.server.metrics import Metrics
from motley.server.state import ServerState

Group: TypeAlias = Literal["parameters", "buffers", "payload"]
GROUPS: tuple[Group, ...] = ("parameters", "buffers", "payload")
#: Group -> its name in reasons.
WORDS = {"parameters": "delta", "buffers": "change of its buffers", "payload": "payload"}

#: Under this name the norms of accepted updates are kept in `ServerState.stage_states`.
STAGE = "bounds"
#: Norms that are kept per group and size, and the number from which on they are used.
HISTORY, ENOUGH = 100, 10
#: The fewest clients of a round whose median says something.
MAJORITY = 3
#: Counters, such as the number of batches that a BatchNorm has seen, change by less per round.
MAX_COUNTER = 10**9
#: A norm this many times its limit is no honest outlier: the update is rejected, not clipped.
ABSURD = 100.0
#: Relative rounding error of a clipped norm.
ROUNDING = 1e-3
#: A Gaussian vector's norm exceeds sqrt(n) by more than this many standard deviations with a
#: probability of less than 1e-12: exp(-t^2 / 2).
TAIL = 7.44


@dataclass(frozen=True)
class Measured:
    """A number of one update that is compared with its limit; both are on the device.

    key: the group, or "privacy", "running_var" or "counters".
    clips: whether the update is scaled down to the limit; otherwise it is rejected.
    """

    client: int
    key: str
    value: Tensor
    limit: Tensor
    clips: bool = False


class BoundedUpdates:
    """Updates, some of them clipped, and the numbers that decide which are rejected.

    metrics: the number of clipped updates, for the round's record.
    """

    def __init__(
        self, updates: Sequence[ClientUpdate], measured: Sequence[Measured], explained: str
    ) -> None:
        self.updates, self._measured, self._explained = updates, measured, explained
        self._numbers: AsyncCopy | None = None
        self.metrics: Metrics = {}
        if measured:
            pairs = []
            for number in measured:
                pairs.append(torch.stack([number.value.double(), number.limit.double()]))
            self._numbers = AsyncCopy(torch.stack(pairs))
        clipped: dict[int, Tensor] = {}
        for number in measured:
            if number.clips:
                beyond = number.value > number.limit
                clipped[number.client] = clipped.get(number.client, beyond) | beyond
        if clipped:
            self.metrics = {"bounds/clipped": torch.stack(list(clipped.values())).sum()}

    @property
    def ready(self) -> bool:
        """Whether `reasons` would return without waiting for the device."""
        return self._numbers is None or self._numbers.ready

    def reasons(self) -> dict[int, str]:
        """Wait for the device; return client -> why its update is rejected."""
        reasons: dict[int, str] = {}
        if self._numbers is None:
            return reasons
        for one, (value, limit) in zip(self._measured, self._numbers.read(), strict=True):
            # NaN is reported by the check for finite numbers.
            if not value > (ABSURD * limit if one.clips else limit):
                continue
            reasons.setdefault(one.client, self._reason(one.key, value, limit))
        return reasons

    def _reason(self, key: str, value: float, limit: float) -> str:
        if key == "running_var":
            return "a running_var of it is negative."
        if key == "counters":
            return f"a counter of it changes by {value:.3g}; at most {limit:.3g} is plausible."
        text = f"the norm of its {WORDS.get(key, 'delta')} is {value:.3g}; "
        if key == "privacy":
            return text + f"clipping and noise (privacy) explain at most {limit:.3g}."
        return text + f"at most {limit:.3g} is accepted ({self._explained})."


@dataclass(frozen=True)
class UpdateBounds:
    """The bounds of a run.

    max_norm: "off", "auto", or the largest norm of a delta's parameters.
    factor: for "auto", the multiple of the median.
    clips: whether updates beyond a limit are scaled down to it; otherwise they are rejected.
    parameters_of: size -> the client's own names of its parameters.
    privacy: the clients' promised clipping. "auto" adds no limit to it.
    channel_noise: `uplink.noise`, which is added to deltas after they were clipped.
    """

    max_norm: float | Literal["off", "auto"]
    factor: float
    clips: bool
    parameters_of: Callable[[str], Collection[str]]
    privacy: PrivacySettings
    channel_noise: float = 0.0

    @property
    def active(self) -> bool:
        """Whether anything is compared."""
        return self.max_norm != "off" or self.privacy.active

    def measure(self, server: ServerState, updates: Sequence[ClientUpdate]) -> BoundedUpdates:
        """Start to compare updates with their limits; clip those that are to be clipped."""
        measured: list[Measured] = []
        if self.privacy.active:
            for update in updates:
                measured.append(self._promise(update))
        if self.max_norm == "off":
            return BoundedUpdates(updates, measured, "")
        norms = [self._norms(update) for update in updates]
        bounded: list[ClientUpdate] = []
        for update, update_norms in zip(updates, norms, strict=True):
            measured.extend(_implausible_buffers(update))
            for group, norm in update_norms.items():
                limit = self._limit(server, update, group, updates, norms)
                if limit is None:
                    continue
                measured.append(Measured(update.client, group, norm, limit, self.clips))
                if self.clips:
                    update = self._clipped(update, group, norm, limit)
            bounded.append(update)
        return BoundedUpdates(bounded, measured, self._explained())

    def remember(self, server: ServerState, updates: Sequence[ClientUpdate]) -> ServerState:
        """Return a server state that also keeps the norms of these updates, for "auto"."""
        if self.max_norm != "auto" or self.privacy.active:
            return server
        history = dict(server.stage_states.get(STAGE, {}))
        for update in sorted(updates, key=lambda update: update.client):
            for group, norm in self._norms(update).items():
                key = f"{group}/{update.size}"
                values = norm.reshape(1)
                if key in history:
                    values = torch.cat([history[key], values])[-HISTORY:]
                history[key] = values
        return server.with_stage_state(STAGE, history)

    # ---- the measured norms

    def _tensors(self, update: ClientUpdate, group: Group) -> State:
        """Return the floating-point tensors of a group, by the client's names."""
        if group == "payload":
            values = update.payload
            names = [name for name in values if not name.startswith(REPORTED)]
        else:
            values = update.delta
            parameters = self.parameters_of(update.size)
            names = []
            for name in values:
                if (name in parameters) == (group == "parameters"):
                    names.append(name)
        return {name: values[name] for name in names if values[name].is_floating_point()}

    def _norms(self, update: ClientUpdate) -> dict[Group, Tensor]:
        norms: dict[Group, Tensor] = {}
        for group in GROUPS:
            tensors = self._tensors(update, group)
            if tensors:
                norms[group] = total_norm(list(tensors.values()))
        return norms

    def _root(self, update: ClientUpdate, group: Group) -> float:
        """Return the square root of the number of coordinates."""
        count = sum(tensor.numel() for tensor in self._tensors(update, group).values())
        return math.sqrt(max(count, 1))

    def _promise(self, update: ClientUpdate) -> Measured:
        """Compare a whole delta with the norm that clipping, noise and the channel's noise explain.

        The norm of Gaussian noise is concentrated around the square root of its dimension.
        """
        tensors = [tensor for tensor in update.delta.values() if tensor.is_floating_point()]
        root = math.sqrt(sum(tensor.numel() for tensor in tensors))
        limit = self.privacy.clip * (1 + self.privacy.noise * (root + TAIL))
        if self.channel_noise:
            limit *= 1 + self.channel_noise * (1 + TAIL)
        norm = total_norm(tensors)
        return Measured(update.client, "privacy", norm, norm.new_tensor(limit * (1 + ROUNDING)))

    # ---- limits

    def _limit(
        self,
        server: ServerState,
        update: ClientUpdate,
        group: Group,
        updates: Sequence[ClientUpdate],
        norms: Sequence[Mapping[Group, Tensor]],
    ) -> Tensor | None:
        """Return the limit of a group of an update; None if it has none."""
        if self.max_norm != "auto":
            if group != "parameters":
                return None
            return norms[0][group].new_tensor(self.max_norm)
        if self.privacy.active:
            return None
        history = server.stage_states.get(STAGE, {}).get(f"{group}/{update.size}")
        if history is not None and len(history) >= ENOUGH:
            return self.factor * _or_infinity(history.median())
        root = self._root(update, group)
        relative = []
        for other, other_norms in zip(updates, norms, strict=True):
            if group in other_norms:
                relative.append(other_norms[group] / self._root(other, group))
        limits: list[Tensor] = []
        if len(relative) >= MAJORITY:
            # An update with a NaN is rejected, but it must not take away the limit of the others.
            limits.append(self.factor * root * _or_infinity(torch.stack(relative).nanmedian()))
        if group == "parameters":
            received = [update.received[name] for name in self._tensors(update, group)]
            limits.append(self.factor * total_norm(received).clamp(min=root))
        return torch.stack(limits).amin() if limits else None

    def _clipped(
        self, update: ClientUpdate, group: Group, norm: Tensor, limit: Tensor
    ) -> ClientUpdate:
        """Return an update with one group scaled down to its limit.

        Within the limit the factor is exactly 1, so that nothing changes.
        """
        factor = torch.where(norm > limit, limit / norm, 1.0)
        scaled = {}
        for name, tensor in self._tensors(update, group).items():
            scaled[name] = tensor * factor.to(tensor.dtype)
        if group == "payload":
            return replace(update, payload={**update.payload, **scaled})
        return replace(update, delta={**update.delta, **scaled})

    def _explained(self) -> str:
        if self.max_norm == "auto":
            return f"server.max_norm = 'auto': {self.factor:g} times the median of accepted norms"
        return f"server.max_norm = {self.max_norm:g}"


def _or_infinity(median: Tensor) -> Tensor:
    """Return a median, or infinity if it is 0 because most clients changed nothing."""
    return torch.where(median > 0, median, math.inf)


def _implausible_buffers(update: ClientUpdate) -> list[Measured]:
    """Measure changes of buffers that no training makes: negative variances and huge counters."""
    measured: list[Measured] = []
    below: list[Tensor] = []
    counters: list[Tensor] = []
    for name, delta in update.delta.items():
        if not delta.is_floating_point():
            counters.append(delta.double().abs().amax())
        elif name.endswith("running_var") and name in update.received:
            received = update.received[name]
            # The sum is rounded, and so is an upload in 16 bits; hence the tolerance.
            tolerance = 0.01 * (received.abs() + delta.abs()) + 1e-6
            below.append((-(received + delta) - tolerance).amax())
    if below:
        lowest = torch.stack(below).amax()
        measured.append(Measured(update.client, "running_var", lowest, torch.zeros_like(lowest)))
    if counters:
        largest = torch.stack(counters).amax()
        limit = largest.new_tensor(float(MAX_COUNTER))
        measured.append(Measured(update.client, "counters", largest, limit))
    return measured
