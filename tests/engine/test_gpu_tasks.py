"""On a GPU: models for signals, tokens and tables, captured, in 16 bits and side by side."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from motley.core.errors import MotleyError
from motley.core.part import take
from motley.engine import LocalEngine
from motley.federation import Federation
from motley.models import MODELS, ModelSpec
from motley.models.inputs import TokenShape
from motley.models.lstm import LSTMLayer
from motley.models.spec import Stage
from motley.server.state import ServerState
from tests.test_tasks import CASES, config_of, data_of, score

pytestmark = [
    pytest.mark.gpu,
    # A user's nn.LSTM in 16 bits; Motley's own layer must not cause it (tested below).
    pytest.mark.filterwarnings("ignore:RNN module weights"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
EXACT = ("engine.device=cuda", "engine.precision=fp32", "training.steps=5")


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the plain engine does not agree with itself."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def federation_of(case: str, *overrides: str) -> Federation:
    _, _, shape, task, classes, per_position = CASES[case]
    dataset = data_of(shape, task, classes, per_position)
    return Federation(config_of(case, *overrides), dataset=dataset)


def after(federation: Federation) -> ServerState:
    server = federation.initial_state()
    for _ in range(2):
        server, record = federation.run_round(server)
        assert not record.refused and math.isfinite(record.train_loss)
        assert all(math.isfinite(one.value) for one in record.scores.values())
    return server


def distance(one: ServerState, other: ServerState) -> float:
    squares = total = 0.0
    for name, tensor in other.state.items():
        squares += float((one.state[name].double() - tensor.double()).square().sum())
        total += float(tensor.double().square().sum())
    return math.sqrt(squares / total)


@pytest.mark.parametrize("method", ["fedavg", "moon", "fedin", "scaffold"])
@pytest.mark.parametrize("case", CASES)
def test_captured_steps_agree_with_debug(case: str, method: str) -> None:
    chosen = (*EXACT, f"method.name={method}", "server.inco.variant=official")
    plain = after(federation_of(case, *chosen, "engine.name=debug"))
    federation = federation_of(case, *chosen, "engine.slots=2", "engine.kernels=false")
    assert distance(after(federation), plain) < 1e-5
    with_kernels = after(federation_of(case, *chosen, "engine.slots=2"))
    assert distance(with_kernels, plain) < 1e-4


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("case", CASES)
def test_training_in_other_precisions_stays_near(case: str, precision: str) -> None:
    """Token and category numbers are not rounded to 16 bits."""
    exact = after(federation_of(case, *EXACT))
    low = after(federation_of(case, *EXACT[::2], f"engine.precision={precision}"))
    assert distance(low, exact) < 0.05


@pytest.mark.parametrize("case", ["decoder", "encoder", "table", "regression"])
def test_clients_side_by_side_agree_with_debug(case: str) -> None:
    plain = after(federation_of(case, *EXACT, "engine.name=debug"))
    assert distance(after(federation_of(case, *EXACT, "engine.vmap_clients=4")), plain) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_captured_evaluation_is_the_task_on_the_whole_test_set(case: str) -> None:
    federation = federation_of(case, *EXACT, "evaluation.batch_size=5")
    server = after(federation)
    federation.evaluate(server.model, 2)  # captured now
    scores = federation.evaluate(server.model, 2)
    inputs = torch.from_numpy(federation.dataset.test.inputs)
    targets = torch.from_numpy(federation.dataset.test.targets)
    for size, found in scores.items():
        model = federation.split.build(size)
        part = take(server.model, federation.split.part(size))
        model.load_state_dict({name: tensor.cpu() for name, tensor in part.items()})
        with torch.no_grad():
            outputs = model.eval()(inputs)
        expected = score(federation.task, federation.dataset.classes, (outputs, targets))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-4)


@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_cudnn_takes_the_weights_as_they_are(dtype: torch.dtype) -> None:
    """CuDNN warns if it has to copy weights into one block of memory."""
    layer = LSTMLayer(5, 8).to("cuda", dtype)
    x = torch.randn(4, 7, 5, device="cuda", dtype=dtype, requires_grad=True)
    expected = nn.LSTM(5, 8, batch_first=True).to("cuda", dtype)
    expected.load_state_dict(layer.state_dict())
    outputs = layer(x)
    torch.testing.assert_close(outputs, expected(x)[0], rtol=1e-2, atol=1e-2)
    outputs.float().square().sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_weights_of_an_lstm_stay_where_they_are() -> None:
    """Captured steps and our optimizer keep the addresses of weights and of received parts."""
    federation = federation_of("lstm", *EXACT, "method.name=moon", "engine.slots=1")
    engine = federation.engine
    assert isinstance(engine, LocalEngine)
    server, _ = federation.run_round(federation.initial_state())
    learners = [slot.learner for slot in engine.pool]

    def addresses() -> list[int]:
        states = [state for learner in learners for state in (learner.state, learner.received)]
        return [tensor.data_ptr() for state in states for tensor in state.values()]

    before = addresses()
    federation.run_round(server)
    assert addresses() == before


class TorchLSTM(nn.Module):
    """A user's model with torch's own recurrent layer."""

    def __init__(self, shape: TokenShape, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, classes)

    def recur(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.lstm(x)[0]
        return outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.recur(self.embedding(x)))
        return outputs


def test_torchs_own_lstm_trains_and_is_refused_where_its_weights_would_move() -> None:
    stages = (Stage("embedding"), Stage("recur", members=("lstm",)), Stage("head"))
    spec = ModelSpec(
        lambda settings, shape, classes: TorchLSTM(shape, classes), "lstm", stages, head="head"
    )
    MODELS.register("torch-lstm", "a toy")(spec)
    try:
        size = ("model.sizes=['torch-lstm']", "split.name=homogeneous", *EXACT)
        plain = after(federation_of("lstm", *size, "engine.name=debug"))
        assert distance(after(federation_of("lstm", *size, "engine.kernels=false")), plain) < 1e-5
        with pytest.raises(MotleyError, match="move such weights in memory"):
            after(federation_of("lstm", *size, "method.name=moon"))
    finally:
        del MODELS._entries["torch-lstm"]
