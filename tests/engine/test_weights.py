"""Low-precision copies against the single-precision weights behind them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from motley.client.training import AdamSettings, OptimizerSettings, SGDSettings
from motley.client.weights import TYPES, LossScale, Weights
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.federation import Federation
from motley.models import MODELS, ImageShape
from motley.models.vit import ViTSettings
from motley.runs.checkpoint import fingerprint
from tests.conftest import tiny_config

IMAGE = ImageShape(3, 16, 16)


def build() -> nn.Module:
    torch.manual_seed(0)
    return MODELS["vit2"].make(ViTSettings(patch=8, dim=32, heads=2), IMAGE, 10)


def train(model: nn.Module, weights: Weights, steps: int) -> State:
    """Take steps the way a method does, with corrections of gradients and weights on the way."""
    optimizer = torch.optim.SGD(weights.masters.values(), lr=0.05)
    numbers = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        images = torch.randn(8, *IMAGE, generator=numbers)
        labels = torch.randint(0, 10, (8,), generator=numbers)
        weights.backward(nn.functional.cross_entropy(model(images.to(dtype)).float(), labels))
        weights.gather()
        for master in weights.masters.values():
            assert master.grad is not None
            master.grad.add_(master.detach(), alpha=0.1)
        optimizer.step()
        with torch.no_grad():
            for master in weights.masters.values():
                master.mul_(0.999)
        weights.sync()
    return {name: master.detach().clone() for name, master in weights.masters.items()}


def test_in_fp32_masters_are_the_models_own_parameters() -> None:
    model = build()
    weights = Weights(model, "fp32")
    assert all(weights.masters[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize("precision", TYPES)
def test_copies_follow_their_masters(precision: str) -> None:
    model = build()
    weights = Weights(model, precision)
    train(model, weights, 3)
    for name, parameter in model.named_parameters():
        assert weights.masters[name].dtype == torch.float32 and parameter.dtype == TYPES[precision]
        assert torch.equal(parameter.detach(), weights.masters[name].detach().to(TYPES[precision]))


@pytest.mark.parametrize(("low", "limit"), [("bf16", 0.1), ("fp16", 0.02)])
def test_low_precision_trains_close_to_fp32_and_keeps_small_changes(low: str, limit: float) -> None:
    ends = {}
    for precision in ("fp32", low):
        model = build()
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        ends[precision] = train(model, Weights(model, precision), 3)
    moved = sum(float((ends["fp32"][name] - start[name]).square().sum()) for name in start) ** 0.5
    apart = (
        sum(float((ends["fp32"][name] - ends[low][name]).square().sum()) for name in start) ** 0.5
    )
    assert 0 < apart < limit * moved
    assert any(not torch.equal(t, t.to(TYPES[low]).float()) for t in ends[low].values())


@pytest.mark.parametrize("precision", ["fp32", *TYPES])
def test_gradients_of_some_names_reach_their_masters(precision: str) -> None:
    """Two kinds of steps in turns, as FedRep has them: each leaves the other's gradients out."""
    model = build()
    weights = Weights(model, precision)
    images = torch.randn(8, *IMAGE, generator=torch.Generator().manual_seed(1))
    images = images.to(next(model.parameters()).dtype)

    def gradients(names: set[str] | None) -> State:
        logits = model(images).float()
        weights.backward(nn.functional.cross_entropy(logits, torch.arange(8)), names)
        return {name: gradient.clone() for name, gradient in weights.gradients().items()}

    whole = gradients(None)
    head = {name for name in whole if name.startswith("head")}
    assert head and head < whole.keys()
    for names in (head, whole.keys() - head, head):
        some = gradients(names)
        assert some.keys() == names
        assert all(torch.equal(gradient, whole[name]) for name, gradient in some.items())


def test_batch_norms_stay_in_single_precision() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    weights = Weights(model, "bf16")
    assert [p.dtype for p in model[1].parameters()] == [torch.float32] * 2
    assert [p.dtype for p in (*model[0].parameters(), *model[3].parameters())] == [
        torch.bfloat16
    ] * 4
    assert weights.masters["1.weight"] is model[1].weight


@pytest.mark.parametrize("settings", [AdamSettings(), SGDSettings(lr=1e-3, momentum=0.9)])
def test_steps_whose_gradients_do_not_fit_are_left_out_until_they_do(
    settings: OptimizerSettings,
) -> None:
    """A gradient of 100 fits under a scale of 512: three steps are left out, and the fourth is the first of fp32."""
    model, plain = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
    start = plain.weight.detach().clone()
    with torch.no_grad():
        model.weight.copy_(start)
    weights = Weights(model, "fp16")
    master, scale, cpu = weights.masters["weight"], weights.scale, torch.device("cpu")
    assert scale is not None
    optimizer = settings.build([master], cpu, weights=weights, scale=scale)
    theirs = settings.build(plain.parameters(), cpu)
    for left_out in (True, True, True, False, False):
        weights.backward(100 * model.weight.float().sum())
        weights.gather()
        optimizer.step()
        weights.sync()
        if left_out:
            assert torch.equal(master.detach(), start)
        else:
            plain.weight.grad = torch.full_like(start, 100.0)
            theirs.step()
    assert torch.equal(master.detach(), plain.weight.detach()) and float(scale.value) == 512
    for _ in range(4 * LossScale.PATIENCE):
        weights.backward(0 * model.weight.float().sum())
        weights.gather()
        optimizer.step()
    assert float(scale.value) == LossScale.HIGHEST


def test_a_turn_does_not_see_the_scale_that_another_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale that no gradient fits under at first, one slot for all clients gives what a slot each gives."""
    monkeypatch.setattr("motley.federation.check_precision", lambda *_: None)
    monkeypatch.setattr(LossScale, "HIGHEST", 2.0**24)
    ends = []
    for slots in (1, 3):
        federation = Federation(
            tiny_config("engine.precision=fp16", f"engine.slots={slots}", "training.steps=30")
        )
        server, record = federation.run_round(federation.initial_state())
        assert not record.refused
        ends.append(fingerprint(server.state))
    assert ends[0] == ends[1] != fingerprint(federation.initial_state().state)


@pytest.mark.parametrize("precision", TYPES)
def test_low_precision_on_a_cpu_is_refused(precision: str) -> None:
    with pytest.raises(MotleyError, match=precision):
        Federation(tiny_config("engine.device=cpu", f"engine.precision={precision}"))


def test_a_block_in_single_precision_computes_with_the_masters() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    weights = Weights(model, "bf16")
    copies = [copy.data_ptr() for copy in weights.copies if copy is not None]
    inputs = torch.randn(5, 4)
    plain = nn.functional.linear(inputs, weights.masters["0.weight"], weights.masters["0.bias"])
    with weights.single_precision():
        assert torch.equal(model[0](inputs), plain)
    assert [copy.data_ptr() for copy in weights.copies if copy is not None] == copies
    assert all(copy.dtype == torch.bfloat16 for copy in weights.copies if copy is not None)
