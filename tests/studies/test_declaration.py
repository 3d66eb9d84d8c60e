"""Built-in studies are complete, and users' studies are validated in the same way."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.config import load_config
from motley.core.errors import MotleyError
from motley.studies.declaration import load_study, studies
from motley.studies.sweep import plan_cells
from tests.studies.conftest import SWEEP


def rejection(file: Path, text: str) -> str:
    """Return the message that rejects a study."""
    file.write_text(text)
    with pytest.raises(MotleyError) as raised:
        load_study(str(file))
    return str(raised.value)


def test_the_papers_tables_are_built_in() -> None:
    expected = {
        "inco-table1",
        "inco-table2",
        "inco-table2-vit",
        "inco-table3",
        "inco-figure7",
        "inco-figure8",
    }
    expected |= {f"inco-figure{number}" for number in range(15, 20)}
    expected |= {
        "fedin-table1",
        "fedin-table3",
        "fedin-table4a",
        "fedin-table4b",
        "fedin-table5",
        "fedin-table6",
    }
    expected |= {f"fedimpro-table{number}" for number in (1, 2, 3, 7, 8, 9, 10, 11)}
    assert expected <= set(studies())


def test_numbers_of_both_versions_of_the_baselines() -> None:
    rows = {row.name: row for row in load_study("inco-table2").methods}
    cell = {name: rows[name].paper["cifar10"][0] for name in ("FedAvg", "HeteroAvg", "InCoAvg")}
    assert {name: (number.mean, number.std) for name, number in cell.items() if number} == {
        "FedAvg": (52.3, 3.4),
        "HeteroAvg": (64.8, 2.9),
        "InCoAvg": (67.8, 3.2),
    }
    assert rows["InCoAvg"].against == "HeteroAvg"


def test_cells_have_the_settings_of_the_paper() -> None:
    cells = plan_cells(load_study("fedimpro-table1"), "full", data=["digits"], methods=["SCAFFOLD"])
    assert [cell.case for cell in cells][-1] == "a=0.1, E=1, M=100"
    assert cells[-1].runs[0].config.federation.clients == 100
    assert cells[2].runs[0].config.training.epochs == 5
    assert [run.seed for run in cells[0].runs] == [1, 2, 3]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "digits"', 'nmae = "digits"', "unknown key 'nmae'. Did you mean 'name'?"),
        (
            'paper.digits = ["50 ± 2"]',
            "paper.digits = [50, 51]",
            "has 2 numbers; 1 are needed, one per case",
        ),
        ('paper.digits = ["50 ± 2"]', 'paper.digits = ["a ± 2"]', "should be a number"),
        (
            'paper.digits = ["50 ± 2"]',
            "paper.digit = [50]",
            "unknown data set 'digit'. Did you mean 'digits'?",
        ),
        (
            'against = "HeteroAvg"',
            'against = "HetroAvg"',
            "unknown line 'HetroAvg'. Did you mean 'HeteroAvg'?",
        ),
        ("seeds = [1, 2]", "seeds = [1, 1]", "seeds: 1 is given twice"),
        ("seeds = [1, 2]", "seeds = []", "seeds = []: at least 1 is needed"),
        (
            "seeds = [1, 2]",
            "seeds = 3",
            "seeds = 3: should be a list, because one number could be a seed or how many there "
            "are: write seeds = [1, 2, 3] for 3 seeds, or seeds = [3] for the seed 3.",
        ),
        ("seeds = [1, 2]", "seeds = 50", "write seeds = [1, ..., 50] for 50 seeds, or"),
        ("seeds = [1, 2]", "seeds = 1", "are: write seeds = [1] for the seed 1."),
        ("seeds = [1, 2]", 'measure = "worst"', "unknown measure 'worst'"),
        (
            "[[cases]]",
            '[[exceptions]]\ndata = ["x"]\nset.seed = 1\n[[cases]]',
            "exceptions: unknown name 'x'",
        ),
    ],
)
def test_an_invalid_study_is_rejected_by_name(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in SWEEP
    assert says in rejection(tmp_path / "mine.toml", SWEEP.replace(old, new))


def test_unknown_studies_and_files() -> None:
    with pytest.raises(
        MotleyError, match=r"unknown study 'inco-tabel2'\. Did you mean 'inco-table2'"
    ):
        load_study("inco-tabel2")
    with pytest.raises(MotleyError, match="no such"):
        load_study("nowhere.toml")


def test_the_configuration_of_a_run_is_no_study(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text in ("[training]\nrounds = 3", '[data]\nname = "digits"'):
        assert "is no study, which has a list [[data]] and a list [[methods]]. If it is the " in (
            message := rejection(file, text)
        )
        assert message.endswith(f"configuration of one run: motley run {file}")
    file.write_text(SWEEP)
    with pytest.raises(MotleyError, match=r"mine\.toml: is a study, .*: motley study "):
        load_config(file)


def test_rounds_to_needs_a_target(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(SWEEP)
    with pytest.raises(MotleyError, match=r"^--score = 'rounds-to': data set 'digits' has no tar"):
        plan_cells(load_study(str(file)), "full", score="rounds-to")
    file.write_text(SWEEP + "\n[targets]\ndigits = [80.0]\n")
    assert plan_cells(load_study(str(file)), "full", score="rounds-to")[0].target == 80.0


def test_a_users_study_runs_in_full_and_a_papers_table_quickly(sweep: Path) -> None:
    assert load_study(str(sweep)).scale == "full"
    assert load_study("inco-table2").scale == "quick"
    assert load_study("demo").scale == "full"


def test_paths_start_from_the_folder_of_the_study(tmp_path: Path) -> None:
    text = SWEEP.replace('name = "digits"', 'name = "site A"\npath = "a.npz"').replace(
        "paper.digits", "paper.'site A'"
    )
    text = text.replace(
        "seeds =", 'set.model.weights = "/abs/w"\nset.data.root = "../data"\nseeds ='
    )
    text = text.replace(
        'against = "HeteroAvg"', 'set.data.partition = { name = "file", path = "p.json" }'
    )
    (tmp_path / "mine.toml").write_text(text)
    study = load_study(str(tmp_path / "mine.toml"))
    assert study.data[0].layer == {"data": {"name": "npz", "path": str(tmp_path / "a.npz")}}
    assert study.set["model"]["weights"] == "/abs/w"
    assert study.set["data"]["root"] == str(tmp_path / "../data")
    assert study.methods[1].set["data"]["partition"]["path"] == str(tmp_path / "p.json")


def test_tables_of_settings_must_be_tables(tmp_path: Path) -> None:
    said = rejection(tmp_path / "mine.toml", SWEEP.replace("seeds = [1, 2]", "set.data = 3"))
    assert "data should be a table" in said


def test_the_example_of_the_documentation_can_be_planned(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    cells = plan_cells(
        load_study(str(tmp_path / "mine.toml")), "full", data=["hospital A", "hospital B"]
    )
    reasons = sorted({reason for cell in cells for _, reason in cell.missing})
    assert len(reasons) == 2  # only the two files are missing
    for reason, name in zip(reasons, ("a.npz", "b.npz"), strict=True):
        assert str(tmp_path / "data" / name) in reason
