"""FedDF and Fed-ET against FedAvg, against plain torch code, and against numbers by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.client.job import Job
from motley.core.errors import MotleyError
from motley.core.part import State, take
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Engine
from motley.federation import Federation
from motley.methods.distillation import (
    SGD,
    Adam,
    ServerModels,
    SizeTrainer,
    cosine,
    draw_batches,
    kl_divergence,
)
from motley.methods.fedet import Consensus, consensus, transfer_loss
from tests.conftest import tiny_config
from tests.methods.turns import after, federation_of, same_bits

NOISE = ("public.name=noise", "public.samples=40")
STEPS = ("method.steps=3", "method.batch_size=16")
GROUPED = ("split.name=grouped",)
MLPS = ("model.sizes=['mlp1','mlp2','mlp3']", "model.mlp.hidden=12")


# ---- the same as FedAvg without distillation


@pytest.mark.parametrize("split", ["grouped", "depth"])
def test_feddf_without_steps_is_fedavg(split: str) -> None:
    split_name = f"split.name={split}"
    _, plain = after(2, split_name, name="fedavg")
    _, distilled = after(2, split_name, *NOISE, "method.steps=0", name="feddf")
    assert same_bits(distilled.state, plain.state)


def test_fedet_without_steps_over_a_shared_head_is_fedavg() -> None:
    _, plain = after(2, "split.name=depth", name="fedavg")
    _, transferred = after(2, "split.name=depth", *NOISE, "method.steps=0", name="fedet")
    assert same_bits(transferred.state, plain.state)


def test_fedet_without_steps_averages_per_size_and_gives_all_sizes_the_clients_mean_head() -> None:
    rounds = ("training.rounds=1", "federation.clients_per_round=4", *GROUPED)
    federation, plain = after(1, *rounds, name="fedavg")
    _, transferred = after(1, *rounds, *NOISE, "method.steps=0", name="fedet")
    sizes = [federation.sizes[client] for client in federation.sample(1)]
    heads = [f"{size}/fc.{kind}" for size in federation.split.sizes for kind in ("weight", "bias")]
    for name, tensor in transferred.state.items():
        if name not in heads:
            assert torch.equal(tensor, plain.state[name]), name
            continue
        mean = sum(plain.state[f"{size}/{name.partition('/')[2]}"] for size in sizes) / len(sizes)
        torch.testing.assert_close(tensor, mean)


@pytest.mark.parametrize("name", ["feddf", "fedet"])
def test_clients_train_with_mixup_as_in_fedavg(name: str) -> None:
    mixup = ("split.name=depth", "training.mixup=0.4")
    _, plain = after(2, *mixup, name="fedavg")
    _, distilled = after(2, *mixup, *NOISE, "method.steps=0", name=name)
    assert same_bits(distilled.state, plain.state)
    _, unmixed = after(2, "split.name=depth", name="fedavg")
    assert not same_bits(distilled.state, unmixed.state)
    after(1, *mixup, *NOISE, *STEPS, name=name)


# ---- formulas by hand


def test_the_divergence_is_that_of_numpy_and_zero_for_the_same_logits() -> None:
    numbers = np.random.default_rng(0)
    teacher, student = numbers.normal(size=(2, 5, 4))
    p = np.exp(teacher / 2) / np.exp(teacher / 2).sum(1, keepdims=True)
    q = np.exp(student / 2) / np.exp(student / 2).sum(1, keepdims=True)
    expected = 4 * (p * np.log(p / q)).sum(1)
    ours = kl_divergence(torch.tensor(teacher), torch.tensor(student), temperature=2.0)
    np.testing.assert_allclose(ours.numpy(), expected)
    logits = torch.tensor(student, requires_grad=True)
    teachers = torch.stack([logits.detach()] * 3)
    kl_divergence(teachers.mean(0), logits).sum().backward()
    assert logits.grad is not None and float(logits.grad.abs().max()) < 1e-15


def test_identical_teachers_and_student_leave_the_student_where_it_is() -> None:
    """With SGD: Adam would turn rounding errors into whole steps."""
    federation = federation_of(*GROUPED, *NOISE, *MLPS, name="feddf")
    state = federation.initial_state().state
    public = federation.method.info.public
    assert public is not None
    split, models = federation.split, ServerModels(federation.split)
    batches = draw_batches(40, 4, 16, seed=1, round_number=1, device=torch.device("cpu"))
    part = split.part("mlp2")
    teacher = models.logits("mlp2", take(state, part), public.images(batches.distinct))

    def loss(logits: Tensor, targets: State) -> Tensor:
        return kl_divergence(targets["logits"], logits).mean()

    targets = {"logits": teacher.detach()}
    trainer = SizeTrainer(models, split.parameters, loss)
    trained, _ = trainer.train(state, {"mlp2": part}, public, batches, targets, SGD(0.9), [0.1] * 4)
    for name, tensor in state.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-7)


def test_the_consensus_is_that_of_numpy() -> None:
    """Three clients, three images: a dispute, agreement, and a client without an opinion."""
    logits = np.array(
        [
            [[4.0, 0.0, -1.0], [2.0, 1.0, 0.0], [0.0, 3.0, 0.0]],
            [[0.0, 1.5, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
            [[0.0, 0.0, 2.0], [1.0, 0.9, 0.8], [0.0, 1.0, 0.5]],
        ]
    )
    variance = logits.var(axis=2)
    weights = variance / variance.sum(0)
    labels = (weights[:, :, None] * logits).sum(0).argmax(1)
    ours = consensus(torch.tensor(logits))
    assert ours.labels.tolist() == labels.tolist() == [0, 0, 1]
    assert ours.disputed.tolist() == [1, 0, 0]
    # On the first image, clients 1 and 2 disagree.
    shares = variance[1:, 0] / variance[1:, 0].sum()
    expected = shares[0] * logits[1, 0] + shares[1] * logits[2, 0]
    np.testing.assert_allclose(ours.diversity[0].numpy(), expected)
    assert ours.diversity[1:].abs().sum() == 0


def test_images_without_dispute_add_no_diversity_loss() -> None:
    teacher = Consensus(
        torch.tensor([2, 0]),
        torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 0.0]]),
        torch.tensor([1.0, 0]),
    )
    logits = torch.tensor([[0.3, 0.1, 0.9], [2.0, 0.0, 1.0]])

    def log_softmax(row: Sequence[float]) -> np.ndarray:
        values = np.array(row)
        return values - np.log(np.exp(values).sum())

    first, second = log_softmax([0.3, 0.1, 0.9]), log_softmax([2.0, 0.0, 1.0])
    target = log_softmax([0.0, 3.0, 1.0])
    cross_entropy = -(first[2] + second[0]) / 2
    divergence = (np.exp(target) * (target - first)).sum() / 2
    ours = transfer_loss(logits, teacher, diversity=0.4)
    np.testing.assert_allclose(float(ours), cross_entropy + 0.4 * divergence, rtol=1e-6)


def test_every_image_is_used_once_per_pass_and_the_round_decides_the_order() -> None:
    cpu = torch.device("cpu")
    batches = draw_batches(30, 6, 10, seed=1, round_number=4, device=cpu)
    assert sorted(batches.rows[:3].flatten().tolist()) == list(range(30))
    assert torch.equal(batches.distinct[batches.positions], batches.rows)
    again = draw_batches(30, 6, 10, seed=1, round_number=4, device=cpu)
    other = draw_batches(30, 6, 10, seed=1, round_number=5, device=cpu)
    assert torch.equal(batches.rows, again.rows) and not torch.equal(batches.rows, other.rows)
    short = draw_batches(5, 2, 10, seed=1, round_number=1, device=cpu)
    assert short.rows.shape == (2, 5)


# ---- against plain torch


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9])
def test_the_optimizers_are_torchs(momentum: float | None) -> None:
    numbers = torch.Generator().manual_seed(1)
    start = {"a": torch.randn(3, 4, generator=numbers), "b": torch.randn(5, generator=numbers)}
    ours = {name: tensor.clone() for name, tensor in start.items()}
    theirs = [nn.Parameter(tensor.clone()) for tensor in start.values()]
    adam = momentum is None
    torchs = torch.optim.Adam(theirs) if adam else torch.optim.SGD(theirs, 0.1, momentum or 0.0)
    optimizer = Adam() if momentum is None else SGD(momentum)
    for step in range(4):
        lr = cosine(0.1, step, 4)
        torchs.param_groups[0]["lr"] = lr
        grads = {n: torch.randn(t.shape, generator=numbers) for n, t in start.items()}
        for parameter, grad in zip(theirs, grads.values(), strict=True):
            parameter.grad = grad.clone()
        torchs.step()
        optimizer.step(ours, grads, lr)
    for tensor, parameter in zip(ours.values(), theirs, strict=True):
        torch.testing.assert_close(tensor, parameter.detach())


class Watched:
    """An engine that keeps the jobs of the last round and its updates."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: Sequence[Job] = []
        self.updates: list[ClientUpdate] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        self.jobs, self.updates = jobs, self.engine.train(jobs, done)
        return self.updates


