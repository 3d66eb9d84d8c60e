"""`motley list`: everything that is registered, a line each."""

from __future__ import annotations

from typing import Any

import pytest

from motley.analysis import ANALYSES
from motley.cli.list import Kind, by_name
from motley.config import presets
from motley.data import DATASETS, PARTITIONS
from motley.methods import METHODS
from motley.methods.names import PREFIXES, STEMS
from motley.models import MODELS
from motley.registry import Registry
from motley.splits import SPLITS
from tests.cli.conftest import Command

REGISTRIES: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "models": MODELS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "splits": SPLITS,
    "analyses": ANALYSES,
}


def test_every_kind_is_tested() -> None:
    assert {kind.value for kind in Kind} == {*REGISTRIES, "presets"}


@pytest.mark.parametrize(("kind", "registry"), REGISTRIES.items(), ids=REGISTRIES)
def test_a_list_has_a_line_an_entry_with_summary_aliases_and_paper(
    motley: Command, kind: str, registry: Registry[object]
) -> None:
    answer = motley("list", kind)
    head, *lines = answer.out.splitlines()
    assert (answer.code, answer.err) == (0, "")
    assert head.split() == [registry.kind.replace(" ", ""), "what", "it", "is", "paper"]
    if kind == "methods":
        lines = lines[: [line.strip() for line in lines].index("")]
    for entry, line in zip(sorted(registry, key=lambda entry: by_name(entry.name)), lines, strict=True):
        assert line.startswith(f"{entry.name} ") and entry.summary in line and line.rstrip().endswith(entry.paper)
        assert all(alias in line for alias in entry.aliases)


ORDERED = ("models", "methods")


def test_lists_are_in_the_order_of_names(motley: Command) -> None:
    models, methods = ([line.split(" ")[0] for line in motley("list", kind).out.splitlines()] for kind in ORDERED)
    assert models[models.index("vgg9") + 1] == "vgg11" and models.index("resnet26") < models.index("resnet101")
    shown = methods[1 : 1 + len(list(METHODS))]
    assert shown == sorted(shown) and {"depthfl", "fedavg", "scalefl"} <= set(shown)


def test_names_of_methods_are_listed_with_what_they_stand_for(motley: Command) -> None:
    _, _, names = motley("list", "methods").out.partition("Names for a method")
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in names.splitlines()}
    assert {f"{prefix}*" for prefix in PREFIXES} | {f"*{stem}" for stem in STEMS} <= rows.keys()
    assert "split.name = depth, method.inco.preset = official" in rows["InCo*"]
    assert "method.inco.normalize = false, method.inco.optimize = false" in rows["InCo* w/o N & O"]
    assert "server.optimizer.name = yogi FedYogi, HeteroYogi or InCoYogi" in rows["*Yogi"]


def test_presets_are_listed_with_their_first_line(motley: Command) -> None:
    answer = motley("list", "presets")
    head, *lines = answer.out.splitlines()
    assert answer.code == 0 and head.split() == ["preset", "what", "it", "is"]
    for (name, summary), line in zip(presets().items(), lines, strict=True):
        assert line.split(maxsplit=1) == [name, summary] or line.split(maxsplit=1)[1].rstrip() == summary


def test_an_alias_is_shown_beside_its_name(motley: Command) -> None:
    assert "(also: stage, layer, layer-wise)" in motley("list", "splits").out


@pytest.mark.parametrize("arguments", [("nothing",), ()])
def test_a_kind_that_is_none_is_refused_with_those_that_are(motley: Command, arguments: tuple[str, ...]) -> None:
    answer = motley("list", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "Traceback" not in answer.err
    assert "Usage: motley list" in answer.err
    if arguments:
        assert all(kind.value in answer.err for kind in Kind)
