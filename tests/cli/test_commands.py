"""Commands are imported when they are used, and import no more than they need."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import motley
from motley.cli import COMMANDS
from motley.cli.commands import LazyCommand
from tests.without_extras import BLOCKED

#: Calls the command line and prints the top-level modules imported by then as the last line.
SCRIPT = """
import json, sys
from motley.cli import main
try:
    main()
except SystemExit as left:
    status = left.code
modules = sorted({name.partition(".")[0] for name in sys.modules})
print()
print(json.dumps([status, modules]))
"""


def imported_by(*arguments: str) -> tuple[int, set[str]]:
    """Run a command in its own process. Return its exit status and the modules it imported."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True
    )
    status, modules = json.loads(ended.stdout.splitlines()[-1])
    return status, set(modules)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("rnu",), ("deploy", "--help")])
def test_help_and_version_do_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    status, modules = imported_by(*arguments)
    assert status == (2 if arguments == ("rnu",) else 0)
    assert not modules & {"torch", "numpy", *BLOCKED}


def test_a_wrong_setting_is_refused_before_any_optional_library_is_imported() -> None:
    status, modules = imported_by("run", "--set", "training.roundz=3")
    assert status == 2
    assert "torch" in modules
    assert not modules & set(BLOCKED)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_all_commands_has_the_line_of_each_command(command: LazyCommand) -> None:
    first_paragraph, _, _ = inspect.cleandoc(command.load().help or "").partition("\n\n")
    assert command.help == " ".join(first_paragraph.split())


def test_public_names_are_imported_when_they_are_asked_for() -> None:
    script = "import sys, motley; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert set(motley.__all__) <= set(dir(motley))
    for name in motley.__all__:
        assert getattr(motley, name).__module__.startswith("motley.")
    with pytest.raises(AttributeError, match="module 'motley' has no attribute 'Federations'"):
        _ = motley.Federations  # type: ignore[attr-defined]
