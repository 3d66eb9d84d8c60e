"""All checks of updates and answers. A bad update is rejected with a reason; the round goes on.

An update is checked in this order:

1. `shape_error`: the delta has the names, shapes and types of the part that was sent out. If it
   comes from a node elsewhere, `report_error`: the numbers that it reports are plausible.
2. The delta and the payload hold no NaN and no infinity (`UpdateCheck`).
3. Norms are within their bounds, if there are any (`bounds.py`).
4. The training loss is finite and plausible, if clients report one (`UpdateCheck`).
5. `payload_error`: the method can use the payload. This is tried for nodes elsewhere only. Clients
   of this process run the server's version of the method.

A collection, which a client sends without training, is checked by `collection_error`,
`moments_error`, `sums_error` or `client_sums_error`.

Whether an update is finite is computed on the update's device. A GPU does that after the training
that is queued before it, so `UpdateCheck` starts the computation and its verdict is read later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from motley.core.async_copy import AsyncCopy
from motley.core.part import Part, State, select
from motley.core.tensors import max_norm
from motley.core.update import ClientUpdate
from motley.methods.base import REPORTED, Collection, ServerAlgorithm
from motley.methods.evaluation import CORRECT, EXAMPLES, SEEN, widths_of
from motley.models.moments import MOMENTS, layers_in
from motley.server.bounds import BoundedUpdates
from motley.server.metrics import Metrics
from motley.server.state import ServerState
from motley.server.timing import Timer
from motley.tasks import Metric, Task

NOT_FINITE = "it holds a number that is not finite."


def shape_error(expected: Mapping[str, Tensor], delta: Mapping[str, Tensor]) -> str | None:
    """Say why a delta does not fit the part that was sent out; None if it does."""
    for name in delta:
        if name not in expected:
            return f"unknown name {name!r}: it was not sent out."
    for name, tensor in expected.items():
        if name not in delta:
            return f"{name!r} is missing."
        if delta[name].shape != tensor.shape:
            shape, expected_shape = tuple(delta[name].shape), tuple(tensor.shape)
            return f"{name!r} has shape {shape}; {expected_shape} was sent out."
        if delta[name].dtype != tensor.dtype:
            return f"{name!r} is {delta[name].dtype}; {tensor.dtype} was sent out."
    return None


def report_error(
    update: ClientUpdate,
    *,
    private: bool,
    max_examples: int | None,
    max_steps: Callable[[int], int] | None,
) -> str | None:
    """Say why the numbers that a node reports are implausible; None if they are not.

    `private` clients report 1 for both numbers. `max_steps` returns the most local steps that a
    client with so many examples takes.
    """
    examples, steps = update.num_examples, update.num_steps
    if private:
        if (examples, steps) != (1, 1):
            return f"it reports {examples} examples and {steps} steps; with privacy both are 1."
        return None
    if max_examples is not None and examples > max_examples:
        return f"it reports {examples} examples; server.max_examples = {max_examples}."
    if max_steps is not None and steps > max_steps(examples):
        allowed = max_steps(examples)
        return f"it reports {steps} steps; with {examples} examples they are at most {allowed}."
    return None


def has_nonfinite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether any value is NaN or infinite, on the tensors' device."""
    return ~max_norm(tensors).isfinite()


@dataclass(frozen=True)
class Verdict:
    """The updates that count, and why the others do not.

    rejected: client -> reason.
    train_loss: the mean loss of the accepted updates; NaN if there is none.
    losses: the loss of each accepted update.
    seconds: how long the check took, most of which is waiting for the training to end.
    """

    accepted: Sequence[ClientUpdate]
    rejected: Mapping[int, str]
    train_loss: float
    seconds: Mapping[str, float]
    losses: Sequence[float] = ()

    def without(self, excluded: Mapping[int, str]) -> Verdict:
        """Return the verdict with more clients rejected, each for a reason."""
        if not excluded:
            return self
        accepted: list[ClientUpdate] = []
        losses: list[float] = []
        for update, loss in zip(self.accepted, self.losses, strict=True):
            if update.client not in excluded:
                accepted.append(update)
                losses.append(loss)
        rejected = {**self.rejected, **excluded}
        return Verdict(accepted, rejected, _mean_loss(losses), self.seconds, losses)


