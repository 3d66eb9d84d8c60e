"""The file formats: how a model is written, and how the written file is run."""

from __future__ import annotations

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from motley.core.errors import MotleyError
from motley.data.files.archive import check_members
from motley.extras import require

Format = Literal["safetensors", "torch", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)
#: Format -> the name of the file with the model.
FILES: dict[str, str] = {
    "safetensors": "model.safetensors",
    "torch": "model.pt2",
    "onnx": "model.onnx",
}
#: A function from a model's inputs to its outputs.
Runner = Callable[[Tensor], Tensor]


def require_format(name: str) -> None:
    """Raise if a library that a format needs is not installed."""
    if name == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            require(module, "--format onnx")


def write_model(name: Format, model: nn.Module, example: Tensor, file: Path) -> None:
    """Write a model in a format. `example` is a batch of at least two inputs, for tracing."""
    if name == "safetensors":
        tensors = {}
        for key, tensor in model.state_dict().items():
            tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
        save_file(tensors, file)
        return
    program = trace(model, example)
    if name == "torch":
        torch.export.save(program, file)
        return
    with _quiet():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            input_names=["input"],
            output_names=["output"],
            dynamic_shapes=({0: "batch"},),
            verbose=False,
        )
        assert exported is not None
        exported.save(str(file))


def trace(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Return a model as a program of tensor operations, for batches of any size."""
    batch = torch.export.Dim("batch")
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(model.eval(), (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # a user's model may do anything
        reason = " ".join(str(error).split())[:300]
        raise MotleyError(
            f"{type(model).__name__} cannot be exported as a program: {type(error).__name__}: "
            f"{reason} A frequent reason is len(x), which torch.export takes for a constant: use "
            "x.shape[0]. --format safetensors writes the weights of any model."
        ) from error


def open_runner(name: Format, file: Path) -> Runner:
    """Return a function that runs an exported program."""
    if name == "torch":
        return open_program(file)
    if name == "onnx":
        return _onnx_runner(file)
    raise MotleyError(f"{file}: has weights only, and no program that could be run.")


def open_program(file: Path) -> nn.Module:
    """Load a program that `write_model` wrote with format "torch"."""
    refuse_pickles(file)
    try:
        with _quiet():
            return torch.export.load(file).module()
    except Exception as error:
        raise MotleyError(f"{file}: cannot be loaded: {type(error).__name__}: {error}") from error


def refuse_pickles(file: Path) -> None:
    """Reject a .pt2 file that torch would unpickle objects from: that can run any code.

    Weights and constants are stored as plain bytes unless their entry says `use_pickle`. The sample
    inputs are read with `weights_only`, but torch falls back to unpickling if that fails.
    """
    try:
        check_members(file)
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                if name.endswith("_config.json"):
                    entries = json.loads(archive.read(name)).get("config", {})
                    if any(entry.get("use_pickle") for entry in entries.values()):
                        raise MotleyError(f"{file}: has pickled objects, which are not loaded.")
                elif "sample_inputs" in name:
                    torch.load(io.BytesIO(archive.read(name)), weights_only=True)
    except MotleyError:
        raise
    except Exception as error:
        raise MotleyError(f"{file}: is not a program of torch.export: {error}") from None


def _onnx_runner(file: Path) -> Runner:
    require("onnxruntime", f"{file.name}")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime has many exceptions and no base class for them
        raise MotleyError(f"{file}: cannot be loaded by onnxruntime: {error}") from None
    name = session.get_inputs()[0].name

    def run(inputs: Tensor) -> Tensor:
        outputs: list[Any] = session.run(None, {name: inputs.numpy()})
        return torch.from_numpy(np.asarray(outputs[0]))

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence messages about missing torchvision operators and torch's own deprecations."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
