"""`motley model check`: what Motley infers about a model, and what can be trained with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import typer
from rich.table import Column, Table
from rich.text import Text

from motley.cli.code import import_beside
from motley.cli.commands import Command, Group
from motley.cli.terminal import Console, visible
from motley.config.schema import ModelSettings
from motley.core.errors import MotleyError
from motley.methods import METHODS
from motley.methods.nested import students_of
from motley.models.facts import classifiers_of, cross_layers_of, head_of
from motley.models.inputs import ArrayShape, ImageShape, InputShape, SignalShape, TokenShape
from motley.models.report import ModelReport, check_trainable, report_of, shared_parameters
from motley.models.spec import spec_of
from motley.models.stages import chain_of
from motley.settings import validate
from motley.splits import SPLITS
from motley.splits.base import Blueprint, Split
from motley.splits.inclusive import last_blocks

#: Width at which a split in width is tried.
RATE = 0.5
#: Methods that treat the layer with one output per class by itself.
KNOW_LAST_LAYER = ("heterofl", "ccvr", "spherefed", "fedet")
#: At most this many rows are printed of a long list.
MAX_ROWS = 12

model = typer.Typer(
    cls=Group,
    help="Check models: your own, or Motley's.",
    no_args_is_help=True,
    add_completion=False,
)


@model.callback()
def _model() -> None:
    """Check models: your own, or Motley's."""


@model.command("check", cls=Command)
def check(
    name: str = typer.Argument(
        ..., help="A model's name (motley list models), or package.module:factory of your own."
    ),
    size: list[str] = typer.Option(
        [], "--size", help="A further size of the same federation; repeatable."
    ),
    shape: str = typer.Option(
        "3,32,32", help="Shape of one input: channels,height,width or channels,length or a length."
    ),
    vocabulary: int = typer.Option(
        0, min=0, help="Number of tokens: the inputs are sequences of token numbers."
    ),
    classes: int = typer.Option(10, min=1, help="Number of classes."),
) -> None:
    """Print what Motley infers about a model, and which methods and splits it can be used with."""
    import_beside(None)
    names = (name, *size)
    settings = validate(ModelSettings, {"sizes": names}, "model")
    inputs = parse_shape(shape, vocabulary)
    console = Console(highlight=False)
    blueprints = {}
    for size_name in names:
        spec, options = settings.declaration(size_name)
        build = partial(spec.make, options, inputs, classes)
        blueprints[size_name] = Blueprint.of(size_name, build)
    _print_sizes(console, blueprints)
    for size_name, blueprint in blueprints.items():
        if not spec_of(blueprint.module).is_complete:
            check_trainable(blueprint.module, classes)
        _print_model(console, size_name, report_of(blueprint.module))
    _print_uses(console, blueprints)


def parse_shape(text: str, vocabulary: int) -> InputShape:
    """Return the shape of inputs that the command line gives."""
    try:
        dims = tuple(int(number) for number in text.split(","))
        if not dims or min(dims) < 1:
            raise ValueError
    except ValueError:
        raise MotleyError(
            f"--shape {text!r}: should be positive numbers with commas, such as 3,32,32."
        ) from None
    if vocabulary:
        if len(dims) != 1:
            raise MotleyError(f"--shape {text!r}: sequences of tokens have one length, such as 64.")
        return TokenShape(dims[0], vocabulary)
    if len(dims) == 3:
        return ImageShape(*dims)
    return SignalShape(*dims) if len(dims) == 2 else ArrayShape(dims)


def _print_sizes(console: Console, blueprints: dict[str, Blueprint]) -> None:
    modules = {name: blueprint.module for name, blueprint in blueprints.items()}
    counts = {}
    for name, module in modules.items():
        counts[name] = sum(parameter.numel() for parameter in module.parameters())
    table = Table("size", "class", Column("parameters", justify="right"))
    for name, module in modules.items():
        table.add_row(name, type(module).__name__, f"{counts[name]:,}")
    console.print(table)
    for (first, second), shared in shared_parameters(modules).items():
        smaller = min(counts[first], counts[second])
        share = shared / smaller if smaller else 0
        _say(
            console,
            f"{first} and {second} share {shared:,} parameters by name and shape, "
            f"{share:.0%} of the smaller one.",
        )