class UpdateCheck:
    """Checks updates whose shapes are right. This is where an update with a NaN is rejected.

    `payload_error` says why the method cannot use an update's payload; None if payloads are
    trusted. `bounds` compares norms with their limits; `updates` are then those that it has
    clipped. A loss beyond `max_loss` is rejected; None: any finite loss is plausible.
    """

    def __init__(
        self,
        updates: Sequence[ClientUpdate],
        *,
        losses_are_reported: bool = True,
        payload_error: Callable[[ClientUpdate], str | None] | None = None,
        bounds: BoundedUpdates | None = None,
        max_loss: float | None = None,
    ) -> None:
        self._bounds, self._max_loss = bounds, max_loss
        self.updates = updates if bounds is None else bounds.updates
        #: Numbers for the round's record.
        self.metrics: Metrics = {} if bounds is None else bounds.metrics
        self._losses_are_reported, self._payload_error = losses_are_reported, payload_error
        # Of the updates as sent: clipping would turn an infinity into NaN.
        norms = [max_norm([*update.delta.values(), *update.payload.values()]) for update in updates]
        self._losses = AsyncCopy(_vector([update.loss for update in updates]))
        self._norms = AsyncCopy(_vector(norms))

    @property
    def ready(self) -> bool:
        """Whether `verdict` would return without waiting for the device."""
        bounds_ready = self._bounds is None or self._bounds.ready
        return self._norms.ready and self._losses.ready and bounds_ready

    @cached_property
    def verdict(self) -> Verdict:
        """Which updates are accepted. The first access waits for the device."""
        accepted: list[ClientUpdate] = []
        losses: list[float] = []
        rejected: dict[int, str] = {}
        timer = Timer()
        with timer.phase("train"):
            numbers = zip(self.updates, self._losses.read(), self._norms.read(), strict=True)
            out_of_bounds = {} if self._bounds is None else self._bounds.reasons()
            for update, loss, norm in numbers:
                reason = self._reason(update, loss, norm, out_of_bounds)
                if reason is None:
                    accepted.append(update)
                    losses.append(loss)
                else:
                    rejected[update.client] = reason
        return Verdict(accepted, rejected, _mean_loss(losses), timer.seconds, losses)

    def _reason(
        self, update: ClientUpdate, loss: float, norm: float, out_of_bounds: Mapping[int, str]
    ) -> str | None:
        if not math.isfinite(norm):
            return NOT_FINITE
        if update.client in out_of_bounds:
            return out_of_bounds[update.client]
        if self._losses_are_reported and not math.isfinite(loss):
            return "its loss is not finite."
        if self._losses_are_reported and self._max_loss is not None and abs(loss) > self._max_loss:
            return f"its loss is {loss:.3g}; server.max_loss = {self._max_loss:g}."
        if self._payload_error is not None:
            return self._payload_error(update)
        return None


def _mean_loss(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses) if losses else math.nan


