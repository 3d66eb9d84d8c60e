"""On a GPU: captured graphs on streams against the plain engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from motley.core.device import on_device
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.engine import Job, LocalEngine
from motley.engine.base import Done
from motley.engine.timeline import Timeline
from motley.federation import Federation
from motley.methods.base import Collection
from motley.methods.distillation import (
    SGD,
    ServerModels,
    SizeTrainer,
    Statistics,
    draw_batches,
    kl_divergence,
)
from motley.server import aggregation, rounds
from motley.server.collection import run_collections
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.server.validation import has_nonfinite
from tests.conftest import tiny_config
from tests.states import with_large_means

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXACT = (
    "engine.device=cuda",
    "engine.precision=fp32",
    "data.transform.crop_padding=1",
    "data.transform.flip=true",
)
VIT = (
    "model.sizes=['vit1','vit2','vit3']",
    "model.vit.dim=32",
    "model.vit.heads=4",
    "model.vit.patch=4",
)

FAMILIES = {
    "resnet": ("model.resnet.width=0.25", "model.resnet.stem=cifar"),
    "vit": VIT,
    "mlp": ("model.sizes=['mlp1','mlp2','mlp3']",),
    "cnn": ("model.sizes=['cnn']", "split.name=homogeneous"),
    "vgg": ("model.sizes=['vgg9']", "split.name=homogeneous", "data.transform.resize=16"),
    "preact": (
        "model.sizes=['heterofl-resnet18']",
        "split.name=width",
        "split.rates=[0.125,0.0625]",
    ),
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the plain engine does not even agree with itself: a tiny net is chaotic after some ten steps."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def after(rounds: int, *overrides: str) -> tuple[ServerState, float]:
    federation = Federation(tiny_config(*EXACT, *overrides))
    server, loss = federation.initial_state(), 0.0
    for _ in range(rounds):
        server, record = federation.run_round(server)
        loss = record.train_loss
    return server, loss


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    return (difference / sum(float(t.double().square().sum()) for t in b.values())) ** 0.5


def steps_from(start: ServerState, end: ServerState) -> dict[str, torch.Tensor]:
    """Return how far the parameters went; buffers would hide them."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return {
        name: end.state[name] - start.state[name]
        for name in start.state
        if not name.endswith(buffers)
    }


REAL = ["fedavg", "fedprox", "scaffold", "fednova", "moon", "feddyn", "fedspeed", "fedsam"]


@pytest.mark.parametrize("method", [*REAL, "noisy", "every-hook", "alternating"])
@pytest.mark.parametrize("model", [(), VIT], ids=["resnet", "vit"])
def test_slots_agree_with_debug(method: str, model: tuple[str, ...]) -> None:
    sgd = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.01",
        "training.batch_size=16",
        "training.steps=5",
    )
    plain, plain_loss = after(3, "engine.name=debug", f"method.name={method}", *sgd, *model)
    fast, fast_loss = after(
        3, "engine.slots=3", "engine.kernels=false", f"method.name={method}", *sgd, *model
    )
    assert fast_loss == pytest.approx(plain_loss, rel=1e-4)
    assert distance(fast.state, plain.state) < 1e-5


@pytest.mark.parametrize("optimizer", ["RMSprop", "RAdam", "Adamax", "Adadelta"])
def test_torchs_other_optimizers_are_captured(optimizer: str) -> None:
    changes = (f"training.optimizer.name=torch.optim:{optimizer}", "training.steps=5")
    plain, plain_loss = after(3, "engine.name=debug", *changes, *FAMILIES["mlp"])
    fast, fast_loss = after(3, "engine.slots=3", *changes, *FAMILIES["mlp"])
    assert fast_loss == pytest.approx(plain_loss, rel=1e-4)
    assert distance(fast.state, plain.state) < 1e-4


def test_an_optimizer_that_cannot_be_captured_is_refused() -> None:
    config = tiny_config(*EXACT, "training.optimizer.name=torch.optim:NAdam")
    with pytest.raises(MotleyError, match="its step cannot be captured in a CUDA graph"):
        Federation(config)
    after(1, "engine.name=debug", "training.optimizer.name=torch.optim:NAdam", "training.steps=2")


