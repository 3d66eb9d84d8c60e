"""The plan of a local update: which examples are in which batch, and what its loss is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from motley.checks import check_task
from motley.client.training import AdamSettings, Plan, SGDSettings, TrainingSettings, make_plan
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.data import Examples
from motley.data.device import DRAWS, MORE_DRAWS
from motley.data.partition import Partition
from motley.federation import Federation
from motley.methods.base import ClientAlgorithm, Method, Requirements
from motley.methods.step import Step
from motley.models.inputs import TokenShape
from motley.tasks import CLASSIFICATION, TASKS
from tests.conftest import tiny_config


def plan(samples: int, *, num_draws: int = 0, smallest: int = 1, **values: Any) -> Plan:
    """Return the plan of a client whose examples are numbered from 1000, in no order."""
    examples = 1000 + np.random.default_rng(0).permutation(samples)
    which = {
        name: values.pop(name, default)
        for name, default in (("seed", 1), ("round_number", 2), ("client", 3))
    }
    return make_plan(
        TrainingSettings(**values),
        examples,
        smallest=smallest,
        num_draws=num_draws,
        **which,
    )


def batches(made: Plan) -> list[list[int]]:
    return [made.rows[step, :length].tolist() for step, length in enumerate(made.lengths)]


@pytest.mark.parametrize(
    ("samples", "smallest", "drop_last", "lengths"),
    [
        (0, 1, False, []),
        (1, 1, False, [1]),
        (1, 2, False, []),
        (1, 2, True, []),
        (2, 2, True, [2]),
        (3, 1, False, [3]),
        (3, 1, True, [3]),
        (4, 1, False, [4]),
        (5, 1, False, [4, 1]),
        (5, 2, False, [4]),
        (5, 1, True, [4]),
        (6, 2, False, [4, 2]),
        (6, 2, True, [4]),
        (8, 2, True, [4, 4]),
        (11, 2, False, [4, 4, 3]),
        (11, 2, True, [4, 4]),
    ],
)
def test_batches_of_an_epoch(
    samples: int, smallest: int, drop_last: bool, lengths: list[int]
) -> None:
    training = TrainingSettings(batch_size=4, drop_last=drop_last)
    assert training.epoch_lengths(samples, smallest) == lengths
    made = plan(samples, smallest=smallest, batch_size=4, drop_last=drop_last)
    assert made.lengths == lengths
    assert made.rows.shape == (len(lengths), 4)


@pytest.mark.parametrize(
    ("epochs", "steps", "epoch_steps", "turn"),
    [
        (1.0, 0, 7, 7),
        (3.0, 0, 7, 21),
        (0.5, 0, 8, 4),
        (0.1, 0, 3, 1),
        (0.01, 0, 1, 1),
        (2.25, 0, 4, 9),
        (5.0, 3, 7, 3),
        (1.0, 30, 7, 30),
        (5.0, 0, 0, 0),
        (1.0, 9, 0, 0),
    ],
)
def test_steps_of_a_turn(epochs: float, steps: int, epoch_steps: int, turn: int) -> None:
    assert TrainingSettings(epochs=epochs, steps=steps).local_steps(epoch_steps) == turn


@settings(derandomize=True, deadline=None)
@given(
    samples=st.integers(0, 40),
    batch_size=st.integers(2, 12),
    epochs=st.sampled_from([0.3, 0.5, 1.0, 1.5, 2.0, 3.0]),
    steps=st.sampled_from([0, 0, 1, 7]),
    drop_last=st.booleans(),
    smallest=st.integers(1, 2),
)
def test_an_epoch_holds_every_example_once(
    samples: int, batch_size: int, epochs: float, steps: int, drop_last: bool, smallest: int
) -> None:
    made = plan(
        samples,
        smallest=smallest,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        drop_last=drop_last,
    )
    own = set(range(1000, 1000 + samples))
    training = TrainingSettings(batch_size=batch_size, drop_last=drop_last)
    epoch = training.epoch_lengths(samples, smallest)
    taken = batches(made)
    assert all(smallest <= len(batch) <= batch_size for batch in taken)
    for first in range(0, len(taken), max(len(epoch), 1)):
        examples = [example for batch in taken[first : first + len(epoch)] for example in batch]
        assert len(examples) == len(set(examples))
        assert set(examples) <= own
        if first + len(epoch) <= len(taken):
            left_out = samples - len(examples)
            assert left_out == samples - sum(epoch)
            assert left_out < max(smallest, batch_size if drop_last else smallest)
    if samples >= smallest:
        assert taken, "whoever can train does"
    if not drop_last and samples % batch_size != 1:
        assert sum(epoch) in (samples, 0)


def test_what_is_unused_of_a_row_is_zero() -> None:
    made = plan(11, batch_size=4)
    assert made.rows.dtype == torch.int64
    assert made.rows[2, :3].min() >= 1000
    assert made.rows[2, 3:].tolist() == [0]


def test_every_epoch_has_an_order_of_its_own() -> None:
    taken = batches(plan(12, batch_size=4, epochs=3.0))
    first, second, third = taken[:3], taken[3:6], taken[6:]
    for epoch in (first, second, third):
        assert sorted(example for batch in epoch for example in batch) == list(range(1000, 1012))
    assert len({str(first), str(second), str(third)}) == 3


def test_what_drop_last_leaves_out_is_not_always_the_same() -> None:
    taken = batches(plan(7, batch_size=4, epochs=8.0, drop_last=True))
    left_out = {frozenset(range(1000, 1007)) - set(batch) for batch in taken}
    assert len(left_out) > 4


# ---- keyed


def same(one: Plan, other: Plan) -> bool:
    draws = (one.draws is None) == (other.draws is None) and (
        one.draws is None or (other.draws is not None and torch.equal(one.draws, other.draws))
    )
    return one.lengths == other.lengths and torch.equal(one.rows, other.rows) and draws


def test_a_plan_depends_on_seed_round_and_client_alone() -> None:
    base = plan(50, batch_size=8, num_draws=DRAWS)
    torch.manual_seed(99)
    np.random.seed(99)
    plan(7, batch_size=8, client=9)
    assert same(plan(50, batch_size=8, num_draws=DRAWS), base)
    for other in ({"seed": 2}, {"round_number": 3}, {"client": 4}, {"seed": 3, "client": 1}):
        different = plan(50, batch_size=8, num_draws=DRAWS, **other)
        assert not torch.equal(different.rows, base.rows)
        assert different.draws is not None
        assert base.draws is not None
        assert not torch.equal(different.draws, base.draws)


def test_augmentation_does_not_change_the_batches() -> None:
    plain, augmented = plan(50, batch_size=8), plan(50, batch_size=8, num_draws=DRAWS)
    assert plain.draws is None
    assert torch.equal(plain.rows, augmented.rows)


def test_longer_turns_begin_like_shorter_ones() -> None:
    short, long = plan(20, batch_size=8, epochs=1.0), plan(20, batch_size=8, epochs=2.5)
    assert batches(long)[: len(short.lengths)] == batches(short)


def test_draws_are_one_vector_per_example_in_0_to_1() -> None:
    made = plan(50, batch_size=8, num_draws=DRAWS)
    assert made.draws is not None
    assert made.draws.shape == (7, 8, DRAWS)
    assert made.draws.dtype == torch.float32
    assert made.draws.min() >= 0
    assert made.draws.max() < 1
    assert made.draws.unique().numel() > 0.99 * made.draws.numel()


def test_more_draws_leave_the_first_ones_as_they_are() -> None:
    few = plan(50, batch_size=8, num_draws=DRAWS).draws
    many = plan(50, batch_size=8, num_draws=DRAWS + MORE_DRAWS).draws
    assert few is not None
    assert many is not None
    assert torch.equal(many[..., :DRAWS], few)
    assert many.unique().numel() > 0.99 * many.numel()


# ---- mixup, label smoothing and logit adjustment


def test_mixup_draws_one_weight_per_batch_and_changes_no_batch() -> None:
    mixed, plain = plan(800, batch_size=8, mixup=0.2), plan(800, batch_size=8)
    assert plain.mix is None
    assert mixed.mix is not None
    assert torch.equal(mixed.rows, plain.rows)
    assert mixed.mix.shape == (100,)
    # The density of Beta(0.2, 0.2) is highest at 0 and 1; its variance is 1 / (4 * 1.4).
    assert ((mixed.mix < 0.1) | (mixed.mix > 0.9)).float().mean() > 0.5
    assert mixed.mix.var().item() == pytest.approx(1 / 5.6, abs=0.05)


def one_client(*overrides: str) -> tuple[Federation, ClientUpdate]:
    """Return a federation whose clients take one SGD step, and a client's update."""
    one_step = ("training.steps=1", "training.optimizer.name=sgd", "training.optimizer.lr=1")
    federation = Federation(tiny_config(*one_step, "model.resnet.norm=group", *overrides))
    job = federation.job(federation.initial_state(), 1, 0)
    (update,) = federation.engine.train([job], lambda client: None)
    assert isinstance(update, ClientUpdate)
    return federation, update


