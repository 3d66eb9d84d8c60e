"""Analyses of runs: each is a function that returns a table and a figure (`Findings`).

`motley list analyses` lists them.
"""

from motley.analysis import (
    cka,
    clients,
    coefficients,
    contribution,
    divergence,
    embedding,
    exits,
    gradient_variance,
    gradients,
    margin,
    overhead,
    reconstruction,
    sizes,
    wasserstein,
)
from motley.analysis.findings import ANALYSES, Analysis, Findings, analysis, new_figure, save

__all__ = [
    "ANALYSES",
    "Analysis",
    "Findings",
    "analysis",
    "cka",
    "clients",
    "coefficients",
    "contribution",
    "divergence",
    "embedding",
    "exits",
    "gradient_variance",
    "gradients",
    "margin",
    "new_figure",
    "overhead",
    "reconstruction",
    "save",
    "sizes",
    "wasserstein",
]
