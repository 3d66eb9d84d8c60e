"""A slot on a device other than the home device.

The server's tensors are on the home device. A job is copied to the slot's device when it is loaded,
and its update is copied home when it has finished; in between, the slot is like any other.

torch runs a copy between GPUs on the source's current stream, and lets it and the destination's
stream wait for each other. If all copies were on one stream of the home device, each would wait for
the client before it in its slot. So every such slot also has a stream on the home device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from motley.client.clients import Clients
from motley.client.job import Job
from motley.client.training import Plan
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.engine.slots import Slot


class OtherDeviceSlot(Slot):
    """A slot whose clients come from the home device and go back to it."""

    def __init__(self, clients: Clients, size: str, where: int, urgent: bool = False) -> None:
        super().__init__(clients, size, where, urgent)
        self.home = clients.device
        self.stream_at_home = torch.cuda.Stream(self.home) if self.home.type == "cuda" else None

    def load(self, job: Job, plan: Plan) -> None:
        """Copy a job to the slot's device and load it."""
        with self._on_both():
            here = replace(
                job,
                state=copied_to(job.state, self.device),
                broadcast=copied_to(job.broadcast, self.device),
            )
            super().load(here, plan)

    def unload(self) -> ClientUpdate:
        """End the client's training and copy its update to the home device."""
        with self._on_both():
            update = super().unload()
            return replace(
                update,
                delta=copied_to(update.delta, self.home),
                payload=copied_to(update.payload, self.home),
                loss=update.loss.to(self.home, copy=True),
            )

    def follow(self) -> None:
        """Let the slot's streams wait for the work so far on both devices."""
        super().follow()
        if self.stream_at_home is not None:
            self.stream_at_home.wait_stream(torch.cuda.current_stream(self.home))

    def lead(self) -> None:
        """Let the streams of both devices wait for the slot's work so far."""
        super().lead()
        if self.stream_at_home is not None:
            torch.cuda.current_stream(self.home).wait_stream(self.stream_at_home)

    @contextmanager
    def _on_both(self) -> Iterator[None]:
        """Make the slot's two streams the current ones of their devices; its own device is the
        current one.
        """
        if self.stream is None or self.stream_at_home is None:
            yield
            return
        with torch.cuda.stream(self.stream_at_home), torch.cuda.stream(self.stream):
            yield


def copied_to(state: State, device: torch.device) -> State:
    """Return a state on another device; tensors that a method keeps in host memory stay there.

    Tensors are copied even if the device is the same one, as it is in tests.
    """
    copied = {}
    for name, tensor in state.items():
        same_type = tensor.device.type == device.type
        copied[name] = tensor.to(device, copy=True) if same_type else tensor
    return copied
