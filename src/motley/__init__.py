"""Motley: federated learning for a motley crew of devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from motley.version import __version__ as __version__

if TYPE_CHECKING:
    from motley.config import Config, load_config
    from motley.export.loading import load
    from motley.federation import Federation

__all__ = ["Config", "Federation", "load", "load_config"]

#: Public name -> the module that defines it. These modules are imported on first use, because they
#: need torch, which takes seconds to import: `motley --help` and `motley --version` avoid it.
_MODULES = {
    "Config": "motley.config",
    "Federation": "motley.federation",
    "load": "motley.export.loading",
    "load_config": "motley.config",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
