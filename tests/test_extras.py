"""The base install works without any optional dependency, and names the extra if one is missing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from motley import Federation
from motley.core.errors import MotleyError
from motley.extras import EXTRAS, require
from tests.cli.conftest import Answer, call, overrides
from tests.conftest import tiny_config

REPOSITORY = Path(__file__).parent.parent
BASE = {"torch", "numpy", "pydantic", "typer", "rich", "safetensors", "tomli-w"}
#: The only modules that cannot be imported without their extra: the commands check for it before they import them.
NEEDS_PLOTLY = ("motley.report.figures", "motley.report.page", "motley.report.server")
NEEDS_FLOWER = ("motley.deploy.", "motley.flower.", "motley.cli.server_app")


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function after which a library cannot be imported."""

    def block(library: str) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == library:
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)

    return block


class Bare(NamedTuple):
    """How Motley did in a process without optional dependencies."""

    folder: Path
    #: Module of Motley that could not be imported -> the module that it missed.
    failed: dict[str, str]
    #: Command -> exit status, output and errors.
    answers: dict[str, Answer]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    folder = tmp_path_factory.mktemp("bare")
    command = [sys.executable, "-m", "tests.without_extras", str(folder)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    answers = {name: Answer(*answer) for name, answer in told["answers"].items()}
    return Bare(folder, told["failed"], answers)


# ---- a bare install


def test_the_base_install_is_as_small_as_promised() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">=")[0] for requirement in project["dependencies"]}
    assert names == BASE


def test_every_extra_installs_its_modules() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    packages = {
        "PIL": "pillow",
        "dp_accounting": "dp-accounting",
        "mlflow": "mlflow-skinny",
        "ray": "flwr[simulation]",
        "sklearn": "scikit-learn",
    }
    for module, extra in EXTRAS.items():
        package = packages.get(module, module)
        assert any(requirement.startswith(f"{package}>=") for requirement in extras[extra]), module


