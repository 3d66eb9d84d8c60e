"""Recalibrated statistics are those of all clients' data together, on every engine, and leave training alone."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.core.part import Part, Piece, State, take
from motley.engine import Job
from motley.federation import Federation
from motley.models.moments import batch_moments
from motley.runs.checkpoint import fingerprint
from motley.runs.run import resume_run, start_run
from motley.server.recalibration import pool
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from motley.server.validation import moments_error
from tests.conftest import tiny_config
from tests.methods.test_contract import NoValueIsRead

RECALIBRATED = ("server.statistics.name=recalibrate",)
BRIEF = ("training.steps=2", "training.rounds=2", "run.tensorboard=false")
ROLLING = (
    "split.name=width",
    "split.channels=rolling",
    "split.rates=[1,0.5,0.25]",
    "model.sizes=['resnet14']",
)
WIDTHS = ("split.rates=[1,0.5,0.25]", "model.sizes=['resnet14']")


def played(*overrides: str, rounds: int = 2) -> tuple[Federation, ServerState, RoundRecord]:
    federation = Federation(tiny_config(*BRIEF, *overrides))
    server = federation.initial_state()
    for _ in range(rounds):
        server, record = federation.run_round(server)
        assert not record.refused
    return federation, server, record


def is_statistic(name: str) -> bool:
    return name.endswith(("running_mean", "running_var"))


# ---- pooling


class FirstLayer(nn.Module):
    """A model whose BatchNorm sees the data themselves."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def report_of(model: nn.Module, *batches: Tensor) -> State:
    return batch_moments(model, [(batch, torch.zeros(len(batch))) for batch in batches])


def part_of(model: nn.Module) -> Part:
    return {name: Piece(name) for name in model.state_dict()}


