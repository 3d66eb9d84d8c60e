"""The card of an exported model: its origin, how well it works, and how to load it.

card.json is for programs, and is all that `motley predict FOLDER` needs beside the model's file.
README.md has the same content for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import tomli_w

from motley.config import Config, from_saved
from motley.core.errors import MotleyError
from motley.data.files.settings import FileSettings
from motley.data.transforms import TransformSettings
from motley.export.formats import FILES, FORMATS, Format
from motley.export.inputs import InputFormat
from motley.export.rows import RowReader
from motley.files import markdown_text, write_atomically
from motley.models.inputs import (
    KINDS,
    ImageShape,
    TableShape,
    TokenShape,
    dims_of,
    shape_from_json,
    shape_to_json,
)
from motley.settings import validate
from motley.tasks import MetricInfo

CARD = "card.json"
#: README.md lists at most this many classes.
LISTED = 200
README = "README.md"


@dataclass(frozen=True)
class Card:
    """Everything that is known about an exported model."""

    format: Format
    size: str
    #: The client whose own model it is; None: the global model.
    client: int | None
    round: int
    task: str
    outputs: int
    class_names: list[str]
    #: Inputs as the data set stores them: kind and shape as JSON, and the type of the numbers.
    input_shape: str
    input_dtype: str
    #: How rows of the user's own tables and texts become inputs (`RowReader.to_json`), if known.
    rows: dict[str, Any] | None
    #: Whether the file takes stored images and normalizes them itself.
    with_normalization: bool
    #: The exit at which the model ends, counted from 1; 0: its ordinary output.
    exit: int
    #: The primary metric, and whether it is a fraction that is shown in percent.
    metric: str
    percent: bool
    #: Every metric of the exported file, on `test_examples` examples of the test set.
    scores: dict[str, float]
    test_examples: int
    #: The primary metric as the run recorded it for this round; None if it did not.
    recorded_score: float | None
    parameters: int
    file_bytes: int
    data: str
    method: str
    commit: str
    versions: dict[str, str]
    config: dict[str, Any]
    #: Pixels are floats that are not in 0 to 1 (`InputFormat.any_range`). Earlier cards lack it.
    any_range: bool = False
    #: The model normalizes with its batch (`normalizes_by_batch`). Earlier cards lack it.
    by_batch: bool = False

    @property
    def score(self) -> float | None:
        """The primary metric of the exported file; None if it was not measured."""
        return self.scores.get(self.metric)

    def text(self, score: float | None) -> str:
        """Return a value of the primary metric as text."""
        if score is None:
            return "nothing"
        return MetricInfo(self.metric, percent=self.percent).text(score)

    @property
    def file(self) -> str:
        """The name of the file with the model."""
        return FILES[self.format]

    def read_config(self) -> Config:
        """Return the configuration of the run. The user's own modules that it names are imported.

        A program runs without them, so everything else reads `config` only.
        """
        return from_saved(self.config)

    def inputs(self) -> InputFormat:
        """Return the format of the inputs."""
        transform = validate(TransformSettings, self.config["data"]["transform"])
        shape = shape_from_json(self.input_shape)
        return InputFormat(shape, self.input_dtype, transform, self.any_range)

    def row_reader(self) -> RowReader | None:
        """Return a reader of the user's own tables and texts, if the run's data came from some."""
        files = self.config["data"].get("files")
        if self.rows is None or files is None:
            return None
        return RowReader.from_json(self.rows, validate(FileSettings, files))


def stored_shape(inputs: InputFormat) -> str:
    """Return the shape of stored inputs as text."""
    return shape_to_json(inputs.shape)


def write_card(card: Card, folder: Path) -> None:
    """Write README.md and, last, card.json: a folder without it is not a complete export."""
    write_atomically(folder / README, read_me(card).encode())
    write_atomically(folder / CARD, (json.dumps(asdict(card), indent=1) + "\n").encode())


def read_card(folder: Path) -> Card:
    """Read the card of an exported model."""
    file = folder / CARD
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content = {"any_range": False, "by_batch": False, **content}
        card = Card(**{field.name: content[field.name] for field in fields(Card)})
        if card.format not in FORMATS:
            raise ValueError(f"format = {card.format!r}: should be one of {', '.join(FORMATS)}")
        card.inputs()
        card.row_reader()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MotleyError(f"{file} cannot be read: {type(error).__name__}: {error}.") from None
    return card


# ---- README.md


def read_me(card: Card) -> str:
    """Return the card as Markdown."""
    rows = [
        ("task", markdown_text(card.task)),
        ("data", markdown_text(card.data)),
        ("method", markdown_text(card.method)),
        ("size", markdown_text(card.size) + (f", ends at exit {card.exit}" if card.exit else "")),
        ("client", "none: the global model" if card.client is None else str(card.client)),
        ("round", f"{card.round} of {card.config['training']['rounds']}"),
        ("parameters", f"{card.parameters:,}"),
        ("file", f"`{card.file}`, {card.file_bytes / 1e6:.2f} MB"),
        (markdown_text(card.metric), _scores(card)),
        ("commit", markdown_text(card.commit) or "unknown"),
        ("versions", markdown_text(", ".join(map(" ".join, card.versions.items())))),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "\n\n".join(
            [
                f"# {markdown_text(card.size)}, trained on {markdown_text(card.data)}",
                f"| | |\n|---|---|\n{table}",
                f"## Load it\n\n```python\n{snippet(card)}\n```",
                f"## Input\n\n{_input_text(card)}",
                f"## Output\n\n{_output_text(card)}",
                f"## Configuration\n\n```toml\n{tomli_w.dumps(card.config).strip()}\n```",
            ]
        )
        + "\n"
    )


def _scores(card: Card) -> str:
    recorded = f"the run recorded {card.text(card.recorded_score)}"
    if card.score is None:
        return f"not measured; {recorded}"
    examples = f"{card.test_examples:,} test examples"
    return f"{card.text(card.score)} on {examples}, measured with `{card.file}`; {recorded}"


def input_dims(card: Card) -> tuple[int, ...]:
    """Return the dimensions of one input of the exported file."""
    inputs = card.inputs()
    return inputs.dims if card.with_normalization else dims_of(inputs.model_shape)


def input_type(card: Card) -> str:
    """Return the type of the exported file's input."""
    if card.with_normalization:
        return card.input_dtype
    return "int64" if isinstance(card.inputs().shape, TokenShape) else "float32"


