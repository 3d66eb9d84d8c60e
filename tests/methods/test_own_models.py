"""Methods that exchange no weights: clients keep models of their own, which are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from motley.client.job import Job
from motley.config import resolve
from motley.core.errors import MotleyError
from motley.core.part import State, size_in_bytes, take
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Engine
from motley.federation import Federation
from motley.methods.fedmd import batches_of
from motley.models.projection import representation_and_answer
from motley.runs.checkpoint import load_checkpoint, save_checkpoint
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import chosen, refused, tiny_config
from tests.methods.turns import same_bits, seated

MLP = ("model.sizes=['mlp2','mlp3']", "model.mlp.hidden=6", "server.ema_decay=0")
UNRELATED = ("model.sizes=['cnn','mlp2']", "model.mlp.hidden=128")
QUICK = ("training.steps=2", "training.batch_size=8", "training.rounds=3", "evaluation.every=1")
OWN = ("local", "fedproto", "fd", "fedmd")
NAMES = ("Local", "FedProto", "FD", "FedMD")
PUBLIC = ("public.name=noise", "public.samples=40")


def played(
    federation: Federation, rounds: int, server: ServerState | None = None
) -> tuple[ServerState, list[RoundRecord]]:
    server = server or federation.initial_state()
    records = []
    for _ in range(rounds):
        server, record = federation.run_round(server)
        records.append(record)
    return server, records


def models_of(federation: Federation, server: ServerState) -> dict[int, State]:
    return {
        client: federation.client_model(server, client).state_dict()
        for client in server.client_state_rounds
    }


def scores_of(records: Sequence[RoundRecord]) -> list[Any]:
    return [
        (record.scores, record.metrics, record.bytes_up, record.bytes_down) for record in records
    ]


# ---- the runtime


@pytest.mark.parametrize("name", OWN)
def test_weights_are_sent_once_and_never_come_back(name: str) -> None:
    federation = Federation(tiny_config(*MLP, *QUICK, *chosen(name)))
    server = federation.initial_state()
    sent: set[int] = set()
    for _ in range(3):
        jobs = federation.jobs(server)
        for job in jobs:
            expected = (
                {} if job.client in sent else take(server.state, federation.split.part(job.size))
            )
            assert same_bits(job.state, expected)
        sent |= {job.client for job in jobs}
        after, record = federation.run_round(server)
        assert same_bits(after.state, server.state), "there is no global model that could change"
        down = sum(size_in_bytes(job.state) + size_in_bytes(job.broadcast) for job in jobs)
        asked = federation.method.server.evaluation_broadcast(after.method_state)
        assert record.bytes_down == down + len(jobs) * size_in_bytes(asked)
        assert record.bytes_up < 10_000
        server = after


@pytest.mark.parametrize("name", OWN)
def test_a_sizes_score_is_the_mean_over_the_rounds_clients(name: str) -> None:
    federation = Federation(tiny_config(*MLP, *QUICK, *chosen(name)))
    server, (*_, record) = played(federation, 2)
    accuracies: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for client in record.clients:
        model = federation.client_model(server, client)
        correct, loss, count = 0.0, 0.0, 0
        for images, labels in federation.evaluator.batches:
            logits = model(images).detach()
            correct += float((logits.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
        accuracies.setdefault(federation.sizes[client], []).append(correct / count)
        losses.setdefault(federation.sizes[client], []).append(loss / count)
    everybody = torch.tensor([accuracy for size in accuracies.values() for accuracy in size])
    spread = record.metrics["own-models/accuracy_std"]
    assert spread == pytest.approx(float(everybody.std(correction=0)), abs=1e-6)
    assert record.scores.keys() == accuracies.keys()
    for size, score in record.scores.items():
        assert score.accuracy == pytest.approx(sum(accuracies[size]) / len(accuracies[size]))
        assert score.loss == pytest.approx(sum(losses[size]) / len(losses[size]))
        assert len(score.class_accuracy) == 10


def test_all_clients_that_have_trained_can_be_evaluated() -> None:
    quick = (*MLP, *QUICK, "federation.clients_per_round=2", "method.name=local")
    all_of_them = Federation(tiny_config(*quick, "evaluation.clients=all"))
    server, (first, *_, last) = played(all_of_them, 3)
    assert len(first.clients) == 2 < len(server.client_state_rounds)
    asked = all_of_them.collections[0].jobs(server, last.clients)
    assert [job.client for job in asked] == sorted(server.client_state_rounds)
    assert "evaluation.clients = 'all': is for methods that exchange no weights" in refused(
        "evaluation.clients=all"
    )


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    "models", [MLP, (*UNRELATED, "server.ema_decay=0")], ids=["mlp", "cnn+mlp"]
)
def test_engines_and_a_resumed_run_agree(
    name: str, models: tuple[str, ...], tmp_path: Path
) -> None:
    """With dropout (the CNN), with two slots, and with models that share nothing."""
    settings = (*models, *QUICK, *chosen(name), "split.name=grouped")
    debug = Federation(tiny_config(*settings, "engine.name=debug"))
    plain, plain_records = played(debug, 3)

    first = Federation(tiny_config(*settings), client_state_folder=tmp_path / "clients")
    half, half_records = played(first, 2)
    first.engine.save_client_states(half.client_state_rounds)
    save_checkpoint(tmp_path / "checkpoints", half, keep=1)
    resumed = Federation(
        tiny_config(*settings, "engine.slots=2"), client_state_folder=tmp_path / "clients"
    )
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert saved is not None
    server, records = played(resumed, 1, resumed.to_device(saved))

    assert scores_of([*half_records, *records]) == scores_of(plain_records)
    assert same_bits(server.method_state, plain.method_state)
    models_there, models_here = models_of(debug, plain), models_of(resumed, server)
    assert models_there.keys() == models_here.keys()
    for client, model in models_there.items():
        assert same_bits(model, models_here[client])


class Breaking:
    """An engine in which client 0 sends NaN, or breaks its own model, in round 2."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, jobs: Sequence[Job], done: Done) -> list[Any]:
        updates = []
        for update in self.engine.train(jobs, done):
            assert isinstance(update, ClientUpdate)
            if update.client == 0 and jobs[0].round_number == 2:
                update.payload["means"][:] = torch.nan
            updates.append(update)
        return updates


