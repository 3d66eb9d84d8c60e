"""FedImpro on top of other methods: its loss and statistics, their corrections and server rules."""

from __future__ import annotations

from motley.methods.base import METHODS
from motley.methods.feddyn import FedDyn, FedDynSettings
from motley.methods.fedimpro import FedImpro, FedImproSettings
from motley.methods.fednova import FedNova, FedNovaSettings
from motley.methods.fedprox import FedProx, FedProxSettings
from motley.methods.scaffold import Scaffold, ScaffoldSettings

PAPER = "Tang et al., ICLR 2024"


class FedImproProxSettings(FedImproSettings, FedProxSettings):
    """The settings of both."""

    name: str = "fedimpro-prox"


@METHODS.register("fedimpro-prox", "FedImpro with FedProx's proximal term", paper=PAPER)
class FedImproProx(FedImpro, FedProx):
    """FedImpro, then FedProx."""

    Settings = FedImproProxSettings
    settings: FedImproProxSettings


class FedImproScaffoldSettings(FedImproSettings, ScaffoldSettings):
    """The settings of both."""

    name: str = "fedimpro-scaffold"


@METHODS.register("fedimpro-scaffold", "FedImpro with SCAFFOLD's control variates", paper=PAPER)
class FedImproScaffold(FedImpro, Scaffold):
    """FedImpro, then SCAFFOLD."""

    Settings = FedImproScaffoldSettings
    settings: FedImproScaffoldSettings


class FedImproNovaSettings(FedImproSettings, FedNovaSettings):
    """The settings of both."""

    name: str = "fedimpro-nova"


@METHODS.register("fedimpro-nova", "FedImpro with FedNova's normalised mean", paper=PAPER)
class FedImproNova(FedImpro, FedNova):
    """FedImpro, then FedNova."""

    Settings = FedImproNovaSettings
    settings: FedImproNovaSettings


class FedImproDynSettings(FedImproSettings, FedDynSettings):
    """The settings of both."""

    name: str = "fedimpro-dyn"


@METHODS.register("fedimpro-dyn", "FedImpro with FedDyn's dynamic regulariser", paper=PAPER)
class FedImproDyn(FedImpro, FedDyn):
    """FedImpro, then FedDyn."""

    Settings = FedImproDynSettings
    settings: FedImproDynSettings
