"""A single client, as a node runs it: it trains the part that it receives on its own examples.

Only the model of its size is built. There is no server and no privacy ledger. There is a test set
only if clients evaluate models of their own, because the method exchanges no weights. Precision and
threads apply only while the client computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

from motley.assembly import assign_sizes, build_clients, build_method, build_split, size_lookup
from motley.checks import check_optimizer, check_precision, check_weights_fit
from motley.client.scoring import ClientTests
from motley.config import Config
from motley.core.update import ClientUpdate
from motley.data.dataset import Examples
from motley.data.device import device_data
from motley.data.partition import Partition
from motley.data.public import PublicData
from motley.engine import Job, LocalEngine
from motley.engine.device import choose_devices, numerics, request_hardware_queues
from motley.evaluate import TestBatches
from motley.methods.base import Collection
from motley.splits.check import check_outputs
from motley.tasks import CLASSIFICATION, Task


class Client:
    """A client of one size."""

    def __init__(
        self,
        config: Config,
        size: str,
        examples: Examples,
        partition: Partition,
        classes: int,
        *,
        folder: Path,
        fresh_noise: bool = False,
        read_test_examples: Callable[[], Examples],
        read_client_tests: Callable[[], tuple[Examples, Partition]],
        public: PublicData | None = None,
        task: Task = CLASSIFICATION,
    ) -> None:
        """Build the client's model for the examples that `partition` gives to it.

        `read_test_examples` is called if the client is asked to evaluate a model of its own, and
        `read_client_tests` if it is asked for a score on its own test examples: it returns a set of
        examples, and which of them are the client's test examples.
        The client state is saved in `folder`. The noise of `privacy` follows from the run's seed;
        with `fresh_noise` it is drawn anew for every update. `public` are the public images, for
        methods whose clients use some.
        """
        self.config, self._read_test_examples = config, read_test_examples
        self._read_client_tests, self._task = read_client_tests, task
        if config.engine.device != "cpu":
            request_hardware_queues()
        (device, *_) = choose_devices(config.engine.device)
        self._device = device
        check_precision(config.engine.precision, device)
        check_optimizer(config, device)
        with self._numerics():
            data = device_data(examples, config.data.transform, device, augment=True)
            data.check_batch_fits("training.batch_size", config.training.batch_size)
            split = build_split(config, data.shape, classes)
            check_weights_fit(split, [size], device)
            target_dims = examples.targets.shape[1:]
            check_outputs(split, [size], data.shape, classes, task, target_dims)
            sizes = assign_sizes(config)
            size_of = size_lookup(config, sizes)
            method = build_method(config, split, sizes, data.shape, classes, size_of, public, task)
            lean = device.type == "cpu"
            clients = build_clients(
                config,
                method,
                [data],
                partition,
                folder,
                fresh_noise=fresh_noise,
                lean=lean,
                test_set=lambda: self._test_batches,
                tests=lambda: self._client_tests,
            )
            self._engine = LocalEngine(clients, slots=1, stack=config.engine.vmap_clients)

    def train(self, job: Job, forget: int) -> ClientUpdate | None:
        """Train a part; return None if the client has too few examples for a step.

        On a CPU the job's state is dropped, to free the memory. The new client state is saved in
        the folder before this returns, and states of rounds before `forget` are deleted.
        """
        with self._numerics():
            updates = self._engine.train([job], lambda client: None)
        self._engine.save_client_states({job.client: job.round_number})
        self._engine.forget_client_states({job.client: forget})
        return updates[0] if updates else None

    def collect(self, job: Job) -> Collection | None:
        """Return the client's part of a collection; None if it has no examples."""
        with self._numerics():
            collections = self._engine.collect([job])
        return collections[0] if collections else None

    @cached_property
    def _test_batches(self) -> TestBatches:
        config = self.config
        examples = self._read_test_examples()
        data = device_data(examples, config.data.transform, self._device, augment=False)
        data.check_batch_fits("evaluation.batch_size", config.evaluation.batch_size)
        return TestBatches(data, config.evaluation.batch_size)

    @cached_property
    def _client_tests(self) -> ClientTests:
        config = self.config
        examples, partition = self._read_client_tests()
        data = device_data(examples, config.data.transform, self._device, augment=False)
        data.check_batch_fits("evaluation.batch_size", config.evaluation.batch_size)
        return ClientTests(lambda: data, partition, config.evaluation.batch_size, self._task)

    def _numerics(self) -> AbstractContextManager[None]:
        return numerics(self.config.engine.precision, self.config.engine.threads)
