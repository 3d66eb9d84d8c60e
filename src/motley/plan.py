"""The costs of each size for a client, and the largest size that fits a client's budget.

Costs are counted on a model without values (on torch's meta device): nothing is allocated, so a
plan for a fleet takes seconds on any machine. A client's memory is the larger of two peaks:

- of a training step: the weights, a copy of them as they were received, the optimizer's state, and
  the most that the forward and the backward pass hold at once, with the copies of its weight that a
  convolution makes while it runs, and the workspace of an LSTM;
- of the exchange with the server, which counts if the optimizer keeps no state: the weights, the
  received copy, the delta, and the two copies of the delta that its encoding needs.

Not counted are other scratch space of libraries and a method's extras (a second model, control
variates). A process that is a node also needs a fixed amount of memory: see `NODE_RUNTIME`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from motley.client.encoding import Encoding, encoded
from motley.client.training import TrainingSettings
from motley.core.errors import MotleyError, unknown
from motley.core.meta import on_meta
from motley.counting import LiveBytes, LSTMsOfCPUs, flop_counter
from motley.limits import allocating, is_out_of_memory
from motley.models.inputs import InputShape, example_inputs
from motley.splits import Split
from motley.splits.base import build_on_meta

#: Bytes that a node's process needs beside `Cost.memory` and beside what `import torch` takes:
#: Flower's and Motley's modules (64 MB), and the code and tables of torch's libraries that are
#: loaded when a model first trains (about 80 MB). It does not depend on the model. Measured with
#: torch 2.13 and Flower 1.41 on an x86 CPU; tests/flower/test_node_memory.py checks it.
NODE_RUNTIME = 145_000_000

#: Copies of a client's state during the exchange: model, received, delta, and two encoded ones.
EXCHANGE_COPIES = 5

#: A line of budgets has about 20 bytes, so this is enough for a million clients.
MAX_BUDGET_BYTES = 50_000_000


@dataclass(frozen=True)
class Cost:
    """The costs of one size."""

    parameters: int
    #: Of a training step, forward and backward; a multiplication and an addition are two.
    flops: int
    #: Bytes that the forward pass leaves for the backward pass.
    activations: int
    #: Bytes at the peak of a training step.
    step_memory: int
    #: Bytes at the peak of the exchange with the server.
    exchange_memory: int
    #: Bytes per round: the part down and its delta up.
    traffic: int

    @property
    def memory(self) -> int:
        """Bytes that a client needs: the larger of its two peaks."""
        return max(self.step_memory, self.exchange_memory)


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a client; None: no limit."""

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


def cost_of(
    split: Split,
    size: str,
    shape: InputShape,
    training: TrainingSettings,
    upload: Encoding = "fp32",
) -> Cost:
    """Return the cost of a size. `upload` is the encoding of its deltas (uplink.dtype)."""
    described = f"{size!r} with training.batch_size = {training.batch_size}"
    with on_meta(), allocating(described):
        model = build_on_meta(size, split.blueprints[size].build).train()
        inputs = example_inputs(shape, training.batch_size)
        existing = [*model.parameters(), *model.buffers()]
        with LSTMsOfCPUs(), LiveBytes(existing) as live, flop_counter() as counter:
            loss = _outputs(model, inputs, size).square().mean()
            activations = live.now
            loss.backward()
    parameter_bytes = _bytes(model.parameters())
    state_bytes = parameter_bytes + _bytes(model.buffers())
    model_and_received = 2 * state_bytes
    moments = training.optimizer.moments * parameter_bytes
    sent = {name: t for name, t in model.state_dict().items() if name not in split.private[size]}
    encoded_delta, _ = encoded(sent, {}, upload)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops=counter.get_total_flops(),
        activations=activations,
        step_memory=model_and_received + moments + inputs.nbytes + live.peak,
        exchange_memory=EXCHANGE_COPIES * state_bytes,
        traffic=_bytes(sent.values()) + _bytes(encoded_delta.values()),
    )


