"""Scores of clients in a run's files and displays: logs, resume, show, report, studies."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from motley.core.errors import MotleyError
from motley.runs.client_log import ClientLog, to_line
from motley.runs.metrics import MetricsLog, summarize_clients
from motley.runs.run import resume_run, set_rounds, start_run
from motley.server.client_scores import ClientScore, ClientScores
from motley.studies.declaration import load_study
from motley.studies.measures import Measure
from motley.studies.results import collect, save
from motley.studies.runner import StudyWatcher, run_study, unfinished_runs
from motley.studies.sweep import plan_cells
from motley.tasks import ACCURACY
from tests.cli.conftest import call
from tests.conftest import tiny_config

SETTINGS = (
    "model.sizes=['mlp1','mlp2']",
    "model.mlp.hidden=8",
    "training.rounds=2",
    "server.ema_decay=0",
    "run.tensorboard=false",
    "evaluation.per_client=all",
    "evaluation.client_test_fraction=0.2",
    "evaluation.personalize_epochs=1",
)
SCORES = ClientScores(
    metric=ACCURACY,
    scores=[
        ClientScore(0, "small", 4, 0.5, 0.75),
        ClientScore(2, "large", 3, 2 / 3, 1.0),
        ClientScore(3, "small", 1, 0.0, 0.0),
    ],
    unscored=[1],
    bytes_down=100,
    bytes_up=48,
)


def test_the_metrics_have_the_distribution_and_the_log_the_scores() -> None:
    summary = summarize_clients(SCORES)
    assert (summary["clients"], summary["unscored"]) == (3, 1)
    assert summary["mean"] == pytest.approx((0.5 + 2 / 3) / 3, abs=1e-6)
    assert summary["weighted"] == pytest.approx((4 * 0.5 + 3 * 2 / 3) / 8)
    assert summary["sizes"]["small"]["worst_tenth"] == 0.0
    assert summary["personalized"]["max"] == 1.0
    assert summary["personalized"]["sizes"]["small"]["mean"] == 0.375
    assert summary["bytes"] == {"down": 100, "up": 48}
    assert to_line(7, SCORES) == {
        "round": 7,
        "metric": "accuracy",
        "sizes": {
            "small": {
                "clients": [0, 3],
                "examples": [4, 1],
                "scores": [0.5, 0.0],
                "personalized": [0.75, 0.0],
            },
            "large": {
                "clients": [2],
                "examples": [3],
                "scores": [0.66667],
                "personalized": [1.0],
            },
        },
        "unscored": [1],
    }


def test_a_thousand_clients_take_a_few_kilobytes(tmp_path: Path) -> None:
    scores = [ClientScore(number, "small", 57, number / 1013) for number in range(1000)]
    many = ClientScores(ACCURACY, scores)
    ClientLog(tmp_path / "log").append(1, many)
    assert (tmp_path / "log").stat().st_size < 20_000
    assert len(json.dumps(summarize_clients(many))) < 1000


def test_the_log_is_cut_and_damaged_lines_are_reported(tmp_path: Path) -> None:
    log = ClientLog(tmp_path / "log")
    assert log.last() is None and log.read() == []
    for number in (1, 2, 3):
        log.append(number, SCORES)
    with log.path.open("a") as file:
        file.write('{"round":4,"met')
    last = log.last()
    assert last is not None
    assert last.round == 3
    assert last.scores() == [0.5, 0.0, 0.66667]
    assert last.scores(personalized=True) == [0.75, 0.0, 1.0]
    log.truncate(2)
    assert [line.round for line in log.read()] == [1, 2]
    log.path.write_text("nonsense\n" + log.path.read_text())
    with pytest.raises(MotleyError, match="log, line 1: these are not the scores of clients"):
        log.read()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with scores of clients."""
    folder = tmp_path_factory.mktemp("scores") / "run"
    start_run(tiny_config(*SETTINGS), folder)
    return folder


def test_a_resumed_run_has_the_same_scores(run: Path, tmp_path: Path) -> None:
    start_run(tiny_config(*SETTINGS, "training.rounds=1"), tmp_path / "run")
    # A round that was scored, and interrupted before its checkpoint.
    ClientLog(tmp_path / "run" / "client_scores.jsonl").append(2, SCORES)
    set_rounds(tmp_path / "run", 2)
    resume_run(tmp_path / "run")
    expected = (run / "client_scores.jsonl").read_text()
    assert (tmp_path / "run" / "client_scores.jsonl").read_text() == expected
    summaries = []
    for folder in (run, tmp_path / "run"):
        lines = MetricsLog(folder / "metrics.jsonl").read()
        summaries.append([line["client_scores"] for line in lines])
    assert summaries[0] == summaries[1]


