"""Methods made up for tests: each uses hooks that FedAvg leaves alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from motley.core.merge import Aggregate, merge
from motley.core.part import State, take
from motley.core.update import ClientUpdate
from motley.engine.learner import Learner
from motley.methods import Collection, Method


class Noisy(Method):
    """Noise on the images and a dropout of the logits: steps that draw random numbers."""

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        answers = learner.model(images + 0.1 * torch.randn_like(images))
        return nn.functional.cross_entropy(nn.functional.dropout(answers, 0.2), labels)


class Alternating(Method):
    """A message whose shape changes from round to round and back: captured steps must not share room."""

    def broadcast(self, server: State, state: State, round_number: int, client: int) -> State:
        return {"pull": torch.full((1 + round_number % 2,), 0.01 * round_number)}

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        pull = learner.message["pull"].sum() * sum(p.square().sum() for p in learner.parameters.values())
        learner.message["pull"].mul_(0.9)
        return nn.functional.cross_entropy(learner.model(images).float(), labels) + pull


class EveryHook(Method):
    """Control variates, a proximal gradient, companion models, replies and a collection pass, all at once."""

    def init(self) -> State:
        state = self.info.split.initial(self.info.seed)
        return {f"c/{name}": torch.zeros_like(state[name]) for name in self.info.split.parameters}

    def broadcast(self, server: State, state: State, round_number: int, client: int) -> State:
        size = self.info.sizes[client]
        control = {name.removeprefix("c/"): tensor for name, tensor in server.items() if name.startswith("c/")}
        part = {n: p for n, p in self.info.split.part(size).items() if p.name in self.info.split.parameters}
        return take(control, part)

    def initial_client_state(self, size: str, received: State) -> State:
        own = {f"own/{name}": torch.zeros_like(received[name]) for name in self.info.split.parameters_of(size)}
        previous = {f"previous/{name}": tensor for name, tensor in received.items()}
        return {**own, **previous, "turns": torch.zeros((), dtype=torch.long)}

    def before_training(self, learner: Learner) -> None:
        learner.memory["turns"].add_(1)

    def loss(self, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
        answers = learner.model(images)
        previous = {n.removeprefix("previous/"): t for n, t in learner.memory.items() if n.startswith("previous/")}
        pull = (answers - learner.frozen(learner.start, images)).square().mean()
        push = (answers - learner.frozen(previous, images)).square().mean()
        return nn.functional.cross_entropy(answers, labels) + 0.01 * pull - 0.001 * push.clamp(max=1.0)

    def after_backward(self, learner: Learner) -> None:
        for name, parameter in learner.parameters.items():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - learner.start[name], alpha=0.01)

    @torch.no_grad()
    def after_step(self, learner: Learner) -> None:
        for name, parameter in learner.parameters.items():
            parameter.sub_(learner.lr * (learner.message[name] - learner.memory[f"own/{name}"]))

    def payload(self, learner: Learner) -> State:
        return {f"delta/{n}": (p.detach() - learner.start[n]) * 0.1 for n, p in learner.parameters.items()}

    def next_client_state(self, learner: Learner) -> State:
        own = {f"own/{n}": (p.detach() - learner.start[n]) * 0.1 for n, p in learner.parameters.items()}
        previous = {f"previous/{n}": t.detach().clone() for n, t in learner.tensors.items()}
        return {**own, **previous, "turns": learner.memory["turns"].clone()}

    def aggregate(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> Aggregate:
        merged = merge(state, updates)
        scaled = {n: c * 0.9 if n in self.info.split.parameters else c for n, c in merged.delta.items()}
        return merged.with_delta(scaled)

    def adjust_aggregate(self, server: State, merged: Aggregate) -> Aggregate:
        return merged.with_delta(
            {n: c - 0.01 * server[f"c/{n}"] if f"c/{n}" in server else c for n, c in merged.delta.items()}
        )

    def update(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        after = {name: tensor.clone() for name, tensor in server.items()}
        for update in updates:
            for local, piece in update.part.items():
                if f"c/{piece.name}" in after:
                    after[f"c/{piece.name}"] += update.payload[f"delta/{local}"] / self.info.owners(piece.name)
        return after

    def post_process(self, server: State, state: State, updates: Sequence[ClientUpdate]) -> State:
        return {n: t * 0.999 if n == _last_bias(state) else t for n, t in state.items()}

    def collection_clients(self, round_number: int) -> Sequence[int]:
        return range(len(self.info.sizes)) if round_number % 2 == 0 else ()

    def collect(self, learner: Learner, batches: Iterable[tuple[Tensor, Tensor]]) -> State:
        learner.model.eval()
        with torch.no_grad():
            total = sum(learner.model(images).sum(0) for images, _ in batches)
        learner.model.train()
        assert isinstance(total, Tensor)
        return {"logits": total}

    def apply_collection(self, server: State, state: State, collections: Sequence[Collection]) -> tuple[State, State]:
        mean = torch.stack([c.values["logits"] for c in collections]).sum(0) / sum(c.samples for c in collections)
        bias = _last_bias(state)
        return server, {**state, bias: state[bias] - 0.01 * mean}


def _last_bias(state: State) -> str:
    return "fc.bias" if "fc.bias" in state else "head.bias"
