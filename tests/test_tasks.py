"""Tasks: losses and metrics by hand, federations of every task and model, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from motley.config import Config, load_config
from motley.core.errors import MotleyError
from motley.core.part import take
from motley.data import Dataset, Examples
from motley.evaluate import Score, mean_score
from motley.federation import Federation
from motley.methods import METHODS
from motley.methods.evaluation import TestSums, as_vector
from motley.models.inputs import InputShape, SignalShape, TableShape, TokenShape
from motley.runs.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from motley.runs.metrics import MetricsLog, metric_of, outcome, scores_of, to_line
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.studies.measures import Measure
from motley.studies.statistics import spread
from motley.tasks import CLASSIFICATION, LOSSES, METRICS, TASKS, Metric, Task

CPU = torch.device("cpu")
REGRESSION, NEXT_TOKEN = TASKS["regression"], TASKS["next-token"]


def score(task: Task, outputs: int, *batches: tuple[Tensor, Tensor]) -> Score:
    sums = TestSums(task, outputs, CPU)
    for batch in batches:
        sums.add(*batch)
    return Score.of(task, outputs, sums.vector.tolist())


# ---- metrics by hand


def test_metrics_of_a_classification_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [0.0, 1.0, 0.0], [5.0, 0.0, 0.0]])
    found = score(CLASSIFICATION, 3, (logits, torch.tensor([0, 1, 1, 1])))
    assert found.accuracy == found.value == 0.5 and found.metric.name == "accuracy"
    assert found.class_accuracy == (1.0, pytest.approx(1 / 3), None)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1, 1]))
    assert found.loss == pytest.approx(expected.item())
    top = CLASSIFICATION.with_choices("", ["top5", "accuracy"])
    both = score(top, 3, (logits, torch.tensor([0, 1, 1, 1])))
    assert both.metrics == {"top5": 1.0, "accuracy": 0.5} and both.accuracy == 0.5


def test_metrics_of_next_tokens_by_hand() -> None:
    """Two sequences of two positions: three of four tokens are right."""
    likely, other = math.log(3.0), 0.0  # probabilities 3/4 and 1/4
    logits = torch.tensor([[[likely, other], [other, likely]], [[likely, other], [likely, other]]])
    targets = torch.tensor([[0, 1], [0, 1]])
    found = score(NEXT_TOKEN, 2, (logits, targets))
    assert found.accuracy == 0.75 and found.class_accuracy == ()
    mean = -(3 * math.log(3 / 4) + math.log(1 / 4)) / 4
    assert found.loss == pytest.approx(mean)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(mean))
    assert NEXT_TOKEN.loss(logits, targets).item() == pytest.approx(mean)
    assert NEXT_TOKEN.example_losses(logits, targets).shape == (2,)
    # One target per sequence is predicted at the last position.
    last = score(NEXT_TOKEN, 2, (logits, targets[:, -1]))
    assert last == score(NEXT_TOKEN, 2, (logits[:, -1], targets[:, -1]))
    assert last.accuracy == 0.5


def test_metrics_of_a_regression_by_hand() -> None:
    outputs, targets = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([1.0, 4.0, 7.0])
    found = score(REGRESSION, 1, (outputs, targets))
    assert found.value == pytest.approx(math.sqrt(5 / 3)) and found.accuracy is None
    assert found.metrics["mae"] == pytest.approx(1.0)
    assert found.metrics["r2"] == pytest.approx(1 - 5 / 18)  # variation 9 + 0 + 9
    assert found.loss == pytest.approx(5 / 3)
    assert not found.metric.higher_is_better
    huber = REGRESSION.with_choices("huber", ())
    assert huber.loss(outputs, targets).item() == pytest.approx((0 + 1.5 + 0.5) / 3)
    two = torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert score(REGRESSION, 2, two).metrics["r2"] == pytest.approx(((1 - 1 / 0.5) + 0.0) / 2)


@pytest.mark.parametrize("task", [CLASSIFICATION, NEXT_TOKEN, REGRESSION], ids=lambda t: t.name)
def test_sums_over_batches_and_clients_are_those_of_all_examples(task: Task) -> None:
    numbers = torch.Generator().manual_seed(0)
    outputs = torch.randn(12, 3, generator=numbers)
    if task is REGRESSION:
        targets: Tensor = torch.randn(12, 3, generator=numbers)
    else:
        targets = torch.randint(3, (12,), generator=numbers)
    whole = TestSums(task, 3, CPU)
    whole.add(outputs, targets)
    clients = []
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        client = TestSums(task, 3, CPU)
        client.add(outputs[rows], targets[rows])
        clients.append(as_vector(task, 3, client.values()))
    torch.testing.assert_close(sum(clients), whole.vector, rtol=1e-12, atol=1e-12)


def test_the_mean_of_scores_is_that_of_every_metric() -> None:
    one = Score(1.0, 2.0, (), REGRESSION.primary, {"mae": 1.0})
    two = Score(3.0, 4.0, (), REGRESSION.primary, {"mae": 2.0})
    assert mean_score([one, two]) == Score(2.0, 3.0, (), REGRESSION.primary, {"mae": 1.5})


def test_a_line_of_a_regression_names_its_metric_and_the_summary_its_direction(
    tmp_path: Path,
) -> None:
    lines = []
    for number, value in enumerate((3.0, 1.0, 2.0), 1):
        scores = {
            "a": Score(value, 1.0, (), REGRESSION.primary, {"mae": 0.5}),
            "b": Score(value + 1, 1.0, (), REGRESSION.primary, {"mae": 0.5}),
        }
        lines.append(to_line(RoundRecord(number, scores=scores)))
    assert lines[0]["metric"] == {"name": "rmse", "higher_is_better": False, "percent": False}
    assert lines[0]["scores"]["rmse"] == {"a": 3.0, "b": 4.0, "mean": 3.5}
    assert "accuracy" not in lines[0] and "class_accuracy" not in lines[0]
    assert scores_of(lines[1]) == {"a": 1.0, "b": 2.0, "mean": 1.5}
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert MetricsLog(file).read() == lines
    file.write_text(json.dumps({**lines[0], "metric": "rmse"}) + "\n" + json.dumps(lines[1]))
    with pytest.raises(MotleyError, match="metric: input should be a valid dictionary"):
        MetricsLog(file).read()
    result = outcome(lines, 2, (1.6, 0.5))
    assert result.metric == metric_of(lines) and result.metric.name == "rmse"
    mean = result.scores["mean"]
    assert (mean.last, mean.best, mean.best_round, mean.mean_of_last_k) == (2.5, 1.5, 2, 2.0)
    assert result.rounds_to == {1.6: 2, 0.5: None} and result.accuracy == {}


# ---- a loss and a metric of one's own


def absolute_error_of_probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
    chosen = outputs.softmax(1).gather(1, targets[:, None])
    return (1 - chosen).flatten()


@pytest.fixture
def own_functions() -> Iterator[None]:
    LOSSES.register("own", "a toy")(absolute_error_of_probabilities)
    LOSSES.register("scalar", "a toy")(torch.nn.functional.cross_entropy)
    METRICS.register("doubt", "a toy")(
        Metric("doubt", False, values=absolute_error_of_probabilities)
    )
    METRICS.register("plain", "a toy")(absolute_error_of_probabilities)
    yield
    for registry, names in ((LOSSES, ("own", "scalar")), (METRICS, ("doubt", "plain"))):
        for name in names:
            del registry._entries[name]  # type: ignore[attr-defined]


def test_a_loss_and_metrics_of_ones_own(own_functions: None) -> None:
    task = CLASSIFICATION.with_choices("own", ["doubt", "plain", "accuracy"])
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])
    targets = torch.tensor([0, 1])
    assert task.loss(logits, targets).item() == pytest.approx((0.25 + 0.5) / 2)
    found = score(task, 2, (logits, targets))
    assert found.value == pytest.approx(0.375) and found.metric.name == "doubt"
    assert found.metrics["absolute_error_of_probabilities"] == pytest.approx(0.375)
    with pytest.raises(MotleyError, match=r"task\.loss: returned shape \(\) for 2 rows"):
        CLASSIFICATION.with_choices("scalar", ()).example_losses(logits, targets)


OWN = """
import motley
import torch.nn.functional as F

