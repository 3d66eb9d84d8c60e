"""`motley list`: one line per registered name, all settings, and the runs in a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from motley.analysis import ANALYSES
from motley.cli.list import Kind, by_name
from motley.config import load_config, presets
from motley.config.paper_names import PREFIXES, STEMS
from motley.core.registry import Registry
from motley.data import DATASETS, PARTITIONS
from motley.methods import METHODS
from motley.models import MODELS
from motley.reference import sections
from motley.settings import flat
from motley.splits import SPLITS
from motley.tasks import LOSSES, METRICS, TASKS
from tests.cli.conftest import Command, TinyRun

REGISTRIES: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "models": MODELS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "splits": SPLITS,
    "analyses": ANALYSES,
    "tasks": TASKS,
    "losses": LOSSES,
    "metrics": METRICS,
}


def test_every_kind_is_tested() -> None:
    assert {kind.value for kind in Kind} == {*REGISTRIES, "presets", "settings", "runs"}


@pytest.mark.parametrize(("kind", "registry"), REGISTRIES.items(), ids=REGISTRIES)
def test_a_list_has_one_line_per_entry_with_summary_aliases_and_paper(
    motley: Command, kind: str, registry: Registry[Any]
) -> None:
    answer = motley("list", kind)
    head, *lines = answer.out.splitlines()
    assert (answer.code, answer.err) == (0, "")
    papers = ["paper"] if any(entry.paper for entry in registry) else []
    states = ["files"] if kind == "datasets" else []
    assert head.split() == [registry.kind.replace(" ", ""), "description", *states, *papers]
    if kind == "methods":
        lines = lines[: [line.strip() for line in lines].index("")]
    for entry, line in zip(
        sorted(registry, key=lambda entry: by_name(entry.name)), lines, strict=True
    ):
        assert (
            line.startswith(f"{entry.name} ")
            and entry.summary in line
            and line.rstrip().endswith(entry.paper)
        )
        assert all(alias in line for alias in entry.aliases)


ORDERED = ("models", "methods")


def test_lists_are_in_the_order_of_names(motley: Command) -> None:
    models, methods = (
        [line.split(" ")[0] for line in motley("list", kind).out.splitlines()] for kind in ORDERED
    )
    assert models[models.index("vgg9") + 1] == "vgg11" and models.index("resnet26") < models.index(
        "resnet101"
    )
    shown = methods[1 : 1 + len(list(METHODS))]
    assert shown == sorted(shown) and {"depthfl", "fedavg", "scalefl"} <= set(shown)


def test_names_of_methods_are_listed_with_what_they_stand_for(motley: Command) -> None:
    _, _, names = motley("list", "methods").out.partition("Names for a method")
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in names.splitlines()}
    assert {f"{prefix}*" for prefix in PREFIXES} | {f"*{stem}" for stem in STEMS} <= rows.keys()
    assert "split.name = depth, server.inco.variant = official" in rows["InCo*"]
    assert "server.inco.normalize = false, server.inco.optimize = false" in rows["InCo* w/o N & O"]
    assert "server.optimizer.name = yogi FedYogi, HeteroYogi or InCoYogi" in rows["*Yogi"]


def test_presets_are_listed_with_their_first_line(motley: Command) -> None:
    answer = motley("list", "presets")
    head, *lines = answer.out.splitlines()
    assert answer.code == 0 and head.split() == ["preset", "description"]
    for (name, summary), line in zip(presets().items(), lines, strict=True):
        assert (
            line.split(maxsplit=1) == [name, summary]
            or line.split(maxsplit=1)[1].rstrip() == summary
        )


def test_an_alias_is_shown_beside_its_name(motley: Command) -> None:
    assert "(also: stage, layer, layer-wise)" in motley("list", "splits").out


@pytest.mark.parametrize("arguments", [("nothing",), ()])
def test_a_kind_that_is_none_is_refused_with_those_that_are(
    motley: Command, arguments: tuple[str, ...]
) -> None:
    answer = motley("list", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Traceback" not in answer.err
    assert "Usage: motley list" in answer.err
    if arguments:
        assert all(kind.value in answer.err for kind in Kind)


# --- settings


def test_every_setting_is_listed_with_its_default_and_a_description(motley: Command) -> None:
    out = motley("list", "settings").out
    listed = {
        line.split()[0]: line
        for line in out.splitlines()
        if line.startswith("  ") and line[2] != " "
    }
    assert "  training.rounds = 20  (integer: at least 1)" in listed.values()
    assert '  split.channels = "leading"' in listed["split.channels"]
    assert {
        "method.mu",
        "server.inco.theta_max",
        "data.partition.alpha",
        "engine.flower.wait_s",
    } <= listed.keys()
    defaults = flat(load_config().model_dump(mode="json"))
    assert set(defaults) <= set(listed)
    assert not [
        setting.key
        for section in sections()
        for setting in section.settings
        if not setting.description
    ]


def test_settings_can_be_searched(motley: Command) -> None:
    out = motley("list", "settings", "training.lr_").out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  training")] == [
        "training.lr_decay",
        "training.lr_milestones",
        "training.lr_gamma",
    ]
    assert motley("list", "settings", "zzz") == (
        2,
        "",
        "motley: motley list settings: no key contains 'zzz'.\n",
    )


def test_the_page_of_all_settings_is_up_to_date(motley: Command) -> None:
    """If this fails: motley list settings --markdown > docs/settings.md."""
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    text = motley("list", "settings", "--markdown").out
    assert text == page.read_text(encoding="utf-8")
    assert "typing." not in text, "a type has no plain name in motley.reference"


# --- runs


def test_runs_are_listed_with_method_rounds_accuracy_and_state(
    motley: Command, tiny_run: TinyRun, tmp_path: Path
) -> None:
    shutil.copytree(tiny_run.path, tmp_path / "runs" / "a")
    shutil.copytree(tiny_run.path, tmp_path / "runs" / "deeper" / "b")
    metrics = tmp_path / "runs" / "deeper" / "b" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))
    # A checkpoint of round 3 would show that the line of round 3 was lost.
    shutil.rmtree(metrics.parent / "checkpoints")
    (tmp_path / "runs" / "no run").mkdir()
    (tmp_path / "runs" / "no run" / "config.toml").write_text("")
    answer = motley("list", "runs")
    head, first, second = (line.split() for line in answer.out.splitlines())
    assert answer.code == 0
    assert head == ["run", "data", "method", "preset", "round", "last", "best", "began", "state"]
    accuracies = [json.loads(line)["accuracy"]["mean"] for line in lines]
    assert first[:10] == [
        *("runs/a", "digits", "fedavg", "+", "InCo", "quickstart", "3", "of", "3"),
        f"{accuracies[2]:.2%}",
    ]
    assert first[10] == f"{max(accuracies):.2%}" and first[-1] == "finished"
    assert second[0] == "runs/deeper/b" and second[6:10] == ["2", "of", "3", f"{accuracies[1]:.2%}"]
    assert second[-1] == "unfinished"


def test_a_damaged_run_does_not_hide_the_others(
    motley: Command, tiny_run: TinyRun, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        shutil.copytree(tiny_run.path, tmp_path / "runs" / name)
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("null\n")
    _, first, second = motley("list", "runs").out.splitlines()
    assert "unreadable: runs/a/metrics.jsonl, line 1: these are not the metrics of a round" in first
    assert second.split()[0] == "runs/b" and second.split()[-1] == "finished"


def test_a_folder_without_runs_says_so(motley: Command, tmp_path: Path) -> None:
    assert motley("list", "runs", tmp_path) == (0, f"There are no runs in {tmp_path}.\n", "")
    assert motley("list", "runs").err.startswith("motley: runs: there is no such folder.")


def test_every_run_is_one_line_in_a_pipe(
    motley: Command, tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Names of a study's runs are longer than a column of a terminal."""
    run = tmp_path / "runs" / "studies" / ("digits-fedavg-seed1-" + 60 * "b") / "first"
    shutil.copytree(tiny_run.path, run)
    answer = motley("list", "runs")
    heading, line = answer.out.splitlines()
    assert heading.split()[0] == "run" and heading.split()[-1] == "state"
    assert line.startswith(f"{run.relative_to(tmp_path)} ") and line.endswith(" finished")


def test_numbers_are_whole_in_a_narrow_terminal(
    motley: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (tmp_path / "budgets.csv").write_text("client,memory_mb\nphone,0.001\nwatch,1000\n")
    answer = motley("plan", "--preset", "digits-small", "--budgets", "budgets.csv")
    for words in ("phone  │ none fits", "watch  │ mlp3", "13,130"):
        assert words in answer.out
