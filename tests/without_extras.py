"""Use Motley with every optional dependency missing, in a process of its own, as after a bare `pip install`.

`python -m tests.without_extras FOLDER` imports all modules and calls some commands, whose runs go to the folder. It
prints what happened as JSON, for tests/test_extras.py.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

#: Not part of the base install. Some of them are used by torch if they are there.
BLOCKED = (
    "PIL",
    "cryptography",
    "dp_accounting",
    "flwr",
    "h5py",
    "matplotlib",
    "mlflow",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "plotly",
    "ray",
    "scipy",
    "sklearn",
    "tensorboard",
    "wandb",
)


class _Finder(PathFinder):
    """Finds no optional dependency on the path, so that both imports and `find_spec` see it as not installed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] in BLOCKED:
            return None
        return super().find_spec(fullname, path, target)


def import_all() -> dict[str, str]:
    """Import all modules of Motley. Return those that cannot be imported, and which module they miss."""
    import motley

    failed: dict[str, str] = {}
    for module in pkgutil.walk_packages(motley.__path__, "motley."):
        if module.name == "motley.__main__":  # importing it runs the command line
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            failed[module.name] = str(error.name)
    return failed


def call_commands(folder: str) -> dict[str, tuple[int, str, str]]:
    """Call commands that must work. Return their exit statuses, outputs and errors."""
    from tests.cli.conftest import call, overrides

    lines = ("--method", "each size alone", "--method", "layers shared", "--seeds", "2")
    return {
        "run": call(
            "run", *overrides("training.rounds=1", "training.epochs=0.5"), "--out", f"{folder}/run"
        ),
        "list": call("list", "analyses"),
        "study": call(
            "study", "demo", *lines, "--set", "training.rounds=1", "--out", f"{folder}/study"
        ),
        "report": call("report", f"{folder}/run", "-o", f"{folder}/report.html"),
    }


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder
    print(json.dumps({"failed": import_all(), "answers": call_commands(sys.argv[1])}))
