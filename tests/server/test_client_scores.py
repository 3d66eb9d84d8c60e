"""Scores of clients on test examples of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from motley.client.scoring import ClientTests
from motley.config import Config
from motley.core.errors import MotleyError
from motley.data import Dataset, Examples, load_dataset
from motley.data.device import device_data
from motley.data.transforms import TransformSettings
from motley.engine.base import Job
from motley.federation import Federation
from motley.methods import METHODS
from motley.methods.base import Collection
from motley.models.inputs import ArrayShape, TokenShape
from motley.runs.checkpoint import fingerprint
from motley.server.client_scores import ClientScores, PendingClientScores, spread
from motley.server.collection import Answers
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.tasks import CLASSIFICATION, TASKS
from tests.conftest import chosen, tiny_config
from tests.partitions import joined

MLP = (
    "model.sizes=['mlp1','mlp2','mlp3']",
    "model.mlp.hidden=8",
    "training.batch_size=16",
    "training.epochs=2",
    "training.rounds=2",
    "training.optimizer.lr=0.01",
)
HELD_OUT = ("evaluation.client_test_fraction=0.2",)
ALL = (*HELD_OUT, "evaluation.per_client=all")
PERSONALIZED = (*ALL, "evaluation.personalize_epochs=2")


def quick(*overrides: str) -> Config:
    return tiny_config(*MLP, *overrides)


def played(federation: Federation, rounds: int = 2) -> tuple[ServerState, list[RoundRecord]]:
    server = federation.initial_state()
    records = []
    for _ in range(rounds):
        server, record = federation.run_round(server)
        records.append(record)
    return server, records


def scores_of(*overrides: str) -> ClientScores:
    _, records = played(Federation(quick(*overrides)))
    scores = records[-1].client_scores
    assert scores is not None
    return scores


# ---- the numbers, computed by hand


@pytest.mark.parametrize("place", range(4))
def test_a_client_that_diverged_leaves_no_worst_tenth(place: int) -> None:
    """Sorted with NaN, 1 or 5 would be the worst, depending on the order of the clients."""
    errors = [1.0, 5.0, 3.0]
    errors.insert(place, math.nan)
    result = spread(errors, [1] * 4, higher_is_better=False)
    numbers = (result.mean, result.weighted, result.worst_tenth, result.std, result.min, result.max)
    assert all(math.isnan(number) for number in numbers) and result.clients == 4


def test_the_spread_of_known_scores() -> None:
    """Four clients with 10, 30, 10 and 50 examples."""
    result = spread([0.9, 0.5, 0.7, 0.1], [10, 30, 10, 50], higher_is_better=True)
    assert result.clients == 4
    assert result.mean == pytest.approx(0.55, abs=1e-15)
    assert result.weighted == pytest.approx((9 + 15 + 7 + 5) / 100, abs=1e-15)
    assert result.worst_tenth == 0.1
    assert result.std == pytest.approx(math.sqrt((0.35**2 + 0.05**2 + 0.15**2 + 0.45**2) / 4))
    assert (result.min, result.max) == (0.1, 0.9)


@pytest.mark.parametrize(
    ("clients", "worst"), [(1, 1), (10, 1), (11, 2), (20, 2), (30, 3), (100, 10), (101, 11)]
)
def test_the_worst_tenth_is_rounded_up(clients: int, worst: int) -> None:
    scores = [float(number) for number in range(clients)]
    expected = sum(scores[:worst]) / worst
    assert spread(scores[::-1], [1] * clients, True).worst_tenth == expected
    highest = sum(scores[-worst:]) / worst
    assert spread(scores, [1] * clients, False).worst_tenth == highest


class Brightness(nn.Module):
    """Predicts class 1 for bright images, class 0 for dark ones."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bright = images.mean(dim=(1, 2, 3)) > 0.5
        return nn.functional.one_hot(bright.long(), 2).float()


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_known_predictions_are_counted_for_their_clients(batch_size: int) -> None:
    images = np.zeros((5, 4, 4, 1), dtype=np.uint8)
    images[[1, 3]] = 255  # predictions: 0, 1, 0, 1, 0
    examples = Examples(images, np.array([0, 1, 1, 0, 0]))
    data = device_data(examples, TransformSettings(), torch.device("cpu"), augment=False)
    partition = joined([np.array([2, 4]), np.array([], dtype=np.int64), np.array([0, 1, 3])])
    tests = ClientTests(lambda: data, partition, batch_size, CLASSIFICATION)
    assert tests.sums(Brightness(), [0, 2]).tolist() == [[1.0, 2.0], [2.0, 3.0]]
    assert tests.sums(Brightness(), [2, 0]).tolist() == [[2.0, 3.0], [1.0, 2.0]]


