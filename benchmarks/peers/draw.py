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
#: Comparisons with --device cuda.
GPU_RESULTS = RESULTS / "gpu"
PAGE = ROOT / "benchmarks/RESULTS.md"
FIGURE = ROOT / "benchmarks/peers.png"
CONTROL = "by hand"
MOTLEY = "Motley"
COLORS = {CONTROL: "#71717a"}
PEER_COLOR = "#93a8c4"
#: Of its default setting, and with vmap_clients.
MOTLEY_COLORS = ("#c2410c", "#7c2d12")
#: Below this ratio of times, Motley is said to be no faster.
NO_FASTER = 1.05
#: If other programs used more cores than this while the control ran, results are provisional.
QUIET = 0.1
BUSY = (
    '**Provisional.** Other programs were running, or may have been (see "others, cores"). That hurts\n'
    "contenders with several threads most, so the ratios do not show which library is faster."
)
#: The machine's facts that the table of versions shows; all others are versions of packages.
ABOUT = (
    *("date", "processor", "cores", "device", "others, cores", "OMP_WAIT_POLICY"),
    *("python", "torch", "numpy", "motleyfl"),
)

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


def read(folder: Path) -> list[Comparison]:
    """Return all comparisons in a folder, in the order of the files' names."""
    comparisons = []
    for file in sorted(folder.glob("*.json")):
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
                    "runs x rounds": f"{row['runs']} x {row['rounds']}",
                    "medians of runs": row["repeats"],
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
    rows = []
    for comparison in comparisons:
        machine = comparison.machine
        left_out = (*ABOUT, "threads", "load before")
        packages = {name: machine[name] for name in machine if name not in left_out}
        versions = ", ".join(f"{name} {version}" for name, version in packages.items())
        common = {name: str(machine.get(name, "unknown")) for name in ABOUT}
        rows.append({"comparison": comparison.peer, "its packages": versions, **common})
    lines = table(rows)
    if was_busy(comparisons):
        lines += ["", BUSY]
    return lines


def was_busy(comparisons: Sequence[Comparison]) -> bool:
    """Tell whether other programs were running, or may have been, during a comparison."""
    for comparison in comparisons:
        others = comparison.machine.get("others, cores")
        if others is None or others > QUIET:
            return True
    return False


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


def gpu_tables(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the tables of the comparisons on a GPU."""
    if not comparisons:
        return ["Not measured yet."]
    lines = versions_table(comparisons)
    for workload in WORKLOADS.values():
        lines += ["", f"{workload.title}:", ""]
        lines += peers_table(comparisons, workload)
        lines += ["", *controls_table(comparisons, workload)]
    return lines


def with_tables(text: str, comparisons: Sequence[Comparison], on_gpu: Sequence[Comparison]) -> str:
    """Return a page's text with all its tables made anew."""
    text = replaced(text, "versions", versions_table(comparisons))
    for workload in WORKLOADS.values():
        text = replaced(text, f"{workload.name} peers", peers_table(comparisons, workload))
        text = replaced(text, f"{workload.name} controls", controls_table(comparisons, workload))
    text = replaced(text, "not faster", not_faster(comparisons))
    return replaced(text, "gpu", gpu_tables(on_gpu))


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a text with other lines between its markers with this name."""
    pattern = re.compile(rf"(<!-- {name}:.*?-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    block = "\n".join(lines)
    text, count = pattern.subn(lambda match: f"{match[1]}\n{block}\n\n{match[2]}", text)
    assert count == 1, f"the page has {count} places for {name!r}"
    return text


# ---- the figure


@dataclass(frozen=True)
class Group:
    """A library's bar, and Motley's bars from the same comparison."""

    library: Row
    motley: list[Row]


def groups(comparisons: Sequence[Comparison], workload: Workload) -> list[Group]:
    """Return the groups of a panel: the slowest library, relative to Motley, first.

    Libraries are shown in their fastest setting, Motley in its default one and, if that is faster,
    with vmap_clients. The control took part in all comparisons; the one with the median ratio to
    Motley is shown.
    """
    result = []
    controls = []
    for comparison in comparisons:
        default = comparison.motley(workload)
        beside = [default]
        best = fastest(comparison.of(workload, MOTLEY))
        if best["setting"].startswith("vmap"):
            beside.append(best)
        result.append(Group(fastest(comparison.of(workload, comparison.peer)), beside))
        controls.append(Group(fastest(comparison.of(workload, CONTROL)), beside))
    controls.sort(key=_times_motley)
    result.append(controls[len(controls) // 2])
    return sorted(result, key=_times_motley, reverse=True)


def _times_motley(group: Group) -> float:
    return ratio(group.library, group.motley[0])


def draw(comparisons: Sequence[Comparison], file: Path) -> None:
    """Draw one panel per workload."""
    panels = [(workload, groups(comparisons, workload)) for workload in WORKLOADS.values()]
    lengths = [sum(1.6 + len(group.motley) for group in panel) for _, panel in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(9, 0.24 * sum(lengths) + 2.2),
        gridspec_kw={"height_ratios": lengths},
        layout="constrained",
    )
    for axis, (workload, panel) in zip(axes, panels, strict=True):
        _draw_panel(axis, workload, panel)
    cores = comparisons[0].machine["cores"]
    title = f"Time per round of FedAvg on a CPU with {cores} cores"
    if was_busy(comparisons):
        title += " (provisional: busy machine)"
    figure.suptitle(title, fontsize=13)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _draw_panel(axis: Any, workload: Workload, panel: Sequence[Group]) -> None:
    """Draw the groups of a workload from top to bottom."""
    longest = max(row["ms per round"] for group in panel for row in (group.library, *group.motley))
    ticks, labels = [], []
    y = 0.0
    for group in panel:
        library = group.library
        ticks.append(y)
        labels.append(f"{library['library']} ({library['setting']})")
        color = COLORS.get(library["library"], PEER_COLOR)
        _draw_bar(axis, y, library["ms per round"], color, longest, "")
        for number, row in enumerate(group.motley):
            y += 1
            kind = "default" if number == 0 else row["setting"]
            text = f"  Motley, {kind}: {ratio(library, row):.1f} times as fast"
            _draw_bar(axis, y, row["ms per round"], MOTLEY_COLORS[number], longest, text)
        y += 1.6
    axis.set_yticks(ticks, labels, fontsize=10)
    axis.invert_yaxis()
    axis.set_title(workload.title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlabel("ms per round with evaluation; shorter is faster")
    axis.set_xlim(0, longest * 1.12)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_bar(axis: Any, y: float, time: float, color: str, longest: float, text: str) -> None:
    axis.barh(y, time, color=color, height=0.9)
    label = f"{time:,.0f} ms{text}"
    # Inside the bar if there is no room beside it.
    inside = bool(text) and time > 0.6 * longest
    axis.text(
        time + (-0.008 if inside else 0.008) * longest,
        y,
        label,
        ha="right" if inside else "left",
        va="center",
        fontsize=9,
        color="white" if inside else "black",
    )


def main() -> None:
    """Draw the figure and write the tables, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    options = parser.parse_args()
    comparisons = read(RESULTS)
    text = PAGE.read_text(encoding="utf-8")
    renewed = with_tables(text, comparisons, read(GPU_RESULTS))
    if options.check:
        sys.exit(0 if renewed == text else f"{PAGE.name} does not agree with {RESULTS.name}/*.json")
    PAGE.write_text(renewed, encoding="utf-8")
    draw(comparisons, FIGURE)


if __name__ == "__main__":
    main()
