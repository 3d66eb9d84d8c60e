"""The public object: a configuration put together into data, split, method, server and engine.

The steps of a round are in `server/rounds.py`. Read that file first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from motley.assembly import (
    build_clients,
    build_collections,
    build_engine,
    build_method,
    build_pipeline,
    build_split,
    chosen_kernels,
    client_sizes,
    compiles,
    deal_examples,
    load_dataset_of,
    load_public,
    size_lookup,
    with_weights,
)
from motley.checks import (
    check_batches_fit,
    check_dataset,
    check_engine,
    check_optimizer,
    check_precision,
    check_recalibration,
    check_weights_fit,
    refuse_global_model,
)
from motley.config import Config
from motley.core.device import on_device
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.data import Dataset
from motley.data.device import DeviceData, device_data
from motley.data.partition import Partition
from motley.engine import DebugEngine, Engine, Job, LocalEngine
from motley.engine.device import choose_devices, numerics, request_hardware_queues
from motley.evaluate import Evaluator, Score
from motley.privacy import Accountant
from motley.server import rounds, speculation
from motley.server.context import RoundContext
from motley.server.exchange import make_job
from motley.server.record import PendingRecord, RoundRecord
from motley.server.sampling import ClientSampler, Sampler
from motley.server.state import ServerState
from motley.server.uplink import Uplink
from motley.splits.check import check_outputs
from motley.tasks import TASKS


class Federation:
    """Runs the rounds of a configuration.

        server = federation.initial_state()
        for _ in range(config.training.rounds):
            server, record = federation.run_round(server)

    Its parts are attributes, and replacing one of them takes effect in the next round: `pipeline`
    (the stages of the aggregation, a list), `collections`, `sample` (chooses a round's clients) and
    `engine`.

    Constructing a federation changes no state of the process, except that a federation for GPUs
    asks CUDA for more hardware queues (`request_hardware_queues`). Precision and threads apply
    while it computes (`numerics`).
    """

    def __init__(
        self,
        config: Config,
        *,
        dataset: Dataset | None = None,
        partition: Partition | None = None,
        memory_folder: Path | None = None,
        engine: Callable[[Federation], Engine] | None = None,
    ) -> None:
        """By default, `dataset` and `partition` are those that the configuration names.

        Client states are saved in `memory_folder`; those that do not fit into memory are kept
        there, too. `engine` builds an engine whose clients are not in this process, for example on
        Flower nodes; the federation then does not know which examples each client has.
        """
        check_engine(config, external=engine is not None)
        if config.engine.device != "cpu":
            request_hardware_queues()
        self.config = config
        devices = choose_devices(config.engine.device)
        #: The devices on which clients train. The first is the home device, which does everything
        #: else.
        self.devices = devices if config.engine.name != "debug" else devices[:1]
        self.device = devices[0]
        check_precision(config.engine.precision, self.device)
        check_optimizer(config, self.device)

        self.dataset = load_dataset_of(config) if dataset is None else check_dataset(dataset)
        self.dataset.check_inferred_classes()
        copies = []
        for device in self.devices:
            copies.append(
                device_data(self.dataset.train, config.data.transform, device, augment=True)
            )
        shape, classes = copies[0].shape, self.dataset.classes
        check_batches_fit(config, copies[0], len(self.dataset.test))

        self.split = build_split(config, shape, classes)
        check_weights_fit(self.split, self.split.sizes, self.device)
        check_outputs(self.split, self.split.sizes, shape, classes)
        check_recalibration(config, self.split)
        # Before sizes are assigned, because a partition reports too many clients for the data set.
        self._partition, held_out = None, np.zeros(0, dtype=np.int64)
        if engine is None or config.public.name == "held-out":
            dealt = deal_examples(config, self.dataset, partition)
            held_out = dealt.held_out
            # Clients elsewhere may have other examples, and only they know which.
            self._partition = dealt.partition if engine is None else None
        #: The size of every client, by client id. Dynamic sizes differ per round: use `size_of`.
        self.sizes = client_sizes(config, self.split, shape)
        #: (client, round) -> the client's size.
        self.size_of = size_lookup(config, self.sizes)
        public = load_public(config, self.dataset, held_out, self.device)
        self.method = build_method(
            config,
            self.split,
            self.sizes,
            shape,
            classes,
            self.size_of,
            public,
            TASKS[self.dataset.task],
        )

        self.pipeline = build_pipeline(config, self.split, self.method)
        self.collections = build_collections(config, self.split, self.method, self.size_of)
        self.accountant: Accountant | None = None
        if config.privacy.active:
            self.accountant = Accountant(config.privacy, self.split, self.sizes)
        federation = config.federation
        self.sample: Sampler = ClientSampler(
            federation.clients, federation.clients_per_round, config.seed, federation.sampler
        )
        self.evaluator = Evaluator(
            self.split,
            self._test_data,
            classes,
            config.evaluation,
            kernels=chosen_kernels(config),
            compiled=compiles(config),
        )
        if engine is not None:
            self.engine: Engine = engine(self)
        else:
            clients = build_clients(
                config,
                self.method,
                copies,
                self.partition,
                memory_folder,
                test_set=lambda: self.evaluator.batches,
            )
            self.engine = build_engine(config, clients)

    @property
    def partition(self) -> Partition:
        """Which examples each client holds."""
        if self._partition is None:
            raise MotleyError(
                "federation.partition: its clients are elsewhere, "
                "and only they know their examples."
            )
        return self._partition

    def _test_data(self) -> DeviceData:
        """Put the test set on the home device."""
        return device_data(
            self.dataset.test, self.config.data.transform, self.device, augment=False
        )

    # ---- rounds

    def initial_state(self) -> ServerState:
        """Return the server state before the first round."""
        with self.numerics():
            state = self.split.initial(self.config.seed)
            if self.config.model.weights:
                state = with_weights(state, self.split, self.config.model)
            return self.to_device(ServerState(0, state, method_state=self.method.server.init()))

    def run_round(
        self, server: ServerState, done: Callable[[int], None] = lambda client: None
    ) -> tuple[ServerState, RoundRecord]:
        """Run the next round; return the server state after it, and the round's record.

        `done` is called with the id of each client that has finished its local update.
        """
        after, pending = self.queue_round(server, done)
        return after, pending.read()

    def queue_round(
        self, server: ServerState, done: Callable[[int], None] = lambda client: None
    ) -> tuple[ServerState, PendingRecord]:
        """Like `run_round`, but do not wait for the evaluation.

        A GPU may evaluate a round while the next one begins.
        """
        with self.numerics():
            return rounds.run_round(self.context, server, done, speculation.finish_round)

    @property
    def context(self) -> RoundContext:
        """The objects and settings that a round works with."""
        config = self.config
        return RoundContext(
            engine=self.engine,
            algorithm=self.method.server,
            split=self.split,
            size_of=self.size_of,
            sample=self.sample,
            pipeline=self.pipeline,
            collections=self.collections,
            evaluator=self.evaluator,
            uplink=Uplink(config.uplink.dtype, config.uplink.noise, config.seed),
            weigh_by_examples=config.server.weighting == "samples",
            accountant=self.accountant,
            device=self.device,
            min_fraction=config.server.min_fraction,
            attempts=config.server.attempts,
            batch_size=config.training.batch_size,
            exchanges_weights=self.method.requirements.exchanges_weights,
        )

    def job(self, server: ServerState, round_number: int, client: int) -> Job:
        """Return the job that a client is sent in a round."""
        return make_job(self.context, server, round_number, client)

    def jobs(self, server: ServerState) -> list[Job]:
        """Return the jobs that the clients of the next round are sent."""
        number = server.round_number + 1
        return [self.job(server, number, client) for client in self.sample(number)]

    # ---- computing with a state

    def evaluate(self, state: State, round_number: int = 0) -> dict[str, Score]:
        """Return every size's score with its part of a global state.

        `evaluate(server.model, server.round_number)` gives the scores of a round's record.
        `round_number` matters for a rolling window of channels only: its default, 0, evaluates the
        leading channels and not the window that the round trained.

        A method that exchanges no weights has no global model, so this raises an error. Its
        clients' models are `client_model`.
        """
        refuse_global_model(self.method)
        with self.numerics():
            return self.evaluator(state, round_number)

    def client_model(self, server: ServerState, client: int) -> nn.Module:
        """Return a client's own model after its last accepted update, in evaluation mode.

        Only methods that exchange no weights have such models, and clients of this process.
        """
        if self.method.requirements.exchanges_weights:
            raise MotleyError(
                f"method.name = {self.config.method.name!r}: clients have no models of their own; "
                "they train parts of the global model."
            )
        if not isinstance(self.engine, DebugEngine | LocalEngine):
            raise MotleyError("client_model: the clients are elsewhere, and so are their models.")
        trained = server.client_state_rounds.get(client)
        if trained is None:
            raise MotleyError(f"client {client} has no model yet: it has not trained.")
        model = self.split.build(self.sizes[client]).to(self.device)
        model.load_state_dict(self.engine.clients.own_model(client, trained))
        return model.eval()

    def to_device(self, server: ServerState) -> ServerState:
        """Return a server state whose tensors are on the federation's device."""
        return server.map_tensors(partial(on_device, device=self.device))

    def numerics(self) -> AbstractContextManager[None]:
        """Return the context in which this federation's precision and number of threads apply."""
        return numerics(self.config.engine.precision, self.config.engine.threads)
