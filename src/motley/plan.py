"""What each size costs a client, and the largest one that fits a client's budget.

Costs are of one training step at the batch size, counted on a model without values: nothing is allocated, so a plan for
a fleet takes seconds on any machine. Memory is the largest sum of what is alive at once: the weights and a copy of them
as they were received, the optimiser's state, and whatever the forward and the backward pass hold at their fullest.
Scratch space of libraries is not in it, nor are a method's own extras (a second model, control variates).
"""

from __future__ import annotations

import csv
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from motley.core.errors import MotleyError, unknown
from motley.engine.encoding import Encoding, encoded
from motley.engine.training import TrainingSettings
from motley.limits import allocating, is_out_of_memory
from motley.models import ImageShape
from motley.splits import Split


@dataclass(frozen=True)
class Cost:
    """What one size takes."""

    parameters: int
    flops: int
    """Of a step: forward and backward."""
    activations: int
    """Bytes that the forward pass leaves for the backward pass."""
    memory: int
    """Bytes in all."""
    traffic: int
    """Bytes a round: the part down and its change up."""


@dataclass(frozen=True)
class Budget:
    """What a client has; None: no limit."""

    client: str
    memory_mb: float | None = None
    parameters: float | None = None
    gflops: float | None = None

    def fits(self, cost: Cost) -> bool:
        """Tell whether a size stays within every limit."""
        pairs = (
            (cost.memory / 1e6, self.memory_mb),
            (cost.parameters, self.parameters),
            (cost.flops / 1e9, self.gflops),
        )
        return all(limit is None or value <= limit for value, limit in pairs)


class LiveBytes(TorchDispatchMode):
    """Follows what a computation allocates and lets go of; `peak` is the most that was alive at once.

    Tensors that were `held` before it are not counted.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return results

    def _follow(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, count: int) -> None:
        self.now -= count


def cost_of(split: Split, size: str, shape: ImageShape, training: TrainingSettings, upload: Encoding = "fp32") -> Cost:
    """Return the cost of a training step of a size, and its traffic if deltas are uploaded in an encoding."""
    what = f"{size!r} with training.batch_size = {training.batch_size}"
    with torch.device("meta"), allocating(what):
        model = split.blueprints[size].build().train()
        images = torch.empty(training.batch_size, *shape)
        with LiveBytes([*model.parameters(), *model.buffers()]) as live, FlopCounterMode(display=False) as counter:
            loss = _outputs(model, images, size).square().mean()
            activations = live.now
            loss.backward()
    weights = _bytes(model.parameters())
    whole = weights + _bytes(model.buffers())
    fixed = 2 * whole + training.optimizer.moments * weights + images.nbytes
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sent, _ = encoded(model.state_dict(), {}, upload)
    return Cost(parameters, counter.get_total_flops(), activations, fixed + live.peak, whole + _bytes(sent.values()))


def _outputs(model: torch.nn.Module, images: Tensor, size: str) -> Tensor:
    """Return a model's outputs on images without values; users' models can return or raise anything."""
    try:
        outputs = model(images)
    except (MotleyError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise MotleyError(
            f"model.sizes: {size!r} cannot be counted with a batch of shape {tuple(images.shape)} on torch's meta "
            f"device, where tensors have no values: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise MotleyError(f"model.sizes: {size!r} returns a {type(outputs).__name__}, not a tensor of logits.")
    return outputs


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def costs_of(split: Split, shape: ImageShape, training: TrainingSettings, upload: Encoding = "fp32") -> dict[str, Cost]:
    """Return the costs of every size, the largest first."""
    costs = {size: cost_of(split, size, shape, training, upload) for size in split.sizes}
    return dict(sorted(costs.items(), key=lambda item: item[1].parameters, reverse=True))


def largest_fitting(costs: Mapping[str, Cost], budget: Budget) -> str | None:
    """Return the largest size within a budget, or None where even the smallest is not."""
    return next((size for size, cost in costs.items() if budget.fits(cost)), None)


def read_budgets(file: Path) -> list[Budget]:
    """Read one budget per line: a column `client`, and any of memory_mb, parameters, gflops. Empty: no limit."""
    budgets = []
    line_of: dict[str, int] = {}
    for line, row in _read_rows(file):
        budget = _budget(file, line, row)
        if budget.client in line_of:
            first = line_of[budget.client]
            raise MotleyError(f"{file}: client {budget.client!r} is listed twice, in lines {first} and {line}.")
        line_of[budget.client] = line
        budgets.append(budget)
    return budgets


def _read_rows(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of a budgets file, each with the number of its line, once its columns have been checked."""
    try:
        # utf-8-sig: spreadsheets begin a file with a byte order mark, which would become part of the first column.
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            rows = [(reader.line_num, row) for row in reader]
            columns = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    allowed = [field.name for field in fields(Budget)]
    for column in columns:
        if column not in allowed:
            raise MotleyError(f"{file}: {unknown('column', column, allowed)}")
        if columns.count(column) > 1:
            raise MotleyError(f"{file}: column {column!r} occurs twice.")
    if "client" not in columns or not rows:
        has = ", ".join(columns) or "none"
        raise MotleyError(f"{file}: needs a column 'client' and one line per client; its columns are: {has}.")
    return rows


def _budget(file: Path, line: int, row: Mapping[Any, Any]) -> Budget:
    if None in row:  # csv's name for cells beyond the last column
        raise MotleyError(f"{file}, line {line}: has more cells than there are columns.")
    client = (row["client"] or "").strip()
    if not client:
        raise MotleyError(f"{file}, line {line}: client is empty; every line needs a number or a name.")
    limits: dict[str, float] = {}
    for column, text in row.items():
        if column == "client" or not (text or "").strip():
            continue
        try:
            limits[column] = float(text)
        except ValueError:
            limits[column] = -1.0
        if not 0 < limits[column] < float("inf"):
            raise MotleyError(f"{file}, line {line}: {column} = {text!r}: should be a number above 0, or empty.")
    return Budget(client, **limits)


def assigned(costs: Mapping[str, Cost], budgets: Sequence[Budget], clients: int) -> tuple[str, ...]:
    """Return the size of every client, by id: the largest one within its budget."""
    sizes = []
    for client, budget in enumerate(_by_id(budgets, clients)):
        size = largest_fitting(costs, budget)
        if size is None:
            name = "" if budget.client == str(client) else f" ({budget.client!r})"
            raise MotleyError(
                f"federation.budgets: no size fits client {client}{name}. `motley plan` shows what each size takes; "
                "add a smaller one, or leave the client out."
            )
        sizes.append(size)
    return tuple(sizes)


def _by_id(budgets: Sequence[Budget], clients: int) -> list[Budget]:
    """Return the budgets in the order of client ids.

    If all clients are whole numbers, these are their ids, and the lines may come in any order. Otherwise they are
    names, which get the ids 0, 1, 2, ... in the order of their lines.
    """
    wanted = f"federation.clients = {clients} needs one line per client"
    if not all(budget.client.isdecimal() for budget in budgets):
        if len(budgets) != clients:
            raise MotleyError(f"federation.budgets: it has {len(budgets)} lines; {wanted}.")
        return list(budgets)
    by_client = {budget.client: budget for budget in budgets}
    ordered = []
    for client in range(clients):
        if str(client) not in by_client:
            raise MotleyError(f"federation.budgets: client {client} is missing; {wanted}, 0 to {clients - 1}.")
        ordered.append(by_client[str(client)])
    if len(budgets) != clients:
        raise MotleyError(f"federation.budgets: it has {len(budgets)} lines; {wanted}, 0 to {clients - 1}.")
    return ordered