def test_a_client_whose_update_was_rejected_continues_from_its_model_before() -> None:
    everybody = ("federation.clients_per_round=6", "method.name=fedproto")
    federation = Federation(tiny_config(*MLP, *QUICK, *everybody))
    server, _ = played(federation, 1)
    before = models_of(federation, server)
    engine, federation.engine = federation.engine, Breaking(federation.engine)  # type: ignore[assignment]
    server, record = federation.run_round(server)
    federation.engine = engine
    assert list(record.refused) == [0]
    assert server.client_state_rounds[0] == 1 and server.client_state_rounds[1] == 2
    after = models_of(federation, server)
    assert same_bits(after[0], before[0]) and not same_bits(after[1], before[1])
    server, record = federation.run_round(server)
    assert not record.refused and server.client_state_rounds[0] == 3


def test_a_model_that_is_not_finite_is_rejected_although_nobody_sees_it() -> None:
    """The loss of its only step is finite, and the weights after that step are not."""
    sgd = "training.optimizer={name='sgd', lr=1e38, weight_decay=1e3}"
    settings = ("training.steps=1", "method.name=local", sgd, "server.min_fraction=0")
    federation = Federation(tiny_config(*MLP, *QUICK, *settings))
    server, (record,) = played(federation, 1)
    assert set(record.refused.values()) == {"its loss is not finite."}
    assert len(record.refused) == 4 and not server.client_state_rounds and not record.scores


def test_there_is_no_global_model() -> None:
    federation = Federation(tiny_config(*MLP, *QUICK, "method.name=local"))
    server = federation.initial_state()
    with pytest.raises(MotleyError, match="there is no global model"):
        federation.evaluate(server.model)
    with pytest.raises(MotleyError, match="client 0 has no model yet"):
        federation.client_model(server, 0)
    fedavg = Federation(tiny_config(*MLP, *QUICK))
    with pytest.raises(MotleyError, match="clients have no models of their own"):
        fedavg.client_model(fedavg.initial_state(), 0)


@pytest.mark.parametrize("method", NAMES)
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("server.optimizer.name=adam", "server.optimizer.name = 'adam'"),
        ("server.lr=0.5", "server.lr = 0.5"),
        ("server.delta_scale=0.5", "server.delta_scale = 0.5"),
        ("server.weighting=samples", "server.weighting = 'samples'"),
        ("server.statistics.name=recalibrate", "server.statistics.name = 'recalibrate'"),
        ("uplink.noise=0.5", "uplink.noise = 0.5"),
        ("uplink.dtype=fp16", "uplink.dtype = 'fp16'"),
        ("privacy.clip=1", "privacy.clip = 1.0"),
    ],
)
def test_settings_without_effect_are_refused(method: str, setting: str, said: str) -> None:
    public = PUBLIC if method == "FedMD" else ()
    message = refused(f"method.name={method}", *public, setting)
    assert message.startswith(f"{said}: ") and "exchanges no weights" in message


