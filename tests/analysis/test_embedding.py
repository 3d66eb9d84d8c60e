"""t-SNE of chosen sizes, clients, classes and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.analysis import ANALYSES
from motley.analysis.embedding import EmbeddingSettings
from motley.analysis.replay import client_examples, open_run, probe_images
from motley.core.errors import MotleyError
from motley.settings import validate
from tests.cli.conftest import call


def drawn(run: Path, **settings: Any) -> list[dict[str, Any]]:
    findings = ANALYSES["embedding"]([run], validate(EmbeddingSettings, settings, "embedding"))
    return [dict(zip(findings.columns, row, strict=True)) for row in findings.rows]


def test_chosen_sizes_and_classes(run: Path) -> None:
    """InCo's Figure 9: one client of a size and two of another."""
    rows = drawn(run, sizes="mlp2,mlp3,mlp3", classes=[1, 8], images=60)
    clients = list(dict.fromkeys((row["client"], row["size"]) for row in rows))
    assert [size for _, size in clients] == ["mlp2", "mlp3", "mlp3"]
    assert len({client for client, _ in clients}) == 3
    assert {row["class"] for row in rows} == {1, 8}
    with open_run(run) as (federation, _):
        for client, size in clients:
            assert federation.sizes[client] == size
        _, labels = probe_images(federation, 60)
    labels_of_client = [row["class"] for row in rows if row["client"] == clients[0][0]]
    assert labels_of_client == [label for label in labels.tolist() if label in (1, 8)]


def test_chosen_clients_are_trained_even_if_the_run_did_not_sample_them(run: Path) -> None:
    """FedIN's Figure 3: s_out of the clients' own examples, one color per client."""
    everything = {"classes": list(range(10)), "images": 40, "color": "client"}
    rows = drawn(run, clients=[0, 2, 4, 5], examples="own", **everything)
    assert list(dict.fromkeys(row["client"] for row in rows)) == [0, 2, 4, 5]
    with open_run(run) as (federation, servers):
        assert set(federation.sample(servers[-1].round_number + 1)) != {0, 2, 4, 5}
        _, labels = client_examples(federation, 4, 40)
    assert [row["class"] for row in rows if row["client"] == 4] == labels.tolist()


def test_the_stage_changes_the_picture(run: Path) -> None:
    """The input of mlp3's head is the output of its last hidden layer."""
    settings = {"sizes": "mlp3", "images": 40}
    last = drawn(run, stage="layer2", **settings)
    assert drawn(run, **settings) == last
    assert drawn(run, stage="layer0", **settings) != last


def test_wrong_choices_are_named(run: Path) -> None:
    wrong = {
        "sizes=mlp9": "embedding.sizes: unknown size 'mlp9'. Did you mean 'mlp",
        "clients=6": "embedding.clients = 6: Allowed: 0 to 5.",
        "classes=10": "embedding.classes = 10: Allowed: 0 to 9.",
        "stage=layer9": "embedding.stage = 'layer9': model 'mlp1': unknown stage 'layer9'.",
        "color=size": "embedding.color = 'size': should be 'class' or 'client'.",
        "sizes=[mlp1,mlp1,mlp1]": "fewer clients of size 'mlp1'. Name it less often.",
    }
    for choice, message in wrong.items():
        answer = call("analyze", "embedding", run, "--set", choice)
        assert answer.code == 2 and message in answer.err, answer.err
    with pytest.raises(MotleyError, match="give only one of them"):
        drawn(run, sizes="mlp1", clients=[1])
    with pytest.raises(MotleyError, match=r"classes = \[3\]: .* has 0 images of them among"):
        drawn(run, classes=[3], images=1)


def test_settings_are_listed() -> None:
    answer = call("list", "analyses", "embedding")
    assert answer.code == 0
    assert '"s_out"' in answer.out and "FedIN exchanges" in answer.out
    assert 'Allowed: "test", "own"' in answer.out
    assert "It has no settings." in call("list", "analyses", "cka").out
    assert "unknown analysis 'ckaa'" in call("list", "analyses", "ckaa").err
