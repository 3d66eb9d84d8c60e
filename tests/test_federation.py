"""The round loop: who is sampled, what is refused, and what a round leaves alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from motley.assembly import assign_sizes
from motley.client.job import Job
from motley.core.errors import MotleyError
from motley.core.part import State, size_in_bytes, take
from motley.core.update import ClientUpdate
from motley.data import Dataset, Examples
from motley.engine.base import Done, Engine
from motley.federation import Federation
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import tiny_config

Change = Callable[[ClientUpdate], ClientUpdate]


class Tampered:
    """An engine whose uploads are changed on their way."""

    trusted = True

    def __init__(self, engine: Engine, changes: dict[int, Change]) -> None:
        self.engine, self.changes = engine, changes

    def train(self, jobs: Sequence[Job], done: Done) -> list[ClientUpdate]:
        return [self.changes.get(u.client, lambda u: u)(u) for u in self.engine.train(jobs, done)]


def with_delta(name: str, value: torch.Tensor) -> Change:
    return lambda upload: replace(upload, delta={**upload.delta, name: value})


def test_a_bad_upload_is_refused_and_the_round_goes_on() -> None:
    federation = Federation(tiny_config("federation.clients_per_round=6", "server.ema_decay=0"))
    server = federation.initial_state()
    honest = federation.engine
    bias = torch.full((10,), float("nan"))
    federation.engine = Tampered(  # type: ignore[assignment]
        honest,
        {
            0: with_delta("fc.bias", bias),
            1: with_delta("fc.bias", torch.zeros(3)),
            2: with_delta("backdoor", torch.zeros(3)),
            3: lambda u: replace(u, delta={n: t for n, t in u.delta.items() if n != "fc.bias"}),
        },
    )
    after, record = federation.run_round(server)
    assert "not finite" in record.refused[0]
    assert "(3,)" in record.refused[1]
    assert "backdoor" in record.refused[2]
    assert "'fc.bias' is missing" in record.refused[3]
    assert after.client_state_rounds.keys() == {4, 5}
    jobs = [federation.job(server, 1, client) for client in (4, 5)]
    good = honest.train(jobs, lambda client: None)
    expected = server.state["fc.bias"] + (good[0].delta["fc.bias"] + good[1].delta["fc.bias"]) / 2
    assert torch.allclose(after.state["fc.bias"], expected)


def test_a_message_that_is_not_finite_is_refused() -> None:
    federation = Federation(tiny_config("method.name=scaffold", "federation.clients_per_round=6"))
    federation.engine = Tampered(  # type: ignore[assignment]
        federation.engine,
        {
            2: lambda u: replace(
                u, payload={**u.payload, "fc.bias": torch.full((10,), float("nan"))}
            )
        },
    )
    after, record = federation.run_round(federation.initial_state())
    assert record.refused == {2: "it holds a number that is not finite."}
    assert all(tensor.isfinite().all() for tensor in after.method_state.values())


def test_a_round_of_diverging_clients_says_how_to_go_on() -> None:
    federation = Federation(tiny_config("federation.clients_per_round=6"))
    diverged = with_delta("fc.bias", torch.full((10,), float("nan")))
    federation.engine = Tampered(  # type: ignore[assignment]
        federation.engine, dict.fromkeys(range(6), diverged)
    )
    with pytest.raises(MotleyError, match=r"never had .* lower training\.optimizer\.lr or set"):
        federation.run_round(federation.initial_state())


def test_a_loss_that_is_not_finite_is_refused() -> None:
    """In fp16 a client whose every step was left out sends no change, and this."""
    federation = Federation(tiny_config("federation.clients_per_round=6"))
    federation.engine = Tampered(  # type: ignore[assignment]
        federation.engine, {2: lambda u: replace(u, loss=torch.tensor(torch.nan))}
    )
    after, record = federation.run_round(federation.initial_state())
    assert record.refused == {2: "its loss is not finite."} and record.train_loss > 0
    assert 2 not in after.client_state_rounds


def test_a_merge_queued_before_the_verdict_is_made_again_without_what_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU that is still training when its uploads are merged."""

    def played(*bad: int) -> tuple[ServerState, RoundRecord]:
        federation = Federation(
            tiny_config("federation.clients_per_round=6", "server.inco.variant=official")
        )
        spoil = with_delta("fc.bias", torch.full((10,), float("nan")))
        federation.engine = Tampered(federation.engine, dict.fromkeys(bad, spoil))  # type: ignore[assignment]
        return federation.run_round(federation.initial_state())

    for bad in ((), (1, 4)):
        expected, at_once = played(*bad)
        with monkeypatch.context() as patched:
            patched.setattr("motley.core.async_copy.AsyncCopy.ready", property(lambda self: False))
            after, late = played(*bad)
        assert late.refused.keys() == set(bad) == at_once.refused.keys()
        assert (late.metrics, late.train_loss, late.scores) == (
            at_once.metrics,
            at_once.train_loss,
            at_once.scores,
        )
        assert after.client_state_rounds == expected.client_state_rounds
        assert all(torch.equal(after.model[name], expected.model[name]) for name in expected.model)