def test_an_average_of_the_global_model_is_refused() -> None:
    message = refused("method.name=fedproto", "server.ema_decay=0.5")
    assert message == (
        "server.ema_decay = 0.5: 'fedproto' exchanges no weights, so there is no global model. "
        "Use server.ema_decay = 0.0."
    )


def test_parts_that_move_are_refused() -> None:
    moving = ("federation.size_assignment=dynamic", "method.name=local")
    with pytest.raises(MotleyError, match="its clients keep models of their own"):
        Federation(tiny_config(*MLP, *moving))


# ---- without their second term, all of them are local training


LOCAL = {
    "fedproto": ("method.weight=0",),
    "fd": ("method.gamma=0",),
    "fedmd": ("method.digest_epochs=0",),
}


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize(
    "models", [(), (*UNRELATED, "split.name=grouped")], ids=["resnets", "cnn+mlp"]
)
def test_without_its_term_a_method_is_local_training(name: str, models: tuple[str, ...]) -> None:
    ends = []
    for settings in ((*chosen(name), *LOCAL[name]), ("method.name=local",)):
        federation = Federation(tiny_config("server.ema_decay=0", *QUICK, *models, *settings))
        server, records = played(federation, 3)
        ends.append((models_of(federation, server), [record.scores for record in records]))
    (own, own_scores), (local, local_scores) = ends
    assert own_scores == local_scores
    for client, model in local.items():
        assert same_bits(own[client], model)


# ---- FedProto by hand


def test_fedprotos_loss_by_hand() -> None:
    federation = Federation(tiny_config(*MLP, *QUICK, "method.name=fedproto", "method.weight=0.3"))
    server, _ = played(federation, 1)
    known = torch.tensor([1.0] * 5 + [0.0] * 5)
    own = {"prototypes": torch.randn(10, 6), "known": known}
    server = ServerState(1, server.state, method_state=own)
    learner = seated(federation, federation.jobs(server)[0])
    learner.inputs, learner.targets = learner.batches.next(8)
    features, logits = representation_and_answer(learner.model, learner.inputs)
    total = 0.0
    for feature, label in zip(features.detach(), learner.targets.tolist(), strict=True):
        if label < 5:
            total += float((feature - own["prototypes"][label]).square().sum())
    expected = float(F.cross_entropy(logits.detach(), learner.targets)) + 0.3 * total / (8 * 6)
    assert float(federation.method.client.loss(learner).detach()) == pytest.approx(
        expected, rel=1e-5
    )


def test_prototypes_are_the_means_of_the_last_epoch() -> None:
    settings = ("method.name=fedproto", "training.epochs=2", "training.batch_size=16")
    federation = Federation(tiny_config(*MLP, *settings, "federation.clients=60"))
    server = federation.initial_state()
    job = federation.jobs(server)[0]
    learner = seated(federation, job)
    assert learner.total_steps == 2 * learner.epoch_steps > 2
    sums, counts = torch.zeros(10, 6), torch.zeros(10)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    learner.model.head.register_forward_pre_hook(  # type: ignore[union-attr,operator]
        lambda module, inputs: seen.append((inputs[0].detach().clone(), learner.targets.clone()))
    )
    for number, length in enumerate(learner.lengths):
        learner.step(length)
        learner.num_steps += 1
        if number >= learner.epoch_steps:
            features, targets = seen[-1]
            sums.index_add_(0, targets, features)
            counts.index_add_(0, targets, torch.ones(len(targets)))
    payload, _, _ = learner.result()
    present = counts > 0
    assert torch.equal(payload["weights"], present.float())
    expected = sums[present] / counts[present][:, None]
    torch.testing.assert_close(payload["means"][present], expected)
    assert not payload["means"][~present].any()
    examples = (learner.class_counts(10) > 0).float()
    assert torch.equal(examples, present.float()), "an epoch has every class that the client has"


def sent(client: int, means: list[list[float]], weights: list[float]) -> ClientUpdate:
    payload = {"means": torch.tensor(means), "weights": torch.tensor(weights)}
    return ClientUpdate(client=client, delta={}, payload=payload)


