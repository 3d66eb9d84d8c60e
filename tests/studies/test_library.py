"""Every run of every built-in study can be built: its names exist and its settings are consistent.

Most data sets are not available here, so images of their shapes replace them. The cells
that cannot be built are listed as missing, and are exactly those named here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.bench import SHAPES
from motley.config import Config
from motley.data import Dataset
from motley.data.dataset import Examples
from motley.data.partition import Partition
from motley.federation import Federation
from motley.studies import sweep
from motley.studies.declaration import Study, load_study, studies
from motley.studies.results import missing
from motley.studies.sweep import Cell, missing_in_motley, plan_cells

LIBRARY = studies()
#: Studies of the campaign that train images: they run on a GPU for hours, so they must be right.
CAMPAIGN = [
    str(Path(__file__).parents[2] / "campaign" / f"{name}.toml")
    for name in ("inco-table2", "inco-fashion", "beyond", "precision", "unrelated")
]
#: What only the user can provide: study -> name -> how the reason begins.
NEEDED = {"inco-table2-vit": {"inco-table2-vit": "needs ImageNet weights"}}


def columns(study: Study) -> list[str]:
    return [column.name for column in study.data]


def dataset(name: str, pixel: int = 0) -> Dataset:
    """Return a few images of a data set's shape, all of one color."""
    height, width, channels = (8, 8, 1) if name == "digits" else SHAPES[name][:3]
    images = np.full((40, height, width, channels), pixel, dtype=np.uint8)
    examples = Examples(images, np.arange(40) % 10)
    return Dataset(name, examples, examples, 10)


def public_dataset(name: str, **options: object) -> Dataset:
    """Return images that are none of the clients' images, which would be refused."""
    return dataset(name, pixel=1)


#: The settings that were built already. Studies have many in common.
BUILT: set[str] = set()


def not_built_yet(configs: Iterator[Config]) -> Iterator[Config]:
    """Yield only configurations whose models, splits and methods no earlier test has built."""
    for config in configs:
        values = config.model_dump(mode="json", include={"model", "split", "method"})
        shape = SHAPES.get(config.data.name)
        key = json.dumps([shape, config.federation.size_assignment, values])
        if key not in BUILT:
            BUILT.add(key)
            yield config