@pytest.mark.parametrize("name", ["feddf", "fedet"])
def test_the_record_has_the_mean_loss_of_the_servers_steps(name: str) -> None:
    federation = federation_of(*GROUPED, *NOISE, *STEPS, *MLPS, "method.lr=0.05", name=name)
    server, losses = federation.initial_state(), []
    for _ in range(2):
        server, record = federation.run_round(server)
        losses.append(record.metrics["post-process/distillation_loss"])
    assert 0 < losses[0] < 5
    if name == "fedet":
        assert 0 <= record.metrics["post-process/disputed"] <= 1


def one_round(name: str, *overrides: str) -> tuple[Federation, dict[str, State], State]:
    """Return a federation, the clients' trained states by client and size, and the state after."""
    federation = federation_of(*GROUPED, *NOISE, *STEPS, *overrides, name=name)
    federation.engine = watched = Watched(federation.engine)  # type: ignore[assignment]
    server, _ = federation.run_round(federation.initial_state())
    trained = {}
    for job in watched.jobs:
        (update,) = [u for u in watched.updates if u.client == job.client]
        state = {n: tensor + update.delta[n] for n, tensor in job.state.items()}
        trained[f"{job.client}/{job.size}"] = state
    return federation, trained, server.state


def loaded(federation: Federation, size: str, state: State) -> nn.Module:
    model = copy.deepcopy(federation.split.build(size)).eval()
    model.load_state_dict(state)
    return model


