"""FedImpro on top of other methods: its loss and statistics, their corrections and server rules."""

from __future__ import annotations

from motley.methods.base import METHODS, Method
from motley.methods.feddyn import FedDyn
from motley.methods.fedimpro import FedImpro, FedImproSettings
from motley.methods.fednova import FedNova
from motley.methods.fedprox import FedProx
from motley.methods.scaffold import Scaffold


def fedimpro_with(other: type[Method], own_name: str, summary: str) -> type[Method]:
    """Return FedImpro before another method, registered. FedImpro's hooks come first and call the other's."""

    class SettingsOfBoth(FedImproSettings, other.Settings):  # type: ignore[name-defined]
        """The settings of both."""

        name: str = own_name

    class Both(FedImpro, other):  # type: ignore[misc, valid-type]
        Settings = SettingsOfBoth

    Both.__name__ = Both.__qualname__ = f"FedImpro{other.__name__.removeprefix('Fed')}"
    return METHODS.register(own_name, f"FedImpro with {summary}", paper="Tang et al., ICLR 2024")(Both)


FedImproProx = fedimpro_with(FedProx, "fedimpro-prox", "FedProx's proximal term")
FedImproScaffold = fedimpro_with(Scaffold, "fedimpro-scaffold", "SCAFFOLD's control variates")
FedImproNova = fedimpro_with(FedNova, "fedimpro-nova", "FedNova's normalised mean")
FedImproDyn = fedimpro_with(FedDyn, "fedimpro-dyn", "FedDyn's dynamic regulariser")