class Copy(nn.Module):
    """Returns its inputs."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


@pytest.mark.parametrize("metric", ["rmse", "r2"])
def test_clients_of_a_regression(metric: str) -> None:
    """Predictions 0, 1, 2, 3 for targets 0, 3, 2, 7: clients have errors of 0, 2 and of 0, 4."""
    inputs = np.array([[0], [1], [2], [3]], dtype=np.float32)
    targets = np.array([[0], [3], [2], [7]], dtype=np.float32)
    examples = Examples(inputs, targets, input_shape=ArrayShape((1,)))
    data = device_data(examples, TransformSettings(), torch.device("cpu"), augment=False)
    task = TASKS["regression"].with_choices("", [metric])
    tests = ClientTests(lambda: data, joined([np.array([0, 1]), np.array([2, 3])]), 3, task)
    values = [task.primary.value(sums) for sums in tests.sums(Copy(), [0, 1]).tolist()]
    # r2 is 1 - (sum of squared errors) / (sum of squares around the mean).
    expected = [math.sqrt(2), math.sqrt(8)] if metric == "rmse" else [1 - 4 / 4.5, 1 - 16 / 12.5]
    assert values == pytest.approx(expected, abs=1e-12)


def test_every_position_of_a_sequence_counts_for_its_client() -> None:
    """Two sequences of three tokens; the model is right twice in the first, once in the second."""
    tokens = np.array([[0, 1, 1], [1, 0, 0]])
    targets = np.array([[0, 1, 0], [0, 0, 1]])
    examples = Examples(tokens, targets, input_shape=TokenShape(3, 2))
    data = device_data(examples, TransformSettings(), torch.device("cpu"), augment=False)

    class Same(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(inputs, 2).float()

    partition = joined([np.array([1]), np.array([0])])
    tests = ClientTests(lambda: data, partition, 10, TASKS["next-token"])
    assert tests.sums(Same(), [0, 1]).tolist() == [[1.0, 3.0], [2.0, 3.0]]


def test_a_score_that_is_not_a_number_is_no_score() -> None:
    """r2 of a single example is not defined."""
    stage = Federation(quick(*ALL)).score_clients
    assert stage is not None
    info = replace(stage.algorithm.info, task=TASKS["regression"].with_choices("", ["r2"]))
    stage.algorithm.info = info
    answers = []
    for client, sums in enumerate([[0.0, 3.0, 9.0, 1.0], [1.0, 2.0, 4.0, 2.0]]):
        values = {"score": torch.tensor(sums, dtype=torch.float64)}
        answers.append(Collection(client, int(sums[-1]), values, "mlp1", 1))
    jobs = [Job(1, client, "mlp1", {}) for client in range(2)]
    scores = PendingClientScores(stage, jobs, Answers(answers, {}, 0, 0)).read()
    assert [(one.client, one.score) for one in scores.scores] == [(1, 0.5)]
    assert scores.unscored == [0]


# ---- in a federation


@pytest.mark.parametrize("settings", [ALL, PERSONALIZED])
def test_one_pass_gives_the_scores_of_one_client_after_the_other(
    settings: tuple[str, ...],
) -> None:
    """The debug engine scores every client alone, the local engine all of a size in one pass."""
    debug = scores_of(*settings, "engine.name=debug")
    local = scores_of(*settings, "evaluation.batch_size=37")
    assert debug == local
    assert [one.client for one in local.scores] == [0, 1, 2, 3, 4, 5]
    assert local.sizes == ["mlp1", "mlp2", "mlp3"]
    assert (local.scores[0].personalized is None) == (settings is ALL)


def test_a_score_does_not_depend_on_other_clients_with_statistics_of_test_batches() -> None:
    """The examples of one client are a batch then, and are normalized by their own statistics."""
    scores = {}
    for engine in ("debug", "local"):
        config = tiny_config(
            *ALL,
            "model.sizes=['resnet10']",
            "split.normalization_statistics=batch",
            "training.rounds=1",
            f"engine.name={engine}",
        )
        _, (record,) = played(Federation(config), rounds=1)
        scores[engine] = record.client_scores
    assert scores["debug"] == scores["local"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("evaluation.batch_size=358",), r"evaluation\.batch_size = 358: 359 test examples"),
        ((*ALL, "federation.clients=200"), r"evaluation\.per_client = 'all': some clients"),
    ],
)
def test_a_batch_of_one_without_statistics_is_refused(
    settings: tuple[str, ...], message: str
) -> None:
    """The last maps of the network are one pixel large, so one example has one value."""
    batch_statistics = ("model.sizes=['resnet10']", "split.normalization_statistics=batch")
    with pytest.raises(MotleyError, match=message):
        Federation(tiny_config(*batch_statistics, *settings))


def test_the_scores_are_those_of_the_global_models_parts() -> None:
    """Recomputed with the sizes' models, example by example, on the examples that are held out."""
    federation = Federation(quick(*ALL))
    server, records = played(federation)
    tests, scores = federation.client_tests, records[-1].client_scores
    assert tests is not None and scores is not None
    data = device_data(
        federation.dataset.train, federation.config.data.transform, federation.device, augment=False
    )
    for one in scores.scores:
        model = federation.split.build(one.size)
        part = federation.split.part(one.size)
        model.load_state_dict({name: server.model[piece.name] for name, piece in part.items()})
        rows = torch.from_numpy(tests.of(one.client))
        images, labels = data.batch(rows)
        correct = (model.eval()(images).argmax(1) == labels).tolist()
        assert one.examples == len(correct)
        assert one.score == sum(correct) / len(correct)


