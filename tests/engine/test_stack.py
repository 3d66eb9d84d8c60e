"""Clients side by side learn what each would learn alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.client.clients import Clients
from motley.core.update import ClientUpdate
from motley.engine import local, stack
from motley.engine.stack import Stack, unfold_convolutions
from motley.federation import Federation
from tests.conftest import tiny_config

PERCEPTRONS = (
    "model.sizes=['mlp1','mlp2','mlp3']",
    "training.epochs=3",
    "federation.clients_per_round=6",
)
CNN = (
    "model.sizes=['cnn']",
    "split.name=homogeneous",
    "model.cnn.map_dropout=0",
    "model.cnn.hidden_dropout=0",
)
AUGMENTED = ("data.transform.crop_padding=1", "data.transform.flip=true")
SGD = (
    "training.optimizer.name=sgd",
    "training.optimizer.momentum=0.9",
    "training.optimizer.weight_decay=0.01",
)


@pytest.fixture(autouse=True)
def with_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let convolutions be stacked here, too: on a CPU they would train in slots, which are faster."""
    allowed = stack.can_stack

    def can_stack(clients: Clients, size: str) -> bool:
        return allowed(clients, size) or size == "cnn"

    monkeypatch.setattr(local, "can_stack", can_stack)


def uploads(*overrides: str) -> list[ClientUpdate]:
    federation = Federation(tiny_config(*overrides))
    server = federation.initial_state()
    jobs = [federation.job(server, 2, client) for client in range(6)]
    finished: list[int] = []
    answer = federation.engine.train(jobs, finished.append)
    assert sorted(finished) == [upload.client for upload in answer]
    return answer


@pytest.mark.parametrize("width", [2, 4, 64])
@pytest.mark.parametrize(
    "more",
    [PERCEPTRONS, (*PERCEPTRONS, *AUGMENTED), (*PERCEPTRONS, *SGD), (*CNN, *SGD)],
    ids=["adam", "augmented", "sgd", "cnn"],
)
def test_stacked_clients_learn_what_they_learn_alone(more: tuple[str, ...], width: int) -> None:
    alone, stacked = (
        uploads("engine.name=debug", *more),
        uploads(f"engine.vmap_clients={width}", *more),
    )
    assert [upload.client for upload in alone] == [upload.client for upload in stacked]
    assert len({upload.num_steps for upload in alone}) > 1  # so that some clients end before others
    for one, other in zip(alone, stacked, strict=True):
        assert (one.num_steps, one.num_examples) == (other.num_steps, other.num_examples)
        assert float(other.loss) == pytest.approx(float(one.loss), rel=1e-5)
        for name, tensor in one.delta.items():
            torch.testing.assert_close(other.delta[name], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "more", [("training.lr_decay=0.5", "training.batch_size=7", "training.drop_last=true")]
)
def test_short_batches_and_late_rounds(more: tuple[str, ...]) -> None:
    alone, stacked = (
        uploads("engine.name=debug", *PERCEPTRONS, *more),
        uploads("engine.vmap_clients=3", *PERCEPTRONS, *more),
    )
    for one, other in zip(alone, stacked, strict=True):
        for name, tensor in one.delta.items():
            torch.testing.assert_close(other.delta[name], tensor, rtol=1e-3, atol=2e-5)


def test_dropout_is_repeatable_and_differs_between_clients_and_rounds() -> None:
    more = ("model.sizes=['cnn']", "split.name=homogeneous", "engine.vmap_clients=6")
    first, again = uploads(*more), uploads(*more)
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta)
    federation = Federation(tiny_config(*more))
    together = Stack(federation.engine.clients, "cnn", 2)  # type: ignore[attr-defined]
    state = {n: torch.stack([t, t]) for n, t in federation.initial_state().state.items()}
    images = torch.randn(1, 8, *federation.engine.clients.data.shape).expand(2, -1, -1, -1, -1)  # type: ignore[attr-defined]
    answers = together._logits(state, images)
    assert not torch.equal(answers[0], answers[1])


@pytest.mark.parametrize(
    "more", [("model.sizes=['resnet10']",), ("training.max_grad_norm=1",), ("method.name=noisy",)]
)
def test_what_cannot_be_stacked_trains_in_slots(more: tuple[str, ...]) -> None:
    settings = ("model.sizes=['mlp1']", "training.epochs=1", *more)
    plain, stacked = uploads(*settings), uploads("engine.vmap_clients=4", *settings)
    for one, other in zip(plain, stacked, strict=True):
        assert all(torch.equal(one.delta[name], other.delta[name]) for name in one.delta)


def test_convolutions_on_a_cpu_train_in_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    federation = Federation(tiny_config(*CNN))
    assert not stack.can_stack(federation.engine.clients, "cnn")  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [(3, 5, 3), (4, 2, (3, 2), (2, 1), (1, 0))])
def test_an_unfolded_convolution_is_a_convolution(arguments: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(*arguments))
    x = torch.randn(2, arguments[0], 9, 8)
    wanted = plain(x)
    unfold_convolutions(plain)
    torch.testing.assert_close(plain(x), wanted)
