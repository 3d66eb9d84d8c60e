"""Draw the curves of docs/results/natural.md from the compact files under results/: needs matplotlib.

python campaign/curves.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from pages import PAGES, RESULTS, load_runs

matplotlib.use("Agg")
from matplotlib import pyplot as plt

#: Title -> study, data set and case.
PANELS = {
    "UCI HAR by person": ("natural-har", "", ""),
    "MNIST by writer (unseen writers)": ("natural-writers", "", ""),
    "Heart disease, three sizes": ("natural-heart", "", ""),
    "Heart disease, logistic regression": ("natural-heart-flamby", "heart-pooled", ""),
    "Shakespeare, LSTMs": ("natural-shakespeare-cpu", "", "LSTM"),
    "Shakespeare, Transformers": ("natural-shakespeare-cpu", "", "Transformer"),
}
#: A line with fewer evaluations is drawn as a level: training alone, measured at its end.
FEWEST_POINTS = 3


def draw(path: Path) -> None:
    """Draw one panel per study that has results."""
    panels = {}
    for title, (study, data, case) in PANELS.items():
        runs = load_runs(study, data, case) if (RESULTS / study).is_dir() else {}
        if runs:
            panels[title] = runs
    columns = 2
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 3.6 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for name, runs in lines.items():
            seeds = list(runs.values())
            rounds = seeds[0]["rounds"]
            means = []
            for at in range(len(rounds)):
                values = [100 * run["accuracy"]["mean"][at] for run in seeds]
                means.append(sum(values) / len(values))
            if len(rounds) < FEWEST_POINTS:
                axis.axhline(means[-1], linestyle=":", color="grey", label=name)
            else:
                axis.plot(rounds, means, label=name, linewidth=1.5)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round", fontsize=8)
        axis.set_ylabel("accuracy on all test examples (%)", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(PAGES / "natural.png")
