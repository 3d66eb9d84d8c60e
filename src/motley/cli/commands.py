"""Two repairs of typer with recent versions of click, each in a class that typer lets one replace."""

from __future__ import annotations

import inspect
from typing import Any

import click
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


class Group(TyperGroup):
    """A group that suggests the nearest command once: click from 8.4 on does it, and typer does it again."""

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the words name."""
        if hasattr(click.exceptions, "NoSuchCommand"):
            return click.Group.resolve_command(self, context, words)
        return super().resolve_command(context, words)