def expected_update(federation: Federation, loss: Callable[[nn.Module, Plan], Tensor]) -> State:
    """Return the delta of one SGD step with rate 1 on a loss: minus its gradient."""
    job = federation.job(federation.initial_state(), 1, 0)
    clients = federation.engine.clients  # type: ignore[attr-defined]
    model = federation.split.build(job.size)
    model.load_state_dict(job.state)
    value = loss(model, clients.plan(job))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(value, parameters)
    return {name: -gradient for name, gradient in zip(names, gradients, strict=True)}


def test_mixup_is_the_mean_of_two_inputs_and_of_two_losses() -> None:
    federation, update = one_client("training.mixup=1.0")

    def loss(model: nn.Module, made: Plan) -> Tensor:
        assert made.mix is not None
        inputs, targets = federation.engine.clients.data.batch(made.rows[0, : made.lengths[0]])  # type: ignore[attr-defined]
        weight = float(made.mix[0])
        logits = model(weight * inputs + (1 - weight) * inputs.flip(0))
        own = F.cross_entropy(logits, targets)
        return weight * own + (1 - weight) * F.cross_entropy(logits, targets.flip(0))

    for name, delta in expected_update(federation, loss).items():
        torch.testing.assert_close(update.delta[name], delta, atol=1e-5, rtol=1e-4)