@pytest.fixture
def data_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assume that all data sets are available, and build no evaluator: five times as fast."""
    monkeypatch.setattr(sweep, "_missing_data", lambda *arguments: iter(()))
    monkeypatch.setattr("motley.data.public.load_dataset", public_dataset)
    monkeypatch.setattr("motley.federation.Evaluator", lambda *arguments, **options: None)


@cache
def planned(name: str) -> list[Cell]:
    """Return all cells of a study with one seed. Only for tests that assume available data."""
    study = LIBRARY[name] if name in LIBRARY else load_study(name)
    return plan_cells(study, "full", data=columns(study), seeds=1)


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("name", [*LIBRARY, *CAMPAIGN], ids=lambda name: Path(name).stem)
def test_every_run_can_be_built(name: str) -> None:
    cells = planned(name)
    assert any(cell.runs for cell in cells) or name in NEEDED
    configs = (run.config for cell in cells for run in cell.runs)
    for config in not_built_yet(configs) if name in LIBRARY else configs:
        clients = config.federation.clients
        changes: dict[str, object] = {}
        changes["engine"] = config.engine.model_copy(update={"device": "cpu", "precision": "fp32"})
        if config.public.name == "held-out":
            changes["public"] = config.public.model_copy(update={"samples": 4})
        # The last four of the 40 images are nobody's.
        partition = Partition.from_owners(np.arange(36) % clients, clients)
        Federation(
            config.model_copy(update=changes),
            dataset=dataset(config.data.name),
            partition=partition,
        )


@pytest.mark.usefixtures("data_available")
def test_the_ceiling_takes_as_many_steps_as_a_rounds_clients() -> None:
    """One size at one client, against the mean over the clients of the federated runs."""
    (beyond,) = [name for name in CAMPAIGN if Path(name).stem == "beyond"]
    configs = {cell.method: cell.runs[0].config for cell in planned(beyond)}

    def steps_per_round(config: Config) -> float:
        labels = np.arange(50_000) % 10
        partition = config.data.partition.split(labels, config.federation.clients, config.seed)
        steps = []
        for examples in partition.sizes.tolist():
            epoch = config.training.epoch_lengths(examples, 2)
            steps.append(config.training.local_steps(len(epoch)))
        return config.federation.clients_per_round * float(np.mean(steps))

    federated = steps_per_round(configs["EMA 0.95"])
    ceilings = [name for name in configs if name.startswith("central ")]
    assert len(ceilings) == 3
    for name in ceilings:
        assert steps_per_round(configs[name]) == pytest.approx(federated, rel=0.01), name


def flat(table: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of nested tables, with their values."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("name", LIBRARY)
def test_settings_of_case_line_and_exceptions_take_effect(name: str) -> None:
    """They might not: a preset of a higher layer, for example, overrides keys of lower layers."""
    study = LIBRARY[name]
    for cell in planned(name):
        case = next(case for case in study.cases if case.name == cell.case)
        row = next(row for row in study.methods if row.name == cell.method)
        expected = {**dict(flat(case.set)), **dict(flat(row.set))}
        for exception in study.exceptions:
            if exception.matches(cell.method, cell.data, cell.case):
                expected |= dict(flat(exception.set))
        for run in cell.runs:
            actual = dict(flat(run.config.model_dump(mode="json")))
            wrong = {key for key, value in expected.items() if actual.get(key) != value}
            assert wrong <= {"method.name"}, (cell.method, cell.column, wrong)


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("name", LIBRARY)
def test_nothing_is_missing_but_data(name: str) -> None:
    study = LIBRARY[name]
    reasons = {}
    for reason, lines in missing(planned(name)).items():
        for line in lines:
            reasons[line] = reason
    expected = NEEDED.get(name, {})
    assert reasons.keys() == expected.keys(), reasons
    assert all(reasons[line].startswith(start) for line, start in expected.items())
    assert [part.name for part in missing_in_motley(study)] == list(study.needs)


@pytest.mark.usefixtures("data_available")
def test_every_client_of_fedimpro_has_as_many_samples_as_there_are_classes() -> None:
    """The authors' code draws the partition again until it is so."""
    for name in ("fedimpro-table1", "fedimpro-table2", "fedimpro-table10"):
        study = LIBRARY[name]
        for cell in plan_cells(study, "full", data=["cifar10", "cifar100"], seeds=1):
            for run in cell.runs:
                expected = {"cifar10": 10, "cifar100": 100}[run.config.data.name]
                assert run.config.data.partition.model_dump()["min_size"] == expected


def test_methods_that_define_a_split_are_run_with_it() -> None:
    """They are not run with the depth split of the other lines.

    FedIN averages all layers of InclusiveFL's sizes too.
    """
    inclusive = {
        "fedin-table1": "depth",
        "fedin-table1-rounds": "depth",
        "inco-splits": "inclusive",
    }
    for name, inclusive_split in inclusive.items():
        cells = plan_cells(LIBRARY[name], "full", data=["digits"], seeds=1)
        splits = {}
        for cell in cells:
            if cell.runs:
                splits[cell.method.removesuffix(" + InCo")] = cell.runs[0].config.split.name
        expected = {
            "HeteroFL": "width",
            "FedRolex": "width",
            "ScaleFL": "grid",
            "InclusiveFL": inclusive_split,
        }
        assert {method: splits[method] for method in expected} == expected