def test_show_has_a_table_of_clients(run: Path) -> None:
    line = MetricsLog(run / "metrics.jsonl").read()[-1]
    scores = line["client_scores"]
    answer = call("show", run)
    assert "clients on their own test data, round 2: 6 scored" in answer.out
    rows = [line for line in answer.out.splitlines() if line.startswith("│")]
    (everyone,) = [row for row in rows if "all clients" in row]
    assert f"{line['accuracy']['mean']:.2%}" in everyone
    for key in ("mean", "weighted", "worst_tenth", "std", "min", "max"):
        assert f"{scores[key]:.2%}" in everyone
    assert f"{scores['personalized']['mean']:.2%}" in rows[-1]
    (shown,) = json.loads(call("show", "--json", run).out)
    assert shown["client_scores"] == {"round": 2, "global": line["accuracy"], **scores}
    both = call("show", run, run)
    assert "clients: worst tenth" in both.out and "personalized: mean" in both.out


STUDY = """
preset = "quickstart"
set.model = { sizes = ["mlp1", "mlp2"], mlp.hidden = 8 }
set.federation = { clients = 6, clients_per_round = 6 }
set.training = { rounds = 1, epochs = 1 }
set.server.ema_decay = 0
set.evaluation = { per_client = "all", client_test_fraction = 0.2, personalize_epochs = 1 }
[[data]]
name = "digits"
[[methods]]
name = "alone"
set.method.name = "local"
[[methods]]
name = "FedAvg"
set.method.name = "fedavg"
"""


def test_local_training_is_the_reference_of_studies_and_reports(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(STUDY)
    study = load_study(str(file))
    cells = plan_cells(study, "full", score="client-mean")
    assert [(cell.method, cell.against) for cell in cells] == [("alone", ""), ("FedAvg", "alone")]
    run_study(unfinished_runs(cells, tmp_path), tmp_path, StudyWatcher())
    results = collect(cells, tmp_path)
    folder = save(study, "full", cells, results, tmp_path)
    table = (folder / "table.md").read_text()
    assert "client-mean, %" in table and "alone (reference)" in table and "alone: " in table
    metrics = MetricsLog(folder / results[1].runs[1] / "metrics.jsonl").read()[-1]
    assert results[1].values[1] == pytest.approx(100 * metrics["client_scores"]["mean"])

    pytest.importorskip("plotly")
    from motley.report import figures
    from motley.report.page import render
    from motley.report.report_data import gather

    data = gather([folder])
    page = render(data, "clients")
    assert "Clients on their own test data" in page
    assert "alone: local training alone, the reference (dotted)." in page
    (panel,) = data.panels.values()
    figure = figures.client_scores(panel, data.labels)
    assert [trace.name for trace in figure.data] == ["alone", "FedAvg", "FedAvg, personalized"]
    assert [trace.line.dash for trace in figure.data] == ["dot", "solid", "solid"]
    last = panel.series["FedAvg"].runs[0].client_scores
    assert last is not None
    assert figure.data[1].y == tuple(round(100 * score, 2) for score in sorted(last.scores()))
    assert figure.data[1].x[-1] == 100
    assert figures.client_curves(panel, data.labels, "worst_tenth", "worst") is not None


@pytest.mark.parametrize(
    ("score", "settings", "message"),
    [
        ("client-worst", {"per_client": "off", "personalize_epochs": 0}, "per_client to 'round'"),
        ("personalized-mean", {"personalize_epochs": 0}, "personalize_epochs above 0"),
        ("client-wrst", {}, "Did you mean 'client-worst'"),
    ],
)
def test_scores_that_runs_do_not_have_are_refused(
    tmp_path: Path, score: str, settings: dict[str, object], message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(STUDY)
    with pytest.raises(MotleyError, match=message) as raised:
        plan_cells(load_study(str(file)), "full", score=score, overrides={"evaluation": settings})
    assert "--score" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "size", "number"),
    [
        ("client-mean", "", 45.0),
        ("client-worst", "small", 15.0),
        ("personalized-mean", "", 60.0),
        ("personalized-worst", "", None),
    ],
)
def test_measures_of_clients(name: str, size: str, number: float | None) -> None:
    lines = []
    for value in (0.9, 0.4, 0.5):
        scores = {
            "mean": value,
            "sizes": {"small": {"worst_tenth": value - 0.3}},
            "personalized": {"mean": 0.6},
        }
        lines += [{"client_scores": scores}, {"round": 1}]
    value = Measure(name).of(lines, tiny_config("evaluation.last_k=2"), None, size=size)
    assert value == (None if number is None else pytest.approx(number))


def test_the_documented_program_prints_what_the_page_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    _, program, printed = re.split(r"```python\n|```\n\n```\n", page.read_text(), maxsplit=2)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, str(page), "exec"), {})
    assert out.getvalue() == printed.split("```")[0]
