"""Private tensors (FedPer, LG-FedAvg, FedBN), FedRep's two phases and Ditto's personal model."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from motley.cli.plan import costs_in
from motley.client.job import Job
from motley.client.learner import Learner
from motley.core.errors import MotleyError
from motley.core.part import State, size_in_bytes, take
from motley.core.tensors import swap_
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Engine
from motley.export.loading import load
from motley.federation import Federation
from motley.methods import Step
from motley.runs.checkpoint import load_checkpoint, save_checkpoint
from motley.runs.run import start_run
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.splits import SplitSettings
from motley.splits.depth import Depth
from tests.conftest import refused, tiny_config
from tests.methods.turns import same_bits, seated

MLP = ("model.sizes=['mlp2','mlp3']", "model.mlp.hidden=6", "server.ema_decay=0")
ONE_MLP = ("model.sizes=['mlp2']", "model.mlp.hidden=6", "split.name=homogeneous")
QUICK = ("training.steps=2", "training.batch_size=8", "training.rounds=3", "evaluation.every=1")
SGD = ("training.optimizer={name='sgd', lr=0.1}",)
EVERYBODY = ("federation.clients_per_round=6",)
WIDTH = ("model.sizes=['resnet10']", "split.name=width", "split.rates=[1,0.5]")
CASES: dict[str, tuple[str, ...]] = {
    "FedPer": (*MLP, "method.name=FedPer"),
    "LG-FedAvg": (*MLP, "method.name=LG-FedAvg"),
    "FedBN": ("model.sizes=['resnet10','resnet14']", "method.name=FedBN"),
    "FedRep": (*MLP, "method.name=FedRep", "method.head_epochs=0.1"),
    "Ditto": (*MLP, "method.name=Ditto"),
    "names": (*MLP, "split.private=['layers.0','head.bias']"),
    "fedprox": (*MLP, "method.name=fedprox", "split.private=head"),
    "scaffold": (*MLP, "method.name=scaffold", "split.private=head"),
    "scaffold-weights": (
        *MLP,
        "method.name=scaffold",
        "method.initial=weights",
        "method.divide_by=sampled",
        "split.private=head",
    ),
    "fednova": (*MLP, "method.name=fednova", "split.private=head"),
    "moon": (*MLP, "method.name=moon", "split.private=head"),
    "feddyn": (*MLP, "method.name=feddyn", "split.private=head"),
    "fedspeed": (*MLP, "method.name=fedspeed", "split.private=head"),
    "fedsam": (*MLP, "method.name=fedsam", "split.private=head"),
    "inco": (
        "model.sizes=['resnet14','resnet18']",
        "split.private=head,normalization",
        "server.inco.variant=official",
    ),
    "grouped": (*MLP, "split.name=grouped", "split.private=head"),
    "width": (*WIDTH, "split.private=head,normalization"),
    "exits": (
        "model.sizes=['resnet14']",
        "method.name=DepthFL",
        "split.cuts=[2,3,6]",
        "split.rates=[1,1,1]",
        "split.private=head",
    ),
    "ema": ("model.sizes=['mlp2','mlp3']", "server.ema_decay=0.5", "split.private=head"),
    "half": (*MLP, "uplink.dtype=fp16", "split.private=head"),
    "optimizer": (*MLP, "server.optimizer.name=adam", "split.private=head"),
}


def federation_of(*overrides: str, folder: Path | None = None) -> Federation:
    return Federation(tiny_config(*QUICK, *overrides), client_state_folder=folder)


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


def batches_of(learner: Learner) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches that a client will train on."""
    batches = [learner.batches.next(length) for length in learner.lengths]
    learner.batches.rewind()
    return batches


