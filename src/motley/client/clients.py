"""The clients that this process runs: their examples, their states, and the learners they use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Collection as Names
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from motley.client.attack import UploadAttack
from motley.client.client_states import ClientStates
from motley.client.encoding import Encoding, encoded
from motley.client.job import CLIENT_SCORES, Job
from motley.client.learner import Learner
from motley.client.scoring import PERSONALIZED, SCORE, ClientTests
from motley.client.state_store import ClientStateStore
from motley.client.training import NO_STEPS, Plan, TrainingSettings, make_plan
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.randomness import key
from motley.core.tensors import max_norm
from motley.core.update import ClientUpdate
from motley.data.device import DeviceData
from motley.data.partition import Partition
from motley.methods.base import Collection, Method
from motley.methods.evaluation import METRICS
from motley.models.moments import batch_moments
from motley.privacy.mechanism import DPMechanism

#: Returns the images and labels of a test set, in batches on the home device.
TestSet: TypeAlias = Callable[[], Iterable[tuple[Tensor, Tensor]]]
#: Collection batches are this many times larger than training batches: no activations are kept.
COLLECTION_BATCH_FACTOR = 8


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
        store: ClientStateStore,
        elsewhere: Sequence[DeviceData] = (),
        dp: DPMechanism | None = None,
        encoding: Encoding = "fp32",
        attack: UploadAttack | None = None,
        lean: bool = False,
        test_set: TestSet | None = None,
        tests: Callable[[], ClientTests] | None = None,
        personalize_epochs: float = 0.0,
    ) -> None:
        """`test_set`: where clients' own models are evaluated, if the method exchanges no weights.

        `tests`: returns the test examples of every client, if clients are scored one by one.
        `personalize_epochs`: epochs of local training before a personalized score.

        `lean`: take as little memory as a step needs. Batches are made one by one, and on a CPU
        a job loses its state once its client has a copy, so the caller must not need it again.
        """
        self.method, self.data, self.partition, self.training = method, data, partition, training
        self.precision, self.seed = precision, seed
        self.kernels, self.compiled = kernels, compiled
        self.dp, self.encoding, self.lean = dp, encoding, lean
        self._attack = attack
        self.test_set, self._tests = test_set, tests
        #: The task with the loss that clients train with.
        self.training_task = method.info.task.with_label_smoothing(training.label_smoothing)
        #: How a client trains for its personalized score.
        self._personalizing = training.model_copy(update={"epochs": personalize_epochs, "steps": 0})
        self._personalizes = personalize_epochs > 0
        #: The examples on each device that clients train on; the home device comes first.
        self.copies = [data, *elsewhere]
        #: What clients keep between rounds.
        self.states = ClientStates(
            method,
            store,
            encoding=encoding,
            seed=seed,
            device=data.device,
            drops_received=self._drops_received,
        )
        self._smallest: dict[str, int] = {}
        #: Size and number of examples -> local steps in a round.
        self._local_steps: dict[tuple[str, int], int] = {}
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
        longest = self.training.local_steps(len(epoch), self.method.extra_epochs)
        if self._personalizes:
            extra = self.method.extra_epochs
            longest = max(longest, self._personalizing.local_steps(len(epoch), extra))
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
            task=self.training_task,
            classes=self.method.info.classes,
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
        samples = self.samples(job.client)
        steps = self._local_steps.get((job.size, samples))
        if steps is None:
            epoch = self.training.epoch_lengths(samples, self.smallest_batch(job.size))
            steps = self.training.local_steps(len(epoch), self.method.extra_epochs)
            self._local_steps[job.size, samples] = steps
        return steps

    def plan(self, job: Job) -> Plan:
        """Draw a job's batches."""
        personalizes = job.collection == "personalized-score"
        return make_plan(
            self._personalizing if personalizes else self.training,
            self.partition.of(job.client),
            smallest=self.smallest_batch(job.size),
            num_draws=self.data.num_draws,
            seed=self.seed_of(job),
            round_number=job.round_number,
            client=job.client,
            extra_epochs=self.method.extra_epochs,
        )

    def seed_of(self, job: Job) -> int:
        """Return the seed of a job's random numbers.

        Training for a score has other ones than the client's training in the same round.
        """
        if job.collection == "personalized-score":
            return key(self.seed, "personalized score")
        return self.seed

    @property
    def _drops_received(self) -> bool:
        """Whether a job loses its state once its client has a copy.

        A slot on a GPU is loaded twice, before and after its step is captured. The state is in host
        memory there, and the training is not.
        """
        return self.lean and self.device.type == "cpu"

    def seat(self, learner: Learner, job: Job, plan: Plan, client_state: State) -> None:
        """Put a client into a learner."""
        learner.rows = self.partition.of(job.client)
        learner.load(job, client_state, plan, self.seed_of(job))
        if self._drops_received:
            job.state.clear()

    def finish(self, learner: Learner) -> ClientUpdate:
        """Take a client out of its learner: store its state, and return its update."""
        assert learner.job is not None
        job = learner.job
        if self.lean:
            learner.drop_moments()
        private = self.method.info.split.private[job.size]
        delta: State = {}
        if self.method.requirements.exchanges_weights:
            for name, tensor in learner.delta().items():
                if name not in private:
                    delta[name] = tensor
        payload, client_state, loss = learner.result()
        self._check_declared(payload, client_state, private)
        own_tensors = self.states.own_tensors(job.size, learner.state)
        if own_tensors:
            # The server cannot see that a model is broken. It rejects a loss that is not finite,
            # and the client then continues from the model before this round.
            broken = ~max_norm(own_tensors.values()).isfinite()
            loss = loss.masked_fill(broken, torch.nan)
        to_store = self.states.to_store(client_state, own_tensors)
        if self.dp is not None:
            # The server sees neither the loss nor that the model is broken, so it accepts the
            # update. The client itself has to continue from the model before this round.
            received = self.states.own_tensors(job.size, learner.received)
            before = self.states.to_store(learner.client_state, received)
            to_store = _finite_or(to_store, before)
        return self.update(job, delta, payload, to_store, loss, learner.num_steps)

    def _check_declared(self, payload: State, client_state: State, private: Names[str]) -> None:
        """Raise if a client algorithm returned something else than its method declares."""
        needs, returned = self.method.requirements, type(self.method.client).__name__
        if (payload and not needs.payload) or bool(client_state) != needs.client_state:
            raise MotleyError(
                f"{returned}.finish returned a payload of {sorted(payload)} and a client state of "
                f"{sorted(client_state)}; its method declares payload = {needs.payload} and "
                f"client_state = {needs.client_state}. Change its `requirements`."
            )
        if not payload.keys().isdisjoint(private):
            raise MotleyError(
                f"{returned}.finish returned {sorted(payload)} as its payload, which has names of "
                "private tensors (split.private)."
            )

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
            self.states.store.put(client, round_number, client_state)
            delta = self._attacked(job, self.dp.privatize(delta, round_number, client))
            return ClientUpdate(client=client, delta=delta, num_examples=1, num_steps=1)
        delta = self._attacked(job, delta)
        if self.encoding != "fp32":
            before = {}
            if job.client_state_round is not None:
                before = self.states.store.load(client, job.client_state_round)
            delta, residual = encoded(delta, before, self.encoding)
            client_state = {**client_state, **residual}
        self.states.store.put(client, round_number, client_state)
        return ClientUpdate(
            client=client,
            delta=delta,
            payload=payload,
            num_examples=self.samples(client),
            num_steps=num_steps,
            loss=loss / num_steps,
        )

    def _attacked(self, job: Job, delta: State) -> State:
        """Return a simulated attacker's upload; the deltas of other clients are unchanged."""
        if self._attack is None:
            return delta
        parameters = self.method.info.split.parameters_of(job.size)
        return self._attack.sent(delta, parameters, job.round_number, job.client)

    def can_answer(self, job: Job) -> bool:
        """Tell whether a client has examples for the collection that a job names."""
        if job.collection in CLIENT_SCORES:
            return self.tests.count(job.client) > 0
        return self.samples(job.client) > 0

    def collect(self, learner: Learner, job: Job) -> Collection:
        """Ask one client for the collection that the job names, over all of its examples.

        In single precision whatever the training precision, because collections serve evaluation.
        For a personalized score, this is the score before the training.
        """
        if job.collection == "evaluation":
            return self._evaluate(learner, job)
        if job.collection in CLIENT_SCORES:
            return self._score(learner, job)
        once = {
            "epochs": 1.0,
            "steps": 0,
            "drop_last": False,
            "batch_size": COLLECTION_BATCH_FACTOR * self.training.batch_size,
        }
        whole = self.training.model_copy(update=once)
        plan = make_plan(
            whole,
            self.partition.of(job.client),
            smallest=1,
            num_draws=0,
            seed=self.seed,
            round_number=job.round_number,
            client=job.client,
        )
        if job.collection == "statistics":
            if self.method.info.split.private[job.size]:
                job, _ = self.states.resume(job)
            learner.receive(job.state)
            with learner.weights.single_precision(), learner.without_compilation():
                values = batch_moments(learner.model, learner.examples(plan))
        else:
            job, client_state = self.states.resume(job)
            self.seat(learner, job, NO_STEPS, client_state)
            learner.seed_step()
            with learner.weights.single_precision(), learner.without_compilation():
                values = self.method.client.collect(learner, learner.examples(plan))
        return Collection(job.client, self.samples(job.client), values, job.size, job.round_number)

    def _evaluate(self, learner: Learner, job: Job) -> Collection:
        """Score one client's own model on the test set."""
        if self.test_set is None:
            raise MotleyError("there is no test set here to evaluate clients' own models on.")
        values = self._evaluate_own_model(learner, job, self.test_set())
        return Collection(job.client, self.samples(job.client), values, job.size, job.round_number)

    def _evaluate_own_model(
        self, learner: Learner, job: Job, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> State:
        """Return what a client's own model counts on some test examples."""
        job, client_state = self.states.resume(job)
        self.seat(learner, job, NO_STEPS, client_state)
        with evaluating(learner):
            return self.method.client.evaluate(learner, batches)

    # ---- scores on clients' own test examples

    @property
    def tests(self) -> ClientTests:
        """The test examples of every client."""
        if self._tests is None:
            raise MotleyError("there are no test examples here to score clients on.")
        return self._tests()

    def _score(self, learner: Learner, job: Job) -> Collection:
        """Score one client: the model that it received, or else its own."""
        if not self.method.has_own_models:
            return self.score_together(learner, [job])[0]
        answer = self._evaluate_own_model(learner, job, self.tests.examples(job.client))
        info = self.method.info
        # The sums of all metrics are one vector, which begins with those of the primary one.
        return self._scored(job, answer[METRICS][: info.task.primary.num_sums(info.classes)])

    def score_together(self, learner: Learner, jobs: Sequence[Job]) -> list[Collection]:
        """Score clients that received the same weights, in one pass over their test examples."""
        learner.receive(jobs[0].state)
        with evaluating(learner):
            sums = self.tests.sums(learner.model, [job.client for job in jobs])
        return [self._scored(job, row) for job, row in zip(jobs, sums.unbind(), strict=True)]

    def _scored(self, job: Job, sums: Tensor) -> Collection:
        count, values = self.tests.count(job.client), {SCORE: sums}
        return Collection(job.client, count, values, job.size, job.round_number)

    def add_personalized(self, answer: Collection, learner: Learner) -> Collection:
        """Return a client's answer with the score of the model that it has now trained."""
        with evaluating(learner):
            sums = self.tests.sums(learner.model, [answer.client])
        return replace(answer, values={**answer.values, PERSONALIZED: sums[0]})

    def add_same_score(self, answer: Collection) -> Collection:
        """Return the answer of a client that has too few examples to train: its score stays."""
        return replace(answer, values={**answer.values, PERSONALIZED: answer.values[SCORE]})


def _finite_or(after: State, before: State) -> State:
    """Return `after`, or the values of `before` if one of `after` is infinite or NaN.

    The device chooses, so that the host does not wait for the training. States with other names
    or shapes than before are kept as they are.
    """
    if {n: t.shape for n, t in after.items()} != {n: t.shape for n, t in before.items()}:
        return after
    broken = ~max_norm(after.values()).isfinite()
    return {name: torch.where(broken, before[name], tensor) for name, tensor in after.items()}


@contextmanager
def evaluating(learner: Learner) -> Iterator[None]:
    """Put a learner's model into evaluation mode, in single precision and without gradients."""
    learner.model.eval()
    try:
        with torch.no_grad(), learner.weights.single_precision(), learner.without_compilation():
            yield
    finally:
        learner.model.train()


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