@pytest.mark.parametrize("private", ["[]", "head"])
@pytest.mark.parametrize("method", ["fedprox", "feddyn", "looking"])
def test_gradients_look_the_same_with_our_own_optimizer(method: str, private: str) -> None:
    """`looking` halves its gradients after adding a proximal term, which our optimizer would add after that."""
    settings = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.01",
        "training.batch_size=16",
        "training.steps=5",
        f"method.name={method}",
        f"split.private={private if method != 'looking' else '[]'}",
    )
    plain, plain_loss = after(3, "engine.name=debug", *settings)
    fused, fused_loss = after(3, "engine.slots=3", "engine.kernels=['optimizer']", *settings)
    assert fused_loss == pytest.approx(plain_loss, rel=1e-4)
    assert distance(fused.state, plain.state) < 1e-5


@pytest.mark.parametrize("method", ["fedavg", "moon"])
@pytest.mark.parametrize("family", ["resnet", "vit", "cnn"])
def test_compiled_models_agree_with_plain_ones(family: str, method: str) -> None:
    """Compiled dropout draws random numbers of its own, so the network with dropout has it switched off.

    Few steps: with five per round, weights that differ by a rounding error end up 1 % apart, because an activation
    crosses a ReLU's kink.
    """
    settings = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.01",
        "training.batch_size=16",
        "training.steps=2",
        f"method.name={method}",
        *FAMILIES[family],
    )
    if family == "cnn":
        settings += ("model.cnn.map_dropout=0", "model.cnn.hidden_dropout=0")
    plain, plain_loss = after(2, "engine.slots=2", "engine.kernels=false", *settings)
    compiled, compiled_loss = after(2, "engine.slots=2", "engine.compile=true", *settings)
    assert compiled_loss == pytest.approx(plain_loss, rel=1e-4)
    assert distance(compiled.state, plain.state) < 1e-5


WIDTHS = ("split.rates=[1,0.5,0.25]", "model.sizes=['resnet14']")
EXITS = ("split.cuts=[2,3,6]", "split.rates=[0.5,0.75,1]", "model.sizes=['resnet14']")
SKEWED = ("data.partition.name=dirichlet", "data.partition.alpha=0.3")
WITH_MORE: dict[str, tuple[str, ...]] = {
    "fedin": ("method.noise=0.5",),
    "fedin-exact": (
        "method.name=fedin",
        "method.combine=exact",
        "method.samples=2",
        "method.noise=0.5",
    ),
    "fedimpro": ("method.variant=official",),
    "fedimpro-scaffold": (),
    "fedgen": ("method.hidden=32",),
    "ccvr-moon": ("method.every=2",),
    # Small steps: Adam makes whole steps of rounding errors.
    "feddf": ("public.name=noise", "public.samples=64", "method.steps=3", "method.lr=1e-6"),
    "fedet": ("public.name=noise", "public.samples=64", "method.steps=3", "method.lr=1e-4"),
    "spherefed": ("training.optimizer.weight_decay=0.01",),
    "HeteroFL": WIDTHS,
    "FedRolex": (*WIDTHS, "split.normalization_statistics=batch"),
    "FederatedDropout": WIDTHS,
    "FjORD": WIDTHS,
    "ScaleFL": (*EXITS, "split.normalization_statistics=batch", "method.begin=0"),
    "DepthFL": (*EXITS, "method.ramp=2"),
    "InclusiveFL": (),
    "nested": ("method.students=all",),
    "fedlc": SKEWED,
    "regularized": (
        "method.name=fedavg",
        *SKEWED,
        "training.mixup=0.3",
        "training.label_smoothing=0.1",
        "training.logit_adjustment=1",
    ),
}
"""Methods with features, exits, a loss or a split of their own."""