def test_nobody_trains_on_held_out_examples() -> None:
    federation = Federation(quick(*HELD_OUT))
    assert federation.client_tests is not None
    shared = np.intersect1d(federation.partition.indices, federation.client_tests.indices)
    assert not len(shared)
    assert len(federation.partition.indices) + len(federation.client_tests.indices) == len(
        federation.dataset.train
    )
    assert played(federation)[1][-1].client_scores is None


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon"])
def test_scoring_clients_does_not_change_the_run(method: str) -> None:
    """Not even training for the personalized score: states, losses and scores stay the same."""
    settings = chosen(method)
    ends = []
    for extra in (HELD_OUT, PERSONALIZED):
        server, records = played(Federation(quick(*settings, *extra)))
        digests = [fingerprint(server.state), fingerprint(server.method_state)]
        ends.append((digests, [(one.scores, one.train_loss, one.bytes_up) for one in records]))
    assert ends[0] == ends[1]


def test_local_training_from_the_global_model_helps_a_client_with_few_classes() -> None:
    scores = scores_of(*PERSONALIZED, "evaluation.personalize_epochs=5", "data.partition.alpha=0.1")
    before, after = scores.spread(), scores.personalized_spread()
    assert before is not None and after is not None
    assert after.mean > before.mean + 0.1


def test_the_rounds_clients_or_every_second_evaluation() -> None:
    settings = ("evaluation.per_client=round", "evaluation.per_client_every=2", "training.rounds=3")
    _, records = played(Federation(quick(*HELD_OUT, *settings)), rounds=3)
    assert [record.client_scores is not None for record in records] == [False, True, True]
    scores = records[-1].client_scores
    assert scores is not None
    assert [one.client for one in scores.scores] == records[-1].clients


def test_clients_without_test_data_are_listed() -> None:
    """Client 5 has one example, so it holds out none."""
    federation = Federation(quick())
    lists = [federation.partition.of(client) for client in range(6)]
    partition = joined([*lists[:5], lists[5][:1]])
    _, records = played(Federation(quick(*PERSONALIZED), partition=partition), rounds=1)
    scores = records[-1].client_scores
    assert scores is not None
    assert [one.client for one in scores.scores] == [0, 1, 2, 3, 4]
    assert scores.unscored == [5]


def test_sizes_are_summarized_separately() -> None:
    scores = scores_of(*ALL)
    by_client = {one.client: one for one in scores.scores}
    middle = scores.spread("mlp2")
    assert middle is not None
    assert middle.clients == 2
    assert middle.mean == (by_client[2].score + by_client[3].score) / 2
    assert scores.spread("mlp9") is None


