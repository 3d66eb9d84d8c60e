"""Accuracy is over the whole test set, whatever the batch size, and what a run's accuracies come to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from motley.core.part import State
from motley.data.device import device_data
from motley.evaluate import EvaluationSettings, Evaluator, Score, Summary, rounds_to, summarize
from motley.federation import Federation
from motley.server.state import ServerState
from tests.conftest import tiny_config
from tests.states import with_large_means

STATISTICS = ("running_mean", "running_var")


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation(
        tiny_config("split.normalization_statistics=per-size", "data.transform.crop_padding=1")
    )


@pytest.fixture(scope="module")
def trained(federation: Federation) -> ServerState:
    """A server whose sizes' statistics have gone different ways, one of them far."""
    server, _ = federation.run_round(federation.initial_state())
    for name, tensor in server.state.items():
        if name.startswith("resnet14/") and name.endswith("running_mean"):
            tensor.add_(0.1)
    return server


def plainly(federation: Federation, state: State, size: str) -> Score:
    """Return a score by the obvious loop: one image at a time, straight from the data set."""
    model = federation.split.build(size).eval()
    model.load_state_dict(
        {name: state[piece.name] for name, piece in federation.split.part(size).items()}
    )
    test = federation.dataset.test
    right, seen, loss = [0] * federation.dataset.classes, [0] * federation.dataset.classes, 0.0
    for image, label in zip(test.inputs, test.targets.tolist(), strict=True):
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
        with torch.no_grad():
            answer: Tensor = model(pixels)
        loss += F.cross_entropy(answer, torch.tensor([label])).item()
        right[label] += int(answer.argmax().item() == label)
        seen[label] += 1
    return Score(
        sum(right) / len(test),
        loss / len(test),
        tuple(r / max(s, 1) for r, s in zip(right, seen, strict=True)),
    )


def evaluator(federation: Federation, batch_size: int) -> Evaluator:
    return fresh(federation, EvaluationSettings(batch_size=batch_size))


def fresh(federation: Federation, settings: EvaluationSettings, classes: int = 10) -> Evaluator:
    data = device_data(
        federation.dataset.test, federation.config.data.transform, federation.device, augment=False
    )
    return Evaluator(federation.split, lambda: data, classes, settings)


def test_every_size_equals_a_plain_loop(federation: Federation, trained: ServerState) -> None:
    scores = federation.evaluate(trained.state)
    assert list(scores) == list(federation.split.sizes)
    for size, score in scores.items():
        plain = plainly(federation, trained.state, size)
        assert score.accuracy == pytest.approx(plain.accuracy, abs=1e-9)
        assert score.class_accuracy == pytest.approx(plain.class_accuracy, abs=1e-6)
        assert score.loss == pytest.approx(plain.loss, rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 7, 100, 358, 359, 360, 100_000])
def test_the_batch_size_does_not_matter(
    federation: Federation, trained: ServerState, batch_size: int
) -> None:
    assert len(federation.dataset.test) == 359, "a prime: nothing but 1 divides it"
    whole = evaluator(federation, 359)(trained.state)
    for size, score in evaluator(federation, batch_size)(trained.state).items():
        assert score.accuracy == whole[size].accuracy
        assert score.class_accuracy == whole[size].class_accuracy
        assert score.loss == pytest.approx(whole[size].loss, rel=1e-4)


def test_accuracy_counts_every_example_once(federation: Federation, trained: ServerState) -> None:
    """A state that always answers 3 is right exactly as often as there is a 3."""
    state = {name: tensor.clone() for name, tensor in trained.state.items()}
    state["fc.weight"].zero_()
    state["fc.bias"].copy_(torch.arange(10) == 3)
    threes = int((federation.dataset.test.targets == 3).sum())
    for score in evaluator(federation, 100)(state).values():
        assert score.accuracy == threes / 359
        assert score.class_accuracy == tuple(float(label == 3) for label in range(10))
        shares = torch.log_softmax(state["fc.bias"].double(), 0)
        by_hand = -(threes * shares[3] + (359 - threes) * shares[0]) / 359
        assert score.loss == pytest.approx(by_hand.item(), rel=1e-5)