class Watched:
    """An engine that keeps all jobs and all answers to them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: list[Job] = []
        self.updates: list[ClientUpdate] = []
        self.answers: list[State] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, jobs: Sequence[Job], done: Done) -> list[Any]:
        self.jobs += jobs
        updates: list[Any] = list(self.engine.train(jobs, done))
        self.updates += updates
        return updates

    def collect(self, jobs: Sequence[Job]) -> list[Any]:
        self.jobs += jobs
        collections: list[Any] = list(self.engine.collect(jobs))
        self.answers += [collection.values for collection in collections]
        return collections


def watched(federation: Federation) -> Watched:
    engine = Watched(federation.engine)
    federation.engine = engine  # type: ignore[assignment]
    return engine


# ---- what is private stays with the client


@pytest.mark.parametrize("case", [case for case in CASES if case != "Ditto"])
def test_private_tensors_are_in_no_job_no_update_and_no_server_state(case: str) -> None:
    federation = federation_of(*CASES[case])
    engine, private = watched(federation), federation.split.private
    assert all(private.values())
    server, records = played(federation, 2)
    assert not any(record.refused for record in records)
    assert all(record.scores for record in records)
    sent = [(job.size, {**job.state, **job.broadcast}) for job in engine.jobs]
    for update in engine.updates:
        sent.append((federation.sizes[update.client], {**update.delta, **update.payload}))
    assert len(engine.updates) == 8 and len(engine.answers) == 8
    for size, tensors in sent:
        assert not private[size] & tensors.keys()
        assert not any("private" in name for name in tensors)
    sums = {"loss", "examples", "metrics", "correct", "seen"}
    assert all(values.keys() == sums for values in engine.answers)
    every_name = {name for names in private.values() for name in names}
    kept = [server.state, server.method_state, *server.stage_states.values(), server.ema or {}]
    for state in kept:
        assert not any(name.removeprefix("first/") in every_name for name in state)
        assert not any(name.partition("/")[2] in every_name for name in state)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case in ("inco", "exits"))) for case in CASES],
)
def test_debug_slots_and_a_resumed_run_agree(case: str, tmp_path: Path) -> None:
    debug = federation_of(*CASES[case], "engine.name=debug")
    plain, plain_records = played(debug, 3)
    first = federation_of(*CASES[case], folder=tmp_path / "clients")
    half, half_records = played(first, 1)
    first.engine.save_client_states(half.client_state_rounds)
    save_checkpoint(tmp_path / "checkpoints", half, keep=1)
    resumed = federation_of(*CASES[case], "engine.slots=2", folder=tmp_path / "clients")
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert saved is not None
    server, records = played(resumed, 2, resumed.to_device(saved))
    assert same_bits(server.state, plain.state)
    assert same_bits(server.method_state, plain.method_state)
    scores = [record.scores for record in (*half_records, *records)]
    assert scores == [record.scores for record in plain_records]
    there, here = models_of(debug, plain), models_of(resumed, server)
    assert there.keys() == here.keys()
    for client, model in there.items():
        assert same_bits(model, here[client])


def test_a_private_head_stays_with_a_client_until_it_trains_again() -> None:
    federation = federation_of(*CASES["FedPer"])
    first, _ = played(federation, 1)
    before = models_of(federation, first)
    second, (record,) = played(federation, 1, first)
    after = models_of(federation, second)
    initial = federation.split.initial_private("mlp2", federation.config.seed)
    for client, model in before.items():
        head = {name: model[name] for name in initial}
        now = {name: after[client][name] for name in initial}
        assert same_bits(head, now) == (client not in record.clients)
        shared = take(second.state, federation.split.part(federation.sizes[client]))
        assert same_bits({n: after[client][n] for n in shared}, shared)
    assert any(client not in record.clients for client in before)


def test_clients_start_from_the_initial_private_tensors_of_their_size() -> None:
    federation = federation_of(*CASES["FedPer"], *EVERYBODY)
    server = federation.initial_state()
    for client in (0, 5):
        size = federation.sizes[client]
        learner = seated(federation, federation.job(server, 1, client))
        initial = federation.split._initialized(size, federation.config.seed).state_dict()
        for name in federation.split.private[size]:
            assert torch.equal(learner.received[name], initial[name])


def test_a_narrow_size_starts_from_the_leading_channels_of_the_whole_model() -> None:
    shared = federation_of(*WIDTH)
    private = federation_of(*WIDTH, "split.private=head")
    size = shared.split.sizes[-1]
    whole = take(shared.initial_state().state, shared.split.part(size))
    initial = private.split.initial_private(size, 1)
    assert initial.keys() == {"fc.weight", "fc.bias"}
    assert same_bits(initial, {name: whole[name] for name in initial})


class Breaking:
    """An engine in which client 0 sends NaN in round 2."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, jobs: Sequence[Job], done: Done) -> list[Any]:
        updates: list[Any] = list(self.engine.train(jobs, done))
        if jobs[0].round_number == 2:
            next(iter(updates[0].delta.values()))[:] = torch.nan
        return updates