@pytest.mark.parametrize("inco", [(), ("server.inco.variant=official",)], ids=["plain", "inco"])
@pytest.mark.parametrize("case", WITH_MORE)
def test_slots_agree_with_debug_for_methods_with_more(case: str, inco: tuple[str, ...]) -> None:
    sgd = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.001",
        "training.batch_size=16",
        "training.steps=5",
    )
    settings = (*sgd, f"method.name={case}", *WITH_MORE[case], *inco)
    plain, plain_loss = after(3, "engine.name=debug", *settings)
    fast, fast_loss = after(3, "engine.slots=3", "engine.kernels=false", *settings)
    assert fast_loss == pytest.approx(plain_loss, rel=1e-4)
    assert distance(fast.state, plain.state) < 1e-5
    torch.testing.assert_close(fast.method_state, plain.method_state, rtol=1e-2, atol=1e-3)


OWN_MODELS: dict[str, tuple[str, ...]] = {
    "Local": (),
    "FedProto": (),
    "FD": (),
    "FedMD": ("public.name=noise", "public.samples=60", "method.digest_batch_size=16"),
    "FedPer": (),
    "LG-FedAvg": (),
    "FedBN": (),
    "FedRep": ("method.head_epochs=0.3",),
    "Ditto": (),
}
"""Methods that exchange no weights, or not all of them, or that train personal models."""


def own_models_after(rounds: int, *overrides: str) -> tuple[State, ServerState, RoundRecord]:
    """Return the models of all clients that have trained, the server, and the last record."""
    federation = Federation(tiny_config(*EXACT, *overrides))
    server = federation.initial_state()
    for _ in range(rounds):
        server, record = federation.run_round(server)
        assert not record.refused
    models = {}
    for client in server.client_state_rounds:
        for name, tensor in federation.client_model(server, client).state_dict().items():
            models[f"{client}/{name}"] = tensor
    return models, server, record


@pytest.mark.parametrize("case", OWN_MODELS)
@pytest.mark.parametrize("model", [(), VIT], ids=["resnet", "vit"])
def test_models_of_clients_own_agree_with_debug(case: str, model: tuple[str, ...]) -> None:
    sgd = ("training.optimizer={name='sgd', lr=0.001}", "training.batch_size=16")
    settings = (*sgd, "training.steps=5", f"method.name={case}", *OWN_MODELS[case], *model)
    settings = (*settings, "training.rounds=3", "evaluation.every=1")
    plain, plain_server, plain_record = own_models_after(3, "engine.name=debug", *settings)
    fast, fast_server, fast_record = own_models_after(
        3, "engine.slots=3", "engine.kernels=false", *settings
    )
    assert distance(fast, plain) < 1e-5
    torch.testing.assert_close(
        fast_server.method_state, plain_server.method_state, rtol=1e-2, atol=1e-3
    )
    assert fast_record.train_loss == pytest.approx(plain_record.train_loss, rel=1e-4)
    assert fast_record.scores.keys() == plain_record.scores.keys()
    for size, score in fast_record.scores.items():
        assert score.loss == pytest.approx(plain_record.scores[size].loss, rel=1e-3)
        assert score.accuracy == pytest.approx(plain_record.scores[size].accuracy, abs=0.02)


@pytest.mark.parametrize("case", ["FedProto", "FedMD", "FedPer", "Ditto"])
def test_models_of_clients_own_on_the_gpu_are_what_they_are_on_the_host(case: str) -> None:
    """With room for all of them, for some, and for none."""
    sgd = ("training.optimizer={name='sgd', lr=0.001}", "training.batch_size=16")
    settings = (*sgd, "training.steps=5", f"method.name={case}", *OWN_MODELS[case])
    settings = (*settings, "federation.clients_per_round=6", "engine.slots=2")
    first, *others = (
        own_models_after(4, *settings, f"engine.client_state_gpu_fraction={fraction}")[0]
        for fraction in (0.1, 1e-6, 0)
    )
    assert all(distance(other, first) < 1e-5 for other in others)


@pytest.mark.parametrize("case", OWN_MODELS)
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_models_of_clients_own_train_in_16_bits(case: str, precision: str) -> None:
    """They are kept and evaluated in single precision."""
    settings = (f"method.name={case}", *OWN_MODELS[case], "training.rounds=3", "evaluation.every=1")
    models, _, record = own_models_after(3, *settings, f"engine.precision={precision}")
    assert all(t.dtype == torch.float32 for t in models.values() if t.is_floating_point())
    assert all(math.isfinite(score.loss) for score in record.scores.values())


