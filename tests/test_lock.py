"""requirements-lock.txt agrees with pyproject.toml and constraints.txt, and the audit's verdicts."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
#: One version of torch has many builds with hashes of their own, so it is not locked.
NOT_LOCKED = {"torch", "motleyfl"}


def locked() -> dict[str, str]:
    text = (ROOT / "requirements-lock.txt").read_text()
    pattern = r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}\n"
    return dict(re.findall(pattern, text, flags=re.MULTILINE))


def required_by(extra: str = "") -> list[Requirement]:
    """Return the requirements of an install, with those of the extras that an extra names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = []
    for text in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        requirement = Requirement(text)
        requirements.append(requirement)
        if requirement.name == "motleyfl":
            for inner in requirement.extras:
                requirements += required_by(inner)
    return requirements


def test_every_line_has_a_version_and_a_hash() -> None:
    text = (ROOT / "requirements-lock.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == 2 * len(locked()) > 100
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_the_locked_versions_are_within_the_bounds() -> None:
    versions = locked()
    assert not NOT_LOCKED & set(versions)
    requirements = [*required_by(), *required_by("dev")]
    for text in (ROOT / "constraints.txt").read_text().splitlines():
        if text.strip() and not text.startswith("#"):
            requirements.append(Requirement(text))
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in NOT_LOCKED:
            continue
        assert name in versions, f"{name} is not locked; run `make lock`"
        assert requirement.specifier.contains(versions[name], prereleases=True), (
            f"{name} is locked at {versions[name]}, and {requirement} is wanted; run `make lock`"
        )


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_audit_fails_for_our_own_packages_that_can_be_updated(audit: ModuleType) -> None:
    def package(name: str, *fixed: str) -> dict[str, object]:
        return {"name": name, "version": "1", "vulns": [{"id": "X-1", "fix_versions": fixed}]}

    found = {
        "dependencies": [
            package("numpy", "2"),
            package("rich"),
            package("jupyter-core", "2"),
            {"name": "torch", "version": "1", "vulns": []},
            {"name": "secret", "skip_reason": "not found"},
        ]
    }
    ours = audit.required((ROOT / "pyproject.toml").read_text()) | {"flwr"}
    assert {"numpy", "rich", "torch", "tomli-w"} <= ours and "plotly" not in ours
    failing, others = audit.judged(found, ours)
    assert failing == ["numpy 1: X-1, fixed in 2"]
    assert others == ["rich 1: X-1, no fixed version yet", "jupyter-core 1: X-1, fixed in 2"]
    assert audit.unaudited(found) == ["secret"]


def test_packages_that_the_advisory_service_does_not_know_are_not_called_safe(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        {"dependencies": [{"name": "a", "skip_reason": "not found"}]},
        {"dependencies": [{"name": "a", "skip_reason": "not found"}, {"name": "b", "vulns": []}]},
    ]
    monkeypatch.setattr(audit, "advisories", lambda versions: answers.pop(0))
    for status in (0, 0):
        with pytest.raises(SystemExit) as exited:
            audit.main()
        assert exited.value.code == status
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "audit: skipped: the advisory service knows none of the packages."
    assert said[1:] == [
        "audit: not known to the advisory service: a",
        "audit: 1 packages, 0 to update, 0 notes",
    ]


def test_the_pins_of_the_lock_file_are_read(audit: ModuleType) -> None:
    assert audit.pins((ROOT / "requirements-lock.txt").read_text()) == locked()


def test_tritons_version_does_not_constrain_torchs_builds(audit: ModuleType) -> None:
    """A build of torch with CUDA needs the Triton that it names, and could not be installed."""
    assert "triton" not in audit.pins((ROOT / "constraints.txt").read_text())
    assert list(audit.pins((ROOT / "requirements-kernels.txt").read_text())) == ["triton"]
