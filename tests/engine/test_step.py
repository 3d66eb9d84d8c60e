"""What a client algorithm sees of its step: the same gradients with every optimizer, and tensors that stay."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from motley.client.learner import Learner
from motley.core.part import State
from motley.federation import Federation
from motley.methods.step import Proximal
from tests.methods.turns import SGD, federation_of, seated

MLP = ("model.sizes=['mlp2']", "split.name=homogeneous", "model.mlp.hidden=6", *SGD)


def learner_after_a_step(*overrides: str, method: str = "fedavg") -> tuple[Federation, Learner]:
    """Return a learner whose parameters are no longer the received ones, with the gradients of a second batch."""
    federation = federation_of(*MLP, *overrides, name=method)
    learner = seated(federation, federation.job(federation.initial_state(), 1, 0))
    learner.step(16)
    backward(learner)
    return federation, learner


def backward(learner: Learner) -> State:
    learner.inputs, learner.targets = learner.first_inputs(8), torch.arange(8)
    learner.backward(learner.task_loss(learner.model(learner.inputs), learner.targets))
    return {name: grad.clone() for name, grad in learner.grads.items()}


class FusedLike(torch.optim.SGD):
    """torch's SGD with the interface of `kernels.optimizers.Fused`: the next step adds a proximal term itself."""

    def __init__(self, parameters: Sequence[Tensor], lr: float) -> None:
        super().__init__(parameters, lr)
        self.pulls: list[tuple[Sequence[Tensor], Sequence[float]]] = []

    def pull(self, towards: Sequence[Tensor], strengths: Sequence[float]) -> None:
        self.pulls.append((towards, strengths))
        for parameter, center, mu in zip(
            self.param_groups[0]["params"], towards, strengths, strict=True
        ):
            parameter.grad.add_(parameter.detach() - center, alpha=mu)


def with_fused_optimizer(learner: Learner) -> FusedLike:
    optimizer = FusedLike(list(learner.weights.masters.values()), float(learner.lr))
    learner.optimizer, learner.fused_optimizer = optimizer, True
    return optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_show_the_proximal_term_whatever_the_optimizer(fused: bool) -> None:
    _, learner = learner_after_a_step()
    optimizer = with_fused_optimizer(learner) if fused else None
    plain = backward(learner)
    learner.proximal(0.5)
    for name, grad in learner.grads.items():
        offset = learner.params[name] - learner.received[name]
        assert offset.abs().max() > 0
        torch.testing.assert_close(grad, plain[name] + 0.5 * offset)
    before = {name: tensor.clone() for name, tensor in learner.params.items()}
    grads = {name: grad.clone() for name, grad in learner.grads.items()}
    learner.optimize()
    for name, tensor in learner.params.items():
        torch.testing.assert_close(tensor, before[name] - 0.05 * grads[name])
    assert optimizer is None or not optimizer.pulls, "who has seen the term must not get it twice"


def test_a_term_that_nobody_looks_at_is_left_to_the_fused_optimizer() -> None:
    ends = []
    for fused in (False, True):
        _, learner = learner_after_a_step()
        optimizer = with_fused_optimizer(learner) if fused else None
        backward(learner)
        learner.proximal(0.5)
        learner.optimize()
        ends.append(learner.params)
        assert optimizer is None or len(optimizer.pulls) == 1
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor)


def test_terms_add_up_and_a_new_backward_drops_them() -> None:
    _, learner = learner_after_a_step()
    plain = backward(learner)
    center = {name: tensor + 1 for name, tensor in learner.params.items()}
    learner.proximal(0.5, center)
    learner.proximal({name: 2.0 if name == "head.bias" else 0.0 for name in learner.params}, center)
    for name, grad in learner.grads.items():
        torch.testing.assert_close(grad, plain[name] - (2.5 if name == "head.bias" else 0.5))
    learner.proximal(0.5)
    again = backward(learner)
    for name, grad in again.items():
        torch.testing.assert_close(grad, plain[name])


