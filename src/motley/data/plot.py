"""A picture of which client has how many examples of which class."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: More clients than this are thinned out, evenly by size.
MAX_CLIENTS = 120
#: More names than this on the axis of classes would overlap.
MAX_NAMES = 40
#: The height of the bars above the discs.
BARS_INCHES = 1.3
INK = "#1b4965"
LIGHT = "#b8c4cc"


def draw_clients(
    counts: np.ndarray,
    class_names: list[str],
    client_names: list[str],
    title: str,
    file: IO[bytes],
) -> None:
    """Draw a partition as a PNG: one column per client, one row per class if there are several.

    `counts` has the shape (clients, classes). The area of a disc is proportional to the number of
    examples, so that classes and clients can be compared across the whole picture. The bars above
    are the clients' totals.
    """
    from matplotlib.figure import Figure

    shown = chosen_clients(counts.sum(axis=1))
    counts = counts[shown]
    clients, classes = counts.shape
    width = min(15.0, max(6.0, 2.6 + 0.16 * clients))
    height = min(11.0, max(3.8, 2.6 + 0.26 * classes))
    if classes == 1:
        height = BARS_INCHES + 1.4
    figure = Figure(figsize=(width, height), layout="constrained")
    if len(shown) < len(client_names):
        title += f" ({len(shown)} of {len(client_names):,} clients shown, evenly by size)"
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    names = [client_names[number] for number in shown]
    if classes == 1:
        bars = figure.subplots()
        _draw_totals(bars, counts.sum(axis=1))
        _name_clients(bars, names, shown)
    else:
        heights = [BARS_INCHES, height - BARS_INCHES - 0.8]
        bars, grid = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
        _draw_totals(bars, counts.sum(axis=1))
        bars.tick_params(axis="x", length=0, labelbottom=False)
        _draw_discs(grid, counts, width, height)
        _name_classes(grid, class_names)
        _name_clients(grid, names, shown)
    figure.savefig(file, format="png", dpi=130)


def chosen_clients(sizes: np.ndarray) -> np.ndarray:
    """Return the clients to draw: all of them, or some of every size, in ascending order."""
    if len(sizes) <= MAX_CLIENTS:
        return np.arange(len(sizes))
    by_size = np.argsort(sizes, kind="stable")
    places = np.linspace(0, len(sizes) - 1, MAX_CLIENTS).round().astype(int)
    return np.sort(by_size[places])


def _draw_totals(axes: Axes, totals: np.ndarray) -> None:
    axes.bar(np.arange(len(totals)), totals, width=0.75, color=INK)
    axes.set_ylabel("examples")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_discs(axes: Axes, counts: np.ndarray, width: float, height: float) -> None:
    clients, classes = np.nonzero(counts)
    values = counts[clients, classes]
    # In points (1/72 inch). The largest disc may reach over its column, because its neighbours
    # are rarely as large, but not over its row.
    column = 72 * (width - 1.6) / len(counts)
    row = 72 * (height - BARS_INCHES - 1.4) / counts.shape[1]
    largest = min(1.7 * column, 0.95 * row, 40.0) ** 2
    areas = np.maximum(values / max(1, values.max(initial=1)) * largest, 0.6)
    axes.scatter(clients, classes, s=areas, color=INK, alpha=0.85, linewidths=0)
    axes.set_xlim(-1, len(counts))
    axes.set_ylim(-0.7, counts.shape[1] - 0.3)
    axes.set_axisbelow(True)
    axes.grid(color=LIGHT, linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    note = f"largest disc: {values.max(initial=0):,} examples"
    axes.text(1, 1.01, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=8)


def _name_classes(axes: Axes, names: list[str]) -> None:
    step = -(-len(names) // MAX_NAMES)
    places = list(range(0, len(names), step))
    axes.set_yticks(places, [_short(names[place]) for place in places], fontsize=8)
    axes.set_ylabel("class")


def _name_clients(axes: Axes, names: list[str], numbers: np.ndarray) -> None:
    """Write clients' names if there is space for them, and else some of their numbers."""
    axes.set_xlabel("client")
    longest = max(len(_short(name)) for name in names)
    if len(names) <= 60:
        turned = longest > 3
        axes.set_xticks(
            range(len(names)),
            [_short(name) for name in names],
            rotation=90 if turned else 0,
            fontsize=8,
        )
        return
    places = list(range(0, len(names), 10))
    axes.set_xticks(places, [str(numbers[place]) for place in places], fontsize=8)


def _short(name: str) -> str:
    # A dollar sign would start a formula.
    return (name if len(name) <= 16 else f"{name[:14]}…").replace("$", r"\$")