@pytest.mark.parametrize("steps", [1, 10, 20])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fast_path_agrees_with_debug_step_for_step(family: str, steps: int) -> None:
    """With kernels, graphs and streams; with dropout, augmentation and sampling.

    Settings are those in which a change of 1e-7 in the weights stays below 1e-5: with larger steps a small network with
    batch norm makes a thousandth of it.
    """
    sgd = ("training.optimizer.name=sgd", "training.optimizer.lr=0.0001", "training.batch_size=64")
    settings = (*sgd, f"training.steps={steps}", *FAMILIES[family])
    start, _ = after(0, *settings)
    plain, plain_loss = after(1, "engine.name=debug", *settings)
    fast, fast_loss = after(1, "engine.slots=3", *settings)
    assert fast_loss == pytest.approx(plain_loss, rel=1e-5)
    assert distance(fast.state, plain.state) < 1e-5
    assert distance(*(steps_from(start, end) for end in (fast, plain))) < 3e-2


PULLED = {
    "fedprox": ("method.mu=1000",),
    "fedprox-norms": ("method.name=fedprox", "method.proximal=norms", "method.mu=10"),
    "fedprox-norm-of-squares": (
        "method.name=fedprox",
        "method.proximal=norm-of-squares",
        "method.mu=1000",
    ),
    "feddyn": ("method.alpha=1000",),
    "fednova": ("method.mu=1000",),
    "fedin": ("method.mu=1000",),
    "fedin-exact": ("method.name=fedin", "method.combine=exact", "method.mu=1000"),
}
"""Methods that pull towards other weights: so strongly that a tenth of a change is lost where they do not."""


@pytest.mark.parametrize("case", PULLED)
def test_a_pull_in_the_fast_path_agrees_with_debug(case: str) -> None:
    sgd = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.0001",
        "training.batch_size=64",
        "training.steps=5",
    )
    settings = (*sgd, f"method.name={case}", *PULLED[case], *FAMILIES["resnet"])
    start, _ = after(0, *settings)
    plain, plain_loss = after(2, "engine.name=debug", *settings)
    fast, fast_loss = after(2, "engine.slots=3", *settings)
    assert fast_loss == pytest.approx(plain_loss, rel=1e-4)
    # The pull of "norm-of-squares" grows with the cube of a distance, and rounding errors with it.
    allowed = 3e-2 if case == "fedprox-norm-of-squares" else 1e-2
    assert distance(*(steps_from(start, end) for end in (fast, plain))) < allowed


def test_a_stack_agrees_with_debug() -> None:
    sgd = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.05",
        "training.batch_size=16",
        "training.epochs=3",
    )
    settings = (*sgd, *FAMILIES["cnn"], "model.cnn.map_dropout=0", "model.cnn.hidden_dropout=0")
    plain, plain_loss = after(2, "engine.name=debug", *settings)
    stacked, stacked_loss = after(2, "engine.vmap_clients=4", *settings)
    assert stacked_loss == pytest.approx(plain_loss, rel=1e-5)
    assert distance(stacked.state, plain.state) < 1e-5


def test_dropout_in_a_stack_is_repeatable() -> None:
    settings = ("engine.vmap_clients=4", *FAMILIES["cnn"], "training.batch_size=16")
    one, two = after(2, *settings), after(2, *settings)
    assert distance(one[0].state, two[0].state) < 1e-6 and one[1] == pytest.approx(two[1], rel=1e-6)


@pytest.mark.parametrize("method", ["scaffold", "moon"])
def test_memories_on_the_gpu_are_what_they_are_on_the_host(method: str) -> None:
    """With room for all of them, for some, and for none."""
    sgd = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.01",
        "training.batch_size=16",
        "training.steps=5",
    )
    settings = (f"method.name={method}", "federation.clients_per_round=6", "engine.slots=2", *sgd)
    ends = [
        after(4, *settings, f"engine.client_state_gpu_fraction={share}") for share in (0.1, 1e-6, 0)
    ]
    assert all(distance(server.state, ends[0][0].state) < 1e-5 for server, _ in ends[1:])


