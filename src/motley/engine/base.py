"""The contract of an engine: client jobs in, uploads out.

The server loop is the same whether clients are slots on a GPU, a plain loop, or nodes elsewhere; an engine is what
differs. It holds, or reaches, the clients' data and their memory; the server sees neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from pydantic import Field
from torch import Tensor

from motley.engine.flower.settings import FlowerSettings
from motley.methods.base import Collection
from motley.settings import Settings
from motley.splits.part import State


class EngineSettings(Settings):
    """How clients are run. `precision` changes what is computed, and `stack` what is drawn; the rest, the last bits."""

    name: Literal["local", "debug", "flower", "flower-simulation"] = "local"
    """local: slots, captured as CUDA graphs on a GPU. debug: a fresh model a client, one at a time. flower: nodes
    elsewhere (motley deploy). flower-simulation: Flower's own simulation of nodes, with Ray.
    """
    device: str = "auto"
    """auto (every GPU that is visible, or else the CPU), cpu, cuda (the first GPU), cuda:N, or several GPUs:
    cuda:0,cuda:1. The first is the server's; clients train on all of them. The debug engine uses the first only.
    """
    slots: int = Field(default=0, ge=0)
    """Clients of a size that train at once on each device; 0: 1 on a CPU, up to 4 on a GPU."""
    stack: int = Field(default=1, ge=1)
    """Clients of a size that train side by side in one step, for small models without batch norm; on a CPU, without
    convolutions too. Changes the last bits, and which numbers dropout draws.
    """
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of torch. Another number changes the last bits of results, and more than one is slow beside other
    busy processes; for large models on an idle machine, the number of cores. At most 1024.
    """
    fused: bool = True
    """On a GPU, kernels of our own for batch norm with addition and ReLU; off in the debug engine."""
    memory_share: float = Field(default=0.125, ge=0, le=1)
    """Share of a GPU's memory for what clients remember between rounds; what is more goes to the host. With several
    GPUs, all of it goes there.
    """
    memory_gib: float = Field(default=1.0, ge=0)
    """Host memory for what clients remember; what is more lies on disk."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "tf32"
    """Precision of training. tf32 is fp32 on a CPU. fp16 and bf16, for a GPU only, compute in 16 bits and keep
    single-precision master weights. fp16 has more digits and a narrow range: a step whose gradients overflow is
    skipped, and the next ones use a smaller loss scale. Evaluation is always in single precision: tf32 on a GPU, or
    fp32 if that is the training precision.
    """
    flower: FlowerSettings = FlowerSettings()


@dataclass(frozen=True)
class Job:
    """What the server asks of one client in a round."""

    round_number: int
    client: int
    size: str
    state: State
    """The client's part of the global state under its own names: views, which the engine copies and never changes."""
    message: State = field(default_factory=dict)
    remembers: int | None = None
    """The round whose memory the client is to use: that of its last upload which the server took."""


@dataclass(frozen=True)
class Upload:
    """What a client sends back."""

    client: int
    change: State
    message: State
    samples: int
    steps: int
    loss: Tensor
    """Mean training loss over the turn's steps; a GPU may still be at it, as at the change."""


@dataclass(frozen=True)
class Failure:
    """Why there is no upload of a client that was asked for one."""

    client: int
    reason: str


Done = Callable[[int], None]
"""Called with a client's id as soon as its turn is over."""


class Engine(Protocol):
    """Runs clients."""

    trusted: ClassVar[bool]
    """Whether clients are this process's own. Others may send anything, so what they send is tried before it counts."""

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[Upload | Failure]:
        """Train every job's client. A client without a single batch is left out of the answer."""
        ...

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        """Ask every job's client for the method's collection, without training.

        A client without a single example is left out of the answer.
        """
        ...

    def save_memory(self, rounds: dict[int, int]) -> None:
        """Make the clients' memory of the given rounds (client -> round) durable."""
        ...

    def forget_memory(self, rounds: dict[int, int]) -> None:
        """Let go of what clients remember of rounds before the given ones (client -> round)."""
        ...
