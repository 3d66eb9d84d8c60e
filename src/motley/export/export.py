"""Write a trained model to a folder, and measure the written file on the test set."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.data.dataset import Examples
from motley.export.card import CARD, Card, stored_shape, write_card
from motley.export.formats import FILES, Format, open_runner, require_format, write_model
from motley.export.inputs import InputFormat, WithNormalization
from motley.export.loading import LoadedExport, LoadedRun
from motley.export.predict import Predictor
from motley.files import output_folder
from motley.models.moments import normalizes_by_batch
from motley.splits.early_exit import AtExit
from motley.splits.exits import WithExits
from motley.tasks import Task
from motley.version import __version__

#: The outputs of the exported file may differ from the model's by this much, because other
#: libraries add in another order.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    card: Card
    #: The largest difference between the outputs of the file and of the trained model, relative to
    #: the largest output if that is above 1.
    difference: float


def default_folder(
    run: Path, size: str, name: Format, exit_number: int = 0, client: int | None = None
) -> Path:
    """Return the folder of an export inside the run's folder."""
    exit_name = f"-exit{exit_number}" if exit_number else ""
    model = re.sub(r"[^\w.-]+", "-", size) if client is None else f"client{client}"
    return run / "export" / f"{model}{exit_name}-{name}"


def export_model(
    run: LoadedRun,
    size: str,
    name: Format,
    folder: Path,
    *,
    with_normalization: bool = False,
    exit_number: int = 0,
    test_examples: int | None = None,
    client: int | None = None,
) -> Exported:
    """Write the trained model of a size to a folder, with a card, and check the written file.

    With `client`, it is that client's own model, and `size` is not used.

    `exit_number` is the exit at which the model ends, counted from 1; 0: the ordinary output. The
    file's score is measured on all test examples, or on the first `test_examples`; 0: not at all.
    """
    require_format(name)
    check_folder(folder)
    if client is None:
        model = run.model(size)
    else:
        size, model = run.client_model(client)
    if exit_number:
        model = _at_exit(model, exit_number, size, name)
        drop_unused(model, run.inputs.prepare(run.inputs.blank(2)))
    with output_folder(folder):
        (folder / CARD).unlink(missing_ok=True)
        program = _with_inputs(model, run.inputs, name, with_normalization)
        example = _example(run.inputs, with_normalization)
        write_model(name, program, example, folder / FILES[name])
        card = _card(run, size, name, model, folder, with_normalization, exit_number, client)
        write_card(card, folder)
        predictor = _reopened(folder, card)
        test = _first(run.dataset.test, test_examples)
        difference = _difference(predictor, model, run.inputs, test)
        if not difference <= TOLERANCE:  # also if it is NaN
            (folder / CARD).unlink()
            raise MotleyError(
                f"{folder / card.file}: its outputs differ from those of the trained model by "
                f"{difference:.2g}, more than {TOLERANCE:g}."
            )
        if len(test):
            scores = measure(run.task, predictor, test, run.config.evaluation.batch_size)
            card = replace(card, scores=scores, test_examples=len(test))
            write_card(card, folder)
    return Exported(folder, card, difference)


