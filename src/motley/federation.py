"""The round loop. Read this first.

    sample clients -> each gets its part of the global state and the method's message
                   -> the ENGINE trains them
                   -> their changes come back and are checked
    merge over owners -> InCo -> the method's correction -> server optimiser -> moving average
                      -> recalibrate BatchNorm statistics (if asked for) -> evaluate every size

A round takes a `Server` and returns a new one; it changes nothing in place. Whatever interrupts a round, the server of
the last whole round is still there to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from motley.aggregate.admit import blemish, misfit, unusable
from motley.aggregate.averaging import average
from motley.aggregate.inco import Coefficients, IncoSettings, inco
from motley.aggregate.noise import perturbed
from motley.aggregate.recalibration import check_report, check_settings, pool
from motley.aggregate.server_optim import optimize
from motley.assembly import (
    assign_sizes,
    build_clients,
    build_engine,
    build_method,
    build_split,
    check_weights_fit,
    chosen_kernels,
    compiles,
    size_in_bytes,
)
from motley.config import Config, RecalibrationSettings
from motley.core.async_copy import AsyncCopy
from motley.core.errors import MotleyError
from motley.core.merge import Aggregate, apply
from motley.core.part import State, take
from motley.core.randomness import generator, key
from motley.core.update import ClientUpdate
from motley.data import Dataset, load_dataset
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.engine import Engine, Failure, Job
from motley.engine.device import choose_devices, on_device, set_precision
from motley.engine.encoding import decoded
from motley.evaluate import Evaluator
from motley.limits import allocating
from motley.methods.base import Collection
from motley.plan import assigned, costs_of, read_budgets
from motley.privacy import Accountant, PrivacyLedger
from motley.round import Record, Server
from motley.splits.check import check_outputs


def deal(config: Config, dataset: Dataset, own: Partition | None = None) -> Partition:
    """Return which samples each client holds: as the configuration says, or the caller's own partition if it fits."""
    labels, clients = dataset.train.labels, config.federation.clients
    if own is None:
        return config.data.partition.split(labels, clients, config.seed)
    if not isinstance(own, Partition):
        raise MotleyError(
            f"partition: a motley.data.Partition is expected, not a {_type_name(own)}. Partition.from_owners(owners, "
            "clients) makes one from the client of each sample; data.partition.name = 'file' reads index lists."
        )
    if len(own) != clients:
        raise MotleyError(f"the partition is of {len(own)} clients; federation.clients = {clients}.")
    if len(own.indices) and not 0 <= own.indices.min() <= own.indices.max() < len(labels):
        raise MotleyError(f"the partition names samples that are not in 0..{len(labels) - 1}.")
    return own


def load_dataset_of(config: Config) -> Dataset:
    """Load the data set of a configuration."""
    return load_dataset(config.data.name, root=config.data.root_path, path=config.data.file_path)


def checked_dataset(dataset: Any) -> Dataset:
    """Return the caller's data set, if it is one of Motley's; those of other libraries are told from it by type."""
    if isinstance(dataset, Dataset):
        return dataset
    raise MotleyError(
        f"dataset: a motley.data.Dataset is expected, not a {_type_name(dataset)}. Make one of arrays: "
        "Dataset(name, Examples(images, labels), Examples(test_images, test_labels), classes), with images in uint8 of "
        "shape (N, height, width, channels) and labels in int64 of shape (N,)."
    )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