def test_label_smoothing_is_in_the_training_loss_only() -> None:
    federation, update = one_client("training.label_smoothing=0.3")

    def loss(model: nn.Module, made: Plan) -> Tensor:
        inputs, targets = federation.engine.clients.data.batch(made.rows[0, : made.lengths[0]])  # type: ignore[attr-defined]
        logs = model(inputs).log_softmax(1)
        own = logs.gather(1, targets[:, None]).squeeze(1)
        return -(0.7 * own + 0.3 * logs.mean(1)).mean()

    for name, delta in expected_update(federation, loss).items():
        torch.testing.assert_close(update.delta[name], delta, atol=1e-5, rtol=1e-4)
    plain = Federation(tiny_config("model.resnet.norm=group"))
    state = plain.initial_state().state
    assert federation.evaluate(state) == plain.evaluate(state)


def test_logit_adjustment_adds_the_logarithms_of_the_clients_shares_of_the_classes() -> None:
    skewed = ("data.partition.name=dirichlet", "data.partition.alpha=0.1")
    federation, update = one_client("training.logit_adjustment=0.7", *skewed)
    clients = federation.engine.clients  # type: ignore[attr-defined]
    labels = clients.data.targets[torch.from_numpy(clients.partition.of(0))]
    counts = torch.bincount(labels, minlength=10)
    assert (counts == 0).any(), "a class that the client does not have"
    shares = counts.clamp(min=0.5) / counts.clamp(min=0.5).sum()

    def loss(model: nn.Module, made: Plan) -> Tensor:
        inputs, targets = clients.data.batch(made.rows[0, : made.lengths[0]])
        return F.cross_entropy(model(inputs) + 0.7 * shares.log(), targets)

    for name, delta in expected_update(federation, loss).items():
        torch.testing.assert_close(update.delta[name], delta, atol=1e-5, rtol=1e-4)


