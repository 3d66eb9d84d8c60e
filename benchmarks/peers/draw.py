"""Draws the figure of RESULTS.md and writes its tables, from the JSON files of the comparisons.

    python -m benchmarks.peers.draw [--check]

Needs matplotlib. Tables are written between the markers of `benchmarks/RESULTS.md`; nothing else of
the page is changed. With --check nothing is written: it fails if the page does not agree with the
files.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.peers.federation import ROOT, WORKLOADS, Workload
from benchmarks.report import table

RESULTS = ROOT / "benchmarks/peers/results"
PAGE = ROOT / "benchmarks/RESULTS.md"
FIGURE = ROOT / "benchmarks/peers.png"
CONTROL = "by hand"
MOTLEY = "Motley"
COLORS = {MOTLEY: "#c2410c", CONTROL: "#52525b"}
PEER_COLOR = "#93a8c4"
#: Below this ratio of times, Motley is said to be no faster.
NO_FASTER = 1.05

Row = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """One run of a peer's script."""

    peer: str
    machine: dict[str, Any]
    rows: list[Row]

    def of(self, workload: Workload, library: str) -> list[Row]:
        """Return the rows of a library in a workload."""
        return [
            row
            for row in self.rows
            if row["workload"] == workload.name and row["library"] == library
        ]

    def motley(self, workload: Workload) -> Row:
        """Return Motley with its default settings."""
        rows = self.of(workload, MOTLEY)
        return next(row for row in rows if row["setting"].startswith("default"))