@pytest.mark.parametrize("case", ["FedPer", "Ditto"])
def test_a_rejected_update_rolls_the_clients_own_tensors_back(case: str) -> None:
    federation = federation_of(*CASES[case], *EVERYBODY)
    server, _ = played(federation, 1)
    memory = federation.engine.clients.states.store  # type: ignore[attr-defined]
    before = dict(memory.get(0, 1))
    federation.engine = Breaking(federation.engine)  # type: ignore[assignment]
    server, (record,) = played(federation, 1, server)
    assert list(record.refused) == [0] and server.client_state_rounds[0] == 1
    assert same_bits(dict(memory.get(0, server.client_state_rounds[0])), before)
    server, (record,) = played(federation, 1, server)
    assert not record.refused and server.client_state_rounds[0] == 3


def test_private_tensors_that_are_not_finite_are_rejected_although_nobody_sees_them() -> None:
    """The loss of the only step is finite, and the private bias after it is not."""
    refused = ("training.steps=1", "server.min_fraction=0", *SGD)
    federation = federation_of(*ONE_MLP, "split.private=head.bias", *refused)
    clients = federation.engine.clients  # type: ignore[attr-defined]
    first = clients.states.initial_private("mlp2")
    first["head.bias"][:] = torch.tensor([3e38] * 10)
    clients.training = clients.training.model_copy(
        update={"optimizer": clients.training.optimizer.model_copy(update={"weight_decay": -1e3})}
    )
    _, (record,) = played(federation, 1)
    assert set(record.refused.values()) == {"its loss is not finite."}


def test_a_payload_with_private_names_does_not_leave_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = federation_of(*CASES["scaffold"])

    def leak(step: Step) -> tuple[State, State]:
        return {"head.bias": step.params["head.bias"]}, step.client_state

    monkeypatch.setattr(federation.method.client, "finish", leak)
    with pytest.raises(MotleyError, match=r"\['head.bias'\] as its payload, .* private tensors"):
        federation.run_round(federation.initial_state())


# ---- what is shared is FedAvg's


def test_the_first_body_of_fedper_is_fedavgs_bit_for_bit() -> None:
    """All heads are the same before the first round, so all clients train alike."""
    ends = []
    for private in ("[]", "head"):
        federation = federation_of(*ONE_MLP, f"split.private={private}")
        engine = watched(federation)
        server, _ = played(federation, 1)
        ends.append((server.state, {update.client: update.delta for update in engine.updates}))
    (whole, whole_deltas), (body, body_deltas) = ends
    assert body.keys() == whole.keys() - {"head.weight", "head.bias"}
    assert same_bits(body, {name: whole[name] for name in body})
    for client, delta in body_deltas.items():
        assert same_bits(delta, {name: whole_deltas[client][name] for name in delta})