def check_folder(folder: Path) -> None:
    """Raise if a folder holds anything but an earlier export, which is replaced."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CARD).exists():
        raise MotleyError(f"{folder}: is not empty, and holds no earlier export. Use another -o.")


def _at_exit(model: nn.Module, number: int, size: str, name: Format) -> nn.Module:
    exits = len(model.cuts) if isinstance(model, WithExits) else 1
    if number > exits or not isinstance(model, WithExits):
        raise MotleyError(f"--exit {number}: size {size!r} has {exits} exit{'s' * (exits > 1)}.")
    if name == "safetensors":
        raise MotleyError(
            f"--exit {number}: --format safetensors writes the weights of all exits. Use torch or "
            "onnx."
        )
    return AtExit(model, number - 1).eval()


def drop_unused(model: nn.Module, inputs: Tensor) -> None:
    """Replace the submodules of a model that its output does not depend on, in place.

    A program would otherwise contain the weights of all blocks and heads behind its exit.
    """
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(inputs).sum(), parameters, allow_unused=True)
    used = set()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            used.add(id(parameter))
    _replace_unused(model, used)


def _replace_unused(module: nn.Module, used: set[int]) -> None:
    for name, child in list(module.named_children()):
        parameters = list(child.parameters())
        is_unused = bool(parameters) and not any(id(parameter) in used for parameter in parameters)
        # A list of blocks keeps its length, by which blocks and exits are counted.
        if is_unused and not isinstance(child, nn.Sequential | nn.ModuleList):
            setattr(module, name, nn.Identity())
        else:
            _replace_unused(child, used)


def _with_inputs(
    model: nn.Module, inputs: InputFormat, name: Format, with_normalization: bool
) -> nn.Module:
    if not with_normalization:
        return model
    if name == "safetensors":
        raise MotleyError(
            "--with-normalization: --format safetensors writes weights only. Use torch or onnx."
        )
    return WithNormalization(model, inputs).eval()


def _example(inputs: InputFormat, with_normalization: bool) -> Tensor:
    """Return a batch for tracing. A batch of one would be traced as a constant."""
    stored = inputs.blank(2)
    return torch.from_numpy(stored) if with_normalization else inputs.prepare(stored)


def _reopened(folder: Path, card: Card) -> Predictor:
    """Return a predictor that runs the written file."""
    if card.format == "safetensors":
        return LoadedExport(folder).predictor()
    runner = open_runner(card.format, folder / card.file)
    return Predictor(
        runner, card.inputs(), card.task, card.class_names, takes_stored=card.with_normalization
    )


def _card(
    run: LoadedRun,
    size: str,
    name: Format,
    model: nn.Module,
    folder: Path,
    with_normalization: bool,
    exit_number: int,
    client: int | None,
) -> Card:
    environment = run.environment()
    # The recorded score belongs to the size's global model.
    is_recorded = client is None and not exit_number
    return Card(
        format=name,
        size=size,
        client=client,
        round=run.server.round_number,
        task=run.task.name,
        outputs=run.dataset.classes,
        class_names=run.class_names,
        input_shape=stored_shape(run.inputs),
        input_dtype=run.inputs.dtype,
        rows=None if run.rows is None else run.rows.to_json(),
        with_normalization=with_normalization,
        exit=exit_number,
        metric=run.task.metric,
        percent=run.task.primary.percent,
        scores={},
        test_examples=0,
        recorded_score=run.recorded(size) if is_recorded else None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        file_bytes=(folder / FILES[name]).stat().st_size,
        data=run.dataset.name,
        method=run.config.method_label,
        commit=str(environment.get("commit") or ""),
        versions={"motley": __version__, "torch": torch.__version__},
        # A tracking URI may contain a password.
        config=run.config.model_dump(mode="json", exclude={"run": {"mlflow"}}),
        any_range=run.inputs.any_range,
        by_batch=normalizes_by_batch(model),
    )


# ---- checking the file


def _first(examples: Examples, count: int | None) -> Examples:
    return examples if count is None else examples.rows(slice(0, count))


@torch.no_grad()
def _difference(
    predictor: Predictor, model: nn.Module, inputs: InputFormat, test: Examples
) -> float:
    """Return how far the file's outputs are from the model's, for a few examples."""
    stored = test.inputs[:32] if len(test) else inputs.blank(2)
    expected = model(inputs.prepare(stored))
    outputs = predictor.outputs(stored)
    scale = max(1.0, float(expected.abs().max()))
    return float((outputs - expected).abs().max()) / scale


def measure(task: Task, predictor: Predictor, test: Examples, batch_size: int) -> dict[str, float]:
    """Return the task's metrics of a predictor on test examples, in batches of the evaluation."""
    outputs = predictor.outputs(test.inputs, batch_size)
    rows, targets = task.rows(outputs, torch.from_numpy(test.targets))
    scores = {}
    for metric in task.metrics:
        scores[metric.name] = metric.value(metric.sums(rows, targets).tolist())
    return scores