def natural_digits() -> Dataset:
    """The digits of six persons, who also have test examples; those of a seventh are in no train."""
    digits = load_dataset("digits")
    train = replace(digits.train, clients=np.arange(len(digits.train)) % 6)
    test = replace(digits.test, clients=np.arange(len(digits.test)) % 7)
    return replace(digits, train=train, test=test)


def test_natural_clients_are_scored_on_their_part_of_the_test_set() -> None:
    config = quick("evaluation.per_client=all", "data.partition.name=natural")
    dataset = natural_digits()
    federation = Federation(config, dataset=dataset)
    _, records = played(federation)
    scores = records[-1].client_scores
    assert scores is not None
    assert dataset.test.clients is not None
    expected = np.bincount(dataset.test.clients)[:6].tolist()
    assert [one.examples for one in scores.scores] == expected


# ---- parts that move, methods of all kinds


MOVING = (*MLP, "model.sizes=['mlp3']", "split.name=width", "split.rates=[1.0,0.5]")
RECALIBRATED = ("server.statistics.name=recalibrate", "training.steps=1")


@pytest.mark.parametrize(
    "settings",
    [
        (*MOVING, "split.channels=rolling"),
        (*MLP, "federation.size_assignment=dynamic"),
        (*RECALIBRATED, "model.sizes=['resnet10']"),
    ],
)
def test_the_evaluated_part_is_scored(settings: tuple[str, ...]) -> None:
    """The clients' held-out examples together are scored like a test set: same counts."""
    federation = Federation(tiny_config(*ALL, *settings))
    server, records = played(federation)
    scores = records[-1].client_scores
    assert scores is not None and federation.client_tests is not None
    for size in scores.sizes:
        clients = [one for one in scores.scores if one.size == size]
        rows = np.concatenate([federation.client_tests.of(one.client) for one in clients])
        train = federation.dataset.train
        test = Examples(train.inputs[rows], train.targets[rows])
        dataset = replace(federation.dataset, test=test)
        other = Federation(tiny_config(*ALL, *settings), dataset=dataset)
        expected = other.evaluate(server.model, server.round_number)[size].accuracy
        spread_of_size = scores.spread(size)
        assert spread_of_size is not None
        assert spread_of_size.weighted == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        chosen("local"),
        chosen("fedproto"),
        (*chosen("ditto"), "server.ema_decay=0"),
        (*chosen("fedavg"), "split.private=['head']"),
    ],
)
def test_own_models_are_scored_on_their_clients_test_examples(settings: tuple[str, ...]) -> None:
    """They are personal already, so their personalized score is the same."""
    federation = Federation(quick(*PERSONALIZED, *settings))
    server, records = played(federation)
    scores, tests = records[-1].client_scores, federation.client_tests
    assert scores is not None and tests is not None
    assert [one.client for one in scores.scores] == sorted(server.client_state_rounds)
    data = device_data(
        federation.dataset.train, federation.config.data.transform, federation.device, augment=False
    )
    for one in scores.scores:
        images, labels = data.batch(torch.from_numpy(tests.of(one.client)))
        predictions = federation.client_model(server, one.client)(images).argmax(1)
        assert one.score == (predictions == labels).double().mean().item()
        assert one.personalized == one.score


# ---- refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("evaluation.personalize_epochs=1",), "evaluation.personalize_epochs = 1: is for the"),
        (("evaluation.per_client=all",), "does not record which client a test example belongs to"),
        (
            (*ALL, "privacy.clip=1", "privacy.noise=1", "split.normalization_statistics=batch"),
            "evaluation.per_client = 'all': privacy.clip = 1 protects deltas",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        Federation(quick(*settings))


def test_held_out_examples_do_not_conflict_with_privacy(tmp_path: Path) -> None:
    private = ("privacy.clip=1", "privacy.noise=1", "split.normalization_statistics=batch")
    assert Federation(quick(*HELD_OUT, *private)).client_tests is not None


@pytest.mark.slow
@pytest.mark.parametrize("method", [entry.name for entry in METHODS])
def test_every_methods_clients_are_scored_alike_by_both_engines(method: str) -> None:
    settings = (*PERSONALIZED, *chosen(method), "training.steps=2", "training.rounds=2")
    records = {}
    for engine in ("debug", "local"):
        federation = Federation(tiny_config(*settings, f"engine.name={engine}"))
        records[engine] = played(federation)[1][-1]
    assert records["debug"].client_scores == records["local"].client_scores
    assert records["local"].client_scores is not None
    assert not records["local"].refused
