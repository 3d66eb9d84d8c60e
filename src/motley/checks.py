"""Refuses settings that do not go together, and arguments that do not fit.

The `config` package makes the checks that need only the settings. The checks here need the data,
the models or the method. One more, `privacy.refuse_leaks`, is in the package `privacy`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from motley.config import Config, ModelSettings
from motley.core.errors import MotleyError
from motley.core.part import size_in_bytes
from motley.data import Dataset, Examples
from motley.data.device import DeviceData
from motley.data.partition import Partition, PartitionSettings
from motley.limits import check_fits
from motley.methods import METHODS, Method
from motley.models.inputs import (
    KINDS,
    ArrayShape,
    ImageShape,
    InputShape,
    SignalShape,
    example_inputs,
)
from motley.models.moments import normalizes_by_batch, norms_of
from motley.models.pretrained import shapes_in
from motley.splits import Split
from motley.splits.base import STATISTICS
from motley.tasks import Task


def check_engine(config: Config, external: bool) -> None:
    """Refuse Flower's engines unless the caller passes one: a federation builds only local ones."""
    if config.engine.name.startswith("flower") and not external:
        raise MotleyError(
            f"engine.name = {config.engine.name!r}: needs Flower; see docs/deploy.md."
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse 16-bit training on a CPU."""
    if precision in ("fp16", "bf16") and device.type == "cpu":
        raise MotleyError(
            f"engine.precision = {precision!r}: is for a GPU; torch's CPU gradients of "
            "convolutions may be wrong in it."
        )


def check_optimizer(config: Config, device: torch.device) -> None:
    """Refuse a user's own optimizer if the engine cannot run it."""
    optimizer = config.training.optimizer
    if optimizer.has_kernel:
        return
    setting = f"training.optimizer.name = {optimizer.name!r}"
    if config.engine.precision == "fp16":
        raise MotleyError(
            f"{setting}: cannot skip steps whose gradients overflow, as engine.precision = 'fp16' "
            "needs it. Use engine.precision = 'bf16', 'tf32' or 'fp32'."
        )
    if device.type == "cuda" and config.engine.name != "debug" and not optimizer.captures:
        raise MotleyError(
            f"{setting}: its step cannot be captured in a CUDA graph. Use engine.name = 'debug', "
            "engine.device = 'cpu', or one of torch.optim's RMSprop, RAdam, Adamax and Adadelta."
        )


def check_dataset(dataset: Any) -> Dataset:
    """Return the caller's data set; refuse other libraries' data sets, with a conversion hint."""
    if isinstance(dataset, Dataset):
        return dataset
    raise MotleyError(
        f"dataset: a motley.data.Dataset is expected, not a {_type_name(dataset)}. Make one of "
        "arrays: Dataset(name, Examples(images, labels), Examples(test_images, test_labels), "
        "classes), with images in uint8 of shape (N, height, width, channels) and labels in int64 "
        "of shape (N,)."
    )


def check_partition(partition: Any, clients: int, examples: int) -> Partition:
    """Return the caller's own partition if it fits the numbers of clients and examples."""
    if not isinstance(partition, Partition):
        raise MotleyError(
            f"partition: a motley.data.Partition is expected, not a {_type_name(partition)}. "
            "Partition.from_owners(owners, clients) makes one from the client of each sample; "
            "data.partition.name = 'file' reads index lists."
        )
    if len(partition) != clients:
        raise MotleyError(
            f"the partition is of {len(partition)} clients; federation.clients = {clients}."
        )
    indices = partition.indices
    if len(indices) and not 0 <= indices.min() <= indices.max() < examples:
        raise MotleyError(f"the partition names samples that are not in 0..{examples - 1}.")
    return partition


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def check_task(config: Config, task: Task, train: Examples, outputs: int) -> None:
    """Refuse settings that do not fit the task, and a task that does not fit the targets."""
    _check_targets(task, train, outputs)
    requirements = METHODS[config.method.name].requirements
    if requirements.classes and not task.has_classes:
        raise MotleyError(
            f"method.name = {config.method.name!r}: is defined for classes, and the task is "
            f"{task.name!r}. Methods for any task: {_methods_for_any_task()}."
        )
    if config.public.active and not isinstance(train.shape, ImageShape):
        raise MotleyError(
            f"public.name = {config.public.name!r}: public inputs are images, and the data set has "
            f"{KINDS[type(train.shape)]}."
        )
    task.with_label_smoothing(config.training.label_smoothing)  # raises if the loss has none
    _check_training_loss(config, task)
    _check_mixup(config, train)
    for target in config.evaluation.targets:
        if task.primary.percent and target > 1:
            raise MotleyError(
                f"evaluation.targets = {target:g}: {task.metric} is a fraction; targets are at "
                "most 1."
            )


def _check_targets(task: Task, train: Examples, outputs: int) -> None:
    """Refuse targets of another type or shape than the task has."""
    setting = f"task.name = {task.name!r}"
    targets = train.targets
    are_numbers = targets.dtype.kind == "f"
    if are_numbers != (task.targets == "numbers"):
        actual = "numbers" if are_numbers else "class or token numbers"
        raise MotleyError(
            f"{setting}: its targets are {task.targets}, and the data set's "
            f"targets are {actual} ({targets.dtype})."
        )
    if are_numbers and math.prod(targets.shape[1:]) != outputs:
        raise MotleyError(
            f"{setting}: the targets have shape {targets.shape}, and "
            f"Dataset.classes, the number of a model's outputs, is {outputs}."
        )
    if task.has_classes and targets.ndim != 1:
        raise MotleyError(
            f"{setting}: needs one class per example, and the targets have shape "
            f"{targets.shape}. Use task.name = 'next-token' for a target per position."
        )


def _methods_for_any_task() -> str:
    """Return the names of the methods that do not need classes, for messages."""
    names = [repr(entry.name) for entry in METHODS if not entry.item.requirements.classes]
    return ", ".join(names)


def _check_training_loss(config: Config, task: Task) -> None:
    """Refuse changes of the training loss that would have no effect or no meaning."""
    training = config.training
    for name in ("label_smoothing", "logit_adjustment"):
        value = getattr(training, name)
        if value and METHODS[config.method.name].requirements.own_loss:
            raise MotleyError(
                f"training.{name} = {value:g}: has no effect on the loss of method "
                f"{config.method.name!r}. Use training.{name} = 0."
            )
    if training.logit_adjustment and not task.has_classes:
        raise MotleyError(
            f"training.logit_adjustment = {training.logit_adjustment:g}: is for classes, and the "
            f"task is {task.name!r}. Use training.logit_adjustment = 0."
        )


def _check_mixup(config: Config, train: Examples) -> None:
    """Refuse mixup for inputs that have no mean, and for methods that need one class per input."""
    mixup = config.training.mixup
    if not mixup:
        return
    has_mean = isinstance(train.shape, ImageShape | SignalShape | ArrayShape)
    if not has_mean or train.inputs.dtype.kind not in "fu":
        raise MotleyError(
            f"training.mixup = {mixup:g}: mixes numbers, and the inputs are "
            f"{KINDS[type(train.shape)]} ({train.inputs.dtype}). Use training.mixup = 0."
        )
    if not _allows_mixup(METHODS[config.method.name]):
        allowed = [repr(entry.name) for entry in METHODS if _allows_mixup(entry.item)]
        raise MotleyError(
            f"training.mixup = {mixup:g}: method {config.method.name!r} is defined for classes, "
            "and a mixed input has two. Use training.mixup = 0, or one of the methods "
            f"{', '.join(allowed)}."
        )


def _allows_mixup(method: type[Method]) -> bool:
    return method.requirements.mixed_classes or not method.requirements.classes


def refuse_partition_by_label(partition: PartitionSettings, task: Task) -> None:
    """Refuse a partition that distributes examples by their class if the task has no classes."""
    if partition.by_label and not task.has_classes:
        raise MotleyError(
            f"data.partition.name = {partition.name!r}: distributes examples by their class, and "
            f"the task is {task.name!r}. Use 'iid', 'quantity' or 'natural'."
        )


def check_batches_fit(config: Config, train: DeviceData, test_examples: int) -> None:
    """Refuse batches that are larger than the device's memory.

    Test images have the shape of training images, but are not on the device before the first
    evaluation.
    """
    train.check_batch_fits("training.batch_size", config.training.batch_size)
    train.check_batch_fits(
        "evaluation.batch_size", min(config.evaluation.batch_size, test_examples)
    )


def check_test_batches(
    config: Config, split: Split, shape: InputShape, test: int, client_tests: Partition | None
) -> None:
    """Refuse test batches of one example if a model normalizes by the batch and cannot do it then.

    `test` is the number of test examples, and `client_tests` has the clients' own ones.
    """
    counts = np.zeros(0) if client_tests is None else np.diff(client_tests.offsets)
    batch_size = config.evaluation.batch_size
    setting = f"evaluation.batch_size = {batch_size}"
    if batch_size == 1 or test % batch_size == 1:
        origin = f"{test} test examples have"
    elif (counts % batch_size == 1).any():
        setting = f"evaluation.per_client = {config.evaluation.per_client!r}"
        origin = "some clients' own test examples have"
    else:
        return
    for size, blueprint in split.blueprints.items():
        if normalizes_by_batch(blueprint.module) and not _normalizes_one(split, size, shape):
            raise MotleyError(
                f"{setting}: {origin} a batch of one, and {size!r} normalizes a test batch by its "
                "own statistics (split.normalization_statistics = "
                f"{config.split.normalization_statistics!r}), which one example does not have. "
                "Use other batches, or running statistics."
            )


def _normalizes_one(split: Split, size: str, shape: InputShape) -> bool:
    """Tell whether every BatchNorm layer of a size sees several values of a single example."""
    model = split.build(size).eval()
    try:
        with torch.no_grad():
            model(example_inputs(shape, 1, "cpu"))
    except ValueError as error:
        return "more than 1 value per channel" not in str(error)
    return True


def check_weights_fit(split: Split, sizes: Iterable[str], device: torch.device) -> None:
    """Refuse a size if its state, model and gradients together exceed the device's total memory."""
    for size in sizes:
        weights = size_in_bytes(split.blueprints[size].module.state_dict())
        copies = f"model.sizes: three copies of the weights of {size!r} (state, model, gradients)"
        check_fits(copies, 3 * weights, device)


def check_client_state(config: Config, split: Split, method: Method) -> None:
    """Refuse client state if clients' parts change: a state belongs to one part."""
    if config.federation.size_assignment == "dynamic":
        cause = "federation.size_assignment = 'dynamic'"
    elif split.parts_change:
        cause = f"split.channels = {getattr(config.split, 'channels', '')!r}"
    else:
        return
    if config.uplink.dtype != "fp32":
        raise MotleyError(
            f"uplink.dtype = {config.uplink.dtype!r}: clients keep the rounding errors of their "
            f"parts, which {cause} changes from round to round. Use 'fp32', or parts that stay."
        )
    if split.has_private:
        raise MotleyError(
            f"split.private = {list(config.split.private)}: clients keep private tensors of their "
            f"parts, which {cause} changes from round to round. Use parts that stay."
        )
    needs = method.requirements
    if needs.client_state or not needs.exchanges_weights:
        kept = "a state of their parts" if needs.exchanges_weights else "models of their own"
        raise MotleyError(
            f"method.name = {config.method.name!r}: its clients keep {kept}, and "
            f"{cause} changes their parts from round to round. Choose another method, or parts "
            "that stay."
        )


def check_merge(config: Config, method: Method) -> None:
    """Refuse a robust rule that could never have as many clients as it needs.

    Rounds that have too few by chance keep coordinates as they are, and report it.
    """
    info, merge = method.info, config.server.merge
    rule = merge.rule(info.split.parameters)
    if rule is None or rule.too_few == "mean":
        return
    setting = f"server.merge.name = {merge.name!r}"
    remedy = (
        "Use another rule, more clients, or server.merge.too_few = 'mean', which averages what too "
        "few clients hold, without protection."
    )
    per_round = config.federation.clients_per_round
    if per_round < rule.needed:
        raise MotleyError(
            f"{setting}: needs {rule.needed} clients, and federation.clients_per_round = "
            f"{per_round}. {remedy}"
        )
    if config.federation.size_assignment == "dynamic" or merge.name == "centered-clipping":
        return
    if merge.name == "krum":
        for size, count in Counter(info.sizes).items():
            if count < rule.needed:
                raise MotleyError(
                    f"{setting}: needs {rule.needed} clients of each size (server.merge.attackers "
                    f"= {getattr(merge, 'attackers', 0)}), and {size!r} has {count}. {remedy}"
                )
        return
    if info.split.parts_change:
        return  # other clients hold a coordinate in other rounds
    for name in info.split.meta_state:
        owners = torch.as_tensor(info.owners(name))
        # Coordinates without any owner are never merged.
        is_too_few = (owners > 0) & (owners < rule.needed)
        if is_too_few.any():
            fewest = int(owners[is_too_few].min())
            raise MotleyError(
                f"{setting}: needs {rule.needed} clients that hold a coordinate, and {name!r} has "
                f"coordinates that {fewest} of the federation's clients hold. {remedy}"
            )


def refuse_global_model(method: Method) -> None:
    """Raise an error if there is no global model: clients have models, or parts, of their own."""
    split = method.info.split
    if split.has_private:
        raise MotleyError(
            f"split.private = {list(split.settings.private)}: there is no global model. Every "
            "client completes the shared part with its own (Federation.client_model)."
        )
    if not method.requirements.exchanges_weights:
        raise MotleyError(
            f"method.name = {method.settings.name!r}: there is no global model. The method "
            "exchanges no weights, and every client has a model of its own "
            "(Federation.client_model)."
        )


def check_private_weights(model: ModelSettings, split: Split) -> None:
    """Refuse a file of initial weights with private tensors: nodes do not have the file."""
    if not split.has_private:
        return
    in_file = shapes_in(Path(model.weights))
    for size, names in split.private.items():
        part = split.whole_part(size)
        tensors = split.blueprints[size].module.state_dict()
        for private in sorted(names):
            name = part[private].name
            if in_file.get(name) == tuple(tensors[private].shape):
                raise MotleyError(
                    f"model.weights = {model.weights!r}: has {name!r}, which is private "
                    f"(split.private = {list(split.settings.private)}). Clients start their "
                    "private tensors from the seed. Remove it from the file, or share it."
                )


def check_recalibration(config: Config, split: Split) -> None:
    """Refuse recalibration if there are no statistics, or if the method computes its own."""
    if config.server.statistics.name != "recalibrate":
        return
    setting = "server.statistics.name = 'recalibrate'"
    if config.split.normalization_statistics == "batch":
        raise MotleyError(
            f"{setting}: with split.normalization_statistics = 'batch' there are no running "
            "statistics to recalibrate. Use split.normalization_statistics = 'per-size' or "
            "'shared', or server.statistics.name = 'averaged'."
        )
    if not any(norms_of(blueprint.module) for blueprint in split.blueprints.values()):
        raise MotleyError(
            f"{setting}: {', '.join(split.sizes)} have no BatchNorm layers with running "
            "statistics, so there is nothing to recalibrate. "
            "Use server.statistics.name = 'averaged'."
        )
    private_names = set().union(*split.private.values())
    if any(name.endswith(STATISTICS) for name in private_names):
        raise MotleyError(
            f"{setting}: running statistics are private (split.private = "
            f"{list(config.split.private)}), and every client has those of its own data. "
            "Use server.statistics.name = 'averaged'."
        )
    if getattr(config.method, "statistics", "") == "pass":
        raise MotleyError(
            f"{setting}: method.statistics = 'pass' already replaces the statistics before each "
            "evaluation, by the method's own formula. Use method.statistics = 'running', or "
            "server.statistics.name = 'averaged'."
        )
