"""FedGen against torch's own modules and optimizer, and where it must be FedAvg."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.randomness import key
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.methods.fedgen import FedGenSettings
from motley.methods.fedgen_generator import draw_labels
from tests.methods.turns import after, federation_of, jobs_of, same_bits, seated

MLP = ("model.sizes=['mlp1','mlp2']", "model.mlp.hidden=12", "method.hidden=16")
CLASSES = 10


def generator_of(own: dict[str, Tensor]) -> nn.ModuleDict:
    """Return the server's generator as modules."""
    hidden, width = own["generator/hidden.weight"], own["generator/features.weight"].shape[0]
    modules = nn.ModuleDict(
        {
            "hidden": nn.Linear(hidden.shape[1], hidden.shape[0]),
            "norm": nn.BatchNorm1d(hidden.shape[0]),
            "features": nn.Linear(hidden.shape[0], width),
        }
    )
    names = [n for n in modules.state_dict() if not n.endswith("num_batches_tracked")]
    modules.load_state_dict({n: own[f"generator/{n}"] for n in names}, strict=False)
    return modules


def output_of(modules: nn.ModuleDict, labels: Tensor, noise: Tensor) -> Tensor:
    inputs = torch.cat([noise, F.one_hot(labels, CLASSES).float()], 1)
    return modules["features"](modules["norm"](modules["hidden"](inputs)).relu())


def updates_of(federation: Federation, number: int) -> list[ClientUpdate]:
    """Return two clients' updates with made-up heads and counts."""
    random = torch.Generator().manual_seed(number)
    updates = []
    for client, size in ((0, "mlp1"), (5, "mlp2")):
        part = federation.split.part(size)
        state = federation.initial_state().state
        delta = {
            local: torch.randn(state[piece.name].shape, generator=random)
            for local, piece in part.items()
        }
        counts = torch.tensor([float((client + label) % 4) for label in range(CLASSES)])
        counts[7] = 0
        update = ClientUpdate(
            client=client,
            delta=delta,
            payload={"counts": counts},
            part=part,
            size=size,
            round_number=number,
        )
        updates.append(update)
    return updates


@pytest.mark.parametrize("teacher", ["losses", "logits"])
def test_the_generator_trains_as_torchs_modules_do(teacher: str) -> None:
    """Over two rounds, so that Adam's moments are kept and the learning rate decays."""
    federation = federation_of(
        *MLP, "method.generator_steps=3", f"method.teacher={teacher}", name="fedgen"
    )
    server = federation.method.server
    state = federation.initial_state().state
    own = server.init()
    modules = generator_of(own)
    adam = torch.optim.Adam(modules.parameters(), lr=3e-4, weight_decay=1e-2)
    for number in (1, 2):
        updates = updates_of(federation, number)
        heads = [
            (
                state["head.weight"] + u.delta["head.weight"],
                state["head.bias"] + u.delta["head.bias"],
            )
            for u in updates
        ]
        counts = torch.stack([u.payload["counts"] for u in updates])
        random = torch.Generator().manual_seed(key(1, "generator", number))
        for _ in range(3):
            labels = draw_labels(counts.sum(0), 16, random)
            noise = torch.rand((16, 64), generator=random)
            z = output_of(modules.train(), labels, noise)
            logits = [z @ weight.t() + bias for weight, bias in heads]
            loss = torch.zeros(())
            if teacher == "logits":
                loss = F.cross_entropy((logits[0] + logits[1]) / 2, labels)
            else:
                for client, given in enumerate(logits):
                    for row, label in enumerate(labels):
                        share = counts[client, label] / counts[:, label].sum()
                        loss = loss - share * given[row].log_softmax(0)[label] / 16
            pairs = [
                (noise[i] - noise[j]).square().mean() * (z[i] - z[j]).abs().mean()
                for i in range(16)
                for j in range(16)
            ]
            loss = loss + torch.exp(-torch.stack(pairs).mean())
            adam.zero_grad()
            loss.backward()
            adam.step()
        for group in adam.param_groups:
            group["lr"] *= 0.98
        own = server.update(own, state, updates)
        for name, tensor in modules.state_dict().items():
            # The bias before batch norm has no gradient but rounding errors, which Adam scales up.
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(own[f"generator/{name}"], tensor, rtol=1e-4, atol=2e-5)