def _print_model(console: Console, name: str, report: ModelReport) -> None:
    console.print()
    _say(console, name, style="bold")
    for title, answer in (
        ("head", report.head),
        ("blocks", report.blocks),
        ("InCo pairs", report.pairs),
    ):
        _say(console, f"{title}: {answer.text or 'not known. ' + answer.refused}")
    if report.stages_refused:
        _say(console, f"stages: none. {report.stages_refused}")
    else:
        table = Table("stage", Column("parameters", justify="right"))
        _rows(table, [(stage, f"{count:,}") for stage, count in report.stages])
        console.print(table)
    if report.streams_refused:
        _say(console, f"streams: none. {report.streams_refused}")
        return
    table = Table("stream of channels", Column("width", justify="right"))
    _rows(table, [(stream, str(width)) for stream, width in report.streams.items()])
    console.print(table)
    if report.fixed:
        table = Table("never cut", "because")
        _rows(table, list(report.fixed))
        console.print(table)


def _rows(table: Table, rows: list[tuple[str, str]]) -> None:
    shown = rows if len(rows) <= MAX_ROWS else [*rows[: MAX_ROWS - 2], ("...", "..."), rows[-1]]
    for row in shown:
        table.add_row(*(Text(visible(cell), overflow="fold") for cell in row))
    if len(shown) < len(rows):
        table.caption = f"{len(rows)} in all"


def _print_uses(console: Console, blueprints: dict[str, Blueprint]) -> None:
    """Print whether each method and split that needs inferred facts can be used."""
    table = Table("for", "applies", "why not")
    for label, reason in uses(blueprints).items():
        applies = "no" if reason else "yes"
        table.add_row(Text(label, overflow="fold"), applies, Text(reason, overflow="fold"))
    console.print()
    console.print(table)
    _say(console, "Methods that are not listed need nothing but the model.")


def uses(blueprints: dict[str, Blueprint]) -> dict[str, str]:
    """Return why the sizes cannot be used, by method or split; empty if they can."""
    # With several sizes, "nested" has a row of its own.
    cutting = ", ".join(_methods_that_cut(with_nested=len(blueprints) == 1))
    reasons = {
        "split depth": _reason(partial(_depth, blueprints)),
        "InCo": _reason(partial(_require_pairs, blueprints)),
    }
    if len(blueprints) > 1:
        reasons["nested"] = _reason(lambda: students_of(_depth(blueprints)))
    needs_of_each_size: dict[str, Callable[[str, Blueprint], object]] = {
        "split width, FedRolex (rate 0.5)": partial(_try_split, "width"),
        "split ordered (FjORD)": partial(_try_split, "ordered"),
        "split inclusive": last_blocks,
        f"methods that cut models: {cutting}": _require_stages,
        f"methods that know the last layer: {', '.join(KNOW_LAST_LAYER)}": _require_classifier,
    }
    for label, need in needs_of_each_size.items():
        texts = []
        for name, blueprint in blueprints.items():
            reason = _reason(partial(need, name, blueprint))
            if reason:
                texts.append(reason if len(blueprints) == 1 else f"{name}: {reason}")
        reasons[label] = " ".join(texts)
    return reasons


def _methods_that_cut(with_nested: bool) -> list[str]:
    """Return the methods that cut models into stages."""
    cutting = [entry.name for entry in METHODS if entry.item.requirements.stages]
    names = []
    for name in cutting:
        # Combinations such as fedimpro-prox have the same needs as their base.
        base, dash, _ = name.partition("-")
        is_combination = bool(dash) and base in cutting
        if not is_combination and (with_nested or name != "nested"):
            names.append(name)
    return names


def _reason(need: Callable[[], object]) -> str:
    try:
        need()
    except MotleyError as error:
        return str(error)
    return ""


def _require_pairs(blueprints: dict[str, Blueprint]) -> None:
    if not any(cross_layers_of(blueprint.module) for blueprint in blueprints.values()):
        raise MotleyError("No layers of one shape follow each other in repeated blocks.")


def _require_stages(name: str, blueprint: Blueprint) -> None:
    chain_of(blueprint.module)


def _require_classifier(name: str, blueprint: Blueprint) -> None:
    if not classifiers_of(blueprint.module):
        head_of(blueprint.module)  # says why


def _try_split(split: str, name: str, blueprint: Blueprint) -> None:
    cls = SPLITS[split]
    settings = validate(cls.Settings, {"name": split, "rates": (1.0, RATE)}, "split")
    cls({name: blueprint.build}, settings)


def _depth(blueprints: dict[str, Blueprint]) -> Split:
    builds = {name: blueprint.build for name, blueprint in blueprints.items()}
    return SPLITS["depth"](builds, SPLITS["depth"].Settings())


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style))
