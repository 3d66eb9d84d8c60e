"""Subclasses of typer's commands and groups.

`Command` also refuses options that were given as an empty text. `Command` and `Group` each work
around a problem of older versions of typer with recent versions of click. `LazyCommand` imports a
command's module only when the command is used.

Recent versions of typer bundle their own copy of click, so click may not be installed.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from motley.core.errors import MotleyError


class Command(TyperCommand):
    """A command whose `--help` describes its positional arguments.

    Up to 0.20 at least, typer sets an argument's help before it calls click's constructor, which
    resets it to None from click 8.5 on. The text is still in the function's signature.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.callback is None:
            return
        declared = inspect.signature(self.callback).parameters
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless an option was given as an empty text.

        The default of many options is the empty text. `--preset "$PRESET"` in a script, with a
        misspelt variable, would silently run the quickstart.
        """
        for parameter in self.params:
            name = parameter.name or ""
            source = ctx.get_parameter_source(name)
            if ctx.params.get(name) == "" and source is not None and source.name == "COMMANDLINE":
                raise MotleyError(
                    f"{parameter.opts[0]} '': is empty. Give a value, or leave the option out."
                )
        return super().invoke(ctx)


def click_suggests_commands() -> bool:
    """Tell whether typer uses a click (8.4 or later) that suggests similar commands by itself."""
    if find_spec("click") is None:
        return False
    import click

    return issubclass(TyperGroup, click.Group) and hasattr(click.exceptions, "NoSuchCommand")


class Group(TyperGroup):
    """A group that suggests a similar command once. typer would repeat click's suggestion."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if click_suggests_commands():
            self.suggest_commands = False


class LazyCommand(TyperCommand):
    """A command whose module is imported only when the command is used.

    Until then only its name and its line in the help are known. Most commands import torch, which
    takes seconds, and `motley --help` and `motley --version` do not need it.
    """

    def __init__(self, name: str, summary: str, function: str) -> None:
        """Describe a command.

        `summary` is the first line of its help, `function` is where to find it: "module:function".
        """
        super().__init__(name, help=summary)
        self.function = function

    def load(self) -> Any:
        """Import the command's module and return the real command.

        `function` may also name a typer application, which becomes a group of commands.
        """
        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        if isinstance(function, typer.Typer):
            return typer.main.get_command(function)
        application = typer.Typer(add_completion=False)
        application.command(self.name, cls=Command)(function)
        return typer.main.get_command(application)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Make the context of the real command.

        click calls this first when a command was chosen, and then runs the command that the context
        belongs to, so this replaces the lazy command by the real one.
        """
        return self.load().make_context(info_name, args, parent, **extra)
