"""The command line's own kinds of command.

`Command` and `Group` each repair something that older versions of typer get wrong with recent versions of click.
`LazyCommand` imports a command's module only when the command is used.

Recent versions of typer do not use click but a copy of their own, so click may be missing.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup


class Command(TyperCommand):
    """A command whose `--help` describes its positional arguments.

    typer up to at least 0.20 sets an argument's help before calling click's constructor, and click from 8.5 on sets it
    to None there. The text is still in the function's signature.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.callback is None:
            return
        declared = inspect.signature(self.callback).parameters
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)


def click_suggests_commands() -> bool:
    """Tell whether typer uses a click that suggests the nearest command by itself, as click does from 8.4 on."""
    if find_spec("click") is None:
        return False
    import click

    return issubclass(TyperGroup, click.Group) and hasattr(click.exceptions, "NoSuchCommand")


class Group(TyperGroup):
    """A group that suggests the nearest command once. typer would repeat click's suggestion."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if click_suggests_commands():
            self.suggest_commands = False


class LazyCommand(TyperCommand):
    """A command that is known by its name and its line in the help until it is used.

    The modules of most commands import torch, which takes seconds. `motley --help` and `motley --version` do without.
    """

    def __init__(self, name: str, summary: str, function: str) -> None:
        """Take a name, the first line of the command's help, and the place of its function: "module:function"."""
        super().__init__(name, help=summary)
        self.function = function

    def load(self) -> Any:
        """Import the command's module and return the real command. The function may also be a typer application."""
        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        if isinstance(function, typer.Typer):
            return typer.main.get_command(function)
        application = typer.Typer(add_completion=False)
        application.command(self.name, cls=Command)(function)
        return typer.main.get_command(application)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Make the context of the real command. click calls this first when a command was chosen, and then runs the
        command that the context belongs to.
        """
        return self.load().make_context(info_name, args, parent, **extra)