class Federation:
    """A configuration put to work: data dealt, sizes assigned, method and engine ready."""

    def __init__(
        self,
        config: Config,
        *,
        dataset: Dataset | None = None,
        partition: Partition | None = None,
        memory_folder: Path | None = None,
        engine: Callable[[Federation], Engine] | None = None,
    ) -> None:
        self.config = config
        devices = choose_devices(config.engine.device)
        self.device = devices[0]
        self.devices = devices if config.engine.name != "debug" else devices[:1]
        """Where clients train; the first is the home device, where everything else is."""
        set_precision(config.engine.precision, self.device)
        torch.set_num_threads(config.engine.threads)
        self.dataset = load_dataset_of(config) if dataset is None else checked_dataset(dataset)
        self.dataset.check_inferred_classes()
        transform = config.data.transform
        train, *elsewhere = (DeviceData(self.dataset.train, transform, device, augment=True) for device in self.devices)
        train.check_batch_fits("training.batch_size", config.training.batch_size)
        # Test images have the shape of training images, but are not put on the device before they are evaluated.
        tested = min(config.evaluation.batch_size, len(self.dataset.test))
        train.check_batch_fits("evaluation.batch_size", tested)
        self.split = build_split(config, train.shape, self.dataset.classes)
        check_weights_fit(self.split, self.split.sizes, self.device)
        check_outputs(self.split, self.split.sizes, train.shape, self.dataset.classes)
        if engine is None:
            if config.engine.name.startswith("flower"):
                raise MotleyError(f"engine.name = {config.engine.name!r}: needs Flower; see docs/deploy.md.")
            # Before sizes are assigned: a partition knows how many clients the data set is enough for.
            self.partition = deal(config, self.dataset, partition)
        if config.method.inco.active and not self.split.cross_layers:
            raise MotleyError(
                f"method.inco.variant = {config.method.inco.variant!r}: {', '.join(config.model.sizes)} have no layers "
                "of one shape behind each other, so there is nothing to mix."
            )
        self.sizes = self._within_budgets(train) if config.federation.budgets else assign_sizes(config)
        self._drawn_sizes = 0, self.sizes
        self.method = build_method(config, self.split, self.sizes, train.shape, self.dataset.classes, self.size_of)
        check_settings(config, self.split)
        private = config.privacy.active
        self.accountant = Accountant(config.privacy, self.split, self.sizes) if private else None
        self.evaluate = Evaluator(
            self.split,
            self._test_data,
            self.dataset.classes,
            config.evaluation,
            kernels=chosen_kernels(config),
            compiled=compiles(config),
        )
        if engine is not None:
            self.engine: Engine = engine(self)
            return
        clients = build_clients(config, self.method, [train, *elsewhere], self.partition, memory_folder)
        self.engine = build_engine(config, clients)

    def _test_data(self) -> DeviceData:
        """Put the test set on the home device."""
        return DeviceData(self.dataset.test, self.config.data.transform, self.device, augment=False)

    def _within_budgets(self, data: DeviceData) -> tuple[str, ...]:
        """Return the largest size for every client that fits its budget."""
        costs = costs_of(self.split, data.shape, self.config.training)
        budgets = read_budgets(Path(self.config.federation.budgets))
        return assigned(costs, budgets, self.config.federation.clients)

    # ---- one round

    def size_of(self, client: int, round_number: int) -> str:
        """Return the size of a client in a round."""
        if self.config.federation.size_assignment != "dynamic":
            return self.sizes[client]
        if self._drawn_sizes[0] != round_number:
            self._drawn_sizes = round_number, assign_sizes(self.config, round_number)
        return self._drawn_sizes[1][client]

    def start(self) -> Server:
        """Return the server before the first round."""
        state = self.split.initial(self.config.seed)
        if self.config.model.weights:
            state = with_weights(state, Path(self.config.model.weights))
        return self.to_device(Server(0, state, None, self.method.server.init(), {}))

    def to_device(self, server: Server) -> Server:
        """Return a server whose tensors are on the federation's device."""
        averaged = self.here(server.averaged) if server.averaged is not None else None
        method, optimizer = self.here(server.method), self.here(server.optimizer)
        return replace(server, state=self.here(server.state), averaged=averaged, method=method, optimizer=optimizer)

    def here(self, state: State) -> State:
        """Return tensors on the server's device."""
        return {name: on_device(tensor, self.device) for name, tensor in state.items()}

    def play(self, server: Server, done: Callable[[int], None] = lambda client: None) -> tuple[Server, Record]:
        """Play one round and return the server after it, and the round's record with all scores."""
        after, record = self.advance(server, done)
        record.settle()
        return after, record

    def advance(self, server: Server, done: Callable[[int], None]) -> tuple[Server, Record]:
        """Play one round, but do not wait for its evaluation: a GPU may be at it while the next round begins.

        While too few uploads can be taken, the round is played again, with clients drawn anew.
        """
        record, settings = Record(server.round_number + 1), self.config.server
        for attempt in range(settings.attempts):
            after = self.attempt(server, record, attempt, done)
            if after is not None:
                return after, record
            record.repeated.append(record.refused)
        raise MotleyError(
            f"round {record.round_number} was played {settings.attempts} times (server.attempts) and never had "
            f"{settings.min_fraction:.0%} of its uploads (server.min_fraction). The last time: "
            + " ".join(f"client {client}: {reason}" for client, reason in record.refused.items())
        )

    def attempt(self, server: Server, record: Record, number: int, done: Callable[[int], None]) -> Server | None:
        """Play a round once; None where too few uploads can be taken.

        While a GPU is still training, nobody knows whether all that it will upload is finite. So the round's end is
        queued behind the training as if it were, and made again without those uploads that turn out not to be. Nodes
        are not asked for a collection twice.
        """
        with record.timed("train"):
            jobs = self.jobs(server, record, number)
            with allocating(f"round {record.round_number}: training with batches of {self.config.training.batch_size}"):
                answers = self.engine.train(jobs, done)
            fitting = self.fitting(jobs, answers, record)
            losses = AsyncCopy(_stacked([upload.loss for upload in fitting]))
            blemished = AsyncCopy(_stacked([blemish(_all_of(upload)) for upload in fitting]))
        queued = self.engine.trusted and not blemished.ready
        early = self.conclude(server, self.updates(jobs, fitting), record) if queued else None
        with record.timed("train"):
            updates = self.updates(jobs, self.admit(fitting, losses.read(), blemished.read(), record))
            if not self.engine.trusted:
                updates = self.usable(server, updates, record)
        if len(jobs) - len(record.refused) < self.config.server.min_fraction * len(jobs):
            record.expect_nothing()
            return None
        if early is not None and len(updates) == len(fitting):
            return early
        return self.conclude(server, updates, record)

    def conclude(self, server: Server, updates: Sequence[ClientUpdate], record: Record) -> Server:
        """End a round: merge, collect where the method wants to, recalibrate statistics, and begin to evaluate."""
        record.expect_nothing()
        with record.timed("merge"):
            after = self.merge(server, updates, record)
        after = self.collect(after, record)
        after = self.recalibrate(after, record)
        if self.method.info.is_evaluated(record.round_number):
            with record.timed("evaluate"):
                record.evaluation = self.evaluate.start(after.model, after.round_number)
        return after

    def sample(self, round_number: int, attempt: int = 0) -> list[int]:
        """Return the clients of a round, in the order of their ids."""
        federation = self.config.federation
        again = (attempt,) if attempt else ()
        numbers: np.random.Generator | np.random.RandomState
        if federation.sampler == "fedml" and not attempt:
            numbers = np.random.RandomState(round_number - 1)
        else:
            numbers = generator(self.config.seed, "clients", round_number, *again)
        return sorted(numbers.choice(federation.clients, federation.clients_per_round, replace=False).tolist())

    def jobs(self, server: Server, record: Record, attempt: int = 0) -> list[Job]:
        """Return what each sampled client is sent."""
        record.clients = self.sample(record.round_number, attempt)
        jobs = [self.job(server, record.round_number, client) for client in record.clients]
        record.bytes_down += sum(size_in_bytes(job.state) + size_in_bytes(job.broadcast) for job in jobs)
        return jobs

    def job(self, server: Server, round_number: int, client: int) -> Job:
        """Return what one client is sent."""
        size = self.size_of(client, round_number)
        part = self.split.part(size, round_number, client)
        message = self.method.server.broadcast(server.method, server.state, round_number, client)
        return Job(round_number, client, size, take(server.state, part), message, server.remembered.get(client))

    def fitting(
        self, jobs: Sequence[Job], answers: Sequence[ClientUpdate | Failure], record: Record
    ) -> list[ClientUpdate]:
        """Return the uploads that have the names and shapes of what was sent out; refuse the others, with a reason."""
        sent = {job.client: job for job in jobs}
        record.refused = {answer.client: answer.reason for answer in answers if isinstance(answer, Failure)}
        uploads = [answer for answer in answers if isinstance(answer, ClientUpdate)]
        record.bytes_up += sum(size_in_bytes(upload.delta) + size_in_bytes(upload.payload) for upload in uploads)
        uploads = [self.decoded(sent[upload.client], upload) for upload in uploads]
        for upload in uploads:
            reason = misfit(sent[upload.client].state, upload.delta)
            if reason:
                record.refused[upload.client] = reason
        answered = {answer.client for answer in answers}
        record.idle = [job.client for job in jobs if job.client not in answered]
        return [upload for upload in uploads if upload.client not in record.refused]

    def admit(
        self, fitting: Sequence[ClientUpdate], losses: Sequence[float], blemished: Sequence[float], record: Record
    ) -> list[ClientUpdate]:
        """Return the uploads of which every number is finite; refuse the others. Guarded ones come without a loss."""
        taken, kept = [], []
        told = not self.config.privacy.active
        for upload, loss, bad in zip(fitting, losses, blemished, strict=True):
            if bad:
                record.refused[upload.client] = "it holds a number that is not finite."
            elif told and not math.isfinite(loss):
                record.refused[upload.client] = "its loss is not finite."
            else:
                taken.append(upload)
                kept.append(loss)
        if kept:
            record.train_loss = sum(kept) / len(kept)
        return taken

    def decoded(self, job: Job, upload: ClientUpdate) -> ClientUpdate:
        """Return an upload with its change as the server computes with it, and where it does."""
        delta = decoded(upload.delta, job.state, self.config.uplink.dtype)
        if self.engine.trusted:
            return replace(upload, delta=delta)
        loss = upload.loss.to(self.device)
        return replace(upload, delta=self.here(delta), payload=self.here(upload.payload), loss=loss)

    def usable(self, server: Server, updates: Sequence[ClientUpdate], record: Record) -> list[ClientUpdate]:
        """Return the updates whose messages the method can use. Nodes may send anything, so each is tried alone."""

        def use(update: ClientUpdate) -> None:
            held = {local: server.state[piece.name] for local, piece in update.part.items() if piece.index is None}
            for name in update.payload.keys() & held.keys():
                if update.payload[name].shape != held[name].shape:
                    raise ValueError(f"{name!r} has shape {tuple(update.payload[name].shape)}")
            self.method.server.aggregate(server.method, server.state, [update])
            self.method.server.update(server.method, server.state, [update])

        for update in updates:
            if reason := unusable("message", partial(use, update)):
                record.refused[update.client] = reason
        return [update for update in updates if update.client not in record.refused]

    def updates(self, jobs: Sequence[Job], uploads: Sequence[ClientUpdate]) -> list[ClientUpdate]:
        """Return uploads with what the server knows of their senders."""
        sent = {job.client: job for job in jobs}
        return [self.update(sent[upload.client], upload) for upload in uploads]

    def update(self, job: Job, upload: ClientUpdate) -> ClientUpdate:
        """Return an upload with what the server knows of its sender, and with the noise it met on its way."""
        delta, noise = upload.delta, self.config.uplink.noise
        if noise:
            names = [name for name in job.state if name in self.split.parameters_of(job.size)]
            delta = perturbed(delta, names, noise, key(self.config.seed, "noise", job.round_number, job.client))
        return replace(
            upload,
            delta=delta,
            part=self.split.part(job.size, job.round_number, job.client),
            weight=float(upload.num_examples) if self.config.server.weighting == "samples" else 1.0,
            size=job.size,
            round_number=job.round_number,
        )

    def merge(self, server: Server, updates: Sequence[ClientUpdate], record: Record) -> Server:
        """Return the server after the clients' changes."""
        number, spent = record.round_number, self.spend(server, updates, record)
        if not updates:
            return replace(server, round_number=number, spent=spent)
        merged = self.method.server.aggregate(server.method, server.state, updates)
        method = self.method.server.update(server.method, server.state, updates)
        numbers = self.method.server.metrics(method, updates)
        asked = {name: number for name, number in numbers.items() if isinstance(number, Tensor)}
        record.method = {name: number for name, number in numbers.items() if not isinstance(number, Tensor)}
        found = AsyncCopy(_stacked([number.float() for number in asked.values()]))
        record.awaited.append((found, lambda values: record.method.update(zip(asked, values, strict=True))))
        merged = self.method.server.adjust_aggregate(method, self.mix(merged, record))
        optimizer, merged = optimize(server.optimizer, merged, self.split.parameters, self.config.server.optimizer)
        state = apply(server.state, merged, self.split.parameters, self.config.server.lr)
        state = self.method.server.post_process(method, state, updates)
        remembered = {**server.remembered, **{update.client: number for update in updates}}
        return Server(number, state, self.averaged(server, state, number), method, remembered, optimizer, spent)

    def spend(self, server: Server, updates: Sequence[ClientUpdate], record: Record) -> PrivacyLedger:
        """Return the privacy ledger after this round, and record epsilon."""
        if self.accountant is None:
            return server.spent
        before = [c for attempt in range(len(record.repeated)) for c in self.sample(record.round_number, attempt)]
        spent = self.accountant.after(server.spent, record.clients, [update.client for update in updates], before)
        record.epsilon = self.accountant.epsilon(spent)
        return spent

    def mix(self, merged: Aggregate, record: Record) -> Aggregate:
        """Apply InCo to the mean change, and note its coefficients."""
        settings = self.config.method.inco
        if not isinstance(settings, IncoSettings):
            return merged
        change, coefficients = inco(merged.delta, self.split.cross_layers, settings, merged.covered)
        if coefficients:
            layers = list(coefficients)
            found = AsyncCopy(torch.stack([torch.stack(tuple(row)) for row in coefficients.values()]))
            record.awaited.append((found, lambda rows: record.inco.update(_by_layer(layers, rows))))
        return merged.with_delta(change)

    def averaged(self, server: Server, state: State, round_number: int) -> State | None:
        """Return the moving average of the state, where one is kept."""
        decay = self.config.server.ema_decay
        return average(server.averaged, state, decay, round_number) if decay else None

    def collect(self, server: Server, record: Record) -> Server:
        """Ask clients for the method's collection on the model that is evaluated, where the method wants one."""
        clients = self.method.server.collection_clients(record.round_number)
        if not clients:
            return server
        with record.timed("collect"):
            jobs = [self.job(server, record.round_number, client) for client in clients]
            parts = [self.split.evaluated(job.size, job.round_number) for job in jobs]
            jobs = [replace(job, state=take(server.model, part)) for job, part in zip(jobs, parts, strict=True)]

            def reason(one: Collection) -> str | None:
                return unusable("collection", partial(self._try_collection, server, one))

            collections = self.collected(jobs, reason, record)
            if not collections:
                return server
            method, model = self.method.server.apply_collection(server.method, server.model, collections)
        return replace(server.with_model(model), method=method)

    def _try_collection(self, server: Server, one: Collection) -> None:
        if one.values and blemish(one.values):
            raise ValueError("it holds a number that is not finite")
        self.method.server.apply_collection(server.method, server.model, [one])

    def recalibrate(self, server: Server, record: Record) -> Server:
        """Replace the running statistics of the evaluated model by those of the clients' data (server.statistics)."""
        number, settings = record.round_number, self.config.server.statistics
        if not isinstance(settings, RecalibrationSettings) or not self.is_recalibrated(number):
            return server
        clients = record.clients if settings.clients == "round" else range(len(self.sizes))
        with record.timed("collect"):
            jobs = []
            for client in clients:
                size = self.size_of(client, number)
                state = take(server.model, self.split.evaluated(size, number))
                jobs.append(Job(number, client, size, state, collection="statistics"))

            def reason(one: Collection) -> str | None:
                try:
                    check_report(server.model, self.split.evaluated(one.size, number), one.values)
                except ValueError as error:
                    return f"its statistics were refused: {error}."
                return None

            collections = self.collected(jobs, reason, record)
            reports = [(self.split.evaluated(one.size, number), one.values) for one in collections]
            model = pool(server.model, reports)
        return server.with_model(model)

    def is_recalibrated(self, round_number: int) -> bool:
        """Tell whether running statistics are recalibrated after a round."""
        settings = self.config.server.statistics
        if not isinstance(settings, RecalibrationSettings):
            return False
        if settings.every == 0:
            return self.method.info.is_evaluated(round_number)
        return round_number % settings.every == 0 or round_number == self.config.training.rounds

    def collected(
        self, jobs: Sequence[Job], reason: Callable[[Collection], str | None], record: Record
    ) -> Sequence[Collection]:
        """Return the clients' collections. Nodes may send anything, so theirs are refused if there is a reason to."""
        answers = self.engine.collect(jobs)
        collections = [answer for answer in answers if isinstance(answer, Collection)]
        record.bytes_down += sum(size_in_bytes(job.state) + size_in_bytes(job.broadcast) for job in jobs)
        record.bytes_up += sum(size_in_bytes(collection.values) for collection in collections)
        if self.engine.trusted:
            return collections
        accepted, refused = [], {}
        for answer in answers:
            if isinstance(answer, Failure):
                refused[answer.client] = f"its collection failed: {answer.reason}"
        for collection in collections:
            one = replace(collection, values=self.here(collection.values))
            why = reason(one)
            if why:
                refused[one.client] = why
            else:
                accepted.append(one)
        record.refused = {**refused, **record.refused}
        return accepted


def _by_layer(layers: Iterable[str], rows: Iterable[Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return InCo's coefficients by layer and by name."""
    return {layer: dict(zip(Coefficients._fields, row, strict=True)) for layer, row in zip(layers, rows, strict=True)}


def _all_of(upload: ClientUpdate) -> State:
    """Return the tensors of an upload, those of the method's message too."""
    return {**upload.delta, **{f"message/{name}": tensor for name, tensor in upload.payload.items()}}


def _stacked(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(scalars)) if scalars else torch.zeros(0)


def with_weights(state: State, file: Path) -> State:
    """Return a state in which the tensors of a file replace those of the same name and shape."""
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise MotleyError(f"model.weights = {str(file)!r}: is not a safetensors file: {error}.") from None
    except (OSError, ValueError) as error:
        raise MotleyError(f"model.weights = {str(file)!r}: cannot be read: {error}.") from None
    fitting = {n: t for n, t in weights.items() if n in state and state[n].shape == t.shape}
    if not fitting:
        raise MotleyError(f"model.weights = {str(file)!r}: has no tensor that fits, by name and shape.")
    return {**state, **{name: tensor.to(state[name].dtype) for name, tensor in fitting.items()}}