def snippet(card: Card) -> str:
    """Return a few lines of Python that load and run the model without Motley."""
    dims = ", ".join(str(length) for length in (1, *input_dims(card)))
    dtype = input_type(card)
    if card.format == "onnx":
        return (
            "import numpy, onnxruntime\n"
            f'session = onnxruntime.InferenceSession("{card.file}")\n'
            f"inputs = numpy.zeros(({dims}), dtype=numpy.{dtype})\n"
            'outputs = session.run(None, {"input": inputs})[0]\n'
            "print(outputs.shape)"
        )
    if card.format == "torch":
        return (
            "import torch\n"
            f'model = torch.export.load("{card.file}").module()\n'
            f"inputs = torch.zeros(({dims}), dtype=torch.{dtype})\n"
            "outputs = model(inputs)\n"
            "print(outputs.shape)"
        )
    return (
        "from safetensors.torch import load_file\n"
        f'weights = load_file("{card.file}")  # the names are those of the module\'s state_dict\n'
        "# model.load_state_dict(weights), with a module of the same architecture.\n"
        '# Motley builds it: motley.load("FOLDER").model()\n'
        "print({name: tuple(tensor.shape) for name, tensor in weights.items()})"
    )


def _input_text(card: Card) -> str:
    inputs = card.inputs()
    dims = ", ".join(map(str, input_dims(card)))
    kind = KINDS[type(inputs.shape)]
    text = f"A batch of {kind}: {input_type(card)}, (N, {dims})."
    if isinstance(inputs.shape, TableShape):
        text += (
            f" The first {inputs.shape.numbers} columns are numbers, then come the numbers of "
            f"categories; there are {list(inputs.shape.categories)} of them."
        )
        return text if card.rows is None else f"{text}\n\n{_columns_text(card.rows)}"
    if not isinstance(inputs.shape, ImageShape):
        return text
    stored = inputs.shape
    pixels = "bytes, 0 to 255" if inputs.dtype == "uint8" else "numbers in 0 to 1"
    if inputs.any_range:
        pixels = "numbers as the data set has them"
    if card.with_normalization:
        return (
            f"{text} The order is height, width, channels; pixels are {pixels}. The file scales "
            "and normalizes them itself."
        )
    steps = ["take the data set's numbers" if inputs.any_range else "scale pixels to 0..1"]
    if inputs.transform.channels > stored.channels:
        steps.append(f"copy the channel to {inputs.transform.channels} channels")
    if inputs.transform.mean:
        mean, std = list(inputs.transform.mean), list(inputs.transform.std)
        steps.append(f"subtract mean {mean} and divide by std {std}, per channel")
    side = inputs.transform.resize
    if side and (stored.height, stored.width) != (side, side):
        steps.append(f"resize to {side}x{side} (bilinear, with antialiasing if it gets smaller)")
    return (
        f"{text} The order is channels, height, width. From {stored.height}x{stored.width} images: "
        f"{'; '.join(steps)}."
    )


def _columns_text(rows: Mapping[str, Any]) -> str:
    """Return how the columns of the user's own table become inputs (`RowReader.to_json`)."""
    lines = ["| column | input |", "|---|---|"]
    for name, mean, scale in zip(
        rows.get("numbers", ()), rows.get("means", ()), rows.get("scales", ()), strict=True
    ):
        formula = f"(value - {mean:.6g}) / {scale:.6g}" if scale else "the value"
        lines.append(f"| {markdown_text(name)} | {formula} |")
    for name, categories in rows.get("categories", {}).items():
        lines.append(f"| {markdown_text(name)} | 0 for others; {_numbered(categories, 1)} |")
    return "\n".join(lines)


def _output_text(card: Card) -> str:
    text = _values_text(card)
    if card.by_batch:
        text += (
            "\n\nThe model normalizes with the statistics of its batch: an output depends on the "
            "other inputs. Give it many inputs at once, never a single one."
        )
    return text


def _values_text(card: Card) -> str:
    if card.task == "regression":
        return f"{card.outputs} predicted number{'s' * (card.outputs > 1)}."
    outputs = "classes" if card.task == "classification" else "tokens"
    return (
        f"Logits of {card.outputs} {outputs} (softmax gives probabilities). "
        f"{_numbered(card.class_names, 0)}"
    )


def _numbered(names: Sequence[str], first: int) -> str:
    """Return names with their numbers. Of very many, only some are listed."""
    listed = []
    for number, name in enumerate(names[:LISTED], first):
        listed.append(f"{number}: {markdown_text(name)}")
    more = [f"... ({len(names)} in all, see {CARD})"] if len(names) > LISTED else []
    return ", ".join([*listed, *more])