def test_logit_adjustment_is_for_the_clients_own_examples() -> None:
    federation, _ = one_client("training.logit_adjustment=1")
    learner = federation.engine.clients.learner("resnet10")  # type: ignore[attr-defined]
    logits, targets = torch.randn(4, 10), torch.arange(4)
    assert torch.equal(learner.task_loss(logits, targets), F.cross_entropy(logits, targets))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("training.logit_adjustment=1", "method.name=spherefed"),
            r"logit_adjustment = 1: has no effect on the loss of method 'spherefed'",
        ),
        (
            ("training.label_smoothing=0.1", "method.name=spherefed"),
            r"label_smoothing = 0.1: has no effect on the loss of method 'spherefed'",
        ),
        (
            ("training.mixup=0.2", "method.name=fedproto"),
            r"mixup = 0.2: method 'fedproto' is defined",
        ),
        (
            ("training.label_smoothing=0.1", "task.loss=torch.nn.functional:mse_loss"),
            r"label_smoothing = 0.1: is for the loss 'cross-entropy'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        Federation(tiny_config("server.ema_decay=0", *settings))


class PlainLoss(Method):
    """A user's method with torch's loss."""

    class Client(ClientAlgorithm):
        def loss(self, step: Step) -> Tensor:
            return F.cross_entropy(step.model(step.inputs), step.targets)

    requirements = Requirements(own_training=True)


@pytest.mark.parametrize(
    "setting", ["label_smoothing = 0.1", "mixup = 0.2", "logit_adjustment = 1"]
)
@pytest.mark.parametrize("engine", ["debug", "local"])
def test_a_method_that_does_not_use_the_tasks_loss_is_noticed(setting: str, engine: str) -> None:
    method = ("method.name=tests.engine.test_training:PlainLoss", f"engine.name={engine}")
    federation = Federation(tiny_config("training.steps=1", *method, f"training.{setting}"))
    with pytest.raises(MotleyError, match=rf"training.{setting}: has no effect, because"):
        federation.run_round(federation.initial_state())
    plain = Federation(tiny_config("training.steps=1", *method))
    _, record = plain.run_round(plain.initial_state())
    assert not record.refused


def test_tokens_have_no_classes_to_adjust() -> None:
    tokens = Examples(
        np.zeros((40, 6), dtype=np.int64), np.arange(40) % 4, input_shape=TokenShape(6, 9)
    )
    with pytest.raises(MotleyError, match=r"logit_adjustment = 0.5: is for classes"):
        check_task(tiny_config("training.logit_adjustment=0.5"), TASKS["next-token"], tokens, 4)


def test_tokens_cannot_be_mixed() -> None:
    tokens = Examples(
        np.zeros((40, 6), dtype=np.int64), np.arange(40) % 4, input_shape=TokenShape(6, 9)
    )
    with pytest.raises(MotleyError, match=r"training.mixup = 0.5: mixes numbers"):
        check_task(tiny_config("training.mixup=0.5"), CLASSIFICATION, tokens, 4)


# ---- clients with next to nothing


def test_a_batch_size_below_what_a_model_can_train_on_is_refused() -> None:
    with pytest.raises(MotleyError, match=r"training\.batch_size = 1"):
        Federation(tiny_config("training.batch_size=1"))
    Federation(tiny_config("training.batch_size=1", "model.resnet.norm=group"))
    assert plan(3, batch_size=1, smallest=1).lengths == [1, 1, 1]


@pytest.mark.parametrize("engine", ["local", "debug"])
@pytest.mark.parametrize(
    ("norm", "steps"),
    [("batch", {1: 1, 2: 1, 3: 2, 4: 1, 5: 1}), ("group", {0: 1, 1: 2, 2: 1, 3: 2, 4: 1, 5: 1})],
)
def test_one_example_more_or_less(engine: str, norm: str, steps: dict[int, int]) -> None:
    """BatchNorm cannot train on one example: a client that has no more is idle, and a remainder of one is left out."""
    config = tiny_config(
        f"engine.name={engine}",
        f"model.resnet.norm={norm}",
        "federation.clients_per_round=6",
        "training.batch_size=16",
    )
    federation = Federation(config)
    sizes = (1, 17, 16, 18, 2, 5)
    clients = federation.engine.clients  # type: ignore[attr-defined]
    clients.partition = Partition(np.arange(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
    server = federation.initial_state()
    uploads = federation.engine.train(federation.jobs(server), lambda client: None)
    _, record = federation.run_round(server)
    assert {upload.client: upload.num_steps for upload in uploads} == steps
    assert {upload.client: upload.num_examples for upload in uploads} == {
        client: sizes[client] for client in steps
    }
    assert record.idle == [client for client in range(6) if client not in steps]
    assert record.refused == {}


# ---- learning rates and optimisers


def test_the_learning_rate_of_a_round() -> None:
    training = TrainingSettings(lr_decay=0.5, optimizer=AdamSettings(lr=0.8))
    assert [training.lr(number) for number in (1, 2, 4)] == [0.8, 0.4, 0.1]
    assert TrainingSettings().lr(500) == TrainingSettings().optimizer.lr


def test_a_parameter_costs_an_optimizer_as_many_tensors_as_it_keeps() -> None:
    assert [AdamSettings().moments, SGDSettings().moments, SGDSettings(momentum=0.9).moments] == [
        2,
        0,
        1,
    ]


def test_the_learning_rate_drops_after_the_rounds_named() -> None:
    training = TrainingSettings(lr_milestones=(2, 4), lr_gamma=0.5, lr_decay=0.9)
    rates = [training.lr(number) / training.optimizer.lr for number in range(1, 6)]
    assert rates == pytest.approx([1, 0.9, 0.81 * 0.5, 0.729 * 0.5, 0.6561 * 0.25])
