"""The contract of a method: a client half, a server half, and a declaration of their needs.

Every hook has a default that makes it FedAvg, so a method is "FedAvg, except for this". The client
half runs where the client is and sees a `Step` (`step.py`, which has the rules for steps). The
server half takes states and returns new ones. A method declares what it needs (`Requirements`), and
the rest of Motley reads this declaration, and never looks at the hooks that a class overrides.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from motley.core.dotted import check_arguments, describe, subclass_of
from motley.core.errors import MotleyError, unknown
from motley.core.merge import Aggregate
from motley.core.part import State
from motley.core.registry import Registry
from motley.core.update import ClientUpdate
from motley.methods.evaluation import TestSums
from motley.methods.info import ClientInfo, FederationInfo
from motley.methods.step import Step
from motley.models.stages import chain_of
from motley.settings import Configured, Settings

#: Prefix of values in a payload that are for the round's record and nothing else.
REPORTED = "reported/"


class MethodSettings(Settings):
    """The method. A method with settings of its own derives its class from this one."""

    lasting = ()

    name: str = "fedavg"
    """The method (`motley list methods`), or the dotted path of your own. The papers' names, such
    as InCoProx, are accepted too.
    """


@dataclass(frozen=True)
class Requirements:
    """What a method needs beyond FedAvg, and what it promises.

    Those that need hooks are checked against the hooks that the method overrides, when it is built.
    """

    #: Clients keep a state between rounds.
    client_state: bool = False
    #: Clients send a payload beside their delta.
    payload: bool = False
    #: Clients train in another way than by plain steps on the task's loss.
    own_training: bool = False
    #: The server does more with updates than average them.
    own_aggregation: bool = False
    #: Clients answer a collection: a pass over their data without training.
    collection: bool = False
    #: Models are cut at their stages, so every model must declare them (`motley.models.stages`).
    stages: bool = False
    #: Clients minimize another loss than the task's, so label smoothing and logit adjustment would
    #: have no effect and are refused.
    own_loss: bool = False
    #: Targets are class numbers, one per example: the method masks, counts, averages or distills
    #: per class. It is refused for other tasks (`motley.tasks.Task.has_classes`).
    classes: bool = False
    #: For methods with `classes`: `training.mixup` may give an input two classes, because clients'
    #: steps use class numbers in `step.task_loss(outputs, step.targets)` only.
    mixed_classes: bool = False
    #: Training depends on the total number of rounds, so a run that is extended later differs from
    #: one that had all its rounds from the start.
    uses_total_rounds: bool = False
    #: The server computes with public images (`info.public`), so the run must name some.
    public_data: bool = False
    #: Clients compute with them too, so nodes load them.
    client_public_data: bool = False
    #: Weights travel. If only logits, prototypes or features do, each client keeps a model of its
    #: own, which it starts from the initial weights of its size, and there is no global model:
    #: nothing is aggregated, and clients' own models are evaluated (`motley.server.own_models`).
    exchanges_weights: bool = True
    #: Clients train a model of their own beside their part, and keep it in their state (see
    #: `ClientAlgorithm.personal_model`). These models are evaluated, not the global one.
    personal_model: bool = False
    #: The method works if some of a client's tensors are private (`split.private`): neither its
    #: payload nor its server half is about tensors that clients do not share.
    private_parts: bool = False
    #: For methods with an aggregation of their own: deltas and everything else that the server
    #: averages over clients go through `info.merge`, so that `server.merge` may be a robust rule.
    robust_merge: bool = False
    #: It makes sense only with private tensors. If a configuration names none, the head is private.
    needs_private_parts: bool = False

    def has_own_models(self, private: bool) -> bool:
        """Tell whether clients' own models are evaluated, and not the global model.

        So it is if no weights are exchanged, if clients train a model beside their part, and if
        some of their tensors are private (`private`).
        """
        return not self.exchanges_weights or self.personal_model or private

    def combined(self, other: Requirements) -> Requirements:
        """Return the requirements of two methods that run on top of each other."""
        either = {}
        for requirement in fields(self):
            name = requirement.name
            either[name] = getattr(self, name) or getattr(other, name)
        for promise in ("exchanges_weights", "private_parts", "robust_merge", "mixed_classes"):
            either[promise] = getattr(self, promise) and getattr(other, promise)
        return Requirements(**either)


@dataclass(frozen=True)
class Collection:
    """One client's answer in a collection pass."""

    client: int
    samples: int
    values: State = field(default_factory=dict)
    size: str = ""
    round_number: int = 0


