"""`motley config`: all settings of a run, with documentation and origins, as a file that gives the same run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from motley.config import load_config, presets
from tests.cli.conftest import Command


def values_with_comments(out: str) -> dict[str, tuple[str, str]]:
    """Return the origin of every key and the comment above it."""
    found = {}
    table, above = "", ""
    for line in out.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line.startswith("#"):
            above = line
        elif line:
            key, _, rest = line.partition(" = ")
            found[table + key] = (rest.rpartition("  # ")[2], above)
    return found


@pytest.mark.parametrize("preset", presets())
def test_the_output_is_a_file_that_gives_the_same_configuration(
    motley: Command, preset: str, tmp_path: Path
) -> None:
    for options in ((), ("--plain",)):
        answer = motley("config", "--preset", preset, *options)
        assert (answer.code, answer.err) == (0, "")
        file = tmp_path / "printed.toml"
        file.write_text(answer.out, encoding="utf-8")
        assert load_config(file) == load_config(preset=preset)
    assert answer.out == load_config(preset=preset).to_toml()


def test_every_key_has_documentation_and_an_origin(motley: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'preset = "inco-cifar10"\n[training]\nrounds = 7\n[method]\nname = "InCoProx w/o N"\nmu = 0.5\n'
    )
    out = motley("config", file, "--set", "federation.clients=50", "--set", "split.name=layer").out
    found = values_with_comments(out)
    values = load_config(file, overrides=["federation.clients=50", "split.name=layer"]).model_dump(
        mode="json"
    )
    assert tomllib.loads(out) == values
    assert all(len(comment) > 5 for _, comment in found.values())
    origins = {key: origin for key, (origin, _) in found.items()}
    assert origins["preset"] == str(file)
    assert origins["seed"] == "default"
    assert origins["training.rounds"] == str(file)
    assert origins["training.epochs"] == "preset inco-cifar10"
    assert origins["federation.clients"] == "--set"
    assert origins["split.name"] == "--set"
    assert origins["method.name"] == f"{file}, InCoProx w/o N"
    assert origins["method.mu"] == str(file)
    assert origins["server.inco.normalize"] == f"{file}, InCoProx w/o N"
    assert origins["server.inco.epsilon"] == "default"
    assert origins["data.transform.variant"] == "preset inco-cifar10"
    assert origins["data.transform.cutout"] == "variant inco"
    assert origins["training.optimizer.betas"] == "default"


def test_a_value_that_a_new_choice_dropped_is_a_default(motley: Command) -> None:
    out = motley(
        "config", "--preset", "heterofl-cifar10", "--set", "training.optimizer.name=adam"
    ).out
    origins = {key: origin for key, (origin, _) in values_with_comments(out).items()}
    assert (origins["training.optimizer.name"], origins["training.optimizer.lr"]) == (
        "--set",
        "default",
    )
    assert origins["preset"] == "--preset"


def test_allowed_words_and_the_documentation_of_a_choice(motley: Command) -> None:
    found = values_with_comments(motley("config").out)
    assert found["preset"] == (
        "default",
        "# The preset that the values started from; it is recorded with the run.",
    )
    comment = found["training.optimizer.name"][1]
    assert comment.startswith("# The clients' optimizer. Also ")
    assert comment.endswith('("adam", "adamw", "sgd")')
    assert found["federation.sampler"][1].endswith('("uniform", "fedml")')


def test_a_wrong_setting_is_refused_as_in_a_run(motley: Command) -> None:
    answer = motley("config", "--set", "training.round=3")
    assert (answer.code, answer.out) == (2, "")
    assert "training.round = 3: unknown key 'round'. Did you mean 'rounds'?" in answer.err


def test_help_of_run_names_the_command(motley: Command) -> None:
    assert "motley config" in motley("run", "--help").out
