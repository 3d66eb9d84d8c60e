"""The page as text; tests/report/test_browser.py opens it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from motley.core.errors import MotleyError
from motley.report.report_data import gather
from tests.cli.conftest import call
from tests.report.conftest import small_run

pytest.importorskip("plotly")


def test_everything_is_in_one_file(study: Path, runs: list[Path], tmp_path: Path) -> None:
    answer = call("report", study, *runs, "-o", tmp_path / "page.html", "--title", "<Mine>")
    assert answer.code == 0, answer.err
    page = (tmp_path / "page.html").read_text()
    without_scripts = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "&lt;Mine&gt;" in without_scripts
    assert "http" not in re.sub(r"http-equiv", "", without_scripts)
    assert "src=" not in re.sub(r'src="data:', "", without_scripts)
    texts = (
        "50 ± 2",
        "there is no method",
        "Rounds, traffic and time",
        "data partition",
        "theta per layer",
    )
    for text in texts:
        assert text in page
    assert "data.partition" in without_scripts  # the configuration


def test_pictures_of_analyses_are_included(tmp_path: Path) -> None:
    from motley.report.page import render

    run = small_run(tmp_path / "run")
    (run / "analysis").mkdir()
    (run / "analysis" / "cka.png").write_bytes(b"not really a picture")
    assert 'alt="cka"' in render(gather([run]), "one")


def test_metrics_of_methods_are_drawn(runs: list[Path], tmp_path: Path) -> None:
    from motley.report import figures

    run = small_run(tmp_path / "run", "method.name=FedIN", "model.sizes=['mlp2','mlp3']")
    panel = next(iter(gather([run]).panels.values()))
    drawn = {}
    for figure in figures.method_metrics(panel, list(panel.series)):
        drawn[figure.layout.title.text.split(": ")[1]] = figure.data[0]
    assert drawn.keys() == {"pool", "feature mb up", "in loss"}
    assert drawn["pool"].x == (1, 2, 3) and drawn["pool"].y[0] == 3
    assert drawn["in loss"].x == (2, 3) and min(drawn["in loss"].y) > 0
    assert not figures.method_metrics(next(iter(gather(runs).panels.values())), [])


def test_a_run_without_a_round_has_a_page(runs: list[Path], tmp_path: Path) -> None:
    from motley.report.page import render

    (tmp_path / "config.toml").write_text((runs[0] / "config.toml").read_text())
    assert "No round has been evaluated yet" in render(gather([tmp_path]), "new")


def test_a_missing_data_set_is_reported(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from motley.report import figures, page

    def absent(run: object) -> None:
        raise MotleyError("data set 'x' was not found.\nmore")

    monkeypatch.setattr(figures, "partition", absent)
    assert "cannot be drawn here: data set &#x27;x&#x27; was not found." in page.render(
        gather(runs), "t"
    )


def test_line_styles_are_distinct_and_the_legend_shows_their_dashes(study: Path) -> None:
    from motley.report import figures
    from motley.report.page import render

    styles = [figures.style(number) for number in range(40)]
    assert len({(line["color"], line["dash"]) for line in styles}) == 40
    page = render(gather([study]), "one")
    samples = re.findall(r'<label.*?stroke="(.*?)" stroke-width="3" stroke-dasharray="(.*?)"', page)
    expected = [(line["color"], figures.DASHES[line["dash"]]) for line in styles[:2]]
    assert samples == expected


def test_the_sizes_of_one_run_share_a_figure(runs: list[Path]) -> None:
    from motley.report import page

    (panel,) = gather(runs[:1]).panels.values()
    (figure,) = page._scores(panel, list(panel.series))
    assert [trace.name for trace in figure.data] == ["mean over sizes", "mlp1", "mlp2", "mlp3"]
    assert figure.layout.xaxis.dtick == 1  # no ticks between rounds
    assert '<ul class="legend">' in page._figure(figure)


def test_figures_of_sizes_have_the_same_scale(runs: list[Path]) -> None:
    from motley.report import page

    (panel,) = gather(runs).panels.values()
    drawn = page._scores(panel, list(panel.series))
    assert len(drawn) == 4
    assert len({figure.layout.yaxis.range for figure in drawn}) == 1


def test_losses_times_and_classes_are_drawn(runs: list[Path]) -> None:
    from motley.report import figures

    (panel,) = gather(runs).panels.values()
    labels = list(panel.series)
    test, train = figures.losses(panel, labels)
    assert test.data[0].x == train.data[0].x == (1, 2, 3)
    assert min(train.data[0].y) > 0
    times = figures.time(panel, labels).data[0].x
    assert list(times) == sorted(times)
    heatmap = figures.classes(panel)
    assert heatmap is not None and list(heatmap.data[0].y) == labels[::-1]
    assert len(heatmap.data[0].z[0]) == 10


@pytest.mark.parametrize(
    ("done", "says"),
    [
        (0, "round 0 of 3, no round"),
        (2, r"round 2 of 3, about \d+ s left"),
        (3, "finished: 3 rounds"),
    ],
)
def test_a_live_page_shows_progress(runs: list[Path], tmp_path: Path, done: int, says: str) -> None:
    from motley.report.page import render

    (tmp_path / "config.toml").write_text((runs[0] / "config.toml").read_text())
    lines = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:done]))
    assert re.search(f'class="progress">{says}', render(gather([tmp_path]), "now", live=True))
    assert 'class="progress"' not in render(gather([tmp_path]), "later")


@pytest.mark.parametrize(
    ("seconds", "text"), [(20.2, "20 s"), (150, "2 min"), (6000, "1 h 40 min")]
)
def test_durations(seconds: float, text: str) -> None:
    from motley.report.page import _duration

    assert _duration(seconds) == text


def test_a_live_page_of_a_study_counts_its_runs(study: Path) -> None:
    from motley.report.page import render

    assert "4 of 4 runs finished" in render(gather([study]), "now", live=True)
