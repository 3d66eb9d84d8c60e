"""What every benchmark says of its machine, and how it writes its tables: on the screen and as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = Mapping[str, str | int | float]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, the hardware and the versions"
    )
    return parser


def report(rows: Sequence[Row], machine: Mapping[str, Any], file: Path | None, **more: Any) -> None:
    """Print rows of one shape as a table, and write them with the machine where a file is named."""
    print(*(f"{name}: {value}" for name, value in machine.items()), sep="\n")
    print()
    print("\n".join(table(rows)))
    if file is not None:
        file.write_text(
            json.dumps({"machine": machine, "rows": rows, **more}, indent=2) + "\n",
            encoding="utf-8",
        )


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table."""
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _text(value: str | int | float) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def machine(*packages: str, threads: int = 1) -> dict[str, Any]:
    """Return when, on what, and with which versions a benchmark runs."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # on the path, but not installed
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
