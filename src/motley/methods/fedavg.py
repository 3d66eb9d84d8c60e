"""FedAvg: train locally, average every coordinate over the clients that hold it.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
2017. Over parts of different depths this is the InCo paper's HeteroAvg; with `server.inco` on, its
InCoAvg.
"""

from __future__ import annotations

from motley.methods.base import METHODS, Method, Requirements


@METHODS.register(
    "fedavg",
    "local training, weighted mean over the owners of every coordinate",
    paper="McMahan et al., AISTATS 2017",
)
class FedAvg(Method):
    """Both halves at their defaults."""

    requirements = Requirements(private_parts=True)