def focal(outputs, targets):
    errors = F.cross_entropy(outputs, targets, reduction="none")
    return (1 - (-errors).exp()) ** 2 * errors

def top2(outputs, targets):
    return (outputs.topk(2).indices == targets[:, None]).any(1)

doubt = motley.Metric("doubt", False, True, lambda outputs, targets: 1 - outputs.softmax(1)[:, 0])
"""


def test_a_run_with_functions_by_dotted_path_is_recorded_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_scores.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = (
        "task.loss=own_scores:focal",
        "task.metrics=own_scores:doubt,own_scores:top2,accuracy",
    )
    config = config_of("encoder", *chosen, *SHORT)
    assert config.task.loss == "own_scores:focal"
    federation = Federation(config, dataset=data_of(TOKENS, "classification", 2))
    _, record = played(federation)
    line = to_line(record)
    assert line["metric"] == {"name": "doubt", "higher_is_better": False, "percent": True}
    assert list(line["scores"]) == ["doubt", "top2"] and "accuracy" in line
    assert line["scores"]["top2"]["mean"] == 1.0
    with pytest.raises(MotleyError, match=r"task\.loss = 'own_scores:nothing'"):
        load_config(overrides=["task.loss=own_scores:nothing"])


def test_a_federation_of_objects_takes_functions() -> None:
    def surprise(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).abs().log1p()

    federation = Federation(
        models=["table1", "table2"],
        data=data_of(TABLE, "regression", 2),
        clients=3,
        training={"rounds": 1},
        task={"loss": absolute_errors, "metrics": ["mae", surprise]},
    )
    _, record = played(federation)
    assert list(record.scores["table1"].metrics) == ["mae", "surprise"]
    assert federation.config.task.loss == "tests.test_tasks:absolute_errors"
    assert federation.config.data.partition.name == "natural"


def absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).abs()


@pytest.mark.parametrize(
    ("task", "loss", "metrics", "message"),
    [
        (CLASSIFICATION, "mse", (), r"task\.loss = 'mse': is for targets that are numbers.*cross"),
        (REGRESSION, "", ("accuracy",), r"task\.metrics = 'accuracy': is for .*rmse, mae, r2"),
        (REGRESSION, "nope", (), r"task\.loss: unknown loss 'nope'"),
        (REGRESSION, "", ("mae", "mae"), r"two metrics have one name"),
    ],
)
def test_losses_and_metrics_that_do_not_fit_are_refused(
    task: Task, loss: str, metrics: tuple[str, ...], message: str
) -> None:
    with pytest.raises(MotleyError, match=message):
        task.with_choices(loss, metrics)


def test_settings_of_the_task_are_checked() -> None:
    assert load_config(overrides=["task.metrics=top5,accuracy"]).task.metrics == (
        "top5",
        "accuracy",
    )
    for key, value in (("name", "x"), ("loss", "x"), ("metrics", "x")):
        with pytest.raises(MotleyError, match=rf"task\.{key}: unknown"):
            load_config(overrides=[f"task.{key}={value}"])


# ---- federations


def data_of(shape: InputShape, task: str, classes: int, per_position: bool = False) -> Dataset:
    """Return random inputs, with targets that can be learned from them."""
    numbers = np.random.default_rng(0)
    count = 72
    if isinstance(shape, TokenShape):
        inputs = numbers.integers(shape.vocabulary, size=(count, shape.length))
        first = inputs[:, 0] % classes
    else:
        dims = (shape.numbers,) if isinstance(shape, TableShape) else tuple(shape)
        inputs = numbers.standard_normal((count, *dims)).astype(np.float32)
        first = (inputs.reshape(count, -1)[:, 0] > 0).astype(np.int64)
        if isinstance(shape, TableShape):
            columns = [numbers.integers(n, size=(count, 1)) for n in shape.categories]
            inputs = np.concatenate([inputs, *columns], 1).astype(np.float32)
    targets = first.astype(np.int64)
    if per_position:
        targets = np.asarray(inputs % classes, dtype=np.int64)
    if task == "regression":
        targets = inputs.reshape(count, -1)[:, :classes].astype(np.float32)
    owners = np.arange(count) % 6
    train = Examples(inputs[:60], targets[:60], owners[:60], shape)
    test = Examples(inputs[60:], targets[60:], owners[60:], shape)
    return Dataset("toy", train, test, classes, task=task)


SIGNAL, TOKENS, TABLE = SignalShape(2, 8), TokenShape(5, 7), TableShape(3, (4, 2))
DIMS = {"dim": 8, "heads": 2, "mlp_ratio": 1.0}
#: Case -> (sizes, settings of the family, shape, task, outputs, a target per position).
CASES: dict[str, tuple[list[str], dict[str, Any], InputShape, str, int, bool]] = {
    "cnn1d": (["cnn1d-1", "cnn1d-2"], {"width": 4}, SIGNAL, "classification", 2, False),
    "lstm-signal": (["lstm1", "lstm2"], {"hidden": 4}, SIGNAL, "classification", 2, False),
    "lstm": (
        ["lstm1", "lstm2", "lstm3"],
        {"embedding": 3, "hidden": 4, "output": "every"},
        TOKENS,
        "next-token",
        7,
        True,
    ),
    "decoder": (["decoder1", "decoder2"], DIMS, TOKENS, "next-token", 7, True),
    "decoder-last": (
        ["decoder1", "decoder2"],
        {**DIMS, "output": "last"},
        TOKENS,
        "next-token",
        7,
        False,
    ),
    "encoder": (["encoder1", "encoder2"], DIMS, TOKENS, "classification", 2, False),
    "table": (["table1", "table2", "table3"], {"hidden": 4}, TABLE, "classification", 2, False),
    "regression": (["table1", "table2", "table3"], {"hidden": 4}, TABLE, "regression", 2, False),
}
FAMILIES = {case: sizes[0].rstrip("0123456789-") for case, (sizes, *_) in CASES.items()}
FAMILIES["cnn1d"] = "cnn1d"


def config_of(case: str, *overrides: str) -> Config:
    sizes, settings, *_ = CASES[case]
    values = [f"model.{FAMILIES[case]}.{key}={value}" for key, value in settings.items()]
    return load_config(
        overrides=[
            f"model.sizes={sizes}",
            *values,
            "data.transform.resize=0",
            "data.partition.name=iid",
            "federation.clients=6",
            "federation.clients_per_round=4",
            "training.rounds=2",
            "training.epochs=1",
            "training.batch_size=8",
            "server.ema_decay=0",
            "training.optimizer={name='sgd', lr=0.1}",
            *overrides,
        ]
    )


def federation_of(case: str, *overrides: str, folder: Path | None = None) -> Federation:
    _, _, shape, task, classes, per_position = CASES[case]
    dataset = data_of(shape, task, classes, per_position)
    return Federation(config_of(case, *overrides), dataset=dataset, client_state_folder=folder)


def played(federation: Federation, server: ServerState | None = None) -> tuple[ServerState, Any]:
    server = server or federation.initial_state()
    record = None
    while server.round_number < federation.config.training.rounds:
        server, record = federation.run_round(server)
        assert not record.refused
    return server, record


@pytest.mark.parametrize("case", CASES)
def test_local_debug_and_a_resumed_run_end_alike(case: str, tmp_path: Path) -> None:
    local = federation_of(case, "server.inco.variant=paper", "engine.slots=2")
    server, record = played(local)
    debug = federation_of(case, "server.inco.variant=paper", "engine.name=debug")
    other, debug_record = played(debug)
    assert fingerprint(server.state) == fingerprint(other.state)
    assert record.scores == debug_record.scores
    task = local.task
    for size_score in record.scores.values():
        assert list(size_score.metrics) == [metric.name for metric in task.metrics]
        assert all(math.isfinite(value) for value in size_score.metrics.values())
        assert bool(size_score.class_accuracy) == task.has_classes

    resumed = federation_of(case, "server.inco.variant=paper")
    half, _ = resumed.run_round(resumed.initial_state())
    save_checkpoint(tmp_path, half, keep=1)
    saved = load_checkpoint(tmp_path)
    assert saved is not None
    assert fingerprint(played(resumed, saved)[0].state) == fingerprint(server.state)


@pytest.mark.parametrize("case", CASES)
def test_evaluation_is_the_task_on_the_whole_test_set(case: str) -> None:
    federation = federation_of(case, "evaluation.batch_size=5")
    server, record = played(federation)
    inputs = torch.from_numpy(federation.dataset.test.inputs)
    targets = torch.from_numpy(federation.dataset.test.targets)
    for size, found in record.scores.items():
        model = federation.split.build(size)
        model.load_state_dict(take(server.model, federation.split.part(size)))
        with torch.no_grad():
            outputs = model.eval()(inputs)
        expected = score(federation.task, federation.dataset.classes, (outputs, targets))
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-6)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)


@pytest.mark.parametrize("case", ["lstm", "decoder", "regression"])
def test_models_learn_their_tasks(case: str) -> None:
    """Random inputs, and targets that depend on them: the training loss falls."""
    adam = "training.optimizer={name='adam', lr=0.02}"
    everybody = ("federation.clients_per_round=6", "training.epochs=2", "training.rounds=5")
    federation = federation_of(case, *everybody, adam, "evaluation.every=9")
    server, first = federation.run_round(federation.initial_state())
    _, last = played(federation, server)
    assert last.train_loss < 0.98 * first.train_loss


SHORT = ("training.steps=1", "evaluation.every=2")
ON_EVERY_MODEL = [
    (case, method)
    for method in ("fedprox", "scaffold", "fedin", "moon")
    for case in ("cnn1d", "lstm", "decoder", "encoder", "regression")
]
ON_ONE_MODEL = [("lstm", "fednova"), ("decoder", "feddyn"), ("lstm", "fedspeed")]
OWN_MODELS = [("regression", "local"), ("decoder", "local")]


@pytest.mark.parametrize(("case", "method"), [*ON_EVERY_MODEL, *ON_ONE_MODEL, *OWN_MODELS])
def test_methods_run_on_every_model(case: str, method: str) -> None:
    server, record = played(federation_of(case, f"method.name={method}", *SHORT))
    assert record.scores and math.isfinite(record.train_loss)
    assert all(tensor.isfinite().all() for tensor in server.state.values())


PER_CLASS = [
    *((case, "fedimpro") for case in ("cnn1d", "lstm-signal", "encoder", "table")),
    *(("encoder", method) for method in ("ccvr", "fedproto", "fedgen")),
]


@pytest.mark.parametrize(("case", "method"), PER_CLASS)
def test_methods_per_class_run_on_every_classification(case: str, method: str) -> None:
    _, record = played(federation_of(case, f"method.name={method}", *SHORT))
    assert record.scores and math.isfinite(record.train_loss)


@pytest.mark.parametrize("channels", ["leading", "rolling"])
@pytest.mark.parametrize("case", ["cnn1d", "lstm", "decoder", "encoder", "table"])
def test_widths_of_every_model_train(case: str, channels: str) -> None:
    size = CASES[case][0][-1]
    widths = (f"model.sizes=['{size}']", "split.name=width", "split.rates=[1.0, 0.5]")
    settings = (*widths, f"split.channels={channels}", *SHORT)
    server, _ = played(federation_of(case, *settings, "server.inco.variant=official"))
    assert all(tensor.isfinite().all() for tensor in server.state.values())


@pytest.mark.parametrize("case", ["decoder", "encoder", "table", "regression", "lstm"])
def test_clients_side_by_side_train_like_clients_in_turn(case: str) -> None:
    """An LSTM has no batching rule in torch, so its clients train in slots."""
    alone, _ = played(federation_of(case))
    federation = federation_of(case, "engine.vmap_clients=4")
    together, _ = played(federation)
    for name, tensor in alone.state.items():
        torch.testing.assert_close(together.state[name], tensor, rtol=1e-4, atol=1e-5)


# ---- what is refused


def test_methods_that_need_classes_are_refused_for_other_tasks() -> None:
    per_class = {entry.name for entry in METHODS if entry.item.requirements.classes}
    assert {"fedgen", "ccvr", "spherefed", "fedimpro", "fd", "fedproto", "heterofl"} <= per_class
    assert not {"fedavg", "moon", "fedin", "scaffold", "inclusivefl", "local"} & per_class
    for case in ("regression", "decoder"):
        with pytest.raises(MotleyError, match=r"method\.name = 'fedimpro': is defined for classes"):
            federation_of(case, "method.name=fedimpro")


@pytest.mark.parametrize("partition", ["dirichlet", "dirichlet-equal", "shards"])
def test_partitions_by_label_are_refused_for_other_tasks(partition: str) -> None:
    for case in ("regression", "decoder", "decoder-last"):
        with pytest.raises(MotleyError, match=r"distributes examples by their class.*'iid'"):
            federation_of(case, f"data.partition.name={partition}")


def test_natural_clients_and_sizes_by_quantity_are_for_every_task() -> None:
    for partition in ("natural", "quantity"):
        for case in ("regression", "decoder"):
            assert len(federation_of(case, f"data.partition.name={partition}").partition) == 6


@pytest.mark.parametrize(
    ("case", "overrides", "message"),
    [
        ("lstm", ["model.lstm.output=last"], r"'lstm1' returns shape \(2, 7\).*output = 'every'"),
        ("encoder", ["task.name=regression"], r"task\.name = 'regression': its targets are num"),
        ("regression", ["task.name=classification"], r"task\.name = 'classification'"),
        ("decoder", ["task.name=classification"], r"needs one class per example.*next-token"),
        ("decoder", ["public.name=noise", "method.name=feddf"], r"is defined for classes"),
        ("encoder", ["public.name=noise", "method.name=feddf"], r"public inputs are images"),
        ("cnn1d", ["data.transform.flip=true"], r"data\.transform\.flip = True: .*signals"),
        ("encoder", ["model.sizes=['mlp2']"], r"'mlp2' takes numbers, .* token sequences"),
        ("encoder", ["model.sizes=['cnn1d-2']"], r"'cnn1d-2' takes signals, .* token sequences"),
        ("cnn1d", ["model.sizes=['resnet10']"], r"'resnet10' takes images, .* signals"),
        ("cnn1d", ["evaluation.targets=[1.5]"], r"evaluation\.targets = 1\.5: accuracy is a frac"),
    ],
)
def test_what_does_not_fit_is_refused(case: str, overrides: list[str], message: str) -> None:
    _, _, shape, task, classes, per_position = CASES[case]
    with pytest.raises(MotleyError, match=message):
        config = config_of(case)
        if any(override.startswith("model.sizes") for override in overrides):
            base = [f"data.transform.resize={0}", "data.partition.name=iid"]
            config = load_config(overrides=[*base, *overrides])
        else:
            config = config_of(case, *overrides)
        Federation(config, dataset=data_of(shape, task, classes, per_position))


def test_a_regression_with_another_number_of_outputs_is_refused() -> None:
    right = data_of(TABLE, "regression", 2)
    wrong = Dataset("toy", right.train, right.test, 3, task="regression")
    with pytest.raises(MotleyError, match=r"targets have shape \(60, 2\), and Dataset\.classes"):
        Federation(config_of("regression"), dataset=wrong)


def test_perceptrons_take_signals_and_tables() -> None:
    for case in ("cnn1d", "regression"):
        _, _, shape, task, classes, _ = CASES[case]
        settings = ["model.sizes=['mlp1','mlp2']", "data.transform.resize=0", "model.mlp.hidden=4"]
        more = ["data.partition.name=iid", "training.rounds=1"]
        config = load_config(overrides=[*settings, *more])
        _, record = played(Federation(config, dataset=data_of(shape, task, classes)))
        assert len(record.scores) == 2


def test_targets_of_a_regression_may_be_any_number() -> None:
    federation = federation_of("regression", "evaluation.targets=[25.0]")
    assert federation.config.evaluation.targets == (25.0,)


def test_an_lstm_is_not_compiled() -> None:
    with pytest.raises(MotleyError, match=r"engine\.compile = true: .*unrolls LSTM layers"):
        played(federation_of("lstm", "engine.compile=true"))


# ---- studies and reports


def regression_lines() -> list[dict[str, Any]]:
    """Return the lines of three rounds of a regression."""
    lines = []
    for number, value in enumerate((0.31, 0.12, 0.24), 1):
        scores = {"table1": Score(value, 1.0, (), REGRESSION.primary, {"mae": 0.1})}
        seconds = {"train": 1.0}
        lines.append(to_line(RoundRecord(number, scores=scores, seconds=seconds)))
    return lines


def test_measures_of_a_study_follow_the_metric() -> None:
    lines, config = regression_lines(), config_of("regression", "evaluation.last_k=2")
    assert Measure("best").of(lines, config, None) == 0.12
    assert Measure("last").of(lines, config, None) == 0.24
    assert Measure("mean-of-last-k").of(lines, config, None) == pytest.approx(0.18)
    assert Measure("rounds-to").of(lines, config, 0.2) == 2
    assert Measure("rounds-to").of(lines, config, 0.05) is None
    assert Measure("best").unit_of(metric_of(lines)) == "rmse, lower is better"
    assert Measure("best").unit_of(metric_of([])) == "%"
    found = spread([0.1234567, 0.2345678])
    assert found is not None and found.text(percent=False) == "0.179 ± 0.079"


def test_tables_and_figures_of_a_report_follow_the_metric() -> None:
    pytest.importorskip("plotly")
    from motley.report import figures, tables
    from motley.report.report_data import Panel, Run

    config = config_of("regression", "evaluation.targets=[0.2]")
    panel = Panel("houses")
    panel.add("fedavg", Run(Path("run"), config, regression_lines(), {}))
    head, row = tables.final(panel)
    assert head[2:5] == ["mean of last k", "last", "best"]
    assert row[2:5] == ["0.2233", "0.24", "0.12"]
    head, row = tables.costs(panel)
    assert head[1:3] == ["rounds to 0.12", "rounds to 0.2"] and row[1:3] == ["2", "2"]
    figure = figures.scores(panel, "mean", ["fedavg"])
    assert list(figure.data[0].y) == [0.31, 0.12, 0.24]
    assert figure.layout.yaxis.title.text == "rmse (lower is better)"
    assert figures.classes(panel) is None