def _outputs(model: torch.nn.Module, inputs: Tensor, size: str) -> Tensor:
    """Return a model's outputs for inputs without values.

    The model may be a user's, which can return or raise anything.
    """
    try:
        outputs = model(inputs)
    except (MotleyError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise MotleyError(
            f"model.sizes: {size!r} cannot be counted with a batch of shape "
            f"{tuple(inputs.shape)} on torch's meta device, where tensors have no values: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(outputs, Tensor):
        raise MotleyError(
            f"model.sizes: {size!r} returns a {type(outputs).__name__}, not a tensor of logits."
        )
    return outputs


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def costs_of(
    split: Split, shape: InputShape, training: TrainingSettings, upload: Encoding = "fp32"
) -> dict[str, Cost]:
    """Return the costs of every size, the largest first."""
    costs = {size: cost_of(split, size, shape, training, upload) for size in split.sizes}
    return dict(sorted(costs.items(), key=lambda item: item[1].parameters, reverse=True))


def largest_fitting(costs: Mapping[str, Cost], budget: Budget) -> str | None:
    """Return the largest size within a budget, or None if no size fits."""
    return next((size for size, cost in costs.items() if budget.fits(cost)), None)


def read_budgets(file: Path) -> list[Budget]:
    """Read a CSV file with one budget per line.

    The columns are `client` and any of memory_mb, parameters and gflops. An empty cell means that
    there is no limit.
    """
    budgets = []
    line_of: dict[str, int] = {}
    for line, row in _read_rows(file):
        budget = _budget(file, line, row)
        if budget.client in line_of:
            first = line_of[budget.client]
            raise MotleyError(
                f"{file}: client {budget.client!r} is listed twice, in lines {first} and {line}."
            )
        line_of[budget.client] = line
        budgets.append(budget)
    return budgets


def _read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a budgets file with their line numbers, after checking its columns."""
    try:
        size = file.stat().st_size
        if size > MAX_BUDGET_BYTES:
            raise MotleyError(
                f"{file}: has {size:,} bytes; a file of budgets has at most {MAX_BUDGET_BYTES:,}."
            )
        # utf-8-sig: spreadsheets write a byte order mark, which would be part of the first column.
        with file.open(newline="", encoding="utf-8-sig") as lines:
            header = lines.readline()
            lines.seek(0)
            # Spreadsheets write semicolons where numbers have a decimal comma.
            is_semicolon = ";" in header and "," not in header
            # strict: an unclosed quote would otherwise swallow all lines below it.
            reader = csv.DictReader(lines, delimiter=";" if is_semicolon else ",", strict=True)
            columns = list(reader.fieldnames or [])
            _check_columns(file, columns)
            has_rows = False
            for row in reader:
                has_rows = True
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MotleyError(f"{file}: cannot be read: {error}.") from None
    if not has_rows:
        raise _no_clients(file, columns)


def _check_columns(file: Path, columns: Sequence[str]) -> None:
    allowed = [field.name for field in fields(Budget)]
    for column in columns:
        if column not in allowed:
            raise MotleyError(f"{file}: {unknown('column', column, allowed)}")
        if columns.count(column) > 1:
            raise MotleyError(f"{file}: column {column!r} occurs twice.")
    if "client" not in columns:
        raise _no_clients(file, columns)


def _no_clients(file: Path, columns: Sequence[str]) -> MotleyError:
    has = ", ".join(columns) or "none"
    return MotleyError(
        f"{file}: needs a column 'client' and one line per client; its columns are: {has}."
    )


def _budget(file: Path, line: int, row: Mapping[Any, Any]) -> Budget:
    if None in row:  # csv's name for cells beyond the last column
        raise MotleyError(f"{file}, line {line}: has more cells than there are columns.")
    client = (row["client"] or "").strip()
    if not client:
        raise MotleyError(
            f"{file}, line {line}: client is empty; every line needs a number or a name."
        )
    limits: dict[str, float] = {}
    for column, text in row.items():
        if column == "client" or not (text or "").strip():
            continue
        try:
            limits[column] = float(text)
        except ValueError:
            limits[column] = -1.0
        if not 0 < limits[column] < float("inf"):
            raise MotleyError(
                f"{file}, line {line}: {column} = {text!r}: should be a number above 0, or empty."
            )
    return Budget(client, **limits)


def assigned(costs: Mapping[str, Cost], budgets: Sequence[Budget], clients: int) -> tuple[str, ...]:
    """Return the size of every client by id: the largest one within its budget."""
    sizes = []
    for client, budget in enumerate(_by_id(budgets, clients)):
        size = largest_fitting(costs, budget)
        if size is None:
            name = "" if budget.client == str(client) else f" ({budget.client!r})"
            raise MotleyError(
                f"federation.budgets: no size fits client {client}{name}. `motley plan` shows what "
                "each size takes; add a smaller one, or leave the client out."
            )
        sizes.append(size)
    return tuple(sizes)


def _by_id(budgets: Sequence[Budget], clients: int) -> list[Budget]:
    """Return the budgets in the order of client ids.

    If all clients are whole numbers, these are their ids, and the lines may be in any order.
    Otherwise they are names, which get the ids 0, 1, 2, ... in the order of their lines.
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
            raise MotleyError(
                f"federation.budgets: client {client} is missing; {wanted}, 0 to {clients - 1}."
            )
        ordered.append(by_client[str(client)])
    if len(budgets) != clients:
        raise MotleyError(
            f"federation.budgets: it has {len(budgets)} lines; {wanted}, 0 to {clients - 1}."
        )
    return ordered
