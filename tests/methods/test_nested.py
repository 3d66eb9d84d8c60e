"""Nested depths: by hand, where they are FedAvg, and models that have no students."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from motley.cli.model import uses
from motley.client.learner import Learner
from motley.core.errors import MotleyError
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.methods.nested import (
    NestedClient,
    check_removable,
    lacking_blocks,
    logits_without,
)
from motley.models.spec import ModelSpec, Stage, declare
from tests.conftest import tiny_config
from tests.methods.turns import PLAIN, after, same_bits, seated

FAMILIES = {
    "resnet": (),
    "mlp": ("model.sizes=['mlp1','mlp2','mlp3']",),
    "vit": (
        "model.sizes=['vit1','vit2','vit3']",
        "model.vit.dim=16",
        "model.vit.heads=2",
        "model.vit.patch=4",
    ),
}


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def largest_in_training(federation: Federation) -> Learner:
    """Return a learner with a client of the largest size in it."""
    server = federation.initial_state()
    largest = federation.split.sizes[-1]
    for number in range(1, 9):
        for client in federation.sample(number):
            if federation.size_of(client, number) == largest:
                return seated(federation, federation.job(server, number, client))
    raise AssertionError(f"no client of size {largest} was sampled")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("students", ["smallest", "all"])
def test_the_loss_by_hand(family: str, students: str) -> None:
    """A student's logits are those of a model of its own size with the client's weights.

    So are its gradients, and the whole model learns nothing from the distillation.
    """
    federation = Federation(
        tiny_config(
            *PLAIN,
            *FAMILIES[family],
            "method.name=nested",
            f"method.students={students}",
            "method.weight=0.6",
            "method.distill=0.3",
            "method.temperature=2",
        )
    )
    learner = largest_in_training(federation)
    images, labels = learner.batches.next(8)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    weights = {name: before[name].clone().requires_grad_() for name in learner.params}

    def logits(size: str) -> Tensor:
        model = federation.split.build(size).train()
        own = {name: weights.get(name, before[name].clone()) for name in model.state_dict()}
        answer: Tensor = functional_call(model, own, (images,))
        return answer

    *smaller, largest = federation.split.sizes
    chosen = smaller[:1] if students == "smallest" else smaller
    teacher = logits(largest)
    expected = F.cross_entropy(teacher, labels)
    for size in chosen:
        answer = logits(size)
        distilled = 4 * kl(teacher.detach() / 2, answer / 2)
        of_student = 0.7 * F.cross_entropy(answer, labels) + 0.3 * distilled
        expected = expected + 0.6 / len(chosen) * of_student
    expected.backward()
    learner.inputs, learner.targets = images, labels
    loss = federation.method.client.loss(learner)
    torch.testing.assert_close(loss, expected)
    learner.backward(loss)
    for name, gradient in learner.grads.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-4, atol=1e-6)
    # Running statistics have seen one pass: that of the whole model.
    with_statistics = federation.split.build(largest).train()
    with_statistics.load_state_dict(before)
    with_statistics(images)
    statistics = dict(with_statistics.named_buffers())
    for name, buffer in learner.model.named_buffers():
        torch.testing.assert_close(buffer, statistics[name])


def test_the_loss_of_mixed_inputs_by_hand() -> None:
    """Every size has the mixed inputs and the mean loss of both targets, also when it is taught."""
    federation = Federation(
        tiny_config(
            *PLAIN,
            "method.name=nested",
            "method.weight=0.6",
            "method.distill=0.3",
            "training.mixup=1.0",
            "training.steps=1",
            "training.optimizer={name='sgd', lr=1}",
            "model.resnet.norm=group",
        )
    )
    smallest, *_, largest = federation.split.sizes
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(6)]
    job = next(job for job in jobs if job.size == largest)
    (update,) = federation.engine.train([job], lambda client: None)
    assert isinstance(update, ClientUpdate)

    clients = federation.engine.clients  # type: ignore[attr-defined]
    plan = clients.plan(job)
    weight = float(plan.mix[0])
    images, labels = clients.data.batch(plan.rows[0, : plan.lengths[0]])
    mixed = weight * images + (1 - weight) * images.flip(0)
    weights = {name: tensor.clone() for name, tensor in job.state.items()}
    for tensor in weights.values():
        tensor.requires_grad_(tensor.is_floating_point())

    def logits(size: str) -> Tensor:
        model = federation.split.build(size).train()
        own = {name: weights[name] for name in model.state_dict()}
        answer: Tensor = functional_call(model, own, (mixed,))
        return answer

    def mixed_loss(answer: Tensor) -> Tensor:
        own, other = F.cross_entropy(answer, labels), F.cross_entropy(answer, labels.flip(0))
        return weight * own + (1 - weight) * other

    teacher, student = logits(largest), logits(smallest)
    of_student = 0.7 * mixed_loss(student) + 0.3 * kl(teacher.detach(), student)
    (mixed_loss(teacher) + 0.6 * of_student).backward()
    assert 0.01 < weight < 0.99
    for name in federation.split.parameters_of(largest):
        torch.testing.assert_close(update.delta[name], -weights[name].grad, rtol=1e-3, atol=1e-5)  # type: ignore[operator]


@pytest.mark.parametrize(
    "overrides",
    [
        ("method.weight=0",),
        ("model.sizes=['resnet14']",),
    ],
    ids=["no-weight", "one-size"],
)
def test_without_students_it_is_fedavg(overrides: tuple[str, ...]) -> None:
    _, nested = after(2, *overrides, name="nested")
    plain = tuple(override for override in overrides if "method" not in override)
    _, fedavg = after(2, *plain, name="fedavg")
    assert same_bits(nested.state, fedavg.state)


def test_students_change_what_they_have_and_nothing_else_is_lost() -> None:
    """With labels only, a student's gradient reaches its own blocks; the others get the whole model's."""
    federation = Federation(tiny_config(*PLAIN, "method.name=nested", "method.distill=0"))
    learner = largest_in_training(federation)
    algorithm = federation.method.client
    assert isinstance(algorithm, NestedClient)
    (lacking,) = algorithm.lacking[federation.split.sizes[-1]]
    learner.inputs, learner.targets = learner.batches.next(8)
    gradients = []
    for weight in (0.0, 1.0):
        algorithm.settings = algorithm.settings.model_copy(update={"weight": weight})
        with learner.preserve_weights():
            learner.backward(algorithm.loss(learner))
        gradients.append({name: grad.clone() for name, grad in learner.grads.items()})
    whole, nested = gradients
    for name in whole:
        in_lacking_block = any(name.startswith(f"{block}.") for block in lacking)
        assert torch.equal(whole[name], nested[name]) == in_lacking_block, name


def test_sizes_inside_of_others() -> None:
    federation = Federation(tiny_config(*PLAIN, "method.name=nested"))
    assert lacking_blocks(federation.split, "resnet10") == []
    assert lacking_blocks(federation.split, "resnet14") == [frozenset({"layer3.1", "layer4.1"})]
    smallest, second = lacking_blocks(federation.split, "resnet18")
    assert smallest == {f"layer{stage}.1" for stage in (1, 2, 3, 4)}
    assert second == {"layer1.1", "layer2.1"}


@pytest.mark.parametrize(
    ("split", "overrides"),
    [
        ("grouped", ()),
        ("width", ("split.rates=[1,0.5]", "model.sizes=['resnet14']")),
        ("inclusive", ()),
    ],
)
def test_sizes_that_share_no_blocks_are_refused(split: str, overrides: tuple[str, ...]) -> None:
    """Also if their tensors have equal names at a client, as those of `grouped`."""
    config = tiny_config(*PLAIN, "method.name=nested", f"split.name={split}", *overrides)
    with pytest.raises(MotleyError) as raised:
        Federation(config)
    message = str(raised.value)
    assert f"split.name = '{split}': method.name = 'nested' needs a size" in message
    assert "Use split.name = 'depth' with sizes that share blocks" in message


class Towers(nn.Module):
    """A user's model: narrow blocks, and wide ones after them."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
        self.narrow = nn.Sequential(*(Residual(8) for _ in range(narrow)))
        self.widen = nn.Linear(8, 32)
        self.wide = nn.Sequential(*(Residual(32) for _ in range(wide)))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.wide(self.widen(self.narrow(self.stem(x)))))
        return answer


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(self.first(x).relu())
        return result