def public_logits(federation: Federation, trained: dict[str, State], images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack(
            [
                loaded(federation, client.partition("/")[2], state)(images)
                for client, state in trained.items()
            ]
        )


def mean_of(trained: dict[str, State], size: str) -> State:
    states = [state for client, state in trained.items() if client.endswith(f"/{size}")]
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(tensor.dtype)
        for name, tensor in states[0].items()
    }


def all_images(federation: Federation) -> Tensor:
    public = federation.method.info.public
    assert public is not None
    return public.images(torch.arange(len(public)))


def assert_same_models(federation: Federation, state: State, size: str, model: nn.Module) -> None:
    ours = take(state, federation.split.part(size))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=2e-5, msg=f"{size} {name}")


def test_feddf_is_the_papers_algorithm_in_plain_torch() -> None:
    federation, trained, state = one_round("feddf", *MLPS, "method.temperature=2")
    images = all_images(federation)
    ensemble = public_logits(federation, trained, images).mean(0)
    batches = draw_batches(40, 3, 16, federation.config.seed, 1, torch.device("cpu"))
    for size in {client.partition("/")[2] for client in trained}:
        student = loaded(federation, size, mean_of(trained, size))
        optimizer = torch.optim.Adam(student.parameters(), lr=0.001)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
        for rows in batches.rows:
            optimizer.zero_grad()
            log_probabilities = F.log_softmax(student(images[rows]) / 2, 1)
            targets = F.softmax(ensemble[rows] / 2, 1)
            (4 * F.kl_div(log_probabilities, targets, reduction="batchmean")).backward()
            nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            optimizer.step()
            schedule.step()
        assert_same_models(federation, state, size, student)


def test_fedet_is_the_papers_algorithm_in_plain_torch() -> None:
    federation, trained, state = one_round("fedet", *MLPS, "method.diversity=0.5")
    images = all_images(federation)
    logits = public_logits(federation, trained, images).numpy()
    variance = logits.var(2)
    labels = ((variance / variance.sum(0))[:, :, None] * logits).sum(0).argmax(1)
    dissent = variance * (logits.argmax(2) != labels)
    assert (dissent.sum(0) > 0).any(), "the case has disputed images"
    sums = np.where(dissent.sum(0) > 0, dissent.sum(0), 1)
    diversity = torch.tensor(((dissent / sums)[:, :, None] * logits).sum(0)).float()
    disputed = torch.tensor(dissent.sum(0) > 0)
    sizes = {client.partition("/")[2] for client in trained}
    assert "mlp3" in sizes
    start = mean_of(trained, "mlp3")
    for name in ("head.weight", "head.bias"):
        start[name] = torch.stack([state[name] for state in trained.values()]).mean(0)
    server = loaded(federation, "mlp3", start)
    optimizer = torch.optim.SGD(server.parameters(), lr=0.005, momentum=0.9)
    batches = draw_batches(40, 3, 16, federation.config.seed, 1, torch.device("cpu"))
    for rows in batches.rows:
        optimizer.zero_grad()
        outputs = server(images[rows])
        loss = F.cross_entropy(outputs, torch.tensor(labels)[rows])
        masked = disputed[rows]
        targets = F.softmax(diversity[rows][masked], 1)
        log_probabilities = F.log_softmax(outputs[masked], 1)
        divergence = F.kl_div(log_probabilities, targets, reduction="sum") / len(rows)
        (loss + 0.5 * divergence).backward()
        optimizer.step()
    assert_same_models(federation, state, "mlp3", server)
    for size in sizes - {"mlp3"}:
        small = loaded(federation, size, mean_of(trained, size))
        small.load_state_dict(
            {n: server.state_dict()[n] for n in ("head.weight", "head.bias")}, strict=False
        )
        assert_same_models(federation, state, size, small)


