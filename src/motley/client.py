"""One client on its own: it trains the part it is sent, with its own examples, and builds no other size's model.

This is what a node is. It has no server, no evaluation and no account of privacy, and no test set. A client lasts for
one message: its memory is free again before the answer is packed.
"""

from __future__ import annotations

from pathlib import Path

from motley.assembly import assign_sizes, build_clients, build_method, build_split, check_weights_fit
from motley.config import Config
from motley.core.update import ClientUpdate
from motley.data.dataset import Examples
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.engine import Job, LocalEngine
from motley.engine.device import choose_devices
from motley.methods.base import Collection
from motley.splits.check import check_outputs


class Client:
    """A client of one size, ready for a job."""

    def __init__(
        self,
        config: Config,
        size: str,
        examples: Examples,
        partition: Partition,
        classes: int,
        *,
        folder: Path,
        secret: bytes | None = None,
    ) -> None:
        """`folder` keeps the client's state. `secret` keys the noise of `privacy`; without one, the run's seed does."""
        self.config = config
        (device, *_) = choose_devices(config.engine.device)
        data = DeviceData(examples, config.data.transform, device, augment=True)
        data.check_batch_fits("training.batch_size", config.training.batch_size)
        split = build_split(config, data.shape, classes)
        check_weights_fit(split, [size], device)
        check_outputs(split, [size], data.shape, classes)
        sizes = assign_sizes(config)

        def size_of(client: int, round_number: int) -> str:
            return assign_sizes(config, round_number)[client]

        method = build_method(config, split, sizes, data.shape, classes, size_of)
        clients = build_clients(config, method, [data], partition, folder, secret=secret, lean=device.type == "cpu")
        self._engine = LocalEngine(clients, slots=1, stack=config.engine.vmap_clients)

    def train(self, job: Job, forget: int) -> ClientUpdate | None:
        """Do a job, which loses its state; None if the client has too few examples for a step.

        The client's state is in its folder afterwards, and those of rounds before `forget` are not.
        """
        uploads = self._engine.train([job], lambda client: None)
        self._engine.save_memory({job.client: job.round_number})
        self._engine.forget_memory({job.client: forget})
        return uploads[0] if uploads else None

    def collect(self, job: Job) -> Collection | None:
        """Answer for the method's collection; None if the client has no examples."""
        collections = self._engine.collect([job])
        return collections[0] if collections else None
