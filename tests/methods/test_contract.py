"""What every method keeps, over every split, with InCo and without: one test for each promise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from motley.client.job import Job
from motley.client.learner import shapes_of
from motley.client.training import OptimizerSettings
from motley.core.part import take
from motley.core.update import ClientUpdate
from motley.engine.base import Done, Engine
from motley.federation import Federation
from motley.methods import METHODS
from motley.runs.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from motley.server.state import ServerState
from tests.conftest import chosen, tiny_config
from tests.methods.turns import sections_of

SPLITS = {
    "homogeneous": ("split.name=homogeneous", "model.sizes=['resnet18']"),
    "grouped": ("split.name=grouped",),
    "depth": ("split.name=depth",),
}
INCO = {"plain": (), "inco": ("server.inco.variant=official",)}
ON_FEDIMPRO = ("fedimpro-prox", "fedimpro-scaffold", "fedimpro-nova", "fedimpro-dyn")
"""Two methods at once, each of which is tested over every split."""
CCVR = ("ccvr", "ccvr-prox", "ccvr-moon")
"""Such methods too, which add a collection to another one's training; here after every round."""
SERVERS = {
    "fedavgm": ("server.optimizer.name=momentum", "server.optimizer.nesterov=true"),
    "fedadam": ("server.optimizer.name=adam",),
    "fedyogi": ("method.name=scaffold", "server.optimizer.name=yogi"),
    "fedadagrad": ("method.name=feddyn", "server.optimizer.name=adagrad"),
    "noise": ("method.name=fednova", "uplink.noise=0.5"),
    "fednova-prox": (
        "method.name=fednova",
        "method.mu=0.1",
        "training.optimizer={name='sgd', lr=0.05, momentum=0.5}",
    ),
    "fedspeed-mixed": (
        "method.name=fedspeed",
        "method.ascent=0.5",
        "training.optimizer={name='sgd', lr=0.05}",
    ),
    "moon-projection": ("method.name=moon", "model.projection=8"),
    "fedin-exact": (
        "method.name=fedin",
        "method.combine=exact",
        "method.samples=2",
        "method.noise=0.5",
    ),
    "fedin-separate": (
        "method.name=fedin",
        "method.step=separate",
        "method.noise=0.5",
        "method.noise_on=upload",
        "method.noise_deviation=coordinate",
    ),
    "fedin-projection": ("method.name=fedin", "method.projection=8", "method.running=local"),
    "fedimpro-official": (
        "method.name=fedimpro",
        "method.variant=official",
        "method.ramp=2",
        "method.noise=0.01",
    ),
    "fedimpro-separate": (
        "method.name=fedimpro",
        "method.normalization=separate",
        "method.merge=counts",
    ),
    **{name: (f"method.name={name}",) for name in ON_FEDIMPRO},
    **{name: (f"method.name={name}", "method.every=1") for name in CCVR},
    "nested-all": ("method.name=nested", "method.students=all"),
    "spherefed-momentum": ("method.name=spherefed", "server.optimizer.name=momentum"),
    "scaffold-weights": (
        "method.name=scaffold",
        "method.initial=weights",
        "method.divide_by=sampled",
        "training.max_grad_norm=1",
    ),
}
SERVER_TRAINS = {"fedet"}
"""Methods in which the server trains a size and changes heads, whoever was sampled."""
WITH_A_SPLIT = {"heterofl", "fjord", "scalefl", "depthfl", "inclusivefl"}
"""Methods for parts in width or with exits, which the tests of those parts go through; here, over depth alone."""
OWN_MODELS = {entry.name for entry in METHODS if not entry.item.requirements.exchanges_weights}
"""Methods whose clients keep models of their own: there is no delta for InCo, and no global model."""
OVER_DEPTH = {*WITH_A_SPLIT, "fedgen", "spherefed", "feddf", "fedet", "nested"}
"""These, and methods whose own tests go through other splits."""
CASES = {
    **{
        f"{entry.name}-{split}-{with_inco}": (
            *chosen(entry.name),
            *SPLITS[split],
            *INCO[with_inco],
        )
        for entry in METHODS
        if entry.name not in (*ON_FEDIMPRO, *CCVR)
        for split in SPLITS
        for with_inco in INCO
        if split == "depth" or entry.name not in OVER_DEPTH
        if with_inco == "plain" or entry.name not in OWN_MODELS
    },
    **{name: (*SPLITS["depth"], *INCO["inco"], *more) for name, more in SERVERS.items()},
    "fedet-grouped-plain": (*chosen("fedet"), *SPLITS["grouped"]),
}
#: InCo works on the state of the server, so its cases over one split stand for those over the others.
SLOW = {case for case in CASES if case.endswith(("homogeneous-inco", "grouped-inco"))}
MARKED = [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
GLOBAL = [case for case in CASES if case.split("-")[0] not in OWN_MODELS]
FIXED = {"spherefed": ("fc.weight", "fc.bias")}
"""Parameters that a method does not train."""
FAST = (
    "training.batch_size=16",
    "training.epochs=0.2",
    "evaluation.every=3",
    "server.ema_decay=0",
    "split.normalization_statistics=shared",
)
"""Three rounds, of which two are played: nothing is evaluated. Clients have unlike numbers of steps."""


class Watched:
    """An engine that keeps what it uploads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.uploads: list[ClientUpdate] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        self.uploads = self.engine.train(jobs, done)
        return self.uploads


def federation_of(case: str, *more: str, folder: Path | None = None) -> Federation:
    return Federation(tiny_config(*FAST, *CASES[case], *more), client_state_folder=folder)


def played(federation: Federation, server: ServerState, rounds: int) -> ServerState:
    for _ in range(rounds):
        server, record = federation.run_round(server)
        assert not record.refused and len(record.clients) == 4
    return server


def everything(federation: Federation, server: ServerState) -> dict[str, str]:
    """Return hashes of all that a server holds and of what the clients it names remember."""
    memory = federation.engine.clients.states.store  # type: ignore[attr-defined]
    needs = federation.method.requirements
    remembers = needs.client_state or not needs.exchanges_weights or federation.split.has_private
    hashes = {section: fingerprint(state) for section, state in sections_of(server).items()}
    remembered = {
        str(c): fingerprint(memory.get(c, made))
        for c, made in server.client_state_rounds.items()
        if remembers
    }
    return {**hashes, **remembered}


@pytest.mark.parametrize("case", MARKED)
def test_slots_debug_and_a_resumed_run_end_alike(case: str, tmp_path: Path) -> None:
    first = federation_of(case, folder=tmp_path / "clients")
    half = played(first, first.initial_state(), 1)
    first.engine.save_client_states(half.client_state_rounds)
    save_checkpoint(tmp_path / "checkpoints", half, keep=1)
    whole = everything(first, played(first, half, 1))

    debug = federation_of(case, "engine.name=debug")
    assert everything(debug, played(debug, debug.initial_state(), 2)) == whole

    resumed = federation_of(case, "engine.slots=2", folder=tmp_path / "clients")
    saved = load_checkpoint(tmp_path / "checkpoints")
    assert saved is not None and everything(resumed, saved) == everything(first, half)
    assert everything(resumed, played(resumed, resumed.to_device(saved), 1)) == whole


@pytest.mark.parametrize("case", GLOBAL)
def test_buffers_get_the_plain_mean_and_parameters_move(case: str) -> None:
    federation = federation_of(case)
    before = played(federation, federation.initial_state(), 1)
    federation.engine = watched = Watched(federation.engine)  # type: ignore[assignment]
    after = played(federation, before, 1)
    changes: dict[str, list[torch.Tensor]] = {}
    for upload in watched.uploads:
        for local, piece in federation.split.part(federation.sizes[upload.client]).items():
            changes.setdefault(piece.name, []).append(upload.delta[local])
    assert any(name.endswith("running_var") for name in changes)
    for name, given in changes.items():
        if name in federation.split.parameters:
            fixed = name in FIXED.get(federation.config.method.name, ())
            assert torch.equal(after.state[name], before.state[name]) == fixed, name
        elif before.state[name].is_floating_point():
            expected = before.state[name] + torch.stack(given).mean(0)
            assert torch.allclose(after.state[name], expected, rtol=1e-5, atol=1e-7), name
    assert all((t >= 0).all() for n, t in after.state.items() if n.endswith("running_var"))
    kept = {
        name.removeprefix("first/").removeprefix("second/")
        for name in (*after.method_state, *sections_of(after)["optimizer"])
    }
    buffers = before.state.keys() - federation.split.parameters
    assert not kept & buffers, "neither a method nor an optimiser keeps anything of buffers"


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in GLOBAL
        if "homogeneous" not in case and case.partition("-")[0] not in SERVER_TRAINS
    ],
)
def test_what_nobody_held_stays_bit_for_bit(case: str) -> None:
    federation = federation_of(case, "federation.clients_per_round=2")
    federation.sample = lambda number, attempt=0: [4, 5] if number == 1 else [0, 1]
    before, _ = federation.run_round(federation.initial_state())
    after, _ = federation.run_round(before)
    held = {piece.name for piece in federation.split.part("resnet10").values()}
    assert held < before.state.keys()
    for section, new in sections_of(after).items():
        old = sections_of(before)[section]
        for name, tensor in new.items():
            plain = name.removeprefix("first/").removeprefix("second/")
            if plain not in before.state:
                assert (
                    section == "method"
                )  # features and their statistics belong to clients, not to names
            elif plain not in held:
                assert torch.equal(tensor, old[name]), (section, name)
            elif section == "state" and plain in federation.split.parameters:
                fixed = plain in FIXED.get(federation.config.method.name, ())
                assert torch.equal(tensor, old[name]) == fixed, (section, name)


class NoValueIsRead(TorchDispatchMode):
    """Refuses what a captured step cannot do: ask the device for a value, or for a shape that depends on values."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in func.name() for word in self.REFUSED), func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [entry.name for entry in METHODS])
def test_steps_can_be_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads no value on the host, and leaves every tensor that a graph would remember in its place."""
    federation = federation_of("fedavg-depth-plain", "training.steps=3", *chosen(name))
    train_step = federation.method.client.train_step
    seen: dict[object, list[list[int]]] = {}

    def guarded(learner: Any) -> torch.Tensor:
        with NoValueIsRead():
            loss = train_step(learner)
        states = [
            learner.state,
            learner.received,
            learner.broadcast,
            learner.client_state,
            *learner.scratch.values(),
        ]
        captured = id(learner), shapes_of(learner.broadcast, learner.client_state)
        seen.setdefault(captured, []).append(
            [t.data_ptr() for state in states for t in state.values()]
        )
        return loss

    monkeypatch.setattr(federation.method.client, "train_step", guarded)
    played(federation, federation.initial_state(), 2)
    assert seen and all(
        len(places) >= 3 and all(p == places[0] for p in places) for places in seen.values()
    )


MLP = (
    "model.sizes=['mlp2','mlp3']",
    "model.mlp.hidden=12",
    "training.steps=4",
    "training.optimizer={name='sgd', lr=0.05}",
    "engine.name=debug",
)
"""Models whose gradients a CPU computes in bfloat16 as well."""


def changes_of(name: str, precision: str) -> dict[str, torch.Tensor]:
    federation = federation_of("fedavg-depth-plain", *MLP, *chosen(name))
    federation.engine.clients.precision = precision  # type: ignore[attr-defined]
    start = federation.initial_state()
    end = played(federation, start, 2)
    if name not in OWN_MODELS:
        return {n: end.state[n] - start.state[n] for n in federation.split.parameters}
    changes = {}
    for client, size in enumerate(federation.sizes):
        if client in end.client_state_rounds:
            initial = take(start.state, federation.split.part(size))
            for n, parameter in federation.client_model(end, client).named_parameters():
                changes[f"{client}/{n}"] = parameter.detach() - initial[n]
    return changes


@pytest.mark.parametrize("name", [entry.name for entry in METHODS])
def test_hooks_act_on_the_weights_behind_bf16_copies(name: str) -> None:
    whole, low = (
        torch.cat([t.flatten() for _, t in sorted(changes_of(name, p).items())])
        for p in ("fp32", "bf16")
    )
    assert 0 < float((low - whole).norm()) < 0.05 * float(whole.norm())


@pytest.mark.parametrize("name", [entry.name for entry in METHODS])
def test_a_learning_rate_on_the_device_is_as_good_as_a_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the learning rate is a tensor, which a captured step reads."""
    expected = changes_of(name, "fp32")
    build = OptimizerSettings.build

    def with_tensor(settings: OptimizerSettings, *given: Any) -> torch.optim.Optimizer:
        optimizer = build(settings, *given)
        optimizer.param_groups[0]["lr"] = torch.tensor(settings.lr)
        return optimizer

    monkeypatch.setattr(OptimizerSettings, "build", with_tensor)
    for key, tensor in changes_of(name, "fp32").items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-7)
