"""What a method declares is true: of every registered method, and of one that a user writes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.part import State
from motley.federation import Federation
from motley.methods import METHODS, ClientAlgorithm, Method, Requirements, ServerAlgorithm, Step
from motley.methods.base import check_requirements
from tests.conftest import chosen, tiny_config
from tests.methods.turns import PLAIN

REGISTERED = [entry.name for entry in METHODS]
MLP = ("model.sizes=['mlp2']", "split.name=homogeneous", "model.mlp.hidden=12", "training.steps=1")


@pytest.mark.parametrize("name", REGISTERED)
def test_a_declaration_agrees_with_the_hooks(name: str) -> None:
    check_requirements(METHODS[name])


@pytest.mark.parametrize("name", REGISTERED)
def test_payloads_and_client_states_are_as_declared(name: str) -> None:
    federation = Federation(tiny_config(*PLAIN, *MLP, *chosen(name)))
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in federation.sample(1)]
    updates = federation.engine.train(jobs, lambda client: None)
    needs = federation.method.requirements
    for job, update in zip(jobs, updates, strict=True):
        assert bool(update.payload) == needs.payload  # type: ignore[union-attr]
        initial = federation.method.client.initial_client_state(job.size, job.state)
        assert bool(initial) == needs.client_state


@pytest.mark.parametrize("name", REGISTERED)
def test_models_without_stages_are_refused_by_methods_that_cut_them(name: str) -> None:
    federation = Federation(tiny_config(*PLAIN, *MLP, *chosen(name)))
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    blueprints = federation.split.blueprints
    blueprints["mlp2"] = replace(blueprints["mlp2"], module=plain)
    if federation.split.has_private:
        federation.split.private["mlp2"] = frozenset({"1.bias"})
    method = METHODS[name]
    if method.requirements.stages:
        with pytest.raises(MotleyError, match="declares no chain of stages"):
            method(federation.config.method, federation.method.info)
    else:
        method(federation.config.method, federation.method.info)


class Quiet(ClientAlgorithm):
    def loss(self, step: Step) -> Tensor:
        return super().loss(step)


class Talkative(ClientAlgorithm):
    def finish(self, step: Step) -> tuple[State, State]:
        return {"secret": step.received["head.bias"]}, {}


class Keeping(ClientAlgorithm):
    def initial_client_state(self, size: str, received: State) -> State:
        return received

    def finish(self, step: Step) -> tuple[State, State]:
        return {}, step.state


class Listening(ServerAlgorithm):
    def update(self, own: State, state: State, updates: object) -> State:
        return own


@pytest.mark.parametrize(
    ("client", "server", "declared", "message"),
    [
        (
            Quiet,
            ServerAlgorithm,
            Requirements(),
            "overrides loss, and declares own_training = False",
        ),
        (Talkative, ServerAlgorithm, Requirements(), "overrides finish, .* payload = False"),
        (
            Keeping,
            ServerAlgorithm,
            Requirements(payload=True),
            "overrides initial_client_state, .*state = False",
        ),
        (
            ClientAlgorithm,
            Listening,
            Requirements(),
            "overrides update, and declares own_aggregation = False",
        ),
        (ClientAlgorithm, ServerAlgorithm, Requirements(payload=True), "does not override finish"),
        (
            ClientAlgorithm,
            ServerAlgorithm,
            Requirements(collection=True),
            "overrides none of collect, ",
        ),
    ],
)
def test_a_wrong_declaration_is_refused_when_the_method_is_built(
    client: type[ClientAlgorithm],
    server: type[ServerAlgorithm],
    declared: Requirements,
    message: str,
) -> None:
    class Mine(Method):
        Client = client
        Server = server
        requirements = declared

    info = Federation(tiny_config(*MLP)).method.info
    with pytest.raises(TypeError, match=f"^Mine {message}"):
        Mine(Mine.Settings(), info)


def test_a_payload_that_is_not_declared_never_leaves_the_client() -> None:
    """`Talkative` declares the client state that it does not have, to get past the check of its hooks."""

    class Mine(Method):
        Client = type("Both", (Talkative, Keeping), {"finish": Talkative.finish})
        requirements = Requirements(client_state=True)

    METHODS.register("talkative", "made up for tests")(Mine)
    try:
        federation = Federation(tiny_config(*PLAIN, *MLP, "method.name=talkative"))
        with pytest.raises(
            MotleyError,
            match=r"finish returned a payload of \['secret'\] and a client state of \[\]",
        ):
            federation.run_round(federation.initial_state())
    finally:
        del METHODS._entries["talkative"]


def test_two_methods_together_need_what_either_needs() -> None:
    one = Requirements(payload=True, exchanges_weights=False)
    other = Requirements(client_state=True, uses_total_rounds=True)
    both = Requirements(
        payload=True, client_state=True, uses_total_rounds=True, exchanges_weights=False
    )
    assert one.combined(other) == both == other.combined(one)