# ---- sizes that share parts, batch norm, other splits


def test_the_gradients_of_sizes_that_share_a_layer_are_added_up() -> None:
    federation = federation_of("split.name=depth", *NOISE, *MLPS, name="feddf")
    split, models = federation.split, ServerModels(federation.split)
    state = federation.initial_state().state
    public = federation.method.info.public
    assert public is not None
    batches = draw_batches(40, 1, 8, seed=1, round_number=1, device=torch.device("cpu"))
    parts = {size: split.part(size) for size in ("mlp1", "mlp3")}

    def loss(logits: Tensor, targets: State) -> Tensor:
        return logits.square().mean()

    trainer = SizeTrainer(models, split.parameters, loss)
    trained, _ = trainer.train(state, parts, public, batches, {}, SGD(0.0), [0.1])
    images = public.images(batches.rows[0])
    expected: State = {}
    for size, part in parts.items():
        model = loaded(federation, size, take(state, part))
        model(images).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            moved = expected.get(part[name].name, state[part[name].name])
            expected[part[name].name] = moved - 0.1 * parameter.grad
    for name, tensor in expected.items():
        torch.testing.assert_close(trained[name], tensor)


@pytest.mark.parametrize("name", ["feddf", "fedet"])
def test_running_statistics_stay_or_follow_the_public_images(name: str) -> None:
    buffers = {}
    for statistics in ("frozen", "adapt"):
        settings = (*GROUPED, *NOISE, *STEPS, f"method.statistics={statistics}")
        federation, server = after(1, *settings, name=name)
        buffers[statistics] = {
            n: t for n, t in server.state.items() if n.endswith(("running_mean", "tracked"))
        }
    _, plain = after(1, *GROUPED, name="fedavg")
    for buffer, tensor in buffers["frozen"].items():
        assert torch.equal(tensor, plain.state[buffer])
    largest = federation.split.smallest_first[-1]
    adapted = [n for n in buffers["adapt"] if not torch.equal(buffers["adapt"][n], plain.state[n])]
    assert adapted and (name == "feddf" or all(n.startswith(largest) for n in adapted))


@pytest.mark.parametrize("channels", ["leading", "rolling", "random"])
def test_feddf_distills_into_parts_in_width(channels: str) -> None:
    width = ("model.sizes=['resnet10']", "split.name=width", f"split.channels={channels}")
    rates = ("split.rates=[1,0.5,0.25]",)
    _, plain = after(1, *width, *rates, name="fedavg")
    _, distilled = after(1, *width, *rates, *NOISE, *STEPS, name="feddf")
    assert not same_bits(distilled.state, plain.state)
    assert all(torch.isfinite(tensor).all() for tensor in distilled.state.values())


def test_statistics_of_channels_that_move_cannot_adapt() -> None:
    width = ("model.sizes=['resnet10']", "split.name=width", "split.channels=rolling", *NOISE)
    with pytest.raises(MotleyError, match=r"method.statistics = 'adapt': the channels of a size"):
        federation_of(*width, "split.rates=[1,0.5]", "method.statistics=adapt", name="feddf")


def test_fedet_needs_classifiers_of_one_shape() -> None:
    sizes = ("model.sizes=['resnet10','mlp2']", "model.mlp.hidden=12", *GROUPED, *NOISE, *STEPS)
    message = r"method.name = 'fedet': the classifiers of resnet10, mlp2 have different shapes"
    with pytest.raises(MotleyError, match=message):
        federation_of(*sizes, name="fedet")
    _, server = after(1, *sizes, "model.projection=8", name="fedet")
    state = server.state
    assert torch.equal(state["resnet10/fc.classify.weight"], state["mlp2/head.classify.weight"])
    assert state["resnet10/fc.project.0.weight"].shape != state["mlp2/head.project.0.weight"].shape


def test_the_papers_names_stand_for_the_grouped_split() -> None:
    for name, method in (("FedET", "fedet"), ("FedDF", "feddf")):
        config = tiny_config(f"method.name={name}", *NOISE)
        assert (config.method.name, config.split.name) == (method, "grouped")