@pytest.mark.parametrize("method", [*REAL, "InCoAvg", "InCoNova", *WITH_MORE, *OWN_MODELS])
def test_no_merge_waits_for_the_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the check of the updates nor a stage nor a metric may read a value from the device."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def without_waiting(*args: Any) -> Any:
            calls.append(function.__name__)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return without_waiting

    calls: list[str] = []
    watched_calls = (
        (rounds, "start_check"),
        (aggregation, "run_stages"),
        (rounds, "PendingMetrics"),
    )
    for module, name in watched_calls:
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    settings = (f"method.name={method}", *{**WITH_MORE, **OWN_MODELS}.get(method, ()))
    after(3, *settings, "training.batch_size=16", "training.steps=2")
    assert set(calls) == {"start_check", "run_stages", "PendingMetrics"}


def overlapping(rounds: int, *overrides: str) -> ServerState:
    """Return the state after some rounds, each of which is queued before the one before it has been checked."""
    federation = Federation(tiny_config(*EXACT, *overrides, "engine.overlap_rounds=true"))
    server = federation.initial_state()
    for number in range(rounds):
        server, _ = federation.queue_round(server, more_rounds=number + 1 < rounds)
    return server


@pytest.mark.parametrize("method", [*REAL, "InCoAvg", *WITH_MORE])
def test_rounds_that_overlap_end_like_others(method: str) -> None:
    settings = (
        f"method.name={method}",
        *WITH_MORE.get(method, ()),
        "training.batch_size=16",
        "training.steps=2",
        "training.rounds=6",
    )
    plain, _ = after(6, *settings)
    assert distance(overlapping(6, *settings).state, plain.state) < 1e-5


QUEUED: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "scaffold": ("method.name=scaffold",),
    "InCoAvg": ("method.name=InCoAvg",),
    "fedlc": ("method.name=fedlc",),
    "logit-adjustment": ("training.logit_adjustment=1",),
    "short-batches": ("training.steps=0", "training.epochs=1"),
    "stacked": (*FAMILIES["mlp"], "engine.vmap_clients=4", "training.steps=0"),
}


