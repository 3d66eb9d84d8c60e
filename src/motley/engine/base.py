"""The contract of an engine: jobs in, client updates out.

Engines differ in how they run clients: in slots on a GPU, in a plain loop, or on nodes elsewhere.
The server loop is the same for all of them. An engine holds, or reaches, the clients' data and the
clients' states; the server sees neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import Field, field_validator

from motley.client.job import Job
from motley.core.update import ClientUpdate
from motley.kernels import ALL, LAYERS
from motley.methods.base import Collection
from motley.settings import Settings

#: The kernels of `motley.kernels.ALL`.
KernelName = Literal["augment", "conv", "norm", "optimizer", "pool", "stem"]


class FlowerSettings(Settings):
    """How long the server waits for nodes, and how large their replies may be."""

    wait_s: float = Field(default=60.0, gt=0)
    """Seconds that a round, and the start of a run, waits for nodes that are not connected."""
    timeout_s: float = Field(default=900.0, gt=0)
    """Seconds that a client has for its local update and the transfers; later replies are ignored.
    Nodes that die, hang or are cut off are noticed without it, so it should be the time of the
    slowest honest update, with a margin.
    """
    max_reply_mib: float = Field(default=1024.0, gt=0)
    """Maximum size of a node's reply, in MiB. The server stores no more of a larger one."""


class EngineSettings(Settings):
    """How and where clients are run. Only `precision` and `vmap_clients` change results by more
    than rounding.
    """

    name: Literal["local", "debug", "flower", "flower-simulation"] = "local"
    """How clients are run. local: in slots, captured as CUDA graphs on a GPU. debug: a fresh model
    per client, one client at a time. flower: on nodes elsewhere (`motley deploy`).
    flower-simulation: Flower's own simulation, with Ray.
    """
    device: str = "auto"
    """auto (every visible GPU, or the CPU if there is none), cpu, cuda (the first GPU), cuda:N, or
    several GPUs: cuda:0,cuda:1. The first one is the server's; clients train on all of them. The
    debug engine uses the first one only.
    """
    slots: int = Field(default=0, ge=0)
    """Clients of the same size that train at the same time on each device; 0: 1 on a CPU, up to 4
    on a GPU.
    """
    vmap_clients: int = Field(default=1, ge=1)
    """Clients of the same size that train in one batched step, for small models without batch norm
    (on a CPU, also without convolutions). Changes the last bits of results, and the random numbers
    of dropout.
    """
    threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of torch. Other values change the last bits of results. More than one thread is
    slow beside other busy processes; for large models on an idle machine, use the number of cores.
    """
    workers: int = Field(default=0, ge=0, le=4096)
    """Worker processes that train clients on a CPU, one client each at a time; 0: one per available
    core, or one in all if workers cannot be used (`threads` above 1, `compile`, a visible GPU,
    another system than Linux). Changes no result.
    """
    kernels: tuple[KernelName, ...] = ("augment", "conv", "norm", "optimizer", "pool", "stem")
    """Motley's own kernels to use on a GPU; true: all, false: none. augment: crop, flip,
    normalization and cutout of a client's batches. conv: convolutions on small maps and their
    gradients, in tf32, fp16 and bf16. norm: batch norm with addition and ReLU. optimizer: one
    kernel over all tensors. pool: max pooling. stem: the first convolution. Those for layers (conv,
    norm, pool, stem) are for ResNets, and are not used in compiled models. No effect in the debug
    engine.
    """
    compile: bool = False
    """Compile models with torch.compile, for batches of the full batch size. The first round takes
    up to half a minute longer per size. Needs a C++ compiler on a CPU, and Triton on a GPU. No
    effect in the debug engine and on clients that train in one batched step (vmap_clients). Changes
    the last bits of results.
    """
    overlap_rounds: bool = False
    """On a GPU, queue the training of the next round before the check of this round's updates is
    read, so that the GPU never waits for the host. Changes no result. Two rounds' updates are in
    memory at once, and a round that has to be repeated takes longer, because training that is
    queued is not cut off. No effect on a CPU and in private runs.
    """
    client_state_gpu_fraction: float = Field(default=0.125, ge=0, le=1)
    """Fraction of a GPU's memory for the clients' state between rounds; the rest of the state is
    kept in host memory. With several GPUs, all of the state is kept there.
    """
    client_state_host_gib: float = Field(default=1.0, ge=0)
    """Host memory for the clients' state, in GiB; the rest of the state is kept on disk."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "tf32"
    """Precision of training. tf32 is fp32 on a CPU. fp16 and bf16, for a GPU only, compute in 16
    bits and keep single-precision master weights. fp16 has more digits and a narrow range: a step
    whose gradients overflow is skipped, and the next ones use a smaller loss scale. Evaluation is
    always in single precision: tf32 on a GPU, or fp32 if that is the training precision.
    """
    flower: FlowerSettings = FlowerSettings()

    @field_validator("kernels", mode="before")
    @classmethod
    def _all_or_none(cls, value: object) -> object:
        if isinstance(value, bool):
            return tuple(sorted(ALL)) if value else ()
        return value

    @property
    def kernel_names(self) -> frozenset[str]:
        """The kernels that a run uses on a GPU. A compiled model uses no kernels for layers."""
        chosen = frozenset(self.kernels)
        return chosen - LAYERS if self.compile else chosen


@dataclass(frozen=True)
class Failure:
    """The reason why a client that was asked for an update sent none."""

    client: int
    reason: str


#: Called with a client's id as soon as it has finished.
Done = Callable[[int], None]


class Engine(Protocol):
    """Runs clients."""

    #: Whether clients run in this process. Others may send anything, so their payloads and
    #: collections are tried first. Shapes and finite numbers are checked for updates of all.
    trusted: ClassVar[bool]

    def train(self, jobs: Sequence[Job], done: Done) -> Sequence[ClientUpdate | Failure]:
        """Train every job's client. A client without a single batch has no update."""
        ...

    def collect(self, jobs: Sequence[Job]) -> Sequence[Collection | Failure]:
        """Ask every job's client for the collection that the job names, without training.

        A client without a single example has no collection.
        """
        ...

    def save_client_states(self, rounds: Mapping[int, int]) -> None:
        """Make the clients' states of the given rounds (client -> round) durable."""
        ...

    def forget_client_states(self, rounds: Mapping[int, int]) -> None:
        """Drop the clients' states of rounds before the given ones (client -> round)."""
        ...