def imported_at_once(file: Path) -> set[str]:
    """Return the top-level names of the libraries that a file imports as soon as it is imported itself."""
    libraries: set[str] = set()
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Import):
            libraries |= {alias.name.partition(".")[0] for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            libraries.add(str(statement.module).partition(".")[0])
    return libraries - sys.stdlib_module_names - {"motley"}


def test_modules_import_no_undeclared_library() -> None:
    """A dependency of a dependency may go away: recent versions of typer do not need click."""
    source = REPOSITORY / "src"
    for file in source.rglob("*.py"):
        module = ".".join(file.relative_to(source).with_suffix("").parts)
        if module.startswith(
            NEEDS_FLOWER
        ):  # they also use libraries of flwr, which is pinned to one minor version
            continue
        allowed = {name.replace("-", "_") for name in BASE} | {
            "pydantic_core"
        }  # which is a half of pydantic
        if module.startswith("motley.kernels."):
            allowed.add("triton")
        if module in NEEDS_PLOTLY:
            allowed.add("plotly")
        assert imported_at_once(file) <= allowed, module


def test_modules_import_without_extras(bare: Bare) -> None:
    for module, library in bare.failed.items():
        if library == "triton":  # part of torch's CUDA builds
            assert module.startswith("motley.kernels."), module
        elif library == "plotly":
            assert module in NEEDS_PLOTLY
        else:
            assert module.startswith(NEEDS_FLOWER), (module, library)
    assert "motley.flower.settings" not in bare.failed


def test_digits_run_without_extras(bare: Bare) -> None:
    assert bare.answers["run"].code == 0, bare.answers["run"].err
    assert len((bare.folder / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_study_with_intervals_runs_without_extras(bare: Bare) -> None:
    code, out, err = bare.answers["study"]
    assert code == 0, err
    assert "within the noise" in out or "beyond the noise" in out


def test_analyses_are_listed_without_extras(bare: Bare) -> None:
    code, out, _ = bare.answers["list"]
    assert code == 0 and "embedding" in out


def test_a_report_without_extras_is_refused(bare: Bare) -> None:
    refused(bare.answers["report"], "motley report", "plotly", "report")
    assert not (bare.folder / "report.html").exists()


# ---- messages


def refused(answer: Answer, needed_for: str, module: str, extra: str) -> None:
    assert answer.code == 2 and answer.out == ""
    assert answer.err == (
        f"motley: {needed_for} needs {module}, which is not installed. In Motley's checkout: "
        f"pip install -c constraints.txt -e '.[{extra}]'\n"
    )


def test_a_run_with_profile_is_refused_before_anything_is_written(
    missing: Callable[[str], None], tmp_path: Path
) -> None:
    missing("matplotlib")
    answer = call("run", *overrides(), "--profile", "--out", tmp_path / "run")
    refused(answer, "--profile", "matplotlib", "analysis")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_page_needs_plotly(missing: Callable[[str], None], tmp_path: Path, command: str) -> None:
    missing("plotly")
    refused(call(command, tmp_path), f"motley {command}", "plotly", "report")


def test_an_analysis_is_refused_before_it_computes(
    missing: Callable[[str], None], tmp_path: Path
) -> None:
    missing("matplotlib")
    refused(call("analyze", "sizes", tmp_path), "motley analyze", "matplotlib", "analysis")


def test_the_embedding_needs_scikit_learn(missing: Callable[[str], None], tmp_path: Path) -> None:
    from motley.analysis.embedding import embedding

    missing("sklearn")
    with pytest.raises(
        MotleyError, match=r"^the analysis embedding needs sklearn, .*'\.\[analysis\]'$"
    ):
        embedding([tmp_path])


@pytest.mark.parametrize("command", ["init", "server", "node", "run", "status"])
def test_deploy_needs_flower(missing: Callable[[str], None], tmp_path: Path, command: str) -> None:
    missing("flwr")
    refused(call("deploy", command, tmp_path), "motley deploy", "flwr", "flower")


def test_the_simulation_needs_ray(missing: Callable[[str], None], tmp_path: Path) -> None:
    missing("ray")
    answer = call("run", "--engine", "flower-simulation", "--out", tmp_path / "run")
    refused(answer, "engine.name = 'flower-simulation'", "ray", "simulation")


def test_epsilon_needs_an_accountant(missing: Callable[[str], None]) -> None:
    missing("dp_accounting")
    clipped = ("privacy.clip=1", "split.normalization_statistics=batch")
    with pytest.raises(
        MotleyError,
        match=r"^privacy.noise = 1: computing epsilon needs dp_accounting, .*'\.\[privacy\]'$",
    ):
        Federation(tiny_config(*clipped, "privacy.noise=1"))
    Federation(tiny_config(*clipped))


def test_a_node_with_a_limit_does_not_start_without_an_accountant(
    missing: Callable[[str], None], tmp_path: Path
) -> None:
    pytest.importorskip("flwr")
    from motley.flower.ledger import describe_ledger
    from motley.flower.settings import NodePrivacy, NodeSettings

    missing("dp_accounting")
    node = NodeSettings(client=0, memory=str(tmp_path))
    assert describe_ledger(node) == ""
    node = node.model_copy(update={"privacy": NodePrivacy(max_epsilon=3.0)})
    with pytest.raises(
        MotleyError,
        match=r"^privacy.max_epsilon = 3: computing epsilon needs dp_accounting, .*'\.\[privacy\]'$",
    ):
        describe_ledger(node)


def test_a_missing_dependency_of_a_library_is_named(
    missing: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plotly.py").write_text("import narwhals_that_is_missing")
    missing("plotly")
    monkeypatch.delitem(sys.modules, "plotly")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        MotleyError, match=r"^the report needs narwhals_that_is_missing, which is not installed"
    ):
        require("plotly", "the report")


def test_a_library_that_cannot_be_imported_is_no_missing_one(
    missing: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plotly.py").write_text("raise ImportError('built for another Python')")
    missing("plotly")
    monkeypatch.delitem(sys.modules, "plotly")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        MotleyError, match=r"^the report needs plotly, which cannot be imported: built for another"
    ):
        require("plotly", "the report")