class FewNarrow(Towers):
    def __init__(self) -> None:
        super().__init__(1, 2)


class FewWide(Towers):
    def __init__(self) -> None:
        super().__init__(2, 1)


class Many(Towers):
    def __init__(self) -> None:
        super().__init__(2, 2)


def test_the_smallest_student_of_a_users_model_has_the_fewest_parameters() -> None:
    """Both smaller sizes lack one block, which is inferred."""
    sizes = [f"{__name__}:{model.__name__}" for model in (FewNarrow, FewWide, Many)]
    federation = Federation(tiny_config(*PLAIN, "method.name=nested", f"model.sizes={sizes}"))
    *_, many = federation.split.sizes
    students = [frozenset({"wide.1"}), frozenset({"narrow.1"})]
    assert lacking_blocks(federation.split, many) == students
    client = federation.method.client
    assert isinstance(client, NestedClient) and client.lacking[many] == students[:1]
    model, smaller = federation.split.build(many), FewWide()
    smaller.load_state_dict({name: model.state_dict()[name] for name in smaller.state_dict()})
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(logits_without(model, images, students[0]), smaller(images))


def test_a_check_of_models_tells_whether_they_can_be_nested() -> None:
    sizes = [f"{__name__}:{model.__name__}" for model in (FewNarrow, FewWide, Many)]
    split = Federation(tiny_config(*PLAIN, f"model.sizes={sizes}")).split
    few_narrow, few_wide, many = split.blueprints.values()
    assert uses({"few": few_wide, "many": many})["nested"] == ""
    assert "none of one, other is" in uses({"one": few_narrow, "other": few_wide})["nested"]


class Branched(nn.Module):
    """Its blocks are not behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def both(self, x: Tensor) -> Tensor:
        return self.blocks[0](x) + self.blocks[1](x)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.both(x))
        return answer


def test_a_model_that_cannot_be_run_without_a_block_is_refused() -> None:
    model = Branched()

    def both(model: Any, x: Tensor) -> Tensor:
        result: Tensor = model.both(x)
        return result

    stages = (Stage("both", both, ("blocks",)), Stage("head"))
    declare(model, ModelSpec(Branched, "branched", stages, ("blocks.0", "blocks.1"), head="head"))
    with pytest.raises(
        MotleyError, match=r"'large' cannot be run without the blocks \['blocks\.1'\]"
    ):
        check_removable(model, {"blocks.1"}, "large")
