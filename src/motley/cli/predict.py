"""`motley predict`: predictions of a trained model for files."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.table import Table

from motley.cli.code import import_for_runs
from motley.cli.export import chosen_size
from motley.cli.terminal import Console
from motley.cli.warnings import warn_about
from motley.core.errors import MotleyError
from motley.export.files import read_inputs
from motley.export.loading import LoadedExport, LoadedRun, load
from motley.export.predict import Prediction, Predictor
from motley.splits.early_exit import exit_costs, exits_of


def predict(
    path: Path = typer.Argument(..., metavar="RUN", help="A run, or a folder of motley export."),
    files: list[Path] = typer.Argument(
        ..., metavar="FILE...", help="Images, .npy, .npz, .csv or .txt files."
    ),
    size: str = typer.Option("", "--size", help="A size of the run; default: its only one."),
    client: int | None = typer.Option(
        None, "--client", help="A client's own model, if the method gives clients such models."
    ),
    top: int = typer.Option(1, "--top", min=1, help="Number of most probable classes to print."),
    checkpoint: int | None = typer.Option(
        None, "--checkpoint", help="The round of a checkpoint; default: the newest."
    ),
    resize: bool = typer.Option(
        False, "--resize", help="Scale image files to the size of the data set's images."
    ),
    exit_threshold: float | None = typer.Option(
        None,
        "--exit-threshold",
        min=0,
        max=1,
        help="Stop each example at the first exit whose confidence reaches this.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list, one object per input."),
) -> None:
    """Predict classes or values for images, arrays or rows of a table."""
    import_for_runs(path)
    warn_about(path, model=checkpoint is None)
    loaded = load(path, checkpoint)
    size = chosen_size(loaded.sizes, size, client)
    predictor = _predictor_of(loaded, path, size, client)
    # All files are read before anything is computed, so that a wrong one is reported at once.
    arrays = []
    for file in files:
        arrays.append(read_inputs(file, predictor.inputs, predictor.rows, resize=resize))
    names: list[str] = []
    predictions: list[Prediction] = []
    for file, array in zip(files, arrays, strict=True):
        for row in range(len(array)):
            names.append(str(file) if len(array) == 1 else f"{file}[{row}]")
    if predictor.by_batch:
        arrays = [_together(arrays)]
    for array in arrays:
        predictions += predictor.predict_stored(array, top, exit_threshold)
    if as_json:
        print(json.dumps(_as_plain(names, predictions), indent=1))
        return
    Console(markup=False, emoji=False).print(_table(names, predictions))
    if exit_threshold is not None:
        _print_cost(predictor, predictions)


def _together(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the inputs of all files as one array, for a model that normalizes with its batch."""
    types = sorted({str(array.dtype) for array in arrays})
    if len(types) > 1:
        raise MotleyError(
            f"the files have inputs of the types {' and '.join(types)}, and the model normalizes "
            "with the statistics of its batch. Give files of one type."
        )
    return np.concatenate(arrays)


def _predictor_of(
    loaded: LoadedRun | LoadedExport, path: Path, size: str, client: int | None
) -> Predictor:
    if isinstance(loaded, LoadedRun):
        return loaded.predictor(size, client)
    if client is not None:
        raise MotleyError(f"--client {client}: {path} is an exported model.")
    return loaded.predictor(size)


def _as_plain(names: list[str], predictions: list[Prediction]) -> list[dict[str, Any]]:
    rows = []
    for name, prediction in zip(names, predictions, strict=True):
        row: dict[str, Any] = {"input": name}
        if prediction.classes:
            row["classes"] = [
                {"class": label, "probability": probability}
                for label, probability in prediction.classes
            ]
        else:
            row["values"] = list(prediction.outputs)
        if prediction.exit is not None:
            row["exit"] = prediction.exit
        rows.append(row)
    return rows


def _table(names: list[str], predictions: list[Prediction]) -> Table:
    table = Table("file")
    has_classes = bool(predictions and predictions[0].classes)
    has_exits = bool(predictions and predictions[0].exit is not None)
    if has_classes:
        table.add_column("class")
        table.add_column("probability", justify="right")
    else:
        table.add_column("value", justify="right")
    if has_exits:
        table.add_column("exit", justify="right")
    for name, prediction in zip(names, predictions, strict=True):
        exit_cell = [str(prediction.exit)] if has_exits else []
        if not has_classes:
            values = ", ".join(f"{value:.6g}" for value in prediction.outputs)
            table.add_row(name, values, *exit_cell)
        for label, probability in prediction.classes:
            table.add_row(name, label, f"{probability:.2%}", *exit_cell)
            # Name and exit are printed beside the most probable class only.
            name, exit_cell = "", [""] * len(exit_cell)
    return table


def _print_cost(predictor: Predictor, predictions: list[Prediction]) -> None:
    say = partial(Console().print, highlight=False, markup=False, soft_wrap=True)
    assert isinstance(predictor.run, torch.nn.Module)
    model = exits_of(predictor.run, "--exit-threshold")
    exits = torch.tensor([prediction.exit for prediction in predictions]) - 1
    costs = exit_costs(model, predictor.inputs.prepare(predictor.inputs.blank(1)))
    counts = torch.bincount(exits, minlength=len(model.cuts)).tolist()
    used = ", ".join(f"exit {number}: {count}" for number, count in enumerate(counts, 1))
    say(f"{used}; mean cost {costs.mean_fraction(exits):.1%} of the full network")
