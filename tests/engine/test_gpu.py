"""On a GPU: captured graphs on streams against the plain engine."""

from __future__ import annotations

import pytest
import torch

from motley.federation import Federation, Server
from tests.conftest import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EXACT = ("engine.device=cuda", "engine.precision=fp32", "data.transform.crop_padding=1", "data.transform.flip=true")
VIT = ("model.sizes=['vit1','vit2','vit3']", "model.vit.dim=32", "model.vit.heads=4", "model.vit.patch=4")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the plain engine does not even agree with itself: a tiny net is chaotic after some ten steps."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def after(rounds: int, *overrides: str) -> tuple[Server, float]:
    federation = Federation(tiny_config(*EXACT, *overrides))
    server, loss = federation.start(), 0.0
    for _ in range(rounds):
        server, record = federation.play(server)
        loss = record.train_loss
    return server, loss


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    return (difference / sum(float(t.double().square().sum()) for t in b.values())) ** 0.5


@pytest.mark.parametrize("method", ["fedavg", "noisy", "every-hook"])
@pytest.mark.parametrize("model", [(), VIT], ids=["resnet", "vit"])
def test_slots_agree_with_debug(method: str, model: tuple[str, ...]) -> None:
    sgd = ("training.optimizer.name=sgd", "training.optimizer.lr=0.01", "training.batch_size=16", "training.steps=4")
    plain, plain_loss = after(2, "engine.name=debug", f"method.name={method}", *sgd, *model)
    fast, fast_loss = after(2, "engine.slots=3", f"method.name={method}", *sgd, *model)
    assert fast_loss == pytest.approx(plain_loss, rel=1e-4)
    assert distance(fast.state, plain.state) < 1e-5


def test_random_numbers_are_each_clients_own() -> None:
    """Noise that raced between streams would differ from run to run."""
    captured = ("method.name=noisy", "training.drop_last=true", "training.batch_size=16", "training.steps=4")
    one, _ = after(2, "engine.slots=1", *captured)
    many, _ = after(2, "engine.slots=4", *captured)
    assert distance(one.state, many.state) < 1e-5


def test_steps_are_captured() -> None:
    federation = Federation(tiny_config(*EXACT, "training.batch_size=16"))
    federation.play(federation.start())
    slots = [slot for slots in federation.engine._slots.values() for slot in slots]  # type: ignore[attr-defined]
    assert slots and all(len(slot._graphs) == 1 for slot in slots)


def test_gpu_and_cpu_start_alike() -> None:
    gpu = Federation(tiny_config(*EXACT)).start()
    cpu = Federation(tiny_config("engine.device=cpu")).start()
    assert all(torch.equal(gpu.state[name].cpu(), cpu.state[name]) for name in cpu.state)
