"""Analyses of finished or running runs: each is a function that returns a picture and a table.

`motley list analyses` lists them.
"""

from motley.analysis import (
    cka,
    coefficients,
    divergence,
    embedding,
    gradient_variance,
    gradients,
    overhead,
    privacy,
    sizes,
    wasserstein,
)
from motley.analysis.findings import ANALYSES, Findings, new_figure, save

__all__ = [
    "ANALYSES",
    "Findings",
    "cka",
    "coefficients",
    "divergence",
    "embedding",
    "gradient_variance",
    "gradients",
    "new_figure",
    "overhead",
    "privacy",
    "save",
    "sizes",
    "wasserstein",
]
