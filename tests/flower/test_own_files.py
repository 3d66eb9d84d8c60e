"""Nodes that read their own files with `[data.files]` in node.toml."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.config import load_config
from motley.core.errors import MotleyError
from motley.flower.examples import read_data
from motley.flower.run_config import to_text
from motley.flower.settings import NodeSettings, read_node

TABLE = "age,sex,outcome\n" + "".join(f"{i},{'mf'[i % 2]},{'ab'[i % 3 == 0]}\n" for i in range(30))


def node(folder: Path, data: str) -> NodeSettings:
    (folder / "mine.csv").write_text(TABLE)
    file = folder / "node.toml"
    text = (
        f'client = 0\n[data]\nname = "files"\npath = "mine.csv"\nfiles.target = "outcome"\n{data}'
    )
    file.write_text(text)
    return read_node(file)


def test_a_node_trains_on_all_of_its_own_rows(tmp_path: Path) -> None:
    own = node(tmp_path, 'files.drop = ["sex"]\nfiles.classes = ["a", "b", "c"]\n')
    data = read_data(own, tested=False)
    assert len(data.train) == 30 and not len(data.test)
    assert (data.classes, data.class_names) == (3, ("a", "b", "c"))
    assert len(read_data(own, tested=True).test) == 6


def test_numbers_that_would_differ_between_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MotleyError, match=r"data\.files\.classes: is not set"):
        read_data(node(tmp_path, 'files.drop = ["sex"]\n'), tested=False)
    with pytest.raises(MotleyError, match="categories would get other numbers on every node"):
        read_data(node(tmp_path, 'files.classes = ["a", "b"]\n'), tested=False)
    characters = 'files.classes = ["a", "b"]\nfiles.features = ["sex"]\nfiles.inputs = "text"\n'
    with pytest.raises(MotleyError, match="characters would get other numbers"):
        read_data(node(tmp_path, characters), tested=False)


def test_a_node_that_shares_a_file_has_the_servers_training_rows(tmp_path: Path) -> None:
    shared = node(tmp_path, "dealt = true\n")
    config = load_config(
        overrides=[
            "data.name=files",
            f"data.path={tmp_path / 'mine.csv'}",
            "data.files.target=outcome",
            "model.sizes=table1",
        ]
    )
    on_node, on_server = read_data(shared, tested=False), config.data.load()
    assert np.array_equal(on_node.train.inputs, on_server.train.inputs)
    assert np.array_equal(on_node.train.targets, on_server.train.targets)
    # Settings of the server's files are not sent: names of columns may look like paths.
    assert "outcome" not in to_text(config)


def test_the_path_of_a_test_file_starts_from_the_nodes_folder(tmp_path: Path) -> None:
    own = node(tmp_path, 'files.test = "more.csv"\n')
    assert own.data.files.test == str(tmp_path / "more.csv")
