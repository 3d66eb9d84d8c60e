"""Empty modules in place of packages that a peer imports, does not use here, and cannot import."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def replace_if_broken(package: str, *submodules: str) -> None:
    """Let `import package` find an empty module if the real one cannot be imported."""
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError):  # torchvision's if its operators do not fit torch's build
        module = sys.modules[package] = ModuleType(package)
        for name in submodules:
            submodule = sys.modules[f"{package}.{name}"] = ModuleType(f"{package}.{name}")
            setattr(module, name, submodule)