def test_a_clients_loss_is_the_papers() -> None:
    federation, server = after(1, *MLP, "method.batch=8", name="fedgen")
    learner = seated(federation, jobs_of(federation, server)[0])
    images, labels = learner.batches.next(16)
    learner.inputs, learner.targets = images, labels
    torch.manual_seed(5)
    loss = federation.method.client.loss(learner)
    modules = generator_of(learner.broadcast).eval()
    torch.manual_seed(5)
    drawn = torch.randint(CLASSES, (8,))
    head = learner.model.get_submodule("head")
    with torch.no_grad():
        logits = learner.model(images)
        generated = head(output_of(modules, drawn, torch.rand(8, 64)))
        target = head(output_of(modules, labels, torch.rand(16, 64))).softmax(1)
        divergence = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
        expected = F.cross_entropy(logits, labels)
        expected = expected + 8 / 16 * 9.8 * F.cross_entropy(generated, drawn) + 9.8 * divergence
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(loss.detach(), F.cross_entropy(logits, labels))
    learner.backward(loss)
    assert learner.grads["head.weight"].any() and learner.grads["layers.0.weight"].any()


def test_the_first_round_is_fedavgs_and_the_second_is_not() -> None:
    for rounds, same in ((1, True), (2, False)):
        _, plain = after(rounds, name="fedavg")
        _, other = after(rounds, "method.hidden=16", name="fedgen")
        assert same_bits(other.state, plain.state) == same


def test_weights_decay_by_round_to_a_floor() -> None:
    settings = FedGenSettings(alpha=10, beta=0.001)
    assert settings.weight_at(settings.alpha, 1) == 10
    assert settings.weight_at(settings.alpha, 3) == pytest.approx(10 * 0.98**2)
    assert settings.weight_at(settings.beta, 1000) == 1e-4


def test_only_labels_that_somebody_has_are_drawn() -> None:
    counts = torch.tensor([0.0, 3.0, 0.0, 1.0, 200.0, 0.0])
    labels = draw_labels(counts, 3000, torch.Generator().manual_seed(1))
    assert torch.bincount(labels, minlength=6).div(1000).round().tolist() == [0, 1, 0, 1, 1, 0]


def test_counts_are_those_of_the_examples_in_the_clients_batches() -> None:
    federation = federation_of(*MLP, "training.epochs=1", name="fedgen")
    jobs = jobs_of(federation, federation.initial_state())
    labels = torch.from_numpy(federation.dataset.train.targets).long()
    for update in federation.engine.train(jobs, lambda client: None):
        rows = federation.partition.of(update.client)
        expected = torch.bincount(labels[rows], minlength=CLASSES).float()
        assert torch.equal(update.payload["counts"], expected)


def test_the_server_refuses_counts_of_another_length() -> None:
    federation = federation_of(*MLP, name="fedgen")
    updates = updates_of(federation, 1)
    updates[0].payload["counts"] = torch.ones(3)
    with pytest.raises(ValueError, match="'counts' has shape"):
        federation.method.server.update(
            federation.method.server.init(), federation.initial_state().state, updates
        )


@pytest.mark.parametrize(
    "overrides",
    [
        ("split.name=width", "split.rates=[1,0.5]", "model.sizes=['resnet14']"),
        ("split.name=grouped", "model.sizes=['mlp1','resnet10']", "model.mlp.hidden=12"),
    ],
    ids=["width", "families"],
)
def test_unlike_heads_are_refused(overrides: tuple[str, ...]) -> None:
    with pytest.raises(MotleyError, match=r"have different heads .* one generator"):
        federation_of(*overrides, name="fedgen")