def test_a_round_is_repeated_with_other_clients_while_too_few_updates_are_valid() -> None:
    config = tiny_config(
        "server.min_fraction=0.75", "server.attempts=3", "training.steps=1", "evaluation.every=3"
    )
    federation = Federation(config)
    spoil = with_delta("fc.bias", torch.full((10,), float("nan")))
    federation.engine = Tampered(federation.engine, {0: spoil, 1: spoil})  # type: ignore[assignment]
    federation.sample = lambda number, attempt=0: [[0, 1, 2, 3], [1, 2, 3, 4]][attempt]
    after, record = federation.run_round(federation.initial_state())
    assert [attempt.keys() for attempt in record.repeated] == [{0, 1}]
    assert record.clients == [1, 2, 3, 4] and record.refused.keys() == {1}
    assert after.client_state_rounds == {2: 1, 3: 1, 4: 1}
    federation.sample = lambda number, attempt=0: [0, 1]
    with pytest.raises(
        MotleyError, match=r"round 1 was tried 3 times .* client 0: it holds a number"
    ):
        federation.run_round(federation.initial_state())


def test_a_round_in_which_everybody_is_refused_changes_nothing() -> None:
    federation = Federation(tiny_config("server.min_fraction=0"))
    server = federation.initial_state()
    spoil = with_delta("fc.bias", torch.full((10,), float("inf")))
    federation.engine = Tampered(federation.engine, dict.fromkeys(range(6), spoil))  # type: ignore[assignment]
    after, record = federation.run_round(server)
    assert after.round_number == 1 and len(record.refused) == 4
    assert all(torch.equal(after.state[name], server.state[name]) for name in server.state)


def test_layers_nobody_held_keep_their_bits() -> None:
    federation = Federation(
        tiny_config("split.normalization_statistics=shared", "server.inco.variant=official")
    )
    federation.sample = lambda number, attempt=0: [0, 1]  # both hold the smallest size
    server = federation.initial_state()
    after, _ = federation.run_round(server)
    held = federation.split.part("resnet10").keys()
    for name in server.state:
        assert torch.equal(after.state[name], server.state[name]) == (name not in held), name


def test_sampling_is_fair_keyed_and_without_repeats() -> None:
    federation = Federation(tiny_config())
    rounds = [federation.sample(number) for number in range(1, 601)]
    assert all(len(set(clients)) == 4 and clients == sorted(clients) for clients in rounds)
    counts = Counter(client for clients in rounds for client in clients)
    assert all(340 < counts[client] < 460 for client in range(6))
    again, other = Federation(tiny_config()), Federation(tiny_config("seed=9"))
    assert rounds[:50] == [again.sample(number) for number in range(1, 51)]
    assert rounds[:50] != [other.sample(number) for number in range(1, 51)]


def test_sampling_by_the_round_is_fedmls() -> None:
    """The expected ids are what numpy.random.seed(0), (1) and (2) with choice(range(10), 5, replace=False) draw."""
    asked = ("federation.sampler=fedml", "federation.clients=10", "federation.clients_per_round=5")
    for seed in (0, 9):
        federation = Federation(tiny_config(*asked, f"seed={seed}"))
        drawn = [federation.sample(number) for number in (1, 2, 3)]
        assert drawn == [[1, 2, 4, 8, 9], [0, 2, 4, 6, 9], [0, 1, 4, 5, 7]]
    assert federation.sample(1, 1) != federation.sample(1)


