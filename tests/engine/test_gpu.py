"""On a GPU: captured graphs on streams against the plain engine."""

from __future__ import annotations

import copy

import pytest
import torch

from motley.federation import Federation, Server
from motley.models.norm import BatchNorm, use_fused
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


REAL = ["fedavg", "fedprox", "scaffold", "fednova", "moon", "feddyn", "fedspeed"]


@pytest.mark.parametrize("method", [*REAL, "noisy", "every-hook", "alternating"])
@pytest.mark.parametrize("model", [(), VIT], ids=["resnet", "vit"])
def test_slots_agree_with_debug(method: str, model: tuple[str, ...]) -> None:
    sgd = ("training.optimizer.name=sgd", "training.optimizer.lr=0.01", "training.batch_size=16", "training.steps=5")
    plain, plain_loss = after(3, "engine.name=debug", f"method.name={method}", *sgd, *model)
    fast, fast_loss = after(3, "engine.slots=3", "engine.fused=false", f"method.name={method}", *sgd, *model)
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
    slots = list(federation.engine.pool)  # type: ignore[attr-defined]
    assert slots and all(len(slot._captures) == 1 for slot in slots)


def test_gpu_and_cpu_start_alike() -> None:
    gpu = Federation(tiny_config(*EXACT)).start()
    cpu = Federation(tiny_config("engine.device=cpu")).start()
    assert all(torch.equal(gpu.state[name].cpu(), cpu.state[name]) for name in cpu.state)


@pytest.mark.parametrize("shape", [(64, 64, 16, 16), (64, 64, 8, 8), (64, 256, 2, 2), (64, 512, 1, 1), (37, 24, 5, 3)])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norm_equals_torchs(shape: tuple[int, ...], add: bool, relu: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = BatchNorm(shape[1]).cuda()
    torch.nn.init.uniform_(plain.weight)
    torch.nn.init.uniform_(plain.bias)
    fused = copy.deepcopy(plain)
    use_fused(fused)

    def drawn() -> torch.Tensor:
        return (torch.randn(shape, device="cuda") * 2 + 1).to(dtype=dtype, memory_format=torch.channels_last)

    x, other, weight = drawn(), drawn(), drawn()
    results = []
    for norm in (plain, fused):
        inputs = [x.detach().requires_grad_(), other.detach().requires_grad_()]
        y = norm(inputs[0], inputs[1] if add else None, relu)
        (y * weight).sum().backward()
        tracked = norm.num_batches_tracked.float()
        gradients = [i.grad for i in inputs[: 1 + add]]
        results.append(
            [y.detach(), norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var, tracked, *gradients]
        )
    limit = 1e-5 if dtype == torch.float32 else 6e-2  # torch rounds before it adds: some signs differ
    for mine, theirs in zip(results[1], results[0], strict=True):
        assert mine is not None and theirs is not None and mine.dtype == theirs.dtype
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < limit


def test_evaluation_is_captured_and_right() -> None:
    federation = Federation(tiny_config(*EXACT, "engine.name=debug"))
    server = federation.start()
    server, record = federation.play(server)
    again = federation.evaluate(server.model)
    on_cpu = Federation(tiny_config("engine.device=cpu"))
    expected = on_cpu.evaluate({name: tensor.cpu() for name, tensor in server.model.items()})
    for size in expected:
        assert again[size].loss == pytest.approx(expected[size].loss, rel=1e-4)
        assert again[size].accuracy == pytest.approx(expected[size].accuracy, abs=0.01)
        assert again[size] == record.scores[size]