@pytest.mark.parametrize(("weighting", "second"), [("uniform", 3.0), ("samples", 3.5)])
def test_the_server_averages_prototypes_over_the_clients_that_have_the_class(
    weighting: str, second: float
) -> None:
    three = ("data.name=digits", "method.name=fedproto", f"method.weighting={weighting}")
    federation = Federation(tiny_config(*MLP, *three))
    rows = [[0.0] * 6 for _ in range(10)]
    one, other = [row[:] for row in rows], [row[:] for row in rows]
    one[0], one[1] = [1.0] * 6, [2.0] * 6
    other[1] = [4.0] * 6
    counted = weighting == "samples"
    updates = [
        sent(0, one, [5.0 if counted else 1.0, 1.0, *[0.0] * 8]),
        sent(1, other, [0.0, 3.0 if counted else 1.0, *[0.0] * 8]),
    ]
    before = {"prototypes": torch.full((10, 6), 9.0), "known": torch.zeros(10)}
    before["known"][2] = 1.0
    after = federation.method.server.update(before, {}, updates)
    assert after["prototypes"][0].tolist() == [1.0] * 6
    assert after["prototypes"][1].tolist() == [second] * 6
    assert after["prototypes"][2].tolist() == [9.0] * 6, "nobody has it: it keeps its prototype"
    assert after["known"].tolist() == [1.0, 1.0, 1.0, *[0.0] * 7]
    with pytest.raises(ValueError, match="'means' has shape"):
        federation.method.server.update(before, {}, [sent(0, [[1.0] * 6], [1.0])])


def test_the_nearest_prototypes_accuracy_is_reported() -> None:
    federation = Federation(tiny_config(*MLP, *QUICK, "method.name=fedproto"))
    server, (*_, record) = played(federation, 2)
    prototypes, known = server.method_state["prototypes"], server.method_state["known"] > 0
    accuracies = []
    for client in record.clients:
        model = federation.client_model(server, client)
        right, count = 0, 0
        for images, labels in federation.evaluator.batches:
            features, _ = representation_and_answer(model, images)
            distances = (features[:, None] - prototypes).square().sum(-1)
            distances[:, ~known] = torch.inf
            right += int((distances.argmin(1) == labels).sum())
            count += len(labels)
        accuracies.append(right / count)
    expected = sum(accuracies) / len(accuracies)
    assert record.metrics["method/prototype_accuracy"] == pytest.approx(expected, abs=1e-6)


def test_features_of_different_widths_are_refused_by_name() -> None:
    sizes = ("model.sizes=['cnn','mlp2']", "model.mlp.hidden=200", "method.name=FedProto")
    with pytest.raises(MotleyError) as raised:
        Federation(tiny_config(*sizes))
    assert "cnn 128, mlp2 200" in str(raised.value)
    assert "model.projection = 200" in str(raised.value)
    federation = Federation(tiny_config(*sizes, *QUICK, "model.projection=16"))
    assert federation.initial_state().method_state["prototypes"].shape == (10, 16)


# ---- FD by hand


@pytest.mark.parametrize("outputs", ["probabilities", "logits"])
def test_fds_loss_and_averages_by_hand(outputs: str) -> None:
    settings = (f"method.outputs={outputs}", "method.gamma=0.7", "method.name=fd")
    federation = Federation(tiny_config(*MLP, *QUICK, *settings))
    learner = seated(federation, federation.jobs(federation.initial_state())[0])
    means = torch.randn(10, 10).softmax(1)
    learner.broadcast["means"].copy_(means)
    learner.broadcast["known"].copy_(torch.tensor([1.0] * 6 + [0.0] * 4))
    learner.inputs, learner.targets = learner.batches.next(8)
    logits = learner.model(learner.inputs).detach()
    total, sums = 0.0, torch.zeros(10, 10)
    for row, label in zip(logits, learner.targets.tolist(), strict=True):
        sums[label] += row if outputs == "logits" else row.softmax(0)
        if label < 6:
            teacher = means[label].softmax(0) if outputs == "logits" else means[label]
            total -= float((teacher * row.log_softmax(0)).sum())
    expected = float(F.cross_entropy(logits, learner.targets)) + 0.7 * total / 8
    assert float(federation.method.client.loss(learner).detach()) == pytest.approx(
        expected, rel=1e-5
    )
    learner.num_steps = 1
    payload, _, _ = learner.result()
    counts = torch.bincount(learner.targets, minlength=10)
    torch.testing.assert_close(payload["means"], sums / counts.clamp(min=1)[:, None])
    assert torch.equal(payload["weights"], (counts > 0).float())