def test_two_clients_of_unequal_sizes_by_hand() -> None:
    """Values 0, 2 and 4, 4, 4, 10: N = 6, S = 24, Q = 152, so the mean is 4 and the variance (152 - 96) / 5."""
    model = FirstLayer(1)
    first, second = torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [4.0], [4.0], [10.0]])
    reports = [report_of(model, first), report_of(model, second)]
    assert [report["norm.count"].item() for report in reports] == [2, 4]
    assert [report["norm.sum"].item() for report in reports] == [2, 22]
    assert [report["norm.squares"].item() for report in reports] == pytest.approx([4, 148])
    after = pool(model.state_dict(), [(part_of(model), report) for report in reports])
    assert after["norm.running_mean"].item() == pytest.approx(4)
    assert after["norm.running_var"].item() == pytest.approx(11.2)
    assert after["norm.running_var"].item() == pytest.approx(
        torch.cat([first, second]).var().item()
    )
    mean_of_variances = (2 * first.var() + 4 * second.var()) / 6
    assert abs(after["norm.running_var"].item() - mean_of_variances.item()) > 1


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_many_batches_give_the_variance_of_their_concatenation(offset: float) -> None:
    """Also of channels whose mean is a thousand times their deviation, where sums in single precision fail."""
    numbers = torch.Generator().manual_seed(1)
    model = FirstLayer(3)
    batches = [
        torch.randn((n, 3), generator=numbers) + offset + shift
        for shift, n in enumerate((5, 40, 1, 12))
    ]
    reports = [report_of(model, *batches[:2]), report_of(model, batches[3], batches[2])]
    after = pool(model.state_dict(), [(part_of(model), report) for report in reports])
    whole = torch.cat(batches).double()
    torch.testing.assert_close(
        after["norm.running_mean"].double(), whole.mean(0), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        after["norm.running_var"].double(), whole.var(0), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(after["norm.weight"], model.state_dict()["norm.weight"])


def test_the_only_example_of_a_client_is_left_out() -> None:
    report = report_of(FirstLayer(2), torch.ones((1, 2)))
    assert all((tensor == 0).all() for tensor in report.values())


def test_coordinates_that_nobody_reported_and_pooled_overflows_keep_their_statistics() -> None:
    model = FirstLayer(3)
    before = {**model.state_dict(), "norm.running_mean": torch.tensor([5.0, 6.0, 7.0])}
    part = {name: Piece(f"norm.{name}", (slice(0, 2),)) for name in ("running_mean", "running_var")}
    moments = {
        "count": torch.tensor([4.0, 4.0], dtype=torch.float64),
        "sum": torch.tensor([8.0, 1e60], dtype=torch.float64),
        "squares": torch.tensor([16.0, 1e120], dtype=torch.float64),
    }
    after = pool(before, [(part, moments)])
    assert after["norm.running_mean"].tolist() == [2, 6, 7]
    assert after["norm.running_var"].tolist() == [0, 1, 1]


def test_the_pass_leaves_modes_and_hooks_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    images = torch.randn((8, 4), generator=torch.Generator().manual_seed(1))
    report = report_of(model, images)
    assert torch.allclose(report["2.sum"].float(), model[0](images).sum(0), atol=1e-5), (
        "dropout should be off"
    )
    assert all(module.training for module in model.modules())
    assert not model[2]._forward_pre_hooks


# ---- in a federation


@pytest.mark.parametrize("statistics", ["per-size", "shared"])
def test_the_first_layer_gets_the_statistics_of_all_training_data(statistics: str) -> None:
    settings = (
        f"split.normalization_statistics={statistics}",
        "training.batch_size=4",
        "server.ema_decay=0.5",
    )
    federation, server, _ = played(*RECALIBRATED, *settings)
    data = federation.engine.clients.data  # type: ignore[attr-defined]
    for size in federation.split.sizes:
        own = take(server.model, federation.split.part(size))
        model = federation.split.build(size)
        model.load_state_dict(own)
        holders = [
            c for c, held in enumerate(federation.sizes) if held == size or statistics == "shared"
        ]
        rows = torch.cat([torch.from_numpy(federation.partition.of(client)) for client in holders])
        with torch.no_grad():
            maps = model.conv1(data.batch(rows)[0])  # type: ignore[operator]
        torch.testing.assert_close(
            own["bn1.running_mean"], maps.mean((0, 2, 3)), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            own["bn1.running_var"], maps.var((0, 2, 3)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "settings",
    [
        ("server.ema_decay=0",),
        ("server.ema_decay=0.9", "split.normalization_statistics=shared"),
        ("method.name=scaffold",),
        ("method.name=moon", "server.statistics.clients=round"),
        ROLLING,
        ("method.name=FjORD", *WIDTHS),
    ],
    ids=["fedavg", "ema-shared", "scaffold", "moon-round", "rolling", "fjord"],
)
def test_debug_and_local_agree_in_every_bit(settings: tuple[str, ...]) -> None:
    ends = []
    for engine in ("debug", "local"):
        _, server, record = played(*RECALIBRATED, *settings, f"engine.name={engine}")
        scores = {size: (score.accuracy, score.loss) for size, score in record.scores.items()}
        ends.append((fingerprint(server.state), fingerprint(server.model), scores))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("average", [0.0, 0.9], ids=["raw", "ema"])
def test_weights_do_not_depend_on_recalibration(average: float) -> None:
    _, averaged, _ = played(f"server.ema_decay={average}")
    _, server, _ = played(f"server.ema_decay={average}", *RECALIBRATED)
    different = {
        name for name in server.model if not torch.equal(server.model[name], averaged.model[name])
    }
    assert different == {name for name in server.model if is_statistic(name)}
    if average:
        assert all(torch.equal(server.state[name], averaged.state[name]) for name in server.state)


def test_a_layer_with_rows_per_width_gets_its_own_row() -> None:
    federation, server, _ = played(*RECALIBRATED, "method.name=FjORD", *WIDTHS)
    data = federation.engine.clients.data  # type: ignore[attr-defined]
    for size in federation.split.sizes:
        model = federation.split.build(size)
        own = take(server.model, federation.split.part(size))
        model.load_state_dict(own)
        holders = [client for client, held in enumerate(federation.sizes) if held == size]
        rows = torch.cat([torch.from_numpy(federation.partition.of(client)) for client in holders])
        with torch.no_grad():
            maps = model.conv1(data.batch(rows)[0])  # type: ignore[operator]
        torch.testing.assert_close(
            own["bn1.running_mean"][-1], maps.mean((0, 2, 3)), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            own["bn1.running_var"][-1], maps.var((0, 2, 3)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("evaluation.every=2",), [2, 4, 5]),
        (("evaluation.every=2", "server.statistics.every=1"), [1, 2, 3, 4, 5]),
        (("evaluation.every=1", "server.statistics.every=3"), [3, 5]),
        (("server.statistics.name=averaged",), []),
    ],
)
def test_when_statistics_are_recalibrated(settings: tuple[str, ...], expected: list[int]) -> None:
    federation = Federation(tiny_config(*RECALIBRATED, *settings, "training.rounds=5"))
    server = federation.initial_state()
    asked = []
    for number in range(1, 6):
        for stage in federation.collections:
            if stage.jobs(replace(server, round_number=number), [0]):
                asked.append(number)
    assert asked == expected


def test_only_the_rounds_clients_are_asked_if_that_is_set() -> None:
    federation = Federation(tiny_config(*RECALIBRATED, "server.statistics.clients=round", *BRIEF))
    asked: list[int] = []
    collect = federation.engine.collect

    def watched(jobs):  # type: ignore[no-untyped-def]
        asked.extend(job.client for job in jobs)
        return collect(jobs)

    federation.engine.collect = watched  # type: ignore[method-assign]
    _, record = federation.run_round(federation.initial_state())
    assert asked == record.clients and len(asked) == 4
    _, _, all_clients = played(*RECALIBRATED, rounds=1)
    assert all_clients.bytes_down > record.bytes_down > 0


@pytest.mark.parametrize("average", [0.0, 0.9], ids=["raw", "ema"])
def test_a_resumed_run_ends_in_the_same_bits(average: float, tmp_path: Path) -> None:
    config = tiny_config(*BRIEF, *RECALIBRATED, f"server.ema_decay={average}")
    _, whole = start_run(config, tmp_path / "whole")
    half = config.model_copy(update={"training": config.training.model_copy(update={"rounds": 1})})
    start_run(half, tmp_path / "half")
    (tmp_path / "half" / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    _, resumed = resume_run(tmp_path / "half")
    assert fingerprint(resumed.state) == fingerprint(whole.state)
    assert fingerprint(resumed.model) == fingerprint(whole.model)


def test_nothing_waits_for_the_device() -> None:
    """On a GPU the end of a round is queued behind its training, so pass and pooling may read no value."""
    federation = Federation(tiny_config(*RECALIBRATED, *BRIEF))
    server = federation.initial_state()
    (collection,) = federation.engine.collect([statistics_job(federation, server, client=0)])
    part = federation.split.part(collection.size)
    model = federation.split.build(collection.size)
    with NoValueIsRead():
        batch_moments(model, [(torch.zeros((4, 1, 8, 8)), torch.zeros(4))])
        pool(server.model, [(part, collection.values)])


def statistics_job(federation: Federation, server: ServerState, client: int) -> Job:
    return replace(federation.job(server, 1, client), collection="statistics")


def test_a_slot_that_has_trained_reports_what_a_fresh_one_does() -> None:
    federation = Federation(tiny_config(*BRIEF, "method.name=scaffold"))
    server = federation.initial_state()
    jobs = [statistics_job(federation, server, client) for client in range(6)]
    fresh = federation.engine.collect(jobs)
    federation.run_round(server)
    for before, after in zip(fresh, federation.engine.collect(jobs), strict=True):
        assert fingerprint(before.values) == fingerprint(after.values)


# ---- what is refused


def test_reports_that_are_none() -> None:
    model = FirstLayer(2)
    state, part = model.state_dict(), part_of(model)
    good = report_of(model, torch.tensor([[1.0, 2.0], [1.0, 3.0]]))
    assert moments_error(state, part, good) is None
    bad = {
        "is missing or was not asked for": {"norm.count": good["norm.count"]},
        "has shape": {**good, "norm.sum": torch.zeros(3, dtype=torch.float64)},
        "is torch.float32": {**good, "norm.sum": torch.zeros(2)},
        "not finite": {**good, "norm.sum": torch.full((2,), math.nan, dtype=torch.float64)},
        "that no inputs have": {**good, "norm.squares": good["norm.squares"] * 0.5},
        "moments that no": {**good, "norm.count": -good["norm.count"]},
    }
    for reason, report in bad.items():
        assert reason in str(moments_error(state, part, report))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ("split.normalization_statistics=batch",),
            "'batch' there are no running statistics to recalibrate",
        ),
        (
            ("model.sizes=['mlp1','mlp2']",),
            "mlp1, mlp2 have no BatchNorm layers with running statistics",
        ),
        (("model.resnet.norm=group",), "have no BatchNorm layers with running statistics"),
        (
            ("method.name=HeteroFL", *WIDTHS),
            "method.statistics = 'pass' already replaces the statistics",
        ),
        (
            ("privacy.clip=1",),
            "sums of activations that clients would report are neither clipped nor noised",
        ),
    ],
)
def test_where_recalibration_is_refused(settings: tuple[str, ...], reason: str) -> None:
    with pytest.raises(MotleyError, match=r"server.statistics.name = 'recalibrate': ") as raised:
        Federation(tiny_config(*RECALIBRATED, *settings))
    assert reason in str(raised.value)


def test_heterofl_can_use_it_in_place_of_its_own_pass() -> None:
    _, server, _ = played(
        *RECALIBRATED, "method.name=HeteroFL", "method.statistics=running", *WIDTHS
    )
    _, own, _ = played("method.name=HeteroFL", *WIDTHS)
    different = [name for name in own.model if not torch.equal(own.model[name], server.model[name])]
    assert different and all(is_statistic(name) for name in different)


def test_a_server_with_another_model() -> None:
    state = {"a": torch.zeros(1)}
    server = ServerState(1, state, None, {}, {})
    other = {"a": torch.ones(1)}
    assert server.with_model(other).state is other
    assert replace(server, ema=state).with_model(other).ema is other
    assert replace(server, ema=state).with_model(other).state is state