class ClientAlgorithm:
    """The client half of a method; here, FedAvg's."""

    #: Number of phases that a client's training has (see `phase`).
    num_phases: ClassVar[int] = 1

    def __init__(self, settings: MethodSettings, info: ClientInfo) -> None:
        self.settings = settings
        self.info = info

    def initial_client_state(self, size: str, received: State) -> State:
        """Return the state of a client of this size before its first training.

        `received` is its part, and its private tensors if it has some. The parameters of its part
        are `self.info.split.parameters_of(size)`.
        """
        return {}

    def shared(self, size: str, tensors: State) -> State:
        """Return a client's tensors without the private ones, which are not in its part."""
        private = self.info.split.private[size]
        if not private:
            return tensors
        return {name: tensor for name, tensor in tensors.items() if name not in private}

    def before_training(self, step: Step) -> None:
        """Prepare for the steps of a round; the part, broadcast and client state are in place.

        Not called for a collection or an evaluation, which have no steps.
        """

    def phase(self, step: Step, step_number: int) -> int:
        """Return the phase of a step, from 0 to below `num_phases`; the first step is number 0.

        A step may do something else in every phase (`step.phase`). Each phase is captured as a CUDA
        graph of its own, so this is the way to let a step depend on its number.
        """
        return 0

    def loss(self, step: Step) -> Tensor:
        """Return the loss of a batch."""
        return step.task_loss(step.model(step.inputs), step.targets)

    def after_backward(self, step: Step) -> None:
        """Change the gradients before the optimizer's step."""

    def after_step(self, step: Step) -> None:
        """Change the parameters after the optimizer's step, and call `step.sync()`."""

    def train_step(self, step: Step) -> Tensor:
        """Take one step and return its loss. Methods with two passes or two losses replace it."""
        loss = self.loss(step)
        step.backward(loss)
        self.descend(step)
        return loss.detach()

    def descend(self, step: Step) -> None:
        """Update the parameters: the second half of a step. Not a hook."""
        self.after_backward(step)
        step.optimize()
        self.after_step(step)

    def finish(self, step: Step) -> tuple[State, State]:
        """Return the payload for the server, and the client's state for its next training."""
        return {}, {}

    def personal_model(self, client_state: State) -> State:
        """Return the client's own model (parameters and buffers) in its state.

        For methods that train one beside the client's part.
        """
        return {}

    def collect(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Answer a collection: a pass over the client's data without augmentation."""
        return {}

    def evaluate(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        """Score the client's own model on a test set; if it has one, or has private tensors.

        The model is in evaluation mode, and no gradients are computed. `step.broadcast` is the
        result of `ServerAlgorithm.evaluation_broadcast`. Returns the sums of `TestSums`, and other
        numbers for the round's record as `reported/NAME`.
        """
        sums = TestSums(self.info.task, self.info.classes, step.round.device)
        for inputs, targets in batches:
            sums.add(step.model(inputs), targets)
        return sums.values()


def mean_reported(answers: Iterable[State]) -> dict[str, Tensor]:
    """Return the mean of each number that clients report as `reported/NAME`, over those that do."""
    reported: dict[str, list[Tensor]] = {}
    for answer in answers:
        for name, number in answer.items():
            if name.startswith(REPORTED):
                numbers = reported.setdefault(name.removeprefix(REPORTED), [])
                numbers.append(number.float().mean())
    return {name: torch.stack(numbers).mean() for name, numbers in reported.items()}


class ServerAlgorithm:
    """The server half of a method; here, FedAvg's.

    `own` is the method's own state at the server, for example control variates or a feature pool.
    `state` is the global state. Neither is changed in place.
    """

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        self.settings = settings
        self.info = info

    def init(self) -> State:
        """Return the method's own state before the first round."""
        return {}

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        """Return the broadcast that a client receives with its part."""
        return {}

    def evaluation_broadcast(self, own: State) -> State:
        """Return the broadcast for a client that evaluates its own model."""
        return {}

    def aggregate(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        """Return the mean delta, before other stages of the pipeline."""
        return self.info.merge(state, updates)

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        """Return the method's own state after a round. `state` is the one that clients started
        from.
        """
        return own

    def adjust_aggregate(self, own: State, merged: Aggregate) -> Aggregate:
        """Return the delta before it is applied, after InCo. `own` is the result of `update`."""
        return merged

    def post_process(
        self, own: State, state: State, updates: Sequence[ClientUpdate]
    ) -> tuple[State, dict[str, Tensor | float]]:
        """Return the global state after training at the server, and numbers for the round's record.

        `state` is the global state with the delta in it.
        """
        return state, {}

    def metrics(self, own: State, updates: Sequence[ClientUpdate]) -> dict[str, Tensor | float]:
        """Return the method's own numbers for the round's record. `own` is the result of `update`.

        By default they are the numbers that clients reported: the mean of each over the clients
        that sent it as `reported/NAME`.
        """
        return {**mean_reported(update.payload for update in updates)}

    def collection_clients(self, round_number: int) -> Sequence[int]:
        """Return the clients that are asked for a collection after this round."""
        return ()

    def apply_collection(
        self, own: State, state: State, collections: Sequence[Collection]
    ) -> tuple[State, State]:
        """Return the method's own state and the global state after the clients' collections."""
        return own, state


class Method:
    """A method: its settings, what it needs, and its two halves. By default, FedAvg."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    Client: ClassVar[type[ClientAlgorithm]] = ClientAlgorithm
    Server: ClassVar[type[ServerAlgorithm]] = ServerAlgorithm
    requirements: ClassVar[Requirements] = Requirements()
    #: Local epochs that clients train beyond `training.epochs` or `training.steps`.
    extra_epochs: float = 0.0

    def __init__(self, settings: MethodSettings, info: FederationInfo) -> None:
        self.settings = settings
        self.info = info
        check_requirements(type(self))
        if self.requirements.stages:
            for blueprint in info.split.blueprints.values():
                chain_of(blueprint.module)
        self.client = self.Client(settings, info.for_clients())
        self.server = self.Server(settings, info)

    @property
    def has_own_models(self) -> bool:
        """Whether clients' own models are evaluated, and not the global model."""
        return self.requirements.has_own_models(self.info.split.has_private)

    @classmethod
    def configure(cls, **settings: Any) -> Configured:
        """Return the method with its settings, for `motley.Federation(method=...)`."""
        return Configured(cls, settings)


#: The hooks behind each requirement. A method declares it if and only if it overrides one of them.
HOOKS = {
    "client_state": ("initial_client_state",),
    "personal_model": ("personal_model",),
    "own_training": ("before_training", "loss", "after_backward", "after_step", "train_step"),
    "own_aggregation": ("aggregate", "update", "adjust_aggregate", "post_process"),
    "collection": ("collect", "collection_clients", "apply_collection"),
}


def check_requirements(method: type[Method]) -> None:
    """Check that a method's declaration agrees with the hooks it overrides.

    This is the only place that asks which hooks a class overrides, and only to catch a wrong
    declaration: without it, a method with an undeclared payload would run with differential
    privacy, for example.
    """
    needs = method.requirements
    for requirement, hooks in HOOKS.items():
        overridden = [hook for hook in hooks if _overrides(method, hook)]
        declared = getattr(needs, requirement)
        if bool(overridden) != declared:
            names = ", ".join(overridden) or "none of " + ", ".join(hooks)
            raise TypeError(
                f"{method.__name__} overrides {names}, and declares {requirement} = {declared}. "
                "Change its `requirements`."
            )
    finishes = _overrides(method, "finish")
    if finishes != (needs.payload or needs.client_state):
        verb = "overrides" if finishes else "does not override"
        raise TypeError(
            f"{method.__name__} {verb} finish, which returns the payload and the client state, and "
            f"declares payload = {needs.payload} and client_state = {needs.client_state}. "
            "Change its `requirements`."
        )
    _check_arguments(method)


def _check_arguments(method: type[Method]) -> None:
    """Check that hooks take the arguments that they are called with, before anything is trained."""
    for half, default in ((method.Client, ClientAlgorithm), (method.Server, ServerAlgorithm)):
        for hook, original in vars(default).items():
            is_hook = inspect.isfunction(original) and not hook.startswith("_")
            if not is_hook or not _overrides(method, hook):
                continue
            arguments = list(inspect.signature(original).parameters)
            check_arguments(getattr(half, hook), arguments, f"{half.__name__}.{hook}")


def _accept(item: Any) -> type[Method]:
    """Check a user's own method."""
    method: type[Method] = subclass_of(Method, "motley.Method")(item)
    if not issubclass(method.Settings, MethodSettings):
        raise MotleyError(
            f"its Settings are {describe(method.Settings)}; "
            "a subclass of motley.MethodSettings is expected."
        )
    halves = (
        ("Client", method.Client, ClientAlgorithm),
        ("Server", method.Server, ServerAlgorithm),
    )
    for name, half, base in halves:
        if not isinstance(half, type) or not issubclass(half, base):
            raise MotleyError(
                f"its {name} is {describe(half)}; a subclass of motley.{base.__name__} is expected."
            )
        _check_names(half, base)
    if not isinstance(method.requirements, Requirements):
        raise MotleyError(
            f"its requirements are {describe(method.requirements)}; motley.Requirements(...) is "
            "expected."
        )
    try:
        check_requirements(method)
    except TypeError as error:
        raise MotleyError(str(error)) from None
    return method


def _check_names(half: type, base: type) -> None:
    """Refuse a half whose functions are all unknown to its base class: nothing would call them."""
    functions = []
    for name, value in vars(half).items():
        if inspect.isfunction(value) and not name.startswith("__"):
            functions.append(name)
    if half is base or not functions or any(hasattr(super(half, half), name) for name in functions):
        return
    public = [name for name in vars(base) if not name.startswith("_")]
    hooks = sorted(name for name in public if inspect.isfunction(vars(base)[name]))
    raise MotleyError(
        f"{half.__name__} overrides no hook of motley.{base.__name__}: "
        f"{unknown('hook', functions[0], hooks)}"
    )


METHODS: Registry[type[Method]] = Registry("method", group="motley.methods", accept=_accept)


def _overrides(method: type[Method], hook: str) -> bool:
    for half, default in ((method.Client, ClientAlgorithm), (method.Server, ServerAlgorithm)):
        if hasattr(default, hook):
            return getattr(half, hook) is not getattr(default, hook)
    raise AttributeError(hook)