def config_of(study: str, method: str, case: str = "", data: str = "cifar10") -> Config:
    """Return the configuration of one cell's first run."""
    cases = [case] if case else []
    cells = plan_cells(LIBRARY[study], "full", data=[data], cases=cases, methods=[method], seeds=1)
    return cells[0].runs[0].config


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("method", ["IID with homo", "Non-IID with homo", "Non-IID with hetero"])
def test_inco_table1_is_run_as_in_appendix_e1(method: str) -> None:
    """Ten clients, batch 64 and Adam's defaults; 50 rounds for ResNets and 20 for ViTs."""
    for study, rounds in (("inco-table1", 50), ("inco-table1-vit", 20)):
        config = config_of(study, method)
        assert config.federation.clients == config.federation.clients_per_round == 10
        assert config.training.rounds == rounds
        assert (config.training.epochs, config.training.batch_size) == (5, 64)
        optimizer = config.training.optimizer
        assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adam", 1e-3, 0.0)
        assert config.server.delta_scale == config.server.lr == 1.0


@pytest.mark.parametrize("study", LIBRARY.values(), ids=LIBRARY)
def test_methods_that_split_by_width_are_scored_by_the_whole_model(study: Study) -> None:
    """HeteroFL's and FedRolex's own code evaluates no other model."""
    for row in study.methods:
        if row.layer["method"]["name"] in ("HeteroFL", "FedRolex"):
            assert row.whole, row.name
        elif row.layer["method"]["name"].lower() in ("scalefl", "inclusivefl"):
            assert not row.whole, row.name


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("method", [row.name for row in LIBRARY["fedin-table3"].methods])
def test_fedin_table3_weights_by_the_number_of_samples(method: str) -> None:
    """Eq. 21 is for models that are averaged within their sizes."""
    for data in ("fashion-mnist", "digits"):
        assert config_of("fedin-table3", method, "IID", data).server.weighting == "samples"


@pytest.mark.usefixtures("data_available")
def test_fedin_table5_has_ten_clients_per_round() -> None:
    numbers = []
    for case in LIBRARY["fedin-table5"].cases:
        federation = config_of("fedin-table5", "FedIN", case.name).federation
        assert federation.clients_per_round == 10
        numbers.append(federation.clients)
    assert numbers == 2 * [10, 20, 50, 100, 200]


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("study", ["inco-table2", "inco-table2-vit"])
def test_moon_has_100_rounds_on_fashion_mnist(study: str) -> None:
    """InCo, Appendix F.3: to prevent overfitting."""
    for row in LIBRARY[study].methods:
        if "Moon" not in row.name:
            continue
        overrides = {"model": {"weights": "weights.safetensors"}} if study.endswith("vit") else {}
        cells = plan_cells(
            LIBRARY[study],
            "full",
            data=["fashion-mnist", "cifar10"],
            methods=[row.name],
            overrides=overrides,
        )
        for cell in cells:
            rounds = cell.runs[0].config.training.rounds
            assert (rounds == 100) == (cell.data == "fashion-mnist"), (cell.method, cell.data)


@pytest.mark.usefixtures("data_available")
@pytest.mark.parametrize("name", [name for name in LIBRARY if name.startswith("fedimpro-")])
def test_fedimpros_networks_start_as_in_its_code(name: str) -> None:
    for cell in planned(name):
        if cell.data == "digits":
            continue
        for run in cell.runs:
            assert run.config.model.init == "torch", (cell.method, cell.column)


@pytest.mark.usefixtures("data_available")
def test_fedimpros_scaffold_divides_by_the_sampled_clients() -> None:
    """As in FedImpro's code; the paper's weak numbers for SCAFFOLD are from it."""
    for name in ("fedimpro-table1", "fedimpro-table2", "fedimpro-table6", "fedimpro-table9"):
        for cell in plan_cells(LIBRARY[name], "full", methods=["SCAFFOLD"], seeds=1):
            for run in cell.runs:
                assert run.config.method.model_dump()["divide_by"] == "sampled", cell.column
