"""FedImpro on top of other methods: its loss and statistics, their corrections and server rules.

FedImpro's halves call `super()` in every hook they override, so each of them can stand before the
half of another method.
"""

from __future__ import annotations

from motley.methods.base import METHODS
from motley.methods.feddyn import FedDyn, FedDynClient, FedDynServer, FedDynSettings
from motley.methods.fedimpro import FedImpro, FedImproClient, FedImproServer, FedImproSettings
from motley.methods.fednova import FedNova, FedNovaClient, FedNovaServer, FedNovaSettings
from motley.methods.fedprox import FedProx, FedProxClient, FedProxSettings
from motley.methods.scaffold import Scaffold, ScaffoldClient, ScaffoldServer, ScaffoldSettings

PAPER = "Tang et al., ICLR 2024"

# ---- FedProx


class FedImproProxSettings(FedImproSettings, FedProxSettings):
    """The settings of both."""

    name: str = "fedimpro-prox"


class FedImproProxClient(FedImproClient, FedProxClient):
    """FedImpro's loss, and the proximal term."""

    settings: FedImproProxSettings


@METHODS.register("fedimpro-prox", "FedImpro with FedProx's proximal term", paper=PAPER)
class FedImproProx(FedImpro):
    """FedImpro on top of FedProx."""

    Settings = FedImproProxSettings
    Client = FedImproProxClient
    requirements = FedImpro.requirements.combined(FedProx.requirements)


# ---- SCAFFOLD


class FedImproScaffoldSettings(FedImproSettings, ScaffoldSettings):
    """The settings of both."""

    name: str = "fedimpro-scaffold"


class FedImproScaffoldClient(FedImproClient, ScaffoldClient):
    """FedImpro's loss, and the correction by control variates."""

    settings: FedImproScaffoldSettings


class FedImproScaffoldServer(FedImproServer, ScaffoldServer):
    """FedImpro's statistics, and control variates."""

    settings: FedImproScaffoldSettings


@METHODS.register("fedimpro-scaffold", "FedImpro with SCAFFOLD's control variates", paper=PAPER)
class FedImproScaffold(FedImpro):
    """FedImpro on top of SCAFFOLD."""

    Settings = FedImproScaffoldSettings
    Client = FedImproScaffoldClient
    Server = FedImproScaffoldServer
    requirements = FedImpro.requirements.combined(Scaffold.requirements)


# ---- FedNova


class FedImproNovaSettings(FedImproSettings, FedNovaSettings):
    """The settings of both."""

    name: str = "fedimpro-nova"


class FedImproNovaClient(FedImproClient, FedNovaClient):
    """FedImpro's loss, and a report of local progress."""

    settings: FedImproNovaSettings


class FedImproNovaServer(FedImproServer, FedNovaServer):
    """FedImpro's statistics, and the normalized mean."""

    settings: FedImproNovaSettings


@METHODS.register("fedimpro-nova", "FedImpro with FedNova's normalised mean", paper=PAPER)
class FedImproNova(FedImpro):
    """FedImpro on top of FedNova."""

    Settings = FedImproNovaSettings
    Client = FedImproNovaClient
    Server = FedImproNovaServer
    requirements = FedImpro.requirements.combined(FedNova.requirements)


# ---- FedDyn


class FedImproDynSettings(FedImproSettings, FedDynSettings):
    """The settings of both."""

    name: str = "fedimpro-dyn"


class FedImproDynClient(FedImproClient, FedDynClient):
    """FedImpro's loss, and the dynamic regularizer."""

    settings: FedImproDynSettings


class FedImproDynServer(FedImproServer, FedDynServer):
    """FedImpro's statistics, and the mean of dual variables."""

    settings: FedImproDynSettings


@METHODS.register("fedimpro-dyn", "FedImpro with FedDyn's dynamic regulariser", paper=PAPER)
class FedImproDyn(FedImpro):
    """FedImpro on top of FedDyn."""

    Settings = FedImproDynSettings
    Client = FedImproDynClient
    Server = FedImproDynServer
    requirements = FedImpro.requirements.combined(FedDyn.requirements)
