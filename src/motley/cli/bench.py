"""`motley bench`: measure how fast a configuration runs on this machine."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from motley.bench import Timing, load, measure, synthetic_dataset, to_json
from motley.cli.code import import_beside
from motley.cli.terminal import Console
from motley.config import load_config
from motley.files import is_stream, output_file


def bench(
    file: Path | None = typer.Argument(None, help="A TOML file. Default: the quickstart preset."),
    preset: str = typer.Option("", help="Start from a named preset (motley list presets)."),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting; repeatable."
    ),
    rounds: int = typer.Option(20, min=1, help="Rounds to measure."),
    warm_up: int = typer.Option(5, min=0, help="Warm-up rounds before that, not measured."),
    synthetic: bool = typer.Option(
        False, help="Use random images instead of the data set's files."
    ),
    json_: Path | None = typer.Option(None, "--json", help="Write the numbers to a file."),
    compare: list[Path] = typer.Option(
        [], help="Compare two such files instead: --compare OLD --compare NEW."
    ),
) -> None:
    """Measure milliseconds per round and per client step, memory, and where the time goes."""
    console = Console()
    if compare:
        if len(compare) != 2:
            raise typer.BadParameter("give two files: --compare OLD --compare NEW")
        console.print(comparison(load(compare[0]), load(compare[1])))
        return
    import_beside(file)
    config = load_config(file, preset=preset, overrides=set_)
    setting = " ".join([config.preset or str(file), *set_])
    dataset = synthetic_dataset(config.data.name) if synthetic else None
    if json_ is None:
        console.print(table([measure(config, setting, rounds, warm_up, dataset)]))
        return
    with output_file(json_) as written:
        timing = measure(config, setting, rounds, warm_up, dataset)
        written.write(to_json([timing]))
    Console(stderr=is_stream(json_)).print(table([timing]))


def table(timings: list[Timing]) -> Table:
    """Return one row per timing."""
    result = Table(
        "setting", "ms per round", "ms per client step", "peak MB", "where the time goes"
    )
    for timing in timings:
        result.add_row(
            timing.setting,
            f"{timing.ms_round:.1f} ± {timing.ms_round_spread:.1f}",
            f"{timing.ms_client_step:.3f}",
            f"{timing.peak_mb:,.0f}",
            ", ".join(f"{phase} {share:.0%}" for phase, share in timing.share.items()),
        )
    return result


def comparison(old: list[Timing], new: list[Timing]) -> Table:
    """Return one row per setting that is in both: old and new time, and the speed-up."""
    result = Table("setting", "old ms per round", "new ms per round", "old / new")
    old_ms = {timing.setting: timing.ms_round for timing in old}
    for timing in new:
        if timing.setting not in old_ms:
            continue
        before, after = old_ms[timing.setting], timing.ms_round
        result.add_row(timing.setting, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}")
    return result
