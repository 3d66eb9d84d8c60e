"""`motley export`: write a trained model to files that work without Motley."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from motley.cli.code import import_for_runs
from motley.cli.terminal import Console
from motley.cli.warnings import warn_about
from motley.core.errors import MotleyError, unknown
from motley.export.export import Exported, default_folder, export_model
from motley.export.formats import FORMATS, Format
from motley.export.loading import LoadedRun


def export(
    path: Path = typer.Argument(..., metavar="RUN", help="The folder of a run."),
    size: str = typer.Option("", "--size", help="A size of the run; default: its only one."),
    client: int | None = typer.Option(
        None, "--client", help="A client's own model, if the method gives clients such models."
    ),
    format_: str = typer.Option(
        "safetensors", "--format", help="safetensors (weights), torch (.pt2 program) or onnx."
    ),
    out: Path | None = typer.Option(
        None, "-o", "--out", help="The folder to write to; by default inside the run's folder."
    ),
    checkpoint: int | None = typer.Option(
        None, "--checkpoint", help="The round of a checkpoint; default: the newest."
    ),
    with_normalization: bool = typer.Option(
        False,
        "--with-normalization",
        help="The file takes images as the data set has them, and normalizes them itself.",
    ),
    exit_number: int = typer.Option(
        0, "--exit", min=0, help="End at this early exit, counted from 1 (torch and onnx)."
    ),
    test_examples: int | None = typer.Option(
        None,
        "--test-examples",
        min=0,
        help="Measure the file on this many test examples; default: all.",
    ),
) -> None:
    """Export the trained model of a size, with a model card, and measure the written file."""
    name = format_of(format_)
    import_for_runs(path)
    warn_about(path, model=checkpoint is None)
    run = LoadedRun(path, checkpoint)
    size = chosen_size(run.sizes, size, client)
    exported = export_model(
        run,
        size,
        name,
        out or default_folder(path, size, name, exit_number, client),
        with_normalization=with_normalization,
        exit_number=exit_number,
        test_examples=test_examples,
        client=client,
    )
    print_export(Console(), exported)


def format_of(name: str) -> Format:
    """Return a format by its name."""
    for known in FORMATS:
        if name == known:
            return known
    raise MotleyError(f"--format: {unknown('format', name, FORMATS)}")


def chosen_size(sizes: tuple[str, ...], size: str, client: int | None) -> str:
    """Return the chosen size: by default the only one. A client's own model has its own size."""
    if client is not None:
        if size:
            raise MotleyError("--size and --client: give one of them; a client has one size.")
        return ""
    if not size and len(sizes) > 1:
        raise MotleyError(f"--size: is needed; the run has {', '.join(sizes)}.")
    if size and size not in sizes:
        raise MotleyError(f"--size: {unknown('size', size, sizes)}")
    return size or sizes[0]


def print_export(console: Console, exported: Exported) -> None:
    """Print the written files, and how well the model works."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    card = exported.card
    say(
        f"{exported.folder / card.file}: {card.file_bytes / 1e6:.2f} MB, {card.parameters:,} "
        f"parameters, size {card.size}, round {card.round}"
    )
    if card.score is not None:
        say(
            f"{card.metric} of the file: {card.text(card.score)} on {card.test_examples:,} test "
            f"examples; recorded by the run: {card.text(card.recorded_score)}"
        )
    say(f"outputs differ from the trained model's by at most {exported.difference:.1e}")
    say(f"how to load it: {exported.folder / 'README.md'}")
