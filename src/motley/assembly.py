"""Builds the objects that a configuration names, from its data set to its engine.

A federation puts all of them together (`federation.py`); a node builds only the objects that its
one client needs (`node.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motley.checks import (
    check_client_state,
    check_merge,
    check_partition,
    check_private_weights,
    refuse_partition_by_label,
)
from motley.client.attack import (
    LabelFlipSettings,
    UploadAttack,
    UploadAttackSettings,
    attackers,
    flip_labels,
)
from motley.client.clients import TestSet
from motley.client.scoring import ClientTests
from motley.client.state_store import ClientStateStore
from motley.config import Config, ModelSettings, RecalibrationSettings
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import generator
from motley.data import Dataset, Examples
from motley.data.client_tests import hold_out, natural_tests
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.data.public import (
    Dealt,
    PublicData,
    PublicDatasetSettings,
    deal,
    held_out_of,
    public_images,
    refuse_clients_images,
)
from motley.engine import Clients, DebugEngine, LocalEngine
from motley.engine.workers import WorkerPool, num_workers
from motley.limits import allocating
from motley.methods import METHODS, FederationInfo, Method
from motley.models import InputShape
from motley.models.pretrained import first_layer, load_weights
from motley.models.projection import with_projection
from motley.plan import assigned, costs_of, read_budgets
from motley.privacy import DPMechanism, refuse_leaks, refuse_stage, why_no_scores
from motley.server.apply import Apply
from motley.server.bounds import UpdateBounds
from motley.server.client_scores import ScoreClients
from motley.server.collection import CollectionStage, MethodCollection
from motley.server.ema import EMA
from motley.server.inco import InCo, IncoSettings
from motley.server.method_stages import AggregateUpdates, MethodCorrection, PostProcess
from motley.server.optimizer import ServerOptimizer
from motley.server.own_models import EvaluateOwnModels
from motley.server.pipeline import STAGES, Stage, insert_stages
from motley.server.recalibration import Recalibrate
from motley.server.scale import Scale
from motley.server.ties import Tie
from motley.splits import SPLITS, Split
from motley.tasks import CLASSIFICATION, Task

# ---- data and sizes


def load_dataset_of(config: Config) -> Dataset:
    """Load the data set of a configuration."""
    return config.data.load()


def deal_examples(config: Config, dataset: Dataset, partition: Partition | None = None) -> Dealt:
    """Return which examples each client holds, and which are public.

    This is the configuration's partition, or the caller's if one is given and it fits.
    """
    clients, examples = config.federation.clients, len(dataset.train)
    if partition is None:
        refuse_partition_by_label(config.data.partition, config.task.build(dataset.task))
        dealt = deal(dataset.train, clients, config.seed, config.data.partition, config.public)
        check_partition(dealt.partition, clients, examples)  # it may be a user's own
        return dealt
    check_partition(partition, clients, examples)
    return Dealt(partition, held_out_of(partition, examples, config.public, config.seed))


def client_tests(
    config: Config, train: Examples, test: Examples, partition: Partition
) -> tuple[Partition, Partition | None]:
    """Return each client's training examples, and the test examples of its own.

    The test examples are rows of the training set if some are held out
    (evaluation.client_test_fraction), else rows of the test set; None if the run neither holds out
    examples nor scores clients.
    """
    evaluation = config.evaluation
    if evaluation.client_test_fraction:
        return hold_out(partition, train.targets, evaluation.client_test_fraction, config.seed)
    if evaluation.per_client == "off":
        return partition, None
    return partition, natural_tests(partition, train.clients, test.clients)


def load_public(
    config: Config, dataset: Dataset, held_out: np.ndarray, device: torch.device
) -> PublicData | None:
    """Return the public images of a configuration, or None if it names none.

    `held_out` are the training examples that no client gets. The images are copied to the server's
    `device`.
    """
    public = config.public
    if not public.active:
        return None
    images = public_images(public, dataset.train, held_out, config.seed, config.data.root_path)
    if isinstance(public, PublicDatasetSettings):
        setting = f"public.name = {public.name!r}"
        refuse_clients_images(images, dataset.train.inputs, setting)
        refuse_clients_images(images, dataset.test.inputs, setting, "test")
    data = PublicData(images, config.data.transform)
    data.copy_to(device)
    return data


def client_sizes(config: Config, split: Split, shape: InputShape) -> tuple[str, ...]:
    """Return the size of every client, by client id: with budgets, the largest that fits."""
    if not config.federation.budgets:
        return assign_sizes(config)
    costs = costs_of(split, shape, config.training)
    return assigned(costs, read_budgets(Path(config.federation.budgets)), config.federation.clients)


def size_lookup(config: Config, sizes: tuple[str, ...]) -> Callable[[int, int], str]:
    """Return a function (client, round) -> the client's size.

    Dynamic sizes are drawn anew in every round.
    """
    if config.federation.size_assignment != "dynamic":
        return lambda client, round_number: sizes[client]
    draw = lru_cache(maxsize=1)(partial(assign_sizes, config))
    return lambda client, round_number: draw(round_number)[client]


def assign_sizes(config: Config, round_number: int = 0) -> tuple[str, ...]:
    """Return the size of every client, by client id. Dynamic sizes depend on the round."""
    sizes, clients = config.split.sizes(config.model.sizes), config.federation.clients
    if config.federation.sizes:
        return config.federation.sizes
    shares = np.array(config.federation.size_fractions or (1.0,) * len(sizes))
    ends = np.rint(np.cumsum(shares) / shares.sum() * clients).astype(int)
    with allocating(f"federation.clients = {clients}: a size for each of them"):
        blocks = np.repeat(np.arange(len(sizes)), np.diff(ends, prepend=0))
        if config.federation.size_assignment in ("random", "dynamic"):
            dynamic = config.federation.size_assignment == "dynamic"
            round_key = (round_number,) if dynamic else ()
            blocks = generator(config.seed, "sizes", *round_key).permutation(blocks)
        elif config.federation.size_assignment == "alternate":
            counts = [count for count in np.bincount(blocks) if count]
            # The clients of each size at equal distances in [0, 1).
            positions = [np.linspace(0, 1, count, endpoint=False) for count in counts]
            blocks = blocks[np.argsort(np.concatenate(positions), kind="stable")]
        return tuple(sizes[block] for block in blocks)


# ---- models, split and method


def build_split(config: Config, shape: InputShape, classes: int) -> Split:
    """Return the split of a configuration for the shape of its images.

    No memory is allocated for its models yet.
    """

    def build(size: str) -> Any:
        spec, settings = config.model.declaration(size)
        model = spec.make(settings, shape, classes, init=config.model.init)
        return with_projection(model, config.model.projection)

    builds = {size: partial(build, size) for size in config.model.sizes}
    return SPLITS[config.split.name](builds, config.split, config.seed)


def build_method(
    config: Config,
    split: Split,
    sizes: tuple[str, ...],
    shape: InputShape,
    classes: int,
    drawn: Callable[[int, int], str],
    public: PublicData | None = None,
    task: Task = CLASSIFICATION,
) -> Method:
    """Return the method of a configuration. Raise if it conflicts with the other settings.

    `drawn` returns the size of a client in a round. It is used only if sizes are dynamic. `public`
    are the public images, if the method uses some here.
    """
    dynamic = config.federation.size_assignment == "dynamic"
    info = FederationInfo(
        split,
        sizes,
        classes,
        config.seed,
        config.training,
        shape,
        config.evaluation.every,
        drawn if dynamic else None,
        public,
        task,
        config.server.merge.rule(split.parameters),
    )
    method = METHODS[config.method.name](config.method, info)
    check_client_state(config, split, method)
    check_merge(config, method)
    refuse_leaks(
        config.privacy,
        split,
        method,
        statistics=config.server.statistics.name,
        dynamic_sizes=dynamic,
        per_client=config.evaluation.per_client,
    )
    return method


def with_weights(state: State, split: Split, model: ModelSettings) -> State:
    """Return the initial global state with the weights of the file that the settings name."""
    first_layers = set()
    for size in split.sizes:
        part = split.part(size)
        for name in first_layer(split.blueprints[size].module):
            first_layers.add(part[name].name)
    check_private_weights(model, split)
    return load_weights(
        state,
        Path(model.weights),
        first_layers,
        allow_new_first_layer=model.allow_new_first_layer,
    )


# ---- the server


def build_pipeline(config: Config, split: Split, method: Method) -> list[Stage]:
    """Return the stages of the aggregation, in order."""
    server = config.server
    pipeline: list[Stage] = [AggregateUpdates(method.server)]
    if not method.requirements.exchanges_weights:
        return pipeline  # there is no delta, and no global model that could change
    if server.delta_scale != 1:
        pipeline.append(Scale(split.parameters, server.delta_scale))
    if isinstance(server.inco, IncoSettings):
        released = server.inco.layers == "released"
        pairs = split.cross_layers if released else split.same_shape_layers
        pipeline.append(InCo(pairs, server.inco))
    pipeline.append(MethodCorrection(method.server))
    if server.optimizer.name != "none":
        pipeline.append(ServerOptimizer(split.parameters, server.optimizer))
    pipeline.append(Apply(split.parameters, server.lr))
    pipeline.append(PostProcess(method.server))
    if split.tied:
        pipeline.append(Tie(split.tied))
    if server.ema_decay:
        pipeline.append(EMA(server.ema_decay))
    for number, settings in enumerate(server.stages):
        if STAGES[settings.name].sees_updates:
            refuse_stage(config.privacy, f"server.stages.{number}.name", settings.name)
    return insert_stages(pipeline, server.stages, split)


def build_bounds(config: Config, split: Split) -> UpdateBounds | None:
    """Return the bounds on updates; None if a run has none."""
    server = config.server
    bounds = UpdateBounds(
        max_norm=server.max_norm or "off",
        factor=server.max_norm_factor,
        clips=server.norm_action == "clip",
        parameters_of=cache(split.parameters_of),
        privacy=config.privacy,
        channel_noise=config.uplink.noise,
    )
    return bounds if bounds.active else None


def most_steps(config: Config, method: Method, num_examples: int) -> int:
    """Return the most local steps that a client with so many examples takes in a round."""
    batches = math.ceil(num_examples / config.training.batch_size)
    return config.training.local_steps(batches, method.extra_epochs)


def build_collections(
    config: Config, split: Split, method: Method, size_of: Callable[[int, int], str]
) -> list[CollectionStage]:
    """Return the collections from clients that follow the pipeline, in order.

    The method's own and the scores of clients' models come last: both depend on recalibrated
    statistics.
    """
    last: CollectionStage = MethodCollection(method.server, split, size_of)
    if method.has_own_models:
        if why_no_scores(config.privacy, method.has_own_models):
            return []
        asked = config.federation.clients if config.evaluation.clients == "all" else None
        last = EvaluateOwnModels(method.server, size_of, asked, split.has_private)
    statistics = config.server.statistics
    if not isinstance(statistics, RecalibrationSettings):
        return [last]

    def is_due(round_number: int) -> bool:
        if statistics.every == 0:
            return method.info.is_evaluated(round_number)
        return round_number % statistics.every == 0 or round_number == config.training.rounds

    everyone = config.federation.clients if statistics.clients == "all" else None
    return [Recalibrate(split, size_of, is_due, everyone), last]


def build_score_clients(
    config: Config, split: Split, method: Method, size_of: Callable[[int, int], str]
) -> ScoreClients | None:
    """Return the stage that asks clients for their own scores; None if the run has none."""
    evaluation = config.evaluation
    if evaluation.per_client == "off":
        return None
    return ScoreClients(
        algorithm=method.server,
        split=split,
        size_of=size_of,
        is_due=lambda number: evaluation.scores_clients(number, config.training.rounds),
        num_clients=config.federation.clients if evaluation.per_client == "all" else None,
        personalize=evaluation.personalize_epochs > 0,
        own_models=method.has_own_models,
        sends_parts=split.has_private or not method.has_own_models,
    )


# ---- clients and engine


def build_clients(
    config: Config,
    method: Method,
    copies: Sequence[DeviceData],
    partition: Partition,
    folder: Path | None,
    *,
    fresh_noise: bool = False,
    lean: bool = False,
    test_set: TestSet | None = None,
    tests: Callable[[], ClientTests] | None = None,
) -> Clients:
    """Return the clients that this process runs, with a copy of the examples on each device.

    Client states are saved in `folder`. The noise of `privacy` follows from the run's seed; with
    `fresh_noise` it is drawn anew for every update. For `lean`, `test_set` and `tests`, see
    `Clients`.
    """
    attack = config.attack
    who = attackers(attack, config.federation.clients, config.seed)
    if isinstance(attack, LabelFlipSettings):
        if not method.info.task.has_classes:
            raise MotleyError(
                "attack.name = 'label-flip': needs one class per example, and the task is "
                f"{method.info.task.name!r}."
            )
        flip_labels(copies, partition, who, method.info.classes)
    on_upload = None
    if isinstance(attack, UploadAttackSettings):
        on_upload = UploadAttack(attack, who, config.seed)
    return Clients(
        method,
        copies[0],
        partition,
        config.training,
        precision=config.engine.precision,
        kernels=chosen_kernels(config),
        compiled=compiles(config),
        seed=config.seed,
        store=_store(config, folder, [data.device for data in copies]),
        elsewhere=copies[1:],
        dp=DPMechanism(config.privacy, config.seed, fresh_noise) if config.privacy.active else None,
        encoding=config.uplink.dtype,
        attack=on_upload,
        lean=lean,
        test_set=test_set,
        tests=tests,
        personalize_epochs=config.evaluation.personalize_epochs,
    )


def build_workers(config: Config, devices: Sequence[torch.device]) -> WorkerPool | None:
    """Return the worker processes of a federation; None if everything runs in this process."""
    workers = num_workers(config.engine, devices)
    return WorkerPool(workers) if workers > 1 else None


def build_engine(
    config: Config, clients: Clients, workers: WorkerPool | None
) -> DebugEngine | LocalEngine:
    """Return the engine that runs clients on this machine."""
    if config.engine.name == "debug":
        return DebugEngine(clients)
    engine = config.engine
    return LocalEngine(clients, engine.slots, engine.vmap_clients, workers)


def chosen_kernels(config: Config) -> frozenset[str]:
    """Return the names of Motley's kernels that a run uses on a GPU: none in the debug engine."""
    if config.engine.name == "debug":
        return frozenset()
    without = frozenset() if config.training.optimizer.has_kernel else frozenset({"optimizer"})
    return config.engine.kernel_names - without


def compiles(config: Config) -> bool:
    """Tell whether models are compiled; in the debug engine they never are."""
    return config.engine.compile and config.engine.name != "debug"


def _store(
    config: Config, folder: Path | None, devices: Sequence[torch.device]
) -> ClientStateStore:
    """Return the store of client states. It uses GPU memory only if there is a single GPU."""
    gpu_bytes = 0
    if devices[0].type == "cuda" and len(devices) == 1:
        total = torch.cuda.get_device_properties(devices[0]).total_memory
        gpu_bytes = int(config.engine.client_state_gpu_fraction * total)
    host_bytes = int(config.engine.client_state_host_gib * 2**30)
    return ClientStateStore(folder, host_bytes, gpu_bytes, devices[0])
