"""Optional dependencies.

The base install needs torch, numpy, pydantic, typer, rich, safetensors and tomli-w. All other
libraries belong to an extra in pyproject.toml. They are imported where they are used, after
`require` has checked that they are installed.
"""

from __future__ import annotations

from importlib import import_module

from motley.core.errors import MotleyError

#: Module -> the extra that installs it.
EXTRAS = {
    "PIL": "data",
    "dp_accounting": "privacy",
    "flwr": "flower",
    "h5py": "data",
    "matplotlib": "analysis",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "plotly": "report",
    "pyarrow": "data",
    "ray": "simulation",
    "sklearn": "analysis",
    "wandb": "wandb",
}


def require(module: str, needed_for: str) -> None:
    """Raise a MotleyError with the command to install `module`, unless it can be imported.

    Call it before long computations, not only before the import. `needed_for` is the subject of
    the message, such as "the report".
    """
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        # A dependency of the module may be the one that is missing.
        missing = error.name or module
        raise MotleyError(
            f"{needed_for} needs {missing}, which is not installed. In Motley's checkout: "
            f"pip install -c constraints.txt -e '.[{EXTRAS[module]}]'"
        ) from None
    except ImportError as error:
        raise MotleyError(
            f"{needed_for} needs {module}, which cannot be imported: {error}"
        ) from error
