"""Runs with users' own code on the command line: run, resume, show, report, study, list."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from motley.core.registry import Registry
from motley.runs.folder import RunFolder
from tests.cli.conftest import call


def forget(project: Path) -> None:
    """Forget the user's module, as a new process would."""
    sys.modules.pop("mine", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(project)]


def test_a_run_finds_modules_beside_its_file_and_resumes_from_anywhere(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = tmp_path / "runs" / "own"
    answer = call("run", project / "run.toml", "--out", run)
    assert answer.code == 0, answer.err
    recorded = json.loads((run / "plugins.json").read_text())
    assert {plugin["setting"] for plugin in recorded} == {
        "data.name",
        "data.partition.name",
        "model.sizes",
        "training.optimizer.name",
        "method.name",
        "server.optimizer.name",
        "server.stages.0.name",
    }
    assert {plugin["folder"] for plugin in recorded} == {str(project)}

    # The same rounds in one go and in two.
    longer = tmp_path / "runs" / "longer"
    answer = call("run", project / "run.toml", "--set", "training.rounds=4", "--out", longer)
    forget(project)
    assert call("resume", run, "--rounds", "4").code == 0
    prints = [call("show", "--fingerprint", folder).out for folder in (run, longer)]
    assert prints[0] == prints[1] != ""

    # The project and its runs may be moved together.
    forget(project)
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.move(str(project), str(moved / "project"))
    shutil.move(str(tmp_path / "runs"), str(moved / "runs"))
    answer = call("resume", moved / "runs" / "own", "--rounds", "5")
    assert answer.code == 0, answer.err
    forget(moved / "project")

    # Changed code is named.
    code = moved / "project" / "mine.py"
    code.write_text(code.read_text() + "\n# a remark\n")
    answer = call("resume", moved / "runs" / "own", "--rounds", "6")
    assert answer.code == 0 and "mine.py (it was " in answer.err
    assert "has changed since the run began" in answer.err


@pytest.fixture
def finished(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a finished run whose code is gone."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "own"
    assert call("run", project / "run.toml", "--out", run).code == 0
    forget(project)
    shutil.rmtree(project)
    return run


def test_numbers_are_shown_without_the_code(finished: Path, tmp_path: Path) -> None:
    answer = call("show", finished)
    assert answer.code == 0, answer.err
    assert "Shown without the run's own code: data.name = 'mine:few_digits': there is no" in (
        answer.out
    )
    assert "mine:Pull" in answer.out and "mine:large" in answer.out and "round 3 of 3" in answer.out
    values = json.loads(call("show", "--json", finished).out)[0]
    assert values["method"] == "mine:Pull" and values["finished"]
    listed = call("list", "runs", tmp_path)
    assert "mine:Pull" in listed.out and "finished" in listed.out
    pytest.importorskip("plotly")
    answer = call("report", finished, "-o", tmp_path / "report.html")
    assert answer.code == 0, answer.err
    page = (tmp_path / "report.html").read_text()
    assert "own code: data.name = &#x27;mine:few_digits&#x27;: there is no module" in page
    assert "mine:Pull" in page and "strength = 0.2" in page and "max_norm = 0.5" in page


def test_continuing_without_the_code_says_what_is_missing(finished: Path) -> None:
    answer = call("resume", finished, "--rounds", "4")
    assert answer.code == 2
    assert "there is no module 'mine'. Looked in " in answer.err


def test_a_damaged_config_is_still_an_error(finished: Path) -> None:
    config = RunFolder(finished).config
    config.write_text(config.read_text().replace('"mine:Pull"', '"fedavg"').replace("mine:", "m:"))
    assert "there is no module 'm'" in call("resume", finished).err
    config.write_text("rounds = ]")
    assert call("show", finished).code == 2


STUDY = """
summary = "mine"
seeds = [1]
set.model.sizes = ["mine:small", "mine:large"]
set.federation = {clients = 4, clients_per_round = 2}
set.training = {rounds = 2, batch_size = 16}
[[data]]
name = "own data"
set.data = {name = "mine:few_digits"}
[[methods]]
name = "own"
set.method = {name = "mine:Pull", strength = 0.3}
[[methods]]
name = "absent"
set.method = {name = "mine:Push"}
"""


def test_a_study_compares_users_methods(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (project / "study.toml").write_text(STUDY)
    answer = call("study", project / "study.toml", "--out", "out")
    assert answer.code == 0, answer.err
    assert "there is no 'Push' in" in answer.out + answer.err
    (run,) = (tmp_path / "out" / "runs").iterdir()
    assert run.name.startswith("mine.few_digits-mine.Pull-seed1-")
    forget(project)
    pytest.importorskip("plotly")
    assert call("report", "out/study-full", "-o", "report.html").code == 0


def test_a_study_runs_edited_code_again(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # The line FedAvg uses no code of the user's.
    (project / "study.toml").write_text(
        'preset = "digits-small"\nseeds = [1]\nset.training = {rounds = 1, steps = 3}\n'
        '[[data]]\nname = "digits"\n[[methods]]\nname = "FedAvg"\n'
        '[[methods]]\nname = "own"\nset.method = {name = "mine:Pull"}\n'
    )
    command = ("study", project / "study.toml", "--out", "out")
    first = call(*command)
    assert first.code == 0, first.err
    assert "2 runs, 0 finished" in first.out and "other code" not in first.out
    plain, old = sorted(path.name for path in (tmp_path / "out" / "runs").iterdir())
    assert plain.startswith("digits-fedavg-") and old.startswith("digits-mine.Pull-")
    forget(project)
    assert "2 runs, 2 finished, 0 to go" in call(*command, "--plan").out

    code = project / "mine.py"
    before = code.read_text()
    code.write_text(before.replace("alpha=self.settings.strength", "alpha=0.9"))
    forget(project)
    second = call(*command)
    assert second.code == 0, second.err
    assert "2 runs, 1 finished, 1 to go" in second.out
    assert f"other code: out/runs/{old}: {code} has changed since the run began." in second.out
    runs = {path.name for path in (tmp_path / "out" / "runs").iterdir()}
    assert {plain, old} < runs and len(runs) == 3
    (new,) = runs - {plain, old}
    prints = {call("show", "--fingerprint", tmp_path / "out/runs" / run).out for run in (old, new)}
    assert len(prints) == 2
    saved = json.loads((tmp_path / "out" / "study-full" / "study.json").read_text())
    assert saved["cells"][1]["runs"] == {"1": f"../runs/{new}"}

    forget(project)
    assert "2 runs, 2 finished" in call(*command, "--plan").out
    code.write_text(before)
    forget(project)
    assert "2 runs, 2 finished" in call(*command, "--plan").out


def test_config_prints_users_settings(project: Path, tmp_path: Path) -> None:
    answer = call("config", project / "run.toml", "--set", "method.strength=0.5")
    assert answer.code == 0, answer.err
    assert "# How hard clients are pulled back." in answer.out
    assert "strength = 0.5  # --set" in answer.out
    options = call("config", project / "run.toml", "--set", "model.options.hidden=3").out
    assert "options = { hidden = 3 }  # --set" in options
    again = tmp_path / "again.toml"
    again.write_text(answer.out)
    assert (
        call("config", "--plain", again).out
        == call("config", "--plain", project / "run.toml", "--set", "method.strength=0.5").out
    )


def test_the_working_folder_has_modules_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    answer = call("model", "check", "mine:small", "--size", "mine:large", "--shape", "1,8,8")
    assert answer.code == 0, answer.err
    assert "mine:large" in answer.out
    answer = call("config", "--plain", "--set", "method.name=mine:Pull")
    assert answer.code == 0 and 'name = "mine:Pull"\nstrength = 0.1' in answer.out


# ---- entry points


@pytest.fixture
def installed(project: Path) -> Path:
    """Install the user's module as a package with entry points."""
    from motley.core import registry

    info = project / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[motley.methods]\npull = mine:Pull\nbad = mine:Nothing\nfedavg = mine:Pull\n"
        "[motley.models]\nmine-small = mine:small\n"
    )
    sys.path.append(str(project))
    registry._points_of.cache_clear()
    yield project
    registry._points_of.cache_clear()


def test_installed_plugins_have_names(installed: Path) -> None:
    listed = call("list", "methods").out
    assert "pull" in listed and "A proximal term, by hand." in listed
    assert "there is no 'Nothing'" in listed and "the name is taken by" in listed
    assert "mine-small" in call("list", "models").out
    answer = call("config", "--plain", "--set", "method.name=pull", "--set", "method.strength=0.7")
    assert answer.code == 0 and 'name = "pull"\nstrength = 0.7' in answer.out
    answer = call("config", "--set", "method.name=pul")
    assert "Did you mean 'pull'?" in answer.err
    assert "bad" in answer.err  # it is among the names, and it is not loaded for that
    assert (
        "method.name = 'bad' (mine:Nothing): there is no"
        in call("config", "--set", "method.name=bad").err
    )


def test_registries_have_distinct_groups() -> None:
    from motley.data import DATASETS, PARTITIONS
    from motley.methods import METHODS
    from motley.models import MODELS
    from motley.splits import SPLITS

    registries: list[Registry] = [DATASETS, PARTITIONS, METHODS, MODELS, SPLITS]
    assert sorted(registry.group for registry in registries) == [
        "motley.datasets",
        "motley.methods",
        "motley.models",
        "motley.partitions",
        "motley.splits",
    ]
