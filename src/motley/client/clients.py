"""The clients that this process runs: their examples, their states, and the learners they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Collection as Names
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from motley.client.encoding import Encoding, encoded, without_residual
from motley.client.job import Job
from motley.client.learner import Learner
from motley.client.own_model import model_in, with_model, without_model
from motley.client.state_store import ClientStateStore
from motley.client.training import NO_STEPS, Plan, TrainingSettings, make_plan
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.tensors import max_norm
from motley.core.update import ClientUpdate
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.methods.base import Collection, Method
from motley.models.moments import batch_moments
from motley.privacy.mechanism import DPMechanism

#: Returns the images and labels of a test set, in batches on the home device.
TestSet: TypeAlias = Callable[[], Iterable[tuple[Tensor, Tensor]]]
#: Collection batches are this many times larger than training batches: no activations are kept.
COLLECTED = 8


class Clients:
    """Everything about the clients that does not depend on how they are run."""

    def __init__(
        self,
        method: Method,
        data: DeviceData,
        partition: Partition,
        training: TrainingSettings,
        *,
        precision: str,
        kernels: Names[str] = (),
        compiled: bool = False,
        seed: int,
        memory: ClientStateStore,
        elsewhere: Sequence[DeviceData] = (),
        dp: DPMechanism | None = None,
        encoding: Encoding = "fp32",
        lean: bool = False,
        test_set: TestSet | None = None,
    ) -> None:
        """`test_set`: where clients' own models are evaluated, if the method exchanges no weights.

        `lean`: take as little memory as a step needs. Batches are made one by one, and on a CPU
        a job loses its state once its client has a copy, so the caller must not need it again.
        """
        self.method, self.data, self.partition, self.training = method, data, partition, training
        self.precision, self.seed, self.memory = precision, seed, memory
        self.kernels, self.compiled = kernels, compiled
        self.dp, self.encoding, self.lean = dp, encoding, lean
        self.test_set = test_set
        #: The examples on each device that clients train on; the home device comes first.
        self.copies = [data, *elsewhere]
        self._smallest: dict[str, int] = {}
        smallest = max(self.smallest_batch(size) for size in method.info.split.sizes)
        if training.batch_size < smallest:
            raise MotleyError(
                f"training.batch_size = {training.batch_size}: BatchNorm trains on batches of at "
                f"least {smallest}."
            )

    @property
    def device(self) -> torch.device:
        """The home device: where jobs come from and uploads go."""
        return self.data.device

    @property
    def devices(self) -> list[torch.device]:
        """The devices that the clients train on."""
        return [data.device for data in self.copies]

    def learner(self, size: str, where: int = 0) -> Learner:
        """Return a fresh learner of a size on one of the devices."""
        epoch = self.training.epoch_lengths(int(self.partition.sizes.max()), 1)
        longest = self.training.local_steps(len(epoch))
        model = self.method.info.split.build(size)
        return Learner(
            model,
            self.method.client,
            self.training,
            self.copies[where],
            longest=max(longest, 1),
            precision=self.precision,
            kernels=self.kernels,
            compiled=self.compiled,
            lean=self.lean,
            task=self.method.info.task,
        )

    def smallest_batch(self, size: str) -> int:
        """Return the fewest examples a batch may have: BatchNorm cannot train on one."""
        if size not in self._smallest:
            modules = self.method.info.split.blueprints[size].module.modules()
            batch_norm = any(
                isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules
            )
            self._smallest[size] = 2 if batch_norm else 1
        return self._smallest[size]

    def samples(self, client: int) -> int:
        """Return how many examples a client has."""
        return len(self.partition.of(client))

    def local_steps(self, job: Job) -> int:
        """Return how many steps a job takes."""
        epoch = self.training.epoch_lengths(self.samples(job.client), self.smallest_batch(job.size))
        return self.training.local_steps(len(epoch))

    def plan(self, job: Job) -> Plan:
        """Draw a job's batches."""
        return make_plan(
            self.training,
            self.partition.of(job.client),
            smallest=self.smallest_batch(job.size),
            augmented=self.data.random,
            seed=self.seed,
            round_number=job.round_number,
            client=job.client,
        )

    def resume(self, job: Job) -> tuple[Job, State]:
        """Return a job with the weights that its client starts from, and the client's state.

        The weights are those that the job carries or, if the method exchanges no weights, those of
        the client's own model. Before its first accepted update a client has no model of its own
        and starts from the weights in the job. The state is the stored one, or the initial one.
        """
        needs = self.method.requirements
        if job.client_state_round is None:
            if not needs.client_state:
                return job, {}
            return job, self.method.client.initial_client_state(job.size, job.state)
        if needs.exchanges_weights and not needs.client_state:
            return job, {}
        stored = without_residual(self.memory.recall(job.client, job.client_state_round))
        if needs.exchanges_weights:
            return job, stored
        return replace(job, state=model_in(stored)), without_model(stored)

    def own_model(self, client: int, round_number: int) -> State:
        """Return a client's own model after a round, if the method exchanges no weights."""
        return model_in(self.memory.get(client, round_number))

    def seat(self, learner: Learner, job: Job, plan: Plan, client_state: State) -> None:
        """Put a client into a learner."""
        learner.rows = self.partition.of(job.client)
        learner.load(job, client_state, plan, self.seed)
        # A slot on a GPU is loaded twice, before and after its step is captured. The state is in
        # host memory there, and the training is not.
        if self.lean and self.device.type == "cpu":
            job.state.clear()

    def finish(self, learner: Learner) -> ClientUpdate:
        """Take a client out of its learner: store its state, and return its update."""
        assert learner.job is not None
        if self.lean:
            learner.drop_moments()
        needs = self.method.requirements
        delta = learner.delta() if needs.exchanges_weights else {}
        payload, client_state, loss = learner.result()
        if (payload and not needs.payload) or bool(client_state) != needs.client_state:
            raise TypeError(
                f"{type(self.method.client).__name__}.finish returned a payload of "
                f"{sorted(payload)} and a client state of {sorted(client_state)}; its method "
                f"declares {needs}."
            )
        if not needs.exchanges_weights:
            client_state = with_model(client_state, learner.state)
            # The server cannot see that a model is broken. It rejects a loss that is not finite,
            # and the client then continues from the model before this round.
            broken = ~max_norm(learner.state.values()).isfinite()
            loss = loss.masked_fill(broken, torch.nan)
        return self.update(learner.job, delta, payload, client_state, loss, learner.num_steps)

    def update(
        self,
        job: Job,
        delta: State,
        payload: State,
        client_state: State,
        loss: Tensor,
        num_steps: int,
    ) -> ClientUpdate:
        """Return a client's update as it leaves the client, and store the client's state.

        This is the upload boundary: deltas are privatized or encoded here, whichever engine ran the
        client. With differential privacy, the number of examples, the number of steps and the loss
        are withheld. `loss` is the sum over the steps.
        """
        client, round_number = job.client, job.round_number
        if self.dp is not None:
            self.memory.put(client, round_number, client_state)
            delta = self.dp.privatize(delta, round_number, client)
            return ClientUpdate(client=client, delta=delta, num_examples=1, num_steps=1)
        if self.encoding != "fp32":
            before = {}
            if job.client_state_round is not None:
                before = self.memory.recall(client, job.client_state_round)
            delta, residual = encoded(delta, before, self.encoding)
            client_state = {**client_state, **residual}
        self.memory.put(client, round_number, client_state)
        return ClientUpdate(
            client=client,
            delta=delta,
            payload=payload,
            num_examples=self.samples(client),
            num_steps=num_steps,
            loss=loss / num_steps,
        )

    def collect(self, learner: Learner, job: Job) -> Collection:
        """Ask one client for the collection that the job names, over all of its examples.

        In single precision whatever the training precision, because collections serve evaluation.
        """
        if job.collection == "evaluation":
            return self._evaluate(learner, job)
        once = {
            "epochs": 1.0,
            "steps": 0,
            "drop_last": False,
            "batch_size": COLLECTED * self.training.batch_size,
        }
        whole = self.training.model_copy(update=once)
        plan = make_plan(
            whole,
            self.partition.of(job.client),
            smallest=1,
            augmented=False,
            seed=self.seed,
            round_number=job.round_number,
            client=job.client,
        )
        if job.collection == "statistics":
            learner.receive(job.state)
            with learner.weights.single_precision(), learner.without_compilation():
                values = batch_moments(learner.model, learner.examples(plan))
        else:
            job, client_state = self.resume(job)
            self.seat(learner, job, NO_STEPS, client_state)
            learner.seed_step()
            with learner.weights.single_precision(), learner.without_compilation():
                values = self.method.client.collect(learner, learner.examples(plan))
        return Collection(job.client, self.samples(job.client), values, job.size, job.round_number)

    def _evaluate(self, learner: Learner, job: Job) -> Collection:
        """Score one client's own model on the test set."""
        if self.test_set is None:
            raise MotleyError("there is no test set here to evaluate clients' own models on.")
        job, client_state = self.resume(job)
        self.seat(learner, job, NO_STEPS, client_state)
        learner.model.eval()
        try:
            with (
                torch.no_grad(),
                learner.weights.single_precision(),
                learner.without_compilation(),
            ):
                values = self.method.client.evaluate(learner, self.test_set())
        finally:
            learner.model.train()
        return Collection(job.client, self.samples(job.client), values, job.size, job.round_number)


@contextmanager
def own_randomness(*devices: torch.device) -> Iterator[None]:
    """Leave the caller's generators as they were: steps key torch's own ones. The first device is
    the current one.
    """
    home = torch.cuda.device(devices[0]) if devices[0].type == "cuda" else nullcontext()
    with home, torch.random.fork_rng(devices=[]):
        defaults = [
            torch.cuda.default_generators[device.index]
            for device in devices
            if device.type == "cuda"
        ]
        before = [default.graphsafe_get_state() for default in defaults]
        try:
            yield
        finally:
            for default, state in zip(defaults, before, strict=True):
                default.graphsafe_set_state(state)