@pytest.mark.parametrize(
    ("average", "to_0", "to_1", "to_2"),
    [
        ("others", [4.0, 0.0], [2.0, 6.0], [3.0, 6.0]),
        ("all", [3.0, 6.0], [3.0, 6.0], [3.0, 6.0]),
    ],
)
def test_a_client_gets_the_mean_of_the_others(
    average: str, to_0: list[float], to_1: list[float], to_2: list[float]
) -> None:
    """Clients 0 and 1 took part, and only client 0 has class 1."""
    settings = ("method.name=fd", f"method.average={average}")
    federation = Federation(tiny_config(*MLP, *settings))
    server = federation.method.server
    one = [[2.0] * 10, [6.0] * 10, *[[0.0] * 10 for _ in range(8)]]
    other = [[4.0] * 10, *[[0.0] * 10 for _ in range(9)]]
    updates = [sent(1, other, [1.0, *[0.0] * 9]), sent(0, one, [1.0, 1.0, *[0.0] * 8])]
    own = server.update({}, {}, updates)
    for client, expected in enumerate((to_0, to_1, to_2)):
        broadcast = server.broadcast(own, {}, 2, client)
        assert broadcast["means"][:2, 0].tolist() == expected
        assert broadcast["known"][:2].tolist() == [float(value > 0) for value in expected]
    first = server.broadcast({}, {}, 1, 0)
    assert not first["known"].any() and first["means"].shape == (10, 10)


# ---- FedMD by hand


def test_fedmd_digests_by_the_mean_absolute_difference() -> None:
    sgd = ("training.optimizer={name='sgd', lr=0.5}", "method.digest_batch_size=64")
    federation = Federation(tiny_config(*MLP, *QUICK, *PUBLIC, "method.name=fedmd", *sgd))
    public = federation.method.info.public
    assert public is not None
    own = {"rows": torch.tensor([3, 0, 7]), "logits": torch.randn(3, 10)}
    server = federation.initial_state()
    server = ServerState(1, server.state, method_state=own)
    job = federation.jobs(server)[0]
    assert same_bits(job.broadcast, own)

    model = federation.split.build(job.size)
    model.load_state_dict(job.state)
    model.train()
    images = public.images(own["rows"])
    loss = (model(images) - own["logits"]).abs().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.5 * parameter.grad

    learner = seated(federation, job)  # the client digests before its first step
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(learner.state[name], tensor)
    assert float(learner.scratch["digest"]["loss"]) == pytest.approx(float(loss.detach()))


def test_fedmds_consensus_is_the_mean_of_logits_on_the_rounds_images() -> None:
    settings = ("method.name=fedmd", "method.samples=12", "method.digest_batch_size=5")
    federation = Federation(tiny_config(*MLP, *QUICK, *PUBLIC, *settings))
    public = federation.method.info.public
    assert public is not None
    server, drawn = None, []
    for _ in range(2):
        server, (record,) = played(federation, 1, server)
        rows = server.method_state["rows"]
        assert len(set(rows.tolist())) == 12 and max(rows.tolist()) < 40
        drawn.append(sorted(rows.tolist()))
        logits = []
        for client in record.clients:
            model = federation.client_model(server, client)
            logits.append(model(public.images(rows)).detach())
        torch.testing.assert_close(server.method_state["logits"], torch.stack(logits).mean(0))
    assert drawn[0] != drawn[1], "every round has its own images"
    wrong = ClientUpdate(client=0, delta={}, payload={"logits": torch.zeros(3, 10)})
    with pytest.raises(ValueError, match="'logits' has shape"):
        federation.method.server.update({}, {}, [wrong])


def test_a_last_batch_of_one_image_joins_the_one_before() -> None:
    assert batches_of(9, 4) == [slice(0, 4), slice(4, 9)]
    assert batches_of(10, 4) == [slice(0, 4), slice(4, 8), slice(8, 10)]
    assert batches_of(3, 4) == [slice(0, 3)]


# ---- unrelated architectures


def test_no_split_need_be_named_for_unrelated_architectures() -> None:
    values: list[dict[str, Any]] = [{"method": {"name": "fd"}, "model": {"sizes": ["cnn", "mlp2"]}}]
    assert resolve("", values).split.name == "grouped"
    values[0]["method"]["name"] = "fedavg"
    assert resolve("", values).split.name == "depth"
    values[0] |= {"split": {"name": "homogeneous"}, "method": {"name": "fd"}}
    assert resolve("", values).split.name == "homogeneous"


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_names_run_unrelated_architectures_on_the_quickstart(name: str) -> None:
    public = PUBLIC if name == "FedMD" else ()
    federation = Federation(tiny_config(*UNRELATED, *QUICK, f"method.name={name}", *public))
    assert federation.config.split.name == "grouped" and not federation.config.server.ema_decay
    _, (record,) = played(federation, 1)
    assert not record.refused and record.scores