def test_each_size_uses_statistics_of_its_own(federation: Federation, trained: ServerState) -> None:
    before = federation.evaluate(trained.state)
    moved = {
        name: tensor + 1 if name.startswith("resnet10/") and name.endswith(STATISTICS) else tensor
        for name, tensor in trained.state.items()
    }
    after = federation.evaluate(moved)
    assert after["resnet10"].loss != before["resnet10"].loss
    assert after["resnet14"] == before["resnet14"]
    assert after["resnet18"] == before["resnet18"]


@pytest.mark.parametrize("precision", ["tf32", "fp16", "bf16"])
def test_evaluation_is_in_single_precision_whatever_the_training_precision(
    precision: str, trained: ServerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With channels whose mean is many times their standard deviation, as long training makes them."""
    # fp16 and bf16 training is refused on a CPU, but evaluation does not depend on the device.
    monkeypatch.setattr("motley.federation.check_precision", lambda precision, device: None)
    state = with_large_means(trained.state)
    expected = federation_of("fp32").evaluate(state)
    scores = federation_of(precision).evaluate(state)
    assert scores == expected


def federation_of(precision: str) -> Federation:
    """Build the federation of these tests for a training precision."""
    overrides = ("split.normalization_statistics=per-size", "data.transform.crop_padding=1")
    return Federation(tiny_config(*overrides, f"engine.precision={precision}"))


def test_rounding_weights_to_16_bits_would_spoil_the_state_of_this_test(
    federation: Federation, trained: ServerState
) -> None:
    """Without this, the test above could pass with evaluation in 16 bits."""
    state = with_large_means(trained.state)
    scores = federation.evaluate(state)
    state["layer1.0.conv1.weight"] = state["layer1.0.conv1.weight"].bfloat16().float()
    differences = []
    for size, rounded in federation.evaluate(state).items():
        differences.append(abs(rounded.loss - scores[size].loss))
    assert max(differences) > 0.2


def test_evaluating_changes_nothing(federation: Federation, trained: ServerState) -> None:
    before = {name: tensor.clone() for name, tensor in trained.state.items()}
    first = federation.evaluate(trained.state)
    federation.evaluate(federation.initial_state().state)
    assert federation.evaluate(trained.state) == first
    assert all(torch.equal(tensor, trained.state[name]) for name, tensor in before.items())


def test_a_class_that_no_test_image_has_counts_nowhere(
    federation: Federation, trained: ServerState
) -> None:
    wider = fresh(federation, EvaluationSettings(), classes=12)
    for size, score in wider(trained.state).items():
        assert len(score.class_accuracy) == 12
        assert score.class_accuracy[10:] == (None, None)
        assert score.accuracy == federation.evaluate(trained.state)[size].accuracy


def test_the_moving_average_is_what_is_evaluated() -> None:
    federation = Federation(
        tiny_config("server.ema_decay=0.9", "training.rounds=2", "training.batch_size=64")
    )
    server, _ = federation.run_round(federation.initial_state())
    server, record = federation.run_round(server)
    assert record.scores == federation.evaluate(server.ema or {})
    assert record.scores != federation.evaluate(server.state)


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3]), (2, [2, 3]), (3, [3]), (9, [3])])
def test_evaluation_every_k_rounds_and_at_the_end(every: int, evaluated: list[int]) -> None:
    federation = Federation(tiny_config(f"evaluation.every={every}", "training.rounds=3"))
    assert [
        number for number in (1, 2, 3) if federation.method.info.is_evaluated(number)
    ] == evaluated


# ---- what a series comes to


def test_summary_by_hand() -> None:
    assert summarize([2, 4, 6, 7], [0.1, 0.5, 0.5, 0.3], last_k=2) == Summary(0.3, 0.5, 4, 0.4)
    assert summarize([3], [0.25], last_k=5) == Summary(0.25, 0.25, 3, 0.25)


def test_rounds_to_a_target() -> None:
    assert rounds_to(0.5, [2, 4, 6], [0.4, 0.5, 0.6]) == 4
    assert rounds_to(0.0, [2, 4, 6], [0.4, 0.5, 0.6]) == 2
    assert rounds_to(0.61, [2, 4, 6], [0.4, 0.5, 0.6]) is None
    assert rounds_to(0.5, [], []) is None
