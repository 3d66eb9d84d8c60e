"""ScaleFL, DepthFL, InclusiveFL and FjORD: by hand, and where they must be FedAvg."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motley.client.learner import Learner
from motley.core.errors import MotleyError
from motley.core.merge import merge
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.server.exchange import complete_update
from motley.splits.exits import exit_logits_of
from tests.conftest import tiny_config
from tests.methods.test_contract import FAST, played

GRID = (
    "split.name=grid",
    "split.cuts=[2,3,6]",
    "split.rates=[0.5,0.75,1]",
    "model.sizes=['resnet14']",
)
ONE = ("model.sizes=['resnet14']",)


def after(rounds: int, *overrides: str) -> dict[str, torch.Tensor]:
    federation = Federation(tiny_config(*FAST, *overrides))
    return played(federation, federation.initial_state(), rounds).state


@pytest.mark.parametrize(
    ("system", "plain"),
    [
        (("method.name=scalefl", "split.name=grid", "split.cuts=[6]", "split.rates=[1]"), ()),
        (("method.name=scalefl",), ()),
        (("method.name=inclusivefl",), ()),
        (
            ("method.name=depthfl", "split.name=grid", "split.cuts=[6]", "split.rates=[1]"),
            ("method.name=feddyn",),
        ),
        (("method.name=fjord", "split.name=ordered", "split.rates=[1]"), ()),
    ],
    ids=["scalefl-one-level", "scalefl", "inclusivefl", "depthfl-one-level", "fjord-p1"],
)
def test_one_size_with_one_exit_is_fedavg_bit_for_bit(
    system: tuple[str, ...], plain: tuple[str, ...]
) -> None:
    """And DepthFL is FedDyn."""
    expected = after(2, *ONE, "split.name=homogeneous", *plain)
    found = after(2, *ONE, "split.name=homogeneous", *system)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name].reshape(tensor.shape), tensor) for name, tensor in expected.items()
    )


def seated(*overrides: str, client: int = 5, round_number: int = 2) -> tuple[Federation, Learner]:
    federation = Federation(tiny_config(*FAST, *overrides))
    clients: Any = federation.engine.clients  # type: ignore[attr-defined]
    job = federation.job(federation.initial_state(), round_number, client)
    learner = clients.learner(job.size)
    job, client_state = clients.states.resume(job)
    clients.seat(learner, job, clients.plan(job), client_state)
    return federation, learner


def loss_of(federation: Federation, learner: Learner, images: Tensor, labels: Tensor) -> Tensor:
    learner.inputs, learner.targets = images, labels
    return federation.method.client.loss(learner)


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


@pytest.mark.parametrize("round_number", [1, 3])
def test_scalefls_loss_by_hand(round_number: int) -> None:
    """Distillation begins after half of three rounds."""
    federation, learner = seated(
        "method.name=scalefl",
        "method.gamma=0.7",
        "method.begin=0.5",
        *GRID,
        round_number=round_number,
    )
    images, labels = learner.batches.next(8)
    answers = [answer.detach() for answer in exit_logits_of(learner.model, images)]
    assert len(answers) == 3
    total = 3 * F.cross_entropy(answers[2], labels)
    for weight, answer in ((1, answers[0]), (2, answers[1])):
        taught = 0.7 * 9 * kl(answers[2] / 3, answer / 3) if round_number > 1.5 else 0
        total = total + weight * (F.cross_entropy(answer, labels) + taught)
    torch.testing.assert_close(loss_of(federation, learner, images, labels).detach(), total / 6)


def test_the_released_scalefl_moves_its_teacher_and_means_over_classes() -> None:
    gradients = []
    for more in ((), ("method.teacher=trained",), ("method.mean_over_classes=true",)):
        federation, learner = seated(
            "method.name=scalefl", "method.gamma=5", "method.begin=0", *GRID, *more
        )
        images, labels = learner.batches.next(8)
        learner.backward(loss_of(federation, learner, images, labels))
        gradients.append(learner.grads["fc.weight"].clone())
    assert torch.equal(gradients[0], gradients[2]), "a detached teacher does not feel its students"
    assert not torch.allclose(gradients[0], gradients[1], rtol=1e-3)


def test_depthfls_loss_by_hand() -> None:
    federation, learner = seated("method.name=depthfl", "method.ramp=4", *GRID)
    images, labels = learner.batches.next(8)
    answers = [answer.detach() for answer in exit_logits_of(learner.model, images)]
    total = sum(F.cross_entropy(answer, labels) for answer in answers)
    mutual = sum(kl(answers[j], answers[i]) for i in range(3) for j in range(3) if i != j)
    expected = total + math.exp(-5 * (1 - 2 / 4) ** 2) * mutual / 2
    torch.testing.assert_close(loss_of(federation, learner, images, labels).detach(), expected)


# ---- InclusiveFL

#: What the sizes share, and the prefixes of a ResNet10's and a ResNet14's own names.
SHARING = {
    "inclusive": ("resnet10/", "resnet14/"),
    "depth": ("", ""),
    "grouped": ("resnet10/", "resnet14/"),
}


def first_updates(*overrides: str) -> tuple[Federation, State, list[ClientUpdate]]:
    """Return the updates of the first round, in which every client takes part."""
    everyone = "federation.clients_per_round=6"
    federation = Federation(tiny_config(*FAST, "method.name=inclusivefl", everyone, *overrides))
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(6)]
    uploads = federation.engine.train(jobs, lambda client: None)
    updates = [
        complete_update(federation.context, job, upload)
        for job, upload in zip(jobs, uploads, strict=True)
    ]
    return federation, server.state, updates


@pytest.mark.parametrize("split", SHARING)
def test_inclusivefl_mixes_last_blocks_with_the_next_sizes_deeper_blocks(split: str) -> None:
    """Clients 0 and 1 are ResNet10s, 2 and 3 ResNet14s, 4 and 5 ResNet18s."""
    federation, state, updates = first_updates(f"split.name={split}", "method.beta=0.2")
    found = federation.method.server.aggregate({}, state, updates).delta
    deltas = [update.delta for update in updates]

    def mean(clients: tuple[int, ...], name: str) -> Tensor:
        return torch.stack([deltas[client][name] for client in clients]).mean(0)

    first, second = "layer4.0.conv2.weight", "layer4.1.conv2.weight"
    teacher = (mean((2, 3), first) + mean((2, 3), second)) / 2
    small = 0.8 * mean((0, 1), first) + 0.2 * teacher
    if split == "depth":
        small = (2 * small + 2 * mean((2, 3), first) + 2 * mean((4, 5), first)) / 6
    torch.testing.assert_close(found[SHARING[split][0] + first], small, rtol=1e-5, atol=1e-8)
    middle = 0.8 * mean((2, 3), second) + 0.2 * mean((4, 5), second)
    if split == "depth":
        middle = (middle + mean((4, 5), second)) / 2
    torch.testing.assert_close(found[SHARING[split][1] + second], middle, rtol=1e-5, atol=1e-8)
    plain = merge(state, updates).delta
    moved = {name for name in plain if not torch.equal(found[name], plain[name])}
    assert moved <= federation.split.parameters
    assert all("layer4" in name and not name.startswith("resnet18/") for name in moved)
    assert len(moved) > 8, "more than the two that were computed by hand"


@pytest.mark.parametrize("split", SHARING)
def test_without_distillation_inclusivefl_is_fedavg_over_its_split(split: str) -> None:
    found = after(2, f"split.name={split}", "method.name=inclusivefl", "method.beta=0")
    expected = after(2, f"split.name={split}", "method.name=fedavg")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_size_without_a_larger_one_in_the_round_is_averaged_as_it_is() -> None:
    federation, state, updates = first_updates("split.name=depth")
    found = federation.method.server.aggregate({}, state, updates[:2]).delta
    expected = merge(state, updates[:2]).delta
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("split.name=width", *ONE), "split.name = 'width': method.name = 'inclusivefl' is for"),
        (GRID, "split.name = 'grid': method.name = 'inclusivefl' is for"),
        (("split.name=grouped", "model.sizes=['mlp1','resnet10']"), "there are none. Name sizes"),
    ],
    ids=["width", "grid", "unrelated sizes"],
)
def test_inclusivefl_is_refused_where_it_would_be_fedavg(
    overrides: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(MotleyError, match=re.escape(problem)):
        Federation(tiny_config(*FAST, "method.name=inclusivefl", *overrides))


WIDTHS = ("split.name=ordered", "split.rates=[1,0.5,0.25]", *ONE)


@pytest.mark.parametrize("distill", ["true", "false"])
def test_fjords_loss_by_hand(distill: str) -> None:
    federation, learner = seated(
        "method.name=fjord", f"method.distill={distill}", *WIDTHS, client=0
    )
    from motley.splits.ordered_dropout import at_width

    images, labels = learner.batches.next(8)
    torch.manual_seed(4)
    choice = torch.randint(3, (1,))
    with torch.no_grad():
        widest = learner.model(images)
        with at_width(learner.model, choice):
            drawn = learner.model(images)
    expected = F.cross_entropy(drawn, labels)
    if distill == "true":
        soft = -(widest.softmax(1) * drawn.log_softmax(1)).sum(1).mean()
        expected = F.cross_entropy(widest, labels) + soft
    torch.manual_seed(4)
    torch.testing.assert_close(loss_of(federation, learner, images, labels).detach(), expected)


def test_a_narrow_draw_moves_only_narrow_weights() -> None:
    from motley.splits.ordered_dropout import at_width

    federation, learner = seated("method.name=fjord", "method.distill=false", *WIDTHS, client=0)
    images, labels = learner.batches.next(8)
    with at_width(learner.model, torch.tensor([0])):
        learner.backward(learner.task_loss(learner.model(images), labels))
    part = federation.split.part("resnet14-w0.25")
    for name in ("layer1.0.conv1.weight", "layer4.1.conv2.weight", "fc.weight", "bn1.bias"):
        gradient = learner.grads[name]
        assert part[name].index is not None
        outside = gradient.clone()
        outside[part[name].index] = 0
        assert outside.abs().max() == 0 < gradient.abs().max(), name