class FixedHead(nn.Module):
    """A body that learns, and a head that does not: the heads of all clients stay the same."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
        )
        self.head = nn.Linear(8, classes).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x))
        return logits


def fixed_head(input_shape: tuple[int, ...], num_classes: int) -> FixedHead:
    return FixedHead(math.prod(input_shape), num_classes)


def test_fedper_on_a_shared_body_is_fedavg_on_that_body_bit_for_bit() -> None:
    """Over several rounds, with all clients: nothing but the place of the heads differs."""
    ends = []
    for private in ("[]", "head"):
        federation = federation_of(
            f"model.sizes=['{__name__}:fixed_head']",
            "split.name=homogeneous",
            f"split.private={private}",
            *EVERYBODY,
            *SGD,
        )
        server, _ = played(federation, 3)
        ends.append(server.state)
    whole, body = ends
    assert body.keys() == whole.keys() - {"head.weight", "head.bias"}
    assert same_bits(body, {name: whole[name] for name in body})
    first = federation.initial_state().state
    assert not any(torch.equal(body[name], first[name]) for name in body), "nothing was learned"


def test_later_bodies_are_the_mean_of_the_clients_bodies() -> None:
    federation = federation_of(*CASES["FedPer"])
    before, _ = played(federation, 1)
    engine = watched(federation)
    after, _ = played(federation, 1, before)
    for name, tensor in after.state.items():
        deltas = [u.delta[name] for u in engine.updates if name in u.delta]
        total = deltas[0] * 1.0
        for delta in deltas[1:]:
            total = total.add(delta, alpha=1.0)
        assert torch.equal(tensor, before.state[name] + total / float(len(deltas)))


def test_nothing_private_is_fedavg() -> None:
    ends = [played(federation_of(*MLP, *more), 2)[0] for more in ((), ("split.private=[]",))]
    assert same_bits(ends[0].state, ends[1].state)


@pytest.mark.parametrize("name", ["FedBN", "FedPer", "LG-FedAvg"])
def test_with_one_client_it_is_fedavg_up_to_the_rounding_of_deltas(name: str) -> None:
    one = (
        "model.sizes=['resnet10']",
        "split.name=homogeneous",
        "federation.clients=1",
        "federation.clients_per_round=1",
        "server.ema_decay=0",
        "split.normalization_statistics=shared",
        "training.optimizer={name='sgd', lr=0.01}",
    )
    fedavg, _ = played(federation_of(*one), 2)
    federation = federation_of(*one, f"method.name={name}")
    server, _ = played(federation, 2)
    model = federation.client_model(server, 0).state_dict()
    assert model.keys() == fedavg.state.keys()
    for key, tensor in fedavg.state.items():
        torch.testing.assert_close(model[key], tensor, rtol=1e-4, atol=1e-6)


def test_fedprox_does_not_pull_at_private_tensors() -> None:
    federation = federation_of(*ONE_MLP, "split.private=head", "method.name=fedprox", *SGD)
    learner = seated(federation, federation.jobs(federation.initial_state())[0])
    learner.inputs, learner.targets = learner.batches.next(8)
    learner.backward(federation.method.client.loss(learner))
    plain = {name: gradient.clone() for name, gradient in learner.grads.items()}
    for parameter in learner.params.values():
        parameter.add_(1.0)
    federation.method.client.after_backward(learner)
    for name, gradient in learner.grads.items():
        pull = 0.0 if name.startswith("head") else 0.1
        torch.testing.assert_close(gradient, plain[name] + pull)


def test_heads_of_different_widths_do_not_keep_bodies_apart() -> None:
    """Sizes whose last layers do not fit can share the layers before them."""

    def build(outputs: int) -> nn.Module:
        layers = {"body": nn.Linear(4, 3), "out": nn.Linear(3, outputs)}
        return nn.Sequential(OrderedDict(layers))

    builds = {"two": partial(build, 2), "five": partial(build, 5)}
    split = Depth(builds, SplitSettings(private=("out",)))
    assert split.meta_state.keys() == {"body.weight", "body.bias"}
    assert split.initial_private("five", 1)["out.weight"].shape == (5, 3)
    with pytest.raises(MotleyError, match=r"'two' declares no head .*: 'body', 'out'\."):
        Depth(builds, SplitSettings(private=("head",)))


# ---- scores


@pytest.mark.parametrize("case", ["FedPer", "FedBN", "Ditto", "ema"])
def test_a_score_is_the_mean_over_the_rounds_clients_models(case: str) -> None:
    federation = federation_of(*CASES[case])
    server, (*_, record) = played(federation, 2)
    accuracies: dict[str, list[float]] = {}
    for client in record.clients:
        model = federation.client_model(server, client)
        correct, count = 0, 0
        for images, labels in federation.evaluator.batches:
            correct += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
        accuracies.setdefault(federation.sizes[client], []).append(correct / count)
    assert record.scores.keys() == accuracies.keys()
    for size, score in record.scores.items():
        assert score.accuracy == pytest.approx(sum(accuracies[size]) / len(accuracies[size]))
    assert "own-models/accuracy_std" in record.metrics


def test_clients_that_never_trained_are_left_out() -> None:
    few = ("federation.clients_per_round=2", "evaluation.clients=all")
    federation = federation_of(*CASES["FedPer"], *few)
    engine = watched(federation)
    server, _ = played(federation, 2)
    last = [job.client for job in engine.jobs if job.collection == "evaluation"]
    assert last[-len(server.client_state_rounds) :] == sorted(server.client_state_rounds)
    federation.engine = engine.engine
    never = next(c for c in range(6) if c not in server.client_state_rounds)
    with pytest.raises(MotleyError, match=f"client {never} has no model yet"):
        federation.client_model(server, never)
    with pytest.raises(MotleyError, match=r"split.private = \['head'\]: there is no global model"):
        federation.evaluate(server.model)


def test_a_size_without_private_tensors_has_its_part_as_its_own_model() -> None:
    """Only the deeper size has the layer that is private."""
    federation = federation_of(*MLP, *EVERYBODY, "split.private=['layers.2']")
    server, (*_, record) = played(federation, 2)
    private = federation.split.private
    assert not private["mlp2"] and private["mlp3"]
    client = federation.sizes.index("mlp2")
    model = federation.client_model(server, client)
    same_bits(model.state_dict(), take(server.model, federation.split.evaluated("mlp2", 2)))
    correct = 0
    for images, labels in federation.evaluator.batches:
        correct += int((model(images).argmax(1) == labels).sum())
    accuracy = correct / len(federation.dataset.test)
    assert record.scores["mlp2"].accuracy == pytest.approx(accuracy, abs=1e-6)


def test_the_global_model_of_ditto_can_be_evaluated_too() -> None:
    federation = federation_of(*CASES["Ditto"])
    server, (record,) = played(federation, 1)
    scores = federation.evaluate(server.model, 1)
    assert scores.keys() == {"mlp2", "mlp3"}
    assert scores["mlp2"].loss != record.scores["mlp2"].loss


def test_recalibration_works_on_shared_statistics() -> None:
    settings = ("model.sizes=['resnet10']", "split.name=homogeneous", "split.private=head")
    federation = federation_of(*settings, "server.statistics.name=recalibrate")
    before, _ = played(federation, 1)
    after, (record,) = played(federation, 1, before)
    assert not record.refused and record.scores
    name = "resnet10/bn1.running_mean"
    assert not torch.equal(before.model[name], after.model[name])


# ---- FedRep


def test_fedreps_phases_touch_only_their_names() -> None:
    settings = ("model.sizes=['resnet10']", "split.name=homogeneous", "method.name=FedRep")
    federation = federation_of(*settings, "method.head_epochs=0.5", "federation.clients=40")
    learner = seated(federation, federation.jobs(federation.initial_state())[0])
    head_steps = round(0.5 * learner.epoch_steps)
    assert head_steps >= 1 and learner.total_steps == head_steps + 2
    private = federation.split.private["resnet10"]
    start = {name: tensor.clone() for name, tensor in learner.state.items()}
    middle = start
    for number, length in enumerate(learner.lengths):
        if number == head_steps:
            middle = {name: tensor.clone() for name, tensor in learner.state.items()}
        learner.enter_phase()
        assert learner.phase == int(number >= head_steps)
        learner.step(length)
        learner.num_steps += 1
    changed_first = {name for name in start if not torch.equal(start[name], middle[name])}
    changed_then = {name for name in start if not torch.equal(middle[name], learner.state[name])}
    assert changed_first == private
    assert changed_then == start.keys() - private


def test_fedreps_phases_compute_only_the_gradients_that_they_use() -> None:
    settings = ("model.sizes=['resnet10']", "split.name=homogeneous", "method.name=FedRep")
    federation = federation_of(*settings, "method.head_epochs=0.5", "federation.clients=40")
    learner = seated(federation, federation.jobs(federation.initial_state())[0])
    head = federation.split.private["resnet10"]
    computed: set[str] = set()

    def watch(tensor: torch.Tensor, name: str) -> None:
        tensor.register_hook(lambda _: computed.add(name))

    def watch_output(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        watch(output, "features")

    for name, parameter in learner.weights.masters.items():
        watch(parameter, name)
    learner.model.get_submodule("layer4").register_forward_hook(watch_output)
    phases = set()
    for length in learner.lengths:
        computed.clear()
        learner.enter_phase()
        learner.step(length)
        learner.num_steps += 1
        phases.add(learner.phase)
        if learner.phase == 0:
            assert computed == head, "backward must stop at the head"
        else:
            assert computed == (learner.params.keys() - head) | {"features"}
    assert phases == {0, 1}


def test_fedrep_by_hand() -> None:
    settings = (*ONE_MLP, "method.name=FedRep", "training.steps=1", *SGD)
    federation = federation_of(*settings, "method.head_epochs=0.2", "federation.clients=60")
    job = federation.jobs(federation.initial_state())[0]
    learner = seated(federation, job)
    assert learner.total_steps == 2
    model = federation.split.build("mlp2")
    model.load_state_dict(learner.received)
    for (inputs, targets), head_phase in zip(batches_of(learner), (True, False), strict=True):
        loss = F.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                if name.startswith("head") == head_phase:
                    parameter -= 0.1 * parameter.grad
    for length in learner.lengths:
        learner.enter_phase()
        learner.step(length)
        learner.num_steps += 1
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(learner.state[name], tensor)


def test_fedrep_needs_parameters_on_both_sides() -> None:
    sizes = ("model.sizes=['resnet10']", "method.name=fedrep")
    with pytest.raises(MotleyError, match="trains private parameters, then shared ones"):
        federation_of(*sizes, "split.private=*.running_mean")


# ---- Ditto


@pytest.mark.parametrize("models", [MLP, ("model.sizes=['resnet10','resnet14']",)])
def test_ditto_without_its_term_is_local_training_and_fedavg(models: tuple[str, ...]) -> None:
    """Everybody takes part in every round: a personal model starts from the first global one."""
    settings = (*models, *EVERYBODY, "split.name=depth", "server.ema_decay=0")
    ditto = federation_of(*settings, "method.name=ditto", "method.weight=0")
    server, records = played(ditto, 2)
    local = federation_of(*settings, "method.name=local")
    local_server, local_records = played(local, 2)
    fedavg, _ = played(federation_of(*settings), 2)
    assert same_bits(server.state, fedavg.state)
    for client, model in models_of(local, local_server).items():
        assert same_bits(models_of(ditto, server)[client], model)
    assert [r.scores for r in records] == [r.scores for r in local_records]


def test_dittos_step_by_hand() -> None:
    """The second step, in which personal and global model differ."""
    settings = (*ONE_MLP, "method.name=ditto", "method.weight=0.7", *SGD)
    federation = federation_of(*settings)
    learner = seated(federation, federation.jobs(federation.initial_state())[0])
    personal = {n: torch.randn_like(t) for n, t in learner.received.items()}
    for name, tensor in learner.scratch["personal"].items():
        tensor.copy_(personal[name])
    inputs, targets = batches_of(learner)[0]
    model = federation.split.build("mlp2")
    model.load_state_dict(personal)
    F.cross_entropy(model(inputs), targets).backward()
    expected = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        pull = 0.7 * (personal[name] - learner.received[name])
        expected[name] = personal[name] - 0.1 * (parameter.grad + pull)
    learner.step(learner.lengths[0])
    learner.num_steps += 1
    _, client_state, _ = learner.result()
    for name, tensor in expected.items():
        torch.testing.assert_close(client_state[name], tensor)
    assert not torch.equal(learner.state["head.bias"], client_state["head.bias"])


def test_swapping_exchanges_values_of_every_type() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    two = {"a": torch.tensor([5.0, 6.0]), "n": torch.tensor(7), "other": torch.zeros(1)}
    swap_(one, two)
    assert one["a"].tolist() == [5, 6] and one["n"] == 7
    assert two["a"].tolist() == [1, 2] and two["n"] == 3


def test_clipping_reaches_both_of_dittos_models_and_both_of_fedreps_phases() -> None:
    for method in ("FedRep", "Ditto"):
        ends = []
        for clip in ("0", "0.001"):
            federation = federation_of(
                *ONE_MLP, *SGD, f"method.name={method}", f"training.max_grad_norm={clip}"
            )
            server, _ = played(federation, 1)
            initial = federation.initial_state()
            client = min(server.client_state_rounds)
            start = federation.split._initialized("mlp2", 1).state_dict()
            model = federation.client_model(server, client).state_dict()
            moved = [float((model[n] - start[n]).norm()) for n in ("head.bias", "head.weight")]
            body = next(n for n in server.state if n.startswith("layers"))
            moved.append(float((server.state[body] - initial.state[body]).norm()))
            ends.append(moved)
        assert all(small < 0.1 * large for large, small in zip(*ends, strict=True)), method


# ---- privacy


def test_private_norms_leave_no_buffers_that_privacy_would_refuse() -> None:
    settings = ("model.sizes=['resnet10']", "split.name=homogeneous", "server.ema_decay=0")
    dp = ("privacy.clip=0.5", "privacy.noise=0.1", "server.weighting=uniform")
    with pytest.raises(MotleyError, match="protects parameters"):
        federation_of(*settings, *dp)
    federation = federation_of(*settings, *dp, "split.private=normalization")
    engine = watched(federation)
    _, (record,) = played(federation, 1)
    assert not record.refused and record.epsilon
    shared = federation.split.part("resnet10").keys()
    assert all(update.delta.keys() == shared for update in engine.updates)


# ---- what is refused, and said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("method.name=fedgen", "split.private=head"), "method.name = 'fedgen' uses whole models"),
        (("method.name=ccvr", "split.private=head"), "method.name = 'ccvr' uses whole models"),
        (("method.name=spherefed", "split.private=head"), "method.name = 'spherefed' uses whole"),
        (("method.name=fedin", "split.private=head"), "method.name = 'fedin' uses whole models"),
        (("method.name=heterofl", "split.private=head"), "method.name = 'heterofl' uses whole"),
        (("method.name=ditto", "split.private=head"), "keeps a whole personal model"),
        (
            ("method.name=Local", "split.private=head"),
            "split.private = ['head']: 'local' exchanges",
        ),
        (("method.name=FedPer", "split.private=body"), "stands for split.private = 'head'"),
    ],
)
def test_methods_that_need_the_private_tensors_are_refused(
    settings: tuple[str, ...], said: str
) -> None:
    assert said in refused(*settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((*MLP, "split.private=[head,body]"), "leaves 'mlp2' nothing to share"),
        ((*MLP, "split.private=normalization"), "have no normalization layers"),
        ((*MLP, "split.private=fc"), "'fc' is neither 'head', 'body' or 'normalization' nor"),
        (
            (*MLP, "split.private=head", "federation.size_assignment=dynamic"),
            "clients keep private tensors of their parts, which federation.size_assignment",
        ),
        (
            (*WIDTH, "split.private=head", "split.channels=rolling"),
            "clients keep private tensors of their parts, which split.channels = 'rolling'",
        ),
        (
            (
                "model.sizes=['resnet10']",
                "method.name=FedBN",
                "server.statistics.name=recalibrate",
            ),
            "running statistics are private (split.private = ['normalization'])",
        ),
    ],
)
def test_federations_that_cannot_have_private_tensors_are_refused(
    settings: tuple[str, ...], said: str
) -> None:
    with pytest.raises(MotleyError) as raised:
        federation_of(*settings)
    assert said in str(raised.value)


def test_a_file_with_private_weights_is_refused(tmp_path: Path) -> None:
    federation = federation_of(*ONE_MLP)
    state = federation.initial_state().state
    save_file(state, tmp_path / "whole.safetensors")
    save_file(
        {name: tensor for name, tensor in state.items() if not name.startswith("head")},
        tmp_path / "body.safetensors",
    )
    private = (*ONE_MLP, "split.private=head")
    with pytest.raises(MotleyError, match=r"has 'head\.bias', which is private"):
        federation_of(*private, f"model.weights={tmp_path}/whole.safetensors").initial_state()
    federation_of(*private, f"model.weights={tmp_path}/body.safetensors").initial_state()


def test_a_plan_counts_the_traffic_of_shared_tensors() -> None:
    config = tiny_config(*CASES["FedPer"])
    federation = Federation(config)
    costs = costs_in(config)
    for size, cost in costs.items():
        shared = take(federation.initial_state().state, federation.split.part(size))
        assert cost.traffic == 2 * size_in_bytes(shared)


def test_the_names_of_a_list_may_be_modules_tensors_and_patterns() -> None:
    names = ["conv1", "bn1.*", "*.downsample.?.weight", "fc.bias"]
    federation = federation_of("model.sizes=['resnet10']", f"split.private={names}")
    private = federation.split.private["resnet10"]
    assert {"conv1.weight", "bn1.weight", "bn1.running_mean", "fc.bias"} < private
    assert "layer2.0.downsample.0.weight" in private
    assert "fc.weight" not in private and "layer1.0.bn1.weight" not in private


# ---- the scores of clients on their own test examples


@pytest.mark.parametrize("case", ["FedPer", "Ditto"])
def test_clients_score_their_own_models_on_their_own_examples(case: str) -> None:
    own = ("evaluation.per_client=all", "evaluation.client_test_fraction=0.3")
    personalize = "evaluation.personalize_epochs=1"
    ends = []
    for engine in ("debug", "local"):
        federation = federation_of(*CASES[case], *own, personalize, f"engine.name={engine}")
        server, (*_, record) = played(federation, 2)
        assert record.client_scores is not None
        ends.append(record.client_scores.scores)
        for one in record.client_scores.scores:
            model = federation.client_model(server, one.client)
            tests = federation.engine.clients.tests  # type: ignore[attr-defined]
            correct, count = 0, 0
            for inputs, targets in tests.examples(one.client):
                correct += int((model(inputs).argmax(1) == targets).sum())
                count += len(targets)
            assert one.score == pytest.approx(correct / count) and one.examples == count
            assert one.personalized == one.score, "a personal model is not trained once more"
        scored = [one.client for one in record.client_scores.scores]
        assert scored == sorted(server.client_state_rounds)
    assert ends[0] == ends[1]


def test_runs_with_private_tensors_have_no_global_model_to_export(tmp_path: Path) -> None:
    config = tiny_config(*QUICK, *CASES["FedPer"], "training.rounds=1", "run.tensorboard=false")
    start_run(config, tmp_path / "run")
    run = load(tmp_path / "run")
    with pytest.raises(MotleyError, match=r"split.private = \['head'\]: .*, so there is no global"):
        run.model(run.sizes[0])


# ---- a later run, or a server that changes its mind


def test_a_tensor_that_is_not_private_any_more_does_not_leave_the_client(tmp_path: Path) -> None:
    """A server may send a node another configuration with every message."""
    first = federation_of(*CASES["FedPer"], *EVERYBODY, folder=tmp_path)
    server, _ = played(first, 1)
    first.engine.save_client_states(server.client_state_rounds)
    other = federation_of(*MLP, *EVERYBODY, "split.private=layers.0", folder=tmp_path)
    start = other.initial_state()
    changed = ServerState(1, start.state, client_state_rounds=server.client_state_rounds)
    with pytest.raises(MotleyError, match=r"are not those that split\.private = "):
        other.run_round(changed)


def test_another_method_does_not_see_a_personal_model(tmp_path: Path) -> None:
    """SCAFFOLD sends the change of its client state, which must not be Ditto's."""
    first = federation_of(*CASES["Ditto"], *EVERYBODY, folder=tmp_path)
    server, _ = played(first, 1)
    first.engine.save_client_states(server.client_state_rounds)
    other = federation_of(*MLP, *EVERYBODY, "method.name=scaffold", folder=tmp_path)
    start = other.initial_state()
    changed = ServerState(
        1, start.state, None, start.method_state, client_state_rounds=server.client_state_rounds
    )
    _, client_state = other.engine.clients.states.resume(other.jobs(changed)[0])  # type: ignore[attr-defined]
    assert client_state == {}


def test_clients_with_private_tensors_are_not_stacked() -> None:
    ends = []
    for together in (1, 4):
        federation = federation_of(*CASES["FedPer"], f"engine.vmap_clients={together}")
        ends.append(played(federation, 2)[0].state)
    assert same_bits(*ends)
