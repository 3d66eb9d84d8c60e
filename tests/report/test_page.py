"""The page as text; tests/report/test_browser.py looks at it in a browser."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from motley.errors import MotleyError
from motley.report.material import gather
from tests.cli.conftest import call
from tests.report.conftest import small_run

pytest.importorskip("plotly")


def test_everything_is_in_one_file(study: Path, runs: list[Path], tmp_path: Path) -> None:
    answer = call("report", study, *runs, "-o", tmp_path / "page.html", "--title", "<Mine>")
    assert answer.code == 0, answer.err
    page = (tmp_path / "page.html").read_text()
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert "&lt;Mine&gt;" in own
    assert "http" not in re.sub(r"http-equiv", "", own)
    assert "src=" not in re.sub(r'src="data:', "", own)
    for text in ("50 ± 2", "there is no method", "Rounds, traffic and time", "who holds what", "theta a layer"):
        assert text in page
    assert "data.partition" in own  # the configuration


def test_a_picture_of_an_analysis_is_put_in(tmp_path: Path) -> None:
    from motley.report.page import render

    run = small_run(tmp_path / "run")
    (run / "analysis").mkdir()
    (run / "analysis" / "cka.png").write_bytes(b"not really a picture")
    assert 'alt="cka"' in render(gather([run]), "one")


def test_what_methods_report_of_themselves_is_drawn(runs: list[Path], tmp_path: Path) -> None:
    from motley.report import figures

    run = small_run(tmp_path / "run", "method.name=FedIN", "model.sizes=['mlp2','mlp3']")
    panel = next(iter(gather([run]).panels.values()))
    found = figures.own_numbers(panel, list(panel.series))
    drawn = {figure.layout.title.text.split(": ")[1]: figure.data[0] for figure in found}
    assert drawn.keys() == {"pool", "feature mb up", "in loss"}
    assert drawn["pool"].x == (1, 2, 3) and drawn["pool"].y[0] == 3
    assert drawn["in loss"].x == (2, 3) and min(drawn["in loss"].y) > 0
    assert not figures.own_numbers(next(iter(gather(runs).panels.values())), [])


def test_a_run_without_a_round_has_a_page(runs: list[Path], tmp_path: Path) -> None:
    from motley.report.page import render

    (tmp_path / "config.toml").write_text((runs[0] / "config.toml").read_text())
    assert "No round has been evaluated yet" in render(gather([tmp_path]), "new")


def test_data_that_is_not_here_is_said(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from motley.report import figures, page

    def absent(run: object) -> None:
        raise MotleyError("data set 'x' was not found.\nmore")

    monkeypatch.setattr(figures, "partition", absent)
    assert "cannot be drawn here: data set &#x27;x&#x27; was not found." in page.render(gather(runs), "t")


def test_without_plotly_the_extra_is_named(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("plotly", "motley.report.page"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    answer = call("report", runs[0])
    assert answer.code == 2
    assert "motleyfl[report]" in answer.err