def test_gradients_of_some_names_are_those_of_all_names() -> None:
    _, learner = learner_after_a_step()
    whole = backward(learner)
    names = ["head.bias", "layers.0.weight"]
    assert set(names) < whole.keys()
    learner.backward(learner.task_loss(learner.model(learner.inputs), learner.targets), names)
    assert learner.grads.keys() == set(names)
    assert all(torch.equal(grad, whole[name]) for name, grad in learner.grads.items())
    learner.backward(learner.task_loss(learner.model(learner.inputs), learner.targets))
    assert learner.grads.keys() == whole.keys(), "a backward pass without names is whole again"


@pytest.mark.parametrize("term", ["norms", "norm-of-squares"])
def test_terms_of_norms_have_no_gradient_where_nothing_has_moved(term: Proximal) -> None:
    federation = federation_of(*MLP, name="fedavg")
    learner = seated(federation, federation.job(federation.initial_state(), 1, 0))
    plain = backward(learner)
    learner.proximal(0.5, term=term)
    assert all(torch.equal(grad, plain[name]) for name, grad in learner.grads.items())


def test_the_norm_of_squares_by_hand() -> None:
    """With d = (1, 2) its norm of squares is sqrt(17), whose gradient is 2 d^3 / sqrt(17)."""
    federation = federation_of(*MLP, name="fedavg")
    learner = seated(federation, federation.job(federation.initial_state(), 1, 0))
    plain = backward(learner)
    center = {name: tensor.clone() for name, tensor in learner.params.items()}
    center["head.bias"][:2] -= torch.tensor([1.0, 2.0])
    learner.proximal(0.5, center, term="norm-of-squares")
    added = {name: grad - plain[name] for name, grad in learner.grads.items()}
    expected = torch.zeros(10)
    expected[:2] = 0.5 * torch.tensor([1.0, 8.0]) / 17**0.5
    torch.testing.assert_close(added.pop("head.bias"), expected)
    assert not any(grad.any() for grad in added.values())


def test_gradients_are_those_that_the_last_loss_reached() -> None:
    _, learner = learner_after_a_step()
    learner.backward(learner.model.head.bias.square().sum())  # type: ignore[union-attr, operator]
    assert learner.grads.keys() == {"head.bias"}


def test_an_excursion_restores_weights_and_keeps_gradients() -> None:
    _, learner = learner_after_a_step()
    before = {name: tensor.clone() for name, tensor in learner.state.items()}
    with learner.preserve_weights():
        for tensor in learner.params.values():
            tensor.add_(1)
        learner.sync()
        there = backward(learner)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state.items())
    assert all(torch.equal(grad, there[name]) for name, grad in learner.grads.items())


def test_scratch_stays_in_place_for_the_next_client() -> None:
    federation, learner = learner_after_a_step()
    learner.keep("mine", {"a": torch.ones(3), "b": torch.zeros((), dtype=torch.long)})
    scratch = learner.scratch["mine"]["a"]
    clients = federation.engine.clients  # type: ignore[attr-defined]
    job = federation.job(federation.initial_state(), 1, 3)
    clients.seat(learner, job, clients.plan(job), {})
    learner.keep("mine", {"a": torch.full((3,), 2.0)})
    assert learner.scratch["mine"]["a"] is scratch and scratch.tolist() == [2, 2, 2]


def test_scaffold_leaves_the_broadcast_and_the_client_state_alone() -> None:
    _, learner = learner_after_a_step(method="scaffold")
    assert all(
        torch.equal(learner.broadcast[n], torch.zeros_like(t)) for n, t in learner.broadcast.items()
    )
    federation = federation_of(*MLP, name="scaffold")
    server, _ = federation.run_round(federation.initial_state())
    client = next(iter(server.client_state_rounds))
    job = federation.job(server, 2, client)
    learner = seated(federation, job)
    learner.step(16)
    assert any(tensor.any() for tensor in job.broadcast.values())
    assert all(
        torch.equal(learner.broadcast[name], tensor) for name, tensor in job.broadcast.items()
    )
