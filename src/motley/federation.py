"""The public object: a configuration put together into data, split, method, server and engine.

The steps of a round are in `server/rounds.py`. Read that file first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from motley.assembly import (
    build_bounds,
    build_clients,
    build_collections,
    build_engine,
    build_method,
    build_pipeline,
    build_score_clients,
    build_split,
    build_workers,
    chosen_kernels,
    client_sizes,
    client_tests,
    compiles,
    deal_examples,
    load_dataset_of,
    load_public,
    most_steps,
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
    check_task,
    check_test_batches,
    check_weights_fit,
    refuse_global_model,
)
from motley.client.scoring import ClientTests
from motley.config import Config
from motley.core.device import on_device
from motley.core.dotted import describe
from motley.core.errors import MotleyError
from motley.core.part import State, take
from motley.core.registry import Entry
from motley.core.results import require_tensors
from motley.data import Dataset
from motley.data.device import DeviceData, device_data
from motley.data.partition import Partition, PartitionSettings
from motley.engine import DebugEngine, Engine, Job, LocalEngine
from motley.engine.device import choose_devices, numerics, request_hardware_queues
from motley.evaluate import Evaluator, Score
from motley.files import given_path
from motley.methods import Method
from motley.models import InputShape
from motley.objects import describe_federation
from motley.privacy import Accountant, why_no_scores
from motley.server import rounds, speculation
from motley.server.context import ReleaseLog, RoundContext
from motley.server.exchange import make_job
from motley.server.record import PendingRecord, RoundRecord
from motley.server.sampling import ClientSampler, Sampler
from motley.server.speculation import NextRound
from motley.server.state import ServerState
from motley.server.uplink import Uplink
from motley.settings import Configured
from motley.splits import Split
from motley.splits.check import check_outputs
from motley.splits.trained import trained_model


class Federation:
    """Runs the rounds of a federation.

        federation = motley.Federation(
            models={"small": make_small, "large": make_large},
            data=motley.data.from_datasets(train, test),
            partition=motley.Dirichlet(alpha=0.5),
            clients=100,
            method="fedprox",
        )
        for record in federation.run(rounds=100):
            print(record.round, record.accuracy)
        model = federation.model("small")

    Instead of objects it takes a configuration: `Federation(config)`. `run` keeps the server state
    in `server`. The functions below it, such as `run_round`, take a state and return another:

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
        config: Config | None = None,
        *,
        models: Mapping[str, Any] | Sequence[str] | None = None,
        data: Dataset | str | Mapping[str, Any] | Callable[[], Dataset] | None = None,
        partition: Partition | PartitionSettings | str | Mapping[str, Any] | None = None,
        clients: int | None = None,
        clients_per_round: int | None = None,
        split: str | Mapping[str, Any] | type[Split] | None = None,
        method: str | Mapping[str, Any] | type[Method] | Configured | None = None,
        server: Sequence[Any] = (),
        training: Mapping[str, Any] | None = None,
        task: str | Mapping[str, Any] | None = None,
        engine: str | Callable[[Federation], Engine] | None = "auto",
        seed: int | None = None,
        settings: Mapping[str, Any] | None = None,
        dataset: Dataset | None = None,
        client_state_folder: str | Path | None = None,
    ) -> None:
        """Put a federation together, from a configuration or from objects.

        Names, tables (as in a TOML file) and objects are all accepted. With a configuration, only
        `dataset`, `partition`, `engine` and `client_state_folder` may be given.

        Args:
            config: A whole configuration, instead of the arguments that describe one.
            models: Size -> a function or class that builds its `nn.Module` (with `input_shape` and
                `num_classes`, if it names them), a `ModelSpec`, or a registered name. Smallest
                first.
            data: A data set, the name of one, or a function that returns one.
            partition: How its examples are dealt to clients: `motley.Dirichlet(alpha=0.5)`, a name,
                or a finished `Partition`. By default natural clients, if the data set has them.
            clients: The number of clients. By default all natural ones, or 20.
            clients_per_round: How many of them train in each round; by default 5.
            split: How sizes share the global state; by default "depth".
            method: A name, a subclass of `motley.Method`, or `MyMethod.configure(mu=0.1)`; by
                default "fedavg".
            server: Further steps of the server: `motley.InCo("paper")`, `motley.EMA(0.95)`,
                `motley.ServerOptimizer("adam")`, stages of your own.
            training: Keys of `[training]`, such as {"epochs": 2, "optimizer": torch.optim.RMSprop}.
            task: The task's name, or keys of `[task]`, such as {"loss": my_loss, "metrics":
                ["accuracy", my_metric]} (docs/tasks.md); by default the data set's own.
            engine: "auto", "local" or "debug". Or a function that builds an engine whose clients
                are not in this process, for example on Flower nodes; the federation then does not
                know which examples each client has.
            seed: The seed of every random choice; by default 1.
            settings: Tables of a configuration, above everything else, such as
                {"evaluation": {"every": 5}}.
            dataset: The data set, instead of the one that the configuration names.
            client_state_folder: Where client states are saved. States that do not fit into memory
                are kept there, too.
        """
        described = {
            "models": models,
            "data": data,
            "clients": clients,
            "clients_per_round": clients_per_round,
            "split": split,
            "method": method,
            "server": server or None,
            "training": training,
            "task": task,
            "seed": seed,
            "settings": settings,
        }
        engine = "auto" if engine is None else engine
        if not (isinstance(engine, str) or callable(engine)):
            raise MotleyError(
                f"Federation: engine: is {describe(engine)}; 'auto', 'local', 'debug' or a "
                "function that builds an engine is expected."
            )
        if client_state_folder is not None:
            client_state_folder = given_path(client_state_folder, "Federation: client_state_folder")
        engine_name = engine if isinstance(engine, str) else "auto"
        build_external_engine = None if isinstance(engine, str) else engine
        #: Names of objects that only this process knows last as long as this list.
        self._in_memory: list[Entry[Any]] = []
        if config is None:
            missing = [name for name in ("models", "data") if described[name] is None]
            if missing:
                raise MotleyError(f"Federation: {' and '.join(missing)}: should be given.")
            if dataset is not None:
                raise MotleyError(
                    "Federation: dataset: is for a configuration; here the data set is `data`."
                )
            description = describe_federation(
                models=models,
                data=data,
                partition=partition,
                clients=clients,
                clients_per_round=clients_per_round,
                split=split,
                method=method,
                server=server,
                training=training,
                task=task,
                engine=engine_name,
                seed=1 if seed is None else seed,
                settings=settings,
            )
            config, dataset = description.config, description.dataset
            self._in_memory, partition = description.in_memory, None
        elif not isinstance(config, Config):
            raise MotleyError(
                f"Federation: config: is {describe(config)}; a motley.Config is expected, which "
                "motley.load_config(file, preset=...) returns. Objects are given by name: "
                "Federation(models=..., data=...)."
            )
        else:
            _require_only_config(config, described, engine_name)
        #: The server state after the last round of `run`; None before the first one.
        self.server: ServerState | None = None
        #: The training of a round that was queued before the round before it had ended.
        self._next_round = NextRound()
        check_engine(config, external=build_external_engine is not None)
        if config.engine.device != "cpu":
            request_hardware_queues()
        self.config = config
        self._choose_devices()
        train_data = self._load_data(dataset)
        self._build_split(train_data[0])
        shape = train_data[0].shape
        held_out = self._deal_examples(partition, external=build_external_engine is not None)
        check_test_batches(config, self.split, shape, len(self.dataset.test), self.client_tests)
        self._build_method(shape, held_out)
        self._build_server()
        self._build_evaluator()
        if build_external_engine is not None:
            self.engine: Engine = build_external_engine(self)
        else:
            self.engine = self._build_engine(train_data, client_state_folder)

    def _choose_devices(self) -> None:
        """Choose the devices, and check that they can train as configured."""
        config = self.config
        devices = choose_devices(config.engine.device)
        #: The devices on which clients train. The first is the home device, which does everything
        #: else.
        self.devices = devices if config.engine.name != "debug" else devices[:1]
        self.device = devices[0]
        check_precision(config.engine.precision, self.device)
        check_optimizer(config, self.device)

    def _load_data(self, dataset: Dataset | None) -> list[DeviceData]:
        """Load the data set, or check the caller's. Return its training set on every device."""
        config = self.config
        self.dataset = load_dataset_of(config) if dataset is None else check_dataset(dataset)
        self.dataset.check_inferred_classes()
        kernel = "augment" in chosen_kernels(config)
        copies = []
        for device in self.devices:
            copies.append(
                device_data(
                    self.dataset.train,
                    config.data.transform,
                    device,
                    augment=True,
                    kernel=kernel,
                )
            )
        #: The loss and the metrics.
        self.task = config.task.build(self.dataset.task)
        check_task(config, self.task, self.dataset.train, self.dataset.classes)
        check_batches_fit(config, copies[0], len(self.dataset.test))
        return copies

    def _build_split(self, train_data: DeviceData) -> None:
        """Build the split, and check that its models fit the device and the data."""
        config, shape, classes = self.config, train_data.shape, self.dataset.classes
        self.split = build_split(config, shape, classes)
        check_weights_fit(self.split, self.split.sizes, self.device)
        target_dims = self.dataset.train.targets.shape[1:]
        check_outputs(self.split, self.split.sizes, shape, classes, self.task, target_dims)
        check_recalibration(config, self.split)

    def _deal_examples(self, partition: Any, external: bool) -> np.ndarray:
        """Deal the examples to clients; return those that are held out as public data.

        `external`: the clients are elsewhere and may have other examples, which only they know.
        """
        config = self.config
        self._partition: Partition | None = None
        #: The test examples of every client: rows of the training set if they are held out
        #: (evaluation.client_test_fraction), else of the test set. None if clients have none, or if
        #: they are elsewhere.
        self.client_tests: Partition | None = None
        if external and config.public.name != "held-out":
            return np.zeros(0, dtype=np.int64)
        dealt = deal_examples(config, self.dataset, partition)
        if not external:
            self._partition, self.client_tests = client_tests(
                config, self.dataset.train, self.dataset.test, dealt.partition
            )
        return dealt.held_out

    def _build_method(self, shape: InputShape, held_out: np.ndarray) -> None:
        """Assign sizes to the clients and build the method.

        Not before the examples are dealt: a partition reports if there are too many clients for the
        data set.
        """
        config = self.config
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
            self.dataset.classes,
            self.size_of,
            public,
            self.task,
        )

    def _build_server(self) -> None:
        """Build the server's part of a round: its stages, privacy accounting and sampling."""
        config = self.config
        self.pipeline = build_pipeline(config, self.split, self.method)
        self.collections = build_collections(config, self.split, self.method, self.size_of)
        self.score_clients = build_score_clients(config, self.split, self.method, self.size_of)
        self.accountant: Accountant | None = None
        if config.privacy.active:
            self.accountant = Accountant(config.privacy, self.split, self.sizes)
        #: Records requests to clients, if the run is private and has a folder.
        self.release_log: ReleaseLog | None = None
        federation = config.federation
        self.sample: Sampler = ClientSampler(
            federation.clients, federation.clients_per_round, config.seed, federation.sampler
        )

    def _build_evaluator(self) -> None:
        """Build the evaluator, and on a CPU the worker processes that it shares with the engine."""
        config = self.config
        self._workers = build_workers(config, self.devices)
        self.evaluator = Evaluator(
            self.split,
            self._test_data,
            self.dataset.classes,
            config.evaluation,
            kernels=chosen_kernels(config),
            compiled=compiles(config),
            task=self.task,
            workers=self._workers,
        )

    def _build_engine(
        self, train_data: Sequence[DeviceData], client_state_folder: Path | None
    ) -> DebugEngine | LocalEngine:
        """Return the engine that trains the clients on this machine."""
        clients = build_clients(
            self.config,
            self.method,
            train_data,
            self.partition,
            client_state_folder,
            test_set=lambda: self.evaluator.batches,
            tests=self._build_client_tests(train_data[0]),
        )
        return build_engine(self.config, clients, self._workers)

    @property
    def partition(self) -> Partition:
        """Which examples each client holds."""
        if self._partition is None:
            raise MotleyError(
                "federation.partition: its clients are elsewhere, "
                "and only they know their examples."
            )
        return self._partition

    def _build_client_tests(self, train: DeviceData) -> Callable[[], ClientTests] | None:
        """Return a function that returns the clients' test examples on the device."""
        if self.client_tests is None:
            return None
        evaluation = self.config.evaluation
        held_out = evaluation.client_test_fraction > 0
        tests = ClientTests(
            lambda: train if held_out else self.evaluator.batches.data,
            self.client_tests,
            evaluation.batch_size,
            self.task,
        )
        return lambda: tests

    def _test_data(self) -> DeviceData:
        """Put the test set on the home device."""
        return device_data(
            self.dataset.test, self.config.data.transform, self.device, augment=False
        )

    # ---- rounds

    def run(self, rounds: int | None = None) -> Iterator[RoundRecord]:
        """Run rounds while the caller iterates, and yield the record of each.

        By default these are all remaining rounds of `training.rounds`. A later call continues.
        `list(federation.run(10))` runs ten rounds at once. `server` is the state after the last
        round whose record was yielded.
        """
        is_number = isinstance(rounds, Integral) and not isinstance(rounds, bool)
        if rounds is not None and (not is_number or rounds < 0):
            raise MotleyError(f"run(rounds={rounds!r}): should be a whole number, 0 or more.")
        server = self._server_or_initial()
        total = self.config.training.rounds
        last = total if rounds is None else server.round_number + rounds
        if last > total and self.method.requirements.uses_total_rounds:
            raise MotleyError(
                f"run(rounds={rounds}): {self.config.method.name!r} schedules its training by the "
                f"total number of rounds, which is {total}. Give it to the federation: "
                f"training={{'rounds': {last}}}."
            )
        try:
            while server.round_number < last:
                more_rounds = server.round_number + 1 < last
                server, pending = self.queue_round(server, more_rounds=more_rounds)
                record = pending.read()
                self.server = server
                yield record
        finally:
            self._next_round.drop()
            self.end_workers()

    def initial_state(self) -> ServerState:
        """Return the server state before the first round."""
        with self.numerics():
            state = self.split.initial(self.config.seed)
            if self.config.model.weights:
                state = with_weights(state, self.split, self.config.model)
            algorithm = self.method.server
            own = require_tensors(algorithm.init(), f"init of {type(algorithm).__name__}")
            return self.to_device(ServerState(0, state, method_state=own))

    def run_round(
        self, server: ServerState, done: Callable[[int], None] = lambda client: None
    ) -> tuple[ServerState, RoundRecord]:
        """Run the next round; return the server state after it, and the round's record.

        `done` is called with the id of each client that has finished its local update.
        """
        _check_server_state("run_round", server)
        after, pending = self.queue_round(server, done)
        return after, pending.read()

    def queue_round(
        self,
        server: ServerState,
        done: Callable[[int], None] = lambda client: None,
        *,
        more_rounds: bool = False,
    ) -> tuple[ServerState, PendingRecord]:
        """Like `run_round`, but do not wait for the evaluation.

        A GPU, or the worker processes of a CPU, evaluate a round while the next one begins.

        `more_rounds`: the caller is going to run another round from the returned state. With
        `engine.overlap_rounds`, its training is queued at once.
        """
        overlaps = more_rounds and self.config.engine.overlap_rounds
        finish = partial(
            speculation.finish_round, next_round=self._next_round if overlaps else None
        )
        with self.numerics():
            return rounds.run_round(
                self.context, server, done, self._next_round.train_clients, finish
            )

    def end_workers(self) -> None:
        """End the worker processes that train and evaluate on a CPU. A later round starts others.

        `run` does this at its end. Workers also end by themselves after a minute without work.
        """
        if self._workers is not None:
            self._workers.close()

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
            has_own_models=self.method.has_own_models,
            score_clients=self.score_clients,
            release_log=self.release_log,
            why_no_scores=why_no_scores(config.privacy, self.method.has_own_models),
            bounds=build_bounds(config, self.split),
            max_step_factor=config.server.max_step_factor,
            max_loss=config.server.max_loss,
            max_examples=config.server.max_examples,
            max_steps=partial(most_steps, config, self.method),
        )

    def job(self, server: ServerState, round_number: int, client: int) -> Job:
        """Return the job that a client is sent in a round."""
        return make_job(self.context, server, round_number, client)

    def jobs(self, server: ServerState) -> list[Job]:
        """Return the jobs that the clients of the next round are sent."""
        number = server.round_number + 1
        return [self.job(server, number, client) for client in self.sample(number)]

    # ---- computing with a state

    def evaluate(self, state: State | None = None, round_number: int = 0) -> dict[str, Score]:
        """Return every size's score with its part of a global state.

        By default this is the state after the last round of `run`.
        `evaluate(server.model, server.round_number)` gives the scores of a round's record.
        `round_number` matters for a rolling window of channels only: its default, 0, evaluates the
        leading channels and not the window that the round trained.

        A method that exchanges no weights has no global model, and neither has a federation with
        private tensors, so this raises an error. Clients' models are `client_model`.
        """
        refuse_global_model(self.method)
        if state is None:
            server = self._server_or_initial()
            state, round_number = server.model, server.round_number
        if not isinstance(state, Mapping):
            raise MotleyError(
                f"evaluate: state: is {describe(state)}; a global state is expected. "
                "evaluate(server.model, server.round_number) takes it from a server state, and "
                "evaluate() is about the last round of `run`."
            )
        with self.numerics():
            return self.evaluator(state, round_number)

    def _server_or_initial(self) -> ServerState:
        return self.initial_state() if self.server is None else self.server

    def model(self, size: str, server: ServerState | None = None) -> nn.Module:
        """Return the trained model of a size, as it is evaluated: an ordinary module.

        By default it is trained by all rounds of `run`. It is in evaluation mode, on the
        federation's device, and shares no memory with `server`.
        """
        refuse_global_model(self.method)
        server = self._server_or_initial() if server is None else server
        _check_server_state("model", server)
        trained = trained_model(self.split, server.model, size, server.round_number)
        return trained.to(self.device)

    def client_model(self, server: ServerState, client: int) -> nn.Module:
        """Return a client's own model after its last accepted update, in evaluation mode.

        It is the client's part of the evaluated global state with its private tensors, the model
        that the method trains beside the part, or, if no weights are exchanged, all the client's
        own. Others have no such models, nor have clients elsewhere.
        """
        if not self.method.has_own_models:
            raise MotleyError(
                f"method.name = {self.config.method.name!r}: clients have no models of their own; "
                "they train parts of the global model."
            )
        if not isinstance(self.engine, DebugEngine | LocalEngine):
            raise MotleyError("client_model: the clients are elsewhere, and so are their models.")
        trained = server.client_state_rounds.get(client)
        if trained is None:
            raise MotleyError(f"client {client} has no model yet: it has not trained.")
        size = self.sizes[client]
        part = take(server.model, self.split.evaluated(size, server.round_number))
        model = self.split.build(size).to(self.device)
        model.load_state_dict(self.engine.clients.states.own_model(client, size, trained, part))
        return model.eval()

    def to_device(self, server: ServerState) -> ServerState:
        """Return a server state whose tensors are on the federation's device."""
        return server.map_tensors(partial(on_device, device=self.device))

    def numerics(self) -> AbstractContextManager[None]:
        """Return the context in which this federation's precision and number of threads apply."""
        return numerics(self.config.engine.precision, self.config.engine.threads)


def _check_server_state(function: str, server: object) -> None:
    """Refuse another object than a server state, such as the record that comes with one."""
    if not isinstance(server, ServerState):
        raise MotleyError(
            f"{function}: server: is {describe(server)}; a server state is expected, such as "
            "federation.server after `run`, or federation.initial_state()."
        )


def _require_only_config(config: Config, described: Mapping[str, Any], engine_name: str) -> None:
    """Raise if arguments that describe a federation were given beside a configuration."""
    given = [name for name, value in described.items() if value is not None]
    if given:
        raise MotleyError(
            f"Federation: {', '.join(given)}: cannot be given beside a configuration. "
            "Change the configuration instead."
        )
    if engine_name != "auto":
        raise MotleyError(
            f"Federation: engine = {engine_name!r}: the configuration has engine.name = "
            f"{config.engine.name!r}."
        )