def _vector(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack([scalar.double() for scalar in scalars]) if scalars else torch.zeros(0)


# ---- payloads and collections, which only the method can judge


def payload_error(
    algorithm: ServerAlgorithm, server: ServerState, update: ClientUpdate
) -> str | None:
    """Say why the method cannot use an update's payload, by trying it alone; None if it can."""

    def use() -> None:
        for local, piece in update.part.items():
            if piece.index is None and local in update.payload:
                shape = update.payload[local].shape
                if shape != server.state[piece.name].shape:
                    raise ValueError(f"{local!r} has shape {tuple(shape)}")
        algorithm.aggregate(server.method_state, server.state, [update])
        algorithm.update(server.method_state, server.state, [update])

    return _error_of_trying("payload", use)


def collection_error(
    algorithm: ServerAlgorithm, server: ServerState, collection: Collection
) -> str | None:
    """Say why the method cannot use a collection, by trying it on its own; None if it can."""

    def use() -> None:
        if has_nonfinite(collection.values.values()):
            raise ValueError("it holds a number that is not finite")
        algorithm.apply_collection(server.method_state, server.model, [collection])

    return _error_of_trying("collection", use)


def _error_of_trying(kind: str, use: Callable[[], None]) -> str | None:
    """Return the error of using a client's "payload" or "collection"; None if there is none."""
    try:
        use()
    except Exception as error:  # a method may raise anything when a node sends it nonsense
        return f"the method cannot use its {kind}: {error!r}"
    return None


def sums_error(task: Task, classes: int, sums: State) -> str | None:
    """Say why an answer is not the sums of a model over a test set; None if it is."""
    problem = _sums_problem(task, classes, sums)
    return f"its scores were refused: {problem}." if problem else None


def _sums_problem(task: Task, classes: int, sums: State) -> str | None:
    shapes = {name: (width,) for name, width in widths_of(task, classes).items() if width}
    for name in (*shapes, *sums):
        if name not in sums:
            return f"{name!r} is missing"
        if name not in shapes and not name.startswith(REPORTED):
            return f"{name!r} was not asked for"
        shape = shapes.get(name, ())
        if tuple(sums[name].shape) != shape:
            return f"{name!r} has shape {tuple(sums[name].shape)}, not {shape}"
        if not sums[name].isfinite().all():
            return f"{name!r} holds a number that is not finite"
    if not sums[EXAMPLES] > 0:
        return "no test set has these sums"
    if task.has_classes:
        correct, seen = sums[CORRECT], sums[SEEN]
        if (correct < 0).any() or (correct > seen).any() or seen.sum() != sums[EXAMPLES]:
            return "no test set has these sums"
    return None


def client_sums_error(
    names: Sequence[str], metric: Metric, outputs: int, sums: Mapping[str, Tensor]
) -> str | None:
    """Say why an answer is not a metric's sums over a client's own test examples; None if it is."""
    for name in sums.keys() ^ set(names):
        return f"its scores were refused: {name!r} is missing or was not asked for."
    for name in names:
        shape, expected = tuple(sums[name].shape), (metric.num_sums(outputs),)
        if shape != expected:
            return f"its scores were refused: {name!r} has shape {shape}, not {expected}."
        numbers = sums[name].tolist()
        if not _is_possible(metric, numbers):
            text = ", ".join(f"{number:g}" for number in numbers)
            return f"its scores were refused: no test set has the sums {text} of {metric.name}."
    return None


def _is_possible(metric: Metric, sums: Sequence[float]) -> bool:
    """Tell whether a metric can have these sums. They are a node's, so nothing is certain."""
    if not all(math.isfinite(number) for number in sums):
        return False
    try:
        value = metric.value(sums)
    except (ArithmeticError, ValueError):  # no rows, or the root of a negative number
        return False
    # The sums of many rows are rounded, hence the tolerance.
    return not metric.percent or -1e-6 <= value <= 1 + 1e-6


def moments_error(model: State, part: Part, moments: State) -> str | None:
    """Say why a report cannot be the moments of BatchNorm's inputs in a part; None if it can."""
    problem = _moments_problem(model, part, moments)
    return f"its statistics were refused: {problem}." if problem else None


def _moments_problem(model: State, part: Part, moments: State) -> str | None:
    expected = {}
    for local, piece in part.items():
        if local == "running_mean" or local.endswith(".running_mean"):
            shape = select(model[piece.name], piece.index).shape
            for name in MOMENTS:
                expected[local.removesuffix("running_mean") + name] = shape
    for name in moments.keys() ^ expected.keys():
        return f"{name!r} is missing or was not asked for"
    for name, shape in expected.items():
        if moments[name].shape != shape:
            return f"{name!r} has shape {tuple(moments[name].shape)}, not {tuple(shape)}"
        if moments[name].dtype != torch.float64:
            return f"{name!r} is {moments[name].dtype}, not torch.float64"
        if not moments[name].isfinite().all():
            return f"{name!r} holds a number that is not finite"
    for prefix in layers_in(moments):
        count, total, squares = (moments[prefix + name] for name in MOMENTS)
        # By Cauchy-Schwarz, total^2 <= count * squares. Clients compute with rounding, hence the
        # tolerance.
        if (count < 0).any() or (count * squares < total.square() * (1 - 1e-6)).any():
            return f"{prefix!r} has moments that no inputs have"
    return None