def test_sizes_are_assigned_as_asked() -> None:
    def sizes(*overrides: str) -> list[str]:
        return [size.removeprefix("resnet") for size in assign_sizes(tiny_config(*overrides))]

    assert sizes() == ["10", "10", "14", "14", "18", "18"]
    assert sizes("federation.size_assignment=alternate") == ["10", "14", "18", "10", "14", "18"]
    assert sizes("federation.size_fractions=[1,1,4]") == ["10", "14", "18", "18", "18", "18"]
    drawn = sizes("federation.size_assignment=random", "federation.clients=30")
    assert Counter(drawn) == {"10": 10, "14": 10, "18": 10} and drawn != sorted(drawn)


def test_weights_by_samples() -> None:
    federation = Federation(tiny_config("server.weighting=samples"))
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(3)]
    uploads = federation.engine.train(jobs, lambda client: None)
    federation.sample = lambda number, attempt=0: [0, 1, 2]
    after, _ = federation.run_round(server)
    counts = [len(federation.partition.of(client)) for client in range(3)]
    mean = sum(n * u.delta["fc.bias"] for n, u in zip(counts, uploads, strict=True)) / sum(counts)
    assert torch.allclose(after.state["fc.bias"], server.state["fc.bias"] + mean, atol=1e-6)


def test_traffic_is_what_parts_weigh() -> None:
    federation = Federation(tiny_config())
    server = federation.initial_state()
    _, record = federation.run_round(server)
    expected = sum(
        size_in_bytes(take(server.state, federation.split.part(federation.sizes[client])))
        for client in record.clients
    )
    assert record.bytes_down == record.bytes_up == expected


def initial_state(*overrides: str) -> State:
    return Federation(tiny_config(*overrides)).initial_state().state


def test_weights_file_replaces_what_fits(tmp_path: Path) -> None:
    weights = {"conv1.weight": torch.full((4, 1, 3, 3), 0.5), "fc.weight": torch.zeros(1000, 32)}
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.warns(UserWarning, match=r"tensors do not start from it") as warned:
        state = initial_state(f"model.weights={tmp_path / 'w.safetensors'}")
    assert torch.equal(state["conv1.weight"], weights["conv1.weight"])
    assert state["fc.weight"].shape == (10, 32)
    message = str(warned[0].message)
    assert f"{len(state) - 1} of {len(state)} tensors" in message
    assert "Of another shape: fc.weight (it has (1000, 32), the model (10, 32))." in message
    assert "Not in the file: bn1.weight, bn1.bias, " in message and " more." in message
    with pytest.raises(MotleyError, match="cannot be read"):
        initial_state(f"model.weights={tmp_path / 'absent.safetensors'}")
    save_file({"other": torch.zeros(1)}, tmp_path / "o.safetensors")
    with pytest.raises(MotleyError, match="no tensor that fits"):
        initial_state(f"model.weights={tmp_path / 'o.safetensors'}")


def test_weights_that_all_fit_are_loaded_without_a_word(tmp_path: Path) -> None:
    state = initial_state()
    weights = {name: tensor.contiguous() + 1 for name, tensor in state.items()}
    save_file(weights, tmp_path / "w.safetensors")
    loaded = initial_state(f"model.weights={tmp_path / 'w.safetensors'}")
    assert all(torch.equal(loaded[name], weights[name]) for name in state)
    save_file({**weights, "head.bias": torch.zeros(3)}, tmp_path / "more.safetensors")
    with pytest.warns(UserWarning, match=r"In the file, but not in the model: head\.bias\."):
        initial_state(f"model.weights={tmp_path / 'more.safetensors'}")


@pytest.mark.parametrize("lost", ["another shape", "absent"])
def test_weights_that_do_not_fit_the_first_layer_are_refused(lost: str, tmp_path: Path) -> None:
    """Grey images have one channel; weights that were trained on colour images have three."""
    state = initial_state()
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    if lost == "another shape":
        weights["conv1.weight"] = torch.zeros(4, 3, 3, 3)
    else:
        del weights["conv1.weight"]
    save_file(weights, tmp_path / "w.safetensors")
    setting = f"model.weights={tmp_path / 'w.safetensors'}"
    with pytest.raises(MotleyError, match=r"does not fit the first layer\. .*conv1\.weight"):
        initial_state(setting)
    with pytest.warns(UserWarning, match=r"1 of \d+ tensors do not start from it.*conv1"):
        initial_state(setting, "model.allow_new_first_layer=true")
    if lost == "another shape":
        loaded = initial_state(setting, "data.transform.channels=3")
        assert torch.equal(loaded["conv1.weight"], weights["conv1.weight"])