def read() -> list[Comparison]:
    """Return all comparisons, in the order of the files' names."""
    comparisons = []
    for file in sorted(RESULTS.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        comparisons.append(Comparison(content["peer"], content["machine"], content["rows"]))
    return comparisons


def fastest(rows: Sequence[Row]) -> Row:
    """Return the row with the shortest rounds."""
    return min(rows, key=lambda row: row["ms per round"])


def ratio(row: Row, other: Row) -> float:
    """Return how many times as long a round takes as another one."""
    return row["ms per round"] / other["ms per round"]


# ---- tables


def peers_table(comparisons: Sequence[Comparison], workload: Workload) -> list[str]:
    """Return a table with one line per peer and setting, beside Motley in the same run."""
    rows = []
    for comparison in comparisons:
        default = comparison.motley(workload)
        best = fastest(comparison.of(workload, MOTLEY))
        for row in comparison.of(workload, comparison.peer):
            rows.append(
                {
                    "library": comparison.peer,
                    "setting": row["setting"],
                    "ms per round": f"{row['ms per round']:,.1f}",
                    "its repeats": row["repeats"],
                    "Motley's default": f"{default['ms per round']:,.1f}",
                    "ratio": f"{ratio(row, default):.2f}",
                    "Motley's fastest": f"{best['ms per round']:,.1f} ({best['setting']})",
                    "its ratio": f"{ratio(row, best):.2f}",
                    "start-up, s": f"{row['start-up, s']:.1f} / {default['start-up, s']:.1f}",
                    "accuracy": f"{row['accuracy']:.3f} / {default['accuracy']:.3f}",
                }
            )
    return table(rows)


def controls_table(comparisons: Sequence[Comparison], workload: Workload) -> list[str]:
    """Return a table of the control and of Motley, which are in every comparison."""
    rows = []
    for library in (CONTROL, MOTLEY):
        for first in comparisons[0].of(workload, library):
            found, ratios = [], []
            for comparison in comparisons:
                hand = fastest(comparison.of(workload, CONTROL))
                for row in comparison.of(workload, library):
                    if row["setting"] == first["setting"]:
                        found.append(row)
                        ratios.append(ratio(row, hand))
            times = [row["ms per round"] for row in found]
            start_ups = [row["start-up, s"] for row in found]
            accuracies = [row["accuracy"] for row in found]
            rows.append(
                {
                    "": f"{library}, {first['setting']}",
                    "ms per round": f"{statistics.median(times):,.1f}",
                    "comparisons": f"{min(times):,.1f} to {max(times):,.1f}",
                    "ratio to the faster control": f"{statistics.median(ratios):.2f}",
                    "start-up, s": f"{statistics.median(start_ups):.1f}",
                    "accuracy": f"{statistics.median(accuracies):.3f}",
                }
            )
    return table(rows)


def versions_table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a table of the machine and the versions of every comparison."""
    about = ("date", "processor", "cores", "load before", "python", "torch", "numpy", "motleyfl")
    rows = []
    for comparison in comparisons:
        machine = comparison.machine
        packages = {name: machine[name] for name in machine if name not in (*about, "threads")}
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        common = {name: str(machine[name]) for name in about}
        rows.append({"comparison": comparison.peer, "its packages": versions, **common})
    return table(rows)


def not_faster(comparisons: Sequence[Comparison]) -> list[str]:
    """Return a list of what Motley's default is not faster than, in the same run."""
    lines = []
    for workload in WORKLOADS.values():
        for comparison in comparisons:
            default = comparison.motley(workload)
            for row in comparison.of(workload, comparison.peer):
                if ratio(row, default) < NO_FASTER:
                    lines.append(_as_line(workload, row, default))
        controls: dict[str, list[tuple[Row, Row]]] = {}
        for comparison in comparisons:
            for row in comparison.of(workload, CONTROL):
                controls.setdefault(row["setting"], []).append((row, comparison.motley(workload)))
        for pairs in controls.values():
            median = statistics.median_low(ratio(*pair) for pair in pairs)
            if median < NO_FASTER:
                (row, default), *_ = [pair for pair in pairs if ratio(*pair) == median]
                lines.append(_as_line(workload, row, default))
    return lines or ["- None of the libraries, and not the control."]


def _as_line(workload: Workload, row: Row, default: Row) -> str:
    return (
        f"- {workload.title}: {row['library']} with {row['setting']}, {row['ms per round']:,.1f} ms "
        f"against {default['ms per round']:,.1f} ms (ratio {ratio(row, default):.2f})."
    )


def with_tables(text: str, comparisons: Sequence[Comparison]) -> str:
    """Return a page's text with all its tables made anew."""
    text = replaced(text, "versions", versions_table(comparisons))
    for workload in WORKLOADS.values():
        text = replaced(text, f"{workload.name} peers", peers_table(comparisons, workload))
        text = replaced(text, f"{workload.name} controls", controls_table(comparisons, workload))
    return replaced(text, "not faster", not_faster(comparisons))


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a text with other lines between its markers with this name."""
    pattern = re.compile(rf"(<!-- {name}:.*?-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    block = "\n".join(lines)
    text, count = pattern.subn(lambda match: f"{match[1]}\n{block}\n\n{match[2]}", text)
    assert count == 1, f"the page has {count} places for {name!r}"
    return text


# ---- the figure


def bars(comparisons: Sequence[Comparison], workload: Workload) -> list[tuple[str, str, float]]:
    """Return (label, library, ms per round), slowest first.

    Peers are shown in their fastest setting; Motley and the control, which are in every comparison,
    with their medians.
    """
    result = []
    for comparison in comparisons:
        row = fastest(comparison.of(workload, comparison.peer))
        result.append((f"{row['library']} ({row['setting']})", row["library"], row["ms per round"]))
    for library in (MOTLEY, CONTROL):
        for first in comparisons[0].of(workload, library):
            times = [
                row["ms per round"]
                for comparison in comparisons
                for row in comparison.of(workload, library)
                if row["setting"] == first["setting"]
            ]
            label = f"{library} ({first['setting']})"
            result.append((label, library, statistics.median(times)))
    return sorted(result, key=lambda bar: -bar[2])


def draw(comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw one panel per workload."""
    panels = [(workload, bars(comparisons, workload)) for workload in WORKLOADS.values()]
    heights = [len(panel) for _, panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 0.36 * sum(heights) + 2.2),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, (workload, panel) in zip(axes, panels, strict=True):
        labels, libraries, times = zip(*panel, strict=True)
        colors = [COLORS.get(library, PEER_COLOR) for library in libraries]
        drawn = axis.barh(range(len(panel)), times, color=colors, height=0.72)
        axis.bar_label(drawn, [f"{time:,.0f} ms" for time in times], padding=4, fontsize=10)
        axis.set_yticks(range(len(panel)), labels, fontsize=10)
        for tick, library in zip(axis.get_yticklabels(), libraries, strict=True):
            tick.set_fontweight("bold" if library == MOTLEY else "normal")
        axis.invert_yaxis()
        axis.set_title(workload.title, loc="left", fontsize=11, fontweight="bold")
        if max(times) > 10 * min(times):
            axis.set_xscale("log")
            axis.set_xlabel("ms per round (logarithmic), shorter is faster")
            axis.set_xlim(min(times) / 2, max(times) * 2)
        else:
            axis.set_xlabel("ms per round, shorter is faster")
            axis.set_xlim(0, max(times) * 1.15)
        axis.spines[["top", "right"]].set_visible(False)
    cores = comparisons[0].machine["cores"]
    figure.suptitle(f"FedAvg on a CPU with {cores} cores, with evaluation", fontsize=12)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def main() -> None:
    """Draw the figure and write the tables, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    options = parser.parse_args()
    comparisons = read()
    text = PAGE.read_text(encoding="utf-8")
    renewed = with_tables(text, comparisons)
    if options.check:
        sys.exit(0 if renewed == text else f"{PAGE.name} does not agree with {RESULTS.name}/*.json")
    PAGE.write_text(renewed, encoding="utf-8")
    draw(comparisons, FIGURE)


if __name__ == "__main__":
    main()
