"""Methods made up for tests: each uses hooks that FedAvg leaves alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from motley.core.merge import Aggregate, merge
from motley.core.part import State, take
from motley.core.tensors import add_, difference, scale_, scaled, subtract_
from motley.core.update import ClientUpdate
from motley.methods import (
    ClientAlgorithm,
    Collection,
    Method,
    Requirements,
    ServerAlgorithm,
    Step,
)


class NoisyClient(ClientAlgorithm):
    """Noise on the inputs and a dropout of the logits: steps that draw random numbers."""

    def loss(self, step: Step) -> Tensor:
        logits = step.model(step.inputs + 0.1 * torch.randn_like(step.inputs))
        return step.task_loss(nn.functional.dropout(logits, 0.2), step.targets)


class Noisy(Method):
    """FedAvg with noise."""

    Client = NoisyClient
    requirements = Requirements(own_training=True)


class AlternatingClient(ClientAlgorithm):
    """A pull towards zero that fades from step to step."""

    def before_training(self, step: Step) -> None:
        step.keep("pull", step.broadcast)

    def loss(self, step: Step) -> Tensor:
        pull = step.scratch["pull"]["pull"]
        squares = sum(parameter.square().sum() for parameter in step.model.parameters())
        loss = step.task_loss(step.model(step.inputs), step.targets) + pull.sum() * squares
        pull.mul_(0.9)
        return loss


class AlternatingServer(ServerAlgorithm):
    """A broadcast whose shape changes from round to round and back."""

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        return {"pull": torch.full((1 + round_number % 2,), 0.01 * round_number)}


class Alternating(Method):
    """A broadcast of changing shape: captured steps must not share their tensors."""

    Client = AlternatingClient
    Server = AlternatingServer
    requirements = Requirements(own_training=True)


class LookingClient(ClientAlgorithm):
    """Reads and changes the gradients after it has added a proximal term."""

    def after_backward(self, step: Step) -> None:
        step.proximal(0.5)
        scale_(step.grads, 0.5)


class Looking(Method):
    """FedProx with halved gradients: the fused optimizer must not hide the term."""

    Client = LookingClient
    requirements = Requirements(own_training=True)


class EveryClientHook(ClientAlgorithm):
    """Control variates, a proximal gradient, companion models, a payload and a collection."""

    def initial_client_state(self, size: str, received: State) -> State:
        names = self.info.split.parameters_of(size)
        own = {f"own/{name}": torch.zeros_like(received[name]) for name in names}
        previous = {f"previous/{name}": tensor for name, tensor in received.items()}
        return {**own, **previous, "times": torch.zeros((), dtype=torch.long)}

    def before_training(self, step: Step) -> None:
        step.keep("own", with_prefix(step.client_state, "own/"))

    def loss(self, step: Step) -> Tensor:
        logits = step.model(step.inputs)
        previous = with_prefix(step.client_state, "previous/")
        pull = (logits - step.frozen(step.received, step.inputs)).square().mean()
        push = (logits - step.frozen(previous, step.inputs)).square().mean()
        loss = step.task_loss(logits, step.targets)
        return loss + 0.01 * pull - 0.001 * push.clamp(max=1.0)

    def after_backward(self, step: Step) -> None:
        add_(step.grads, difference(step.params, step.received), 0.01)

    def after_step(self, step: Step) -> None:
        subtract_(step.params, difference(step.broadcast, step.scratch["own"]), step.lr)
        step.sync()

    def finish(self, step: Step) -> tuple[State, State]:
        moved = scaled(difference(step.params, step.received), 0.1)
        payload = {f"delta/{name}": tensor for name, tensor in moved.items()}
        own = {f"own/{name}": tensor for name, tensor in moved.items()}
        previous = {f"previous/{name}": tensor.clone() for name, tensor in step.state.items()}
        return payload, {**own, **previous, "times": step.client_state["times"] + 1}

    def collect(self, step: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        step.model.eval()
        with torch.no_grad():
            total = sum(step.model(images).sum(0) for images, _ in batches)
        step.model.train()
        assert isinstance(total, Tensor)
        return {"logits": total}


class EveryServerHook(ServerAlgorithm):
    """The mean of the clients' control variates, and small changes at every other place."""

    def init(self) -> State:
        state = self.info.split.initial(self.info.seed)
        return {f"c/{name}": torch.zeros_like(state[name]) for name in self.info.split.parameters}

    def broadcast(self, own: State, state: State, round_number: int, client: int) -> State:
        part = self.info.split.part(self.info.sizes[client])
        parameters = {n: p for n, p in part.items() if p.name in self.info.split.parameters}
        return take(with_prefix(own, "c/"), parameters)

    def aggregate(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        merged = merge(state, updates)
        delta = {
            n: d * 0.9 if n in self.info.split.parameters else d for n, d in merged.delta.items()
        }
        return merged.with_delta(delta)

    def adjust_aggregate(self, own: State, merged: Aggregate) -> Aggregate:
        delta = dict(merged.delta)
        for name, control in with_prefix(own, "c/").items():
            if name in delta:
                delta[name] = delta[name] - 0.01 * control
        return merged.with_delta(delta)

    def update(self, own: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        after = {name: tensor.clone() for name, tensor in own.items()}
        for update in updates:
            for local, piece in update.part.items():
                if f"c/{piece.name}" in after:
                    change = update.payload[f"delta/{local}"] / self.info.owners(piece.name)
                    after[f"c/{piece.name}"] += change
        return after

    def post_process(
        self, own: State, state: State, updates: Sequence[ClientUpdate]
    ) -> tuple[State, dict[str, Tensor | float]]:
        bias = state[_last_bias(state)] * 0.999
        return {**state, _last_bias(state): bias}, {"bias": bias.norm()}

    def collection_clients(self, round_number: int) -> Sequence[int]:
        return range(len(self.info.sizes)) if round_number % 2 == 0 else ()

    def apply_collection(
        self, own: State, state: State, collections: Sequence[Collection]
    ) -> tuple[State, State]:
        total = torch.stack([one.values["logits"] for one in collections]).sum(0)
        mean = total / sum(one.samples for one in collections)
        bias = _last_bias(state)
        return own, {**state, bias: state[bias] - 0.01 * mean}


class EveryHook(Method):
    """Every hook of both halves at once."""

    Client = EveryClientHook
    Server = EveryServerHook
    requirements = Requirements(
        client_state=True, payload=True, own_training=True, own_aggregation=True, collection=True
    )


def with_prefix(state: State, prefix: str) -> State:
    """Return the tensors whose names begin with a prefix, without it."""
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def _last_bias(state: State) -> str:
    return "fc.bias" if "fc.bias" in state else "head.bias"