def test_the_first_layer_of_a_vit_is_its_patch_embedding(tmp_path: Path) -> None:
    small = ("model.sizes=['vit8','vit9']", "data.transform.resize=16")
    sizes = ("model.vit.patch=8", "model.vit.dim=12", "model.vit.heads=2")
    state = initial_state(*small, *sizes)
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    name = next(name for name in state if name.startswith("patch_embed") and "weight" in name)
    weights[name] = torch.cat([weights[name]] * 3, dim=1)
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(MotleyError, match=r"the first layer\. Of another shape: patch_embed"):
        initial_state(*small, *sizes, f"model.weights={tmp_path / 'w.safetensors'}")


def test_inco_coefficients_are_recorded_for_every_pair_that_was_held() -> None:
    federation = Federation(tiny_config("server.inco.variant=official"))
    federation.sample = lambda number, attempt=0: [0, 2, 4]
    _, record = federation.run_round(federation.initial_state())
    layers = {pair.target for pair in federation.split.cross_layers}
    coefficients = ("theta", "alpha", "beta", "positive")
    assert record.metrics.keys() == {
        f"inco/{layer}/{name}" for layer in layers for name in coefficients
    }


def test_inco_changes_its_targets_only() -> None:
    ends = {}
    for preset in ("off", "official", "paper"):
        federation = Federation(tiny_config(f"server.inco.variant={preset}", "training.steps=2"))
        federation.sample = lambda number, attempt=0: [0, 2, 4]
        ends[preset], _ = federation.run_round(federation.initial_state())
    targets = {pair.target for pair in federation.split.cross_layers}
    for preset in ("official", "paper"):
        changed = {
            n for n, t in ends["off"].state.items() if not torch.equal(t, ends[preset].state[n])
        }
        assert changed == targets


def test_your_own_data_in_memory() -> None:
    numbers = np.random.default_rng(0)

    def examples(count: int) -> Examples:
        return Examples(
            numbers.integers(0, 255, (count, 8, 8, 3), dtype=np.uint8), np.arange(count) % 4
        )

    mine = Dataset("mine", examples(200), examples(40), 4)
    federation = Federation(tiny_config(), dataset=mine)
    _, record = federation.run_round(federation.initial_state())
    assert len(record.scores["resnet10"].class_accuracy) == 4


def test_arrays_that_run_backwards_are_the_same_data() -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8, 1), dtype=np.uint8)
    labels = np.arange(60) % 4
    losses = []
    for copied in (False, True):
        inputs, targets = images[::-1, :, ::-1], labels[::-1]
        if copied:
            inputs, targets = inputs.copy(), targets.copy()
        data = Dataset("mine", Examples(inputs, targets), Examples(inputs, targets), 4)
        federation = Federation(tiny_config(), dataset=data)
        losses.append(federation.run_round(federation.initial_state())[1].train_loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": "4"}, "data set 'mine': classes = '4': should be the number of a model's"),
        ({"classes": list("abcd")}, "should be the number of a model's outputs, 1 or more"),
        ({"train": ([1], [2])}, "data set 'mine': train: is a tuple; motley.data.Examples are"),
        ({"test": None}, "data set 'mine': test: is a NoneType; motley.data.Examples are expect"),
    ],
)
def test_a_data_set_of_other_things_is_refused(arguments: dict[str, Any], message: str) -> None:
    examples = Examples(np.zeros((4, 8, 8, 1), np.uint8), np.arange(4))
    with pytest.raises(MotleyError) as raised:
        Dataset("mine", **{"train": examples, "test": examples, "classes": 4, **arguments})
    assert message in str(raised.value)


def test_examples_of_lists_are_refused() -> None:
    images: Any = [[[[0]]]]
    with pytest.raises(MotleyError, match="Examples: inputs: is a list; a NumPy array is expected"):
        Examples(images, np.zeros(1, dtype=np.int64))


def test_a_federation_learns() -> None:
    federation = Federation(
        tiny_config(
            "training.rounds=12",
            "training.epochs=3",
            "model.resnet.width=0.125",
            "federation.clients_per_round=6",
        )
    )
    server = federation.initial_state()
    for _ in range(12):
        server, record = federation.run_round(server)
    assert min(score.accuracy for score in record.scores.values()) > 0.6