@pytest.mark.parametrize("case", QUEUED)
def test_the_next_round_is_queued_without_waiting(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last rounds, when all steps have been captured. `NextRound` would hide an error, so they are kept."""
    errors: list[Exception] = []
    queued: list[int] = []
    train_clients = rounds.train_clients

    def without_waiting(*args: Any) -> rounds.Attempt:
        number = args[1].round_number + 1
        queued.append(number)
        if number > 4:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return train_clients(*args)
        except Exception as error:
            errors.append(error)
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(rounds, "train_clients", without_waiting)
    if case == "short-batches":
        # As if there were more lengths than graphs: they all run eagerly.
        monkeypatch.setattr("motley.engine.slots.SHORT", 0)
    overlapping(
        6,
        "federation.clients_per_round=6",
        "training.batch_size=16",
        "training.steps=8",
        "training.rounds=6",
        *QUEUED[case],
    )
    assert not errors
    assert queued == [1, 2, 3, 4, 5, 6]


def test_collections_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients are asked behind the round's training, and the next round is queued behind that."""
    run, calls = rounds.run_collections, []

    def without_waiting(*args: Any) -> Any:
        calls.append(args)
        torch.cuda.set_sync_debug_mode("error" if len(calls) > 1 else "default")
        try:
            return run(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(rounds, "run_collections", without_waiting)
    after(3, "server.statistics.name=recalibrate", "evaluation.every=1", "training.steps=2")
    assert len(calls) >= 3


@pytest.mark.parametrize("statistics", ["frozen", "adapt"])
@pytest.mark.parametrize("split", ["grouped", "depth"])
def test_captured_server_steps_agree_with_a_cpus(split: str, statistics: Statistics) -> None:
    """Distillation captures a graph per size in its first step, and replays it in later rounds."""
    public_images = ("method.name=feddf", "public.name=noise", "public.samples=96")
    federation = Federation(
        tiny_config(*EXACT, "engine.device=cpu", f"split.name={split}", *public_images)
    )
    public = federation.method.info.public
    assert public is not None
    parts = {size: federation.split.part(size) for size in federation.split.sizes}
    teacher = torch.randn(96, 10, generator=torch.Generator().manual_seed(1))

    def loss(logits: torch.Tensor, targets: State) -> torch.Tensor:
        return kl_divergence(targets["teacher"], logits).mean()

    ends = []
    with federation.numerics():
        for device in (torch.device("cpu"), torch.device("cuda", 0)):
            server = federation.initial_state()
            state = {name: on_device(tensor, device) for name, tensor in server.state.items()}
            trainer = SizeTrainer(
                ServerModels(federation.split),
                federation.split.parameters,
                loss,
                max_norm=5.0,
                statistics=statistics,
            )
            for number in (1, 2):
                batches = draw_batches(96, 4, 32, 1, number, device)
                targets = {"teacher": teacher.to(device)[batches.distinct]}
                optimizer = SGD(0.9)
                state, _ = trainer.train(
                    state, parts, public, batches, targets, optimizer, [0.01] * 4
                )
            ends.append({n: t.cpu() for n, t in state.items() if t.is_floating_point()})
    start = federation.initial_state().state
    moved = distance(ends[0], {name: start[name] for name in ends[0]})
    assert moved > 1e-4 and distance(ends[1], ends[0]) < 0.01 * moved


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_numbers_that_are_not_finite_are_found_on_the_device(
    bad: float, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    fine = [
        torch.ones(3, device="cuda"),
        torch.full((70_000,), largest, dtype=dtype, device="cuda"),
    ]
    assert not has_nonfinite([*fine, torch.tensor(1, device="cuda"), torch.zeros(0, device="cuda")])
    for place in (0, 35_000, 69_999):
        spoiled = torch.full((70_000,), largest, dtype=dtype, device="cuda")
        spoiled[place] = bad
        assert has_nonfinite([*fine, spoiled])


def test_random_numbers_are_each_clients_own() -> None:
    """Noise that raced between streams would differ from run to run."""
    captured = (
        "method.name=noisy",
        "training.drop_last=true",
        "training.batch_size=16",
        "training.steps=4",
    )
    one, _ = after(2, "engine.slots=1", *captured)
    many, _ = after(2, "engine.slots=4", *captured)
    assert distance(one.state, many.state) < 1e-5


def test_steps_are_captured() -> None:
    federation = Federation(tiny_config(*EXACT, "training.batch_size=16"))
    federation.run_round(federation.initial_state())
    slots = list(federation.engine.pool)  # type: ignore[attr-defined]
    assert slots and all(len(slot._captures) == 1 for slot in slots)


@pytest.mark.parametrize(
    "method", ["fedavg", "noisy", "every-hook", "alternating", "FedProto", "FedRep"]
)
@pytest.mark.parametrize("numbers", [(0, 0), (0, 1)], ids=["one-gpu-twice", "two-gpus"])
def test_two_devices_agree_with_one(
    method: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same GPU is no setting, but carries jobs between streams as two GPUs do."""
    if max(numbers) >= torch.cuda.device_count():
        pytest.skip("needs two CUDA devices")
    sgd = (
        "training.optimizer.name=sgd",
        "training.optimizer.lr=0.01",
        "training.batch_size=16",
        "training.steps=5",
    )
    settings = (f"method.name={method}", "federation.clients_per_round=6", "engine.slots=1", *sgd)
    one, one_loss = after(3, *settings)
    devices = [torch.device("cuda", number) for number in numbers]
    monkeypatch.setattr("motley.federation.choose_devices", lambda setting: devices)
    federation = Federation(tiny_config(*EXACT, *settings))
    timeline = Timeline(*federation.devices)
    federation.engine.record(timeline)  # type: ignore[attr-defined]
    generators = [torch.cuda.get_rng_state(device) for device in devices]
    server = federation.initial_state()
    for _ in range(3):
        server, record = federation.run_round(server)
    assert record.train_loss == pytest.approx(one_loss, rel=1e-4)
    assert distance(server.state, one.state) < 1e-5
    assert {
        tensor.device for tensor in (*server.state.values(), *server.method_state.values())
    } == {devices[0]}
    assert {slot.device for slot in federation.engine.pool} == set(devices)  # type: ignore[attr-defined]
    assert {span.device for span in timeline.spans()} == {0, 1}
    assert all(
        torch.equal(torch.cuda.get_rng_state(d), g)
        for d, g in zip(devices, generators, strict=True)
    )


class Nodes(LocalEngine):
    """Clients whose answers come over a network: none of their tensors is on the server's device."""

    trusted = False

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        def there(state: State) -> State:
            return {name: tensor.cpu() for name, tensor in state.items()}

        uploads = super().train(jobs, done)
        return [
            replace(u, delta=there(u.delta), payload=there(u.payload), loss=u.loss.cpu())
            for u in uploads
        ]

    def collect(self, jobs: Sequence[Job]) -> list[Collection]:
        return [
            replace(c, values={n: v.cpu() for n, v in c.values.items()})
            for c in super().collect(jobs)
        ]


@pytest.mark.parametrize(
    "method", ["InCoAvg", "scaffold", "fednova", "heterofl", "ccvr", "spherefed", "FD"]
)
def test_answers_of_nodes_are_brought_to_the_servers_gpu(method: str) -> None:
    settings = ("evaluation.every=1", "training.rounds=1")
    config = tiny_config(*EXACT, f"method.name={method}", *settings)
    ends = []
    for engine in (LocalEngine, Nodes):
        federation = Federation(config)
        federation.engine = engine(federation.engine.clients, 1)  # type: ignore[attr-defined]
        server, record = federation.run_round(federation.initial_state())
        assert not record.refused
        ends.append({**server.state, **server.method_state})
    assert distance(*ends) < 1e-5


def test_gpu_and_cpu_start_alike() -> None:
    gpu = Federation(tiny_config(*EXACT)).initial_state()
    cpu = Federation(tiny_config("engine.device=cpu")).initial_state()
    assert all(torch.equal(gpu.state[name].cpu(), cpu.state[name]) for name in cpu.state)


def test_evaluation_is_captured_and_right() -> None:
    federation = Federation(tiny_config(*EXACT, "engine.name=debug"))
    server = federation.initial_state()
    server, record = federation.run_round(server)
    again = federation.evaluate(server.model)
    on_cpu = Federation(tiny_config("engine.device=cpu"))
    expected = on_cpu.evaluate({name: tensor.cpu() for name, tensor in server.model.items()})
    for size in expected:
        assert again[size].loss == pytest.approx(expected[size].loss, rel=1e-4)
        assert again[size].accuracy == pytest.approx(expected[size].accuracy, abs=0.01)
        assert again[size] == record.scores[size]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bit_runs_are_evaluated_in_single_precision(precision: str) -> None:
    """With channels whose mean is many times their standard deviation, as long training makes them."""
    start = Federation(tiny_config(*EXACT)).initial_state()
    state = with_large_means(start.state)
    single = Federation(tiny_config("engine.device=cuda", "engine.precision=tf32")).evaluate(state)
    scores = Federation(
        tiny_config("engine.device=cuda", f"engine.precision={precision}")
    ).evaluate(state)
    for size, score in scores.items():
        assert score.loss == pytest.approx(single[size].loss, rel=1e-5)
        assert score.accuracy == single[size].accuracy


def test_tf32_evaluation_is_close_to_fp32() -> None:
    """After three rounds; docs/results/evaluation-precision.md compares both after 500."""
    server, _ = after(3)
    exact = Federation(tiny_config("engine.device=cuda", "engine.precision=fp32")).evaluate(
        server.state
    )
    scores = Federation(tiny_config("engine.device=cuda", "engine.precision=tf32")).evaluate(
        server.state
    )
    for size, score in scores.items():
        assert score.loss == pytest.approx(exact[size].loss, rel=0.01)
        assert score.accuracy == pytest.approx(exact[size].accuracy, abs=0.01)


def collected(federation: Federation) -> ServerState:
    """Return the initial server state after the collections of round 1."""
    server = replace(federation.initial_state(), round_number=1)
    with federation.numerics():
        return run_collections(
            federation.collections, federation.engine, server, range(6), federation.device
        ).server


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_statistics_are_collected_in_single_precision(precision: str) -> None:
    """HeteroFL's pass over clients gives the statistics of the weights that are evaluated, not of rounded ones."""
    settings = ("engine.device=cuda", "method.name=HeteroFL", *WIDTHS, "evaluation.every=1")
    servers = {}
    for name in ("tf32", precision):
        federation = Federation(tiny_config(*settings, f"engine.precision={name}"))
        servers[name] = collected(federation)
    for name, tensor in servers["tf32"].state.items():
        torch.testing.assert_close(servers[precision].state[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_statistics_are_recalibrated_in_single_precision(precision: str) -> None:
    settings = ("engine.device=cuda", "server.statistics.name=recalibrate", "evaluation.every=1")
    servers = {}
    for name in ("tf32", precision):
        federation = Federation(tiny_config(*settings, f"engine.precision={name}"))
        servers[name] = collected(federation)
    for name, tensor in servers["tf32"].state.items():
        torch.testing.assert_close(servers[precision].state[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", [LocalEngine, Nodes])
def test_recalibrated_statistics_are_those_of_the_plain_engine(engine: type[LocalEngine]) -> None:
    # Adam would turn differences in the last bits of small gradients into whole steps.
    sgd = ("training.optimizer.name=sgd", "training.optimizer.lr=0.001")
    settings = (
        *EXACT,
        *sgd,
        "server.statistics.name=recalibrate",
        "evaluation.every=1",
        "server.ema_decay=0",
    )
    plain = Federation(tiny_config(*settings, "engine.name=debug"))
    expected, _ = plain.run_round(plain.initial_state())
    federation = Federation(tiny_config(*settings))
    federation.engine = engine(federation.engine.clients, 2)  # type: ignore[attr-defined]
    found, record = federation.run_round(federation.initial_state())
    assert not record.refused
    assert distance(found.state, expected.state) < 1e-5


# ---- scores of clients

SCORED = (
    "evaluation.per_client=all",
    "evaluation.client_test_fraction=0.2",
    "federation.clients_per_round=6",
    # Adam would turn differences in the last bits of small gradients into whole steps, and the
    # running statistics of two rounds make the logits of a ResNet nearly equal.
    "training.optimizer.name=sgd",
    "training.optimizer.lr=0.01",
    "model.sizes=mlp1,mlp2,mlp3",
)


@pytest.mark.parametrize("personalized", [False, True])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_clients_are_scored_as_by_the_plain_engine(method: str, personalized: bool) -> None:
    """At most one test example of a client may be classified otherwise."""
    settings = [*EXACT, *SCORED, f"method.name={method}"]
    if personalized:
        settings.append("evaluation.personalize_epochs=2")
    records = {}
    for engine in ("debug", "local"):
        federation = Federation(tiny_config(*settings, f"engine.name={engine}"))
        server = federation.initial_state()
        for _ in range(2):
            server, records[engine] = federation.run_round(server)
    plain, fast = records["debug"].client_scores, records["local"].client_scores
    assert plain is not None and fast is not None
    assert len(plain.scores) == len(fast.scores) == 6
    for expected, one in zip(plain.scores, fast.scores, strict=True):
        assert (one.client, one.size, one.examples) == (
            expected.client,
            expected.size,
            expected.examples,
        )
        tolerance = 1.01 / one.examples
        assert one.score == pytest.approx(expected.score, abs=tolerance)
        if personalized:
            assert expected.personalized is not None
            assert one.personalized == pytest.approx(expected.personalized, abs=2 * tolerance)


@pytest.mark.parametrize("more", [(), ("evaluation.personalize_epochs=1",)])
def test_scoring_clients_does_not_change_a_run(more: tuple[str, ...]) -> None:
    held_out = ("evaluation.client_test_fraction=0.2", *SCORED[2:])
    before, _ = after(3, *held_out)
    scored, _ = after(3, *SCORED, *more)
    assert distance(scored.state, before.state) < 1e-6


def test_scoring_clients_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once per client, and not at all once every size has a slot."""
    start, calls = rounds.start_client_scores, []

    def without_waiting(*args: Any) -> Any:
        calls.append(args)
        torch.cuda.set_sync_debug_mode("error" if len(calls) > 1 else "default")
        try:
            return start(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(rounds, "start_client_scores", without_waiting)
    after(3, *SCORED, "training.batch_size=16", "training.steps=2")
    assert len(calls) >= 3
