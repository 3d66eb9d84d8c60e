"""`motley study`: run the demo, a paper's table, or a user's own study."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from motley.cli.code import import_beside
from motley.cli.terminal import Console
from motley.cli.warnings import warn_about
from motley.config import parse_overrides
from motley.core.errors import MotleyError
from motley.files import output_folder
from motley.studies.declaration import Study, load_study, studies
from motley.studies.results import (
    COLUMNS,
    Result,
    collect,
    columns,
    missing,
    results_folder,
    save,
    table_row,
    used_columns,
)
from motley.studies.runner import (
    StudyWatcher,
    finished,
    run_path,
    run_study,
    runs_of_other_code,
    unfinished_runs,
)
from motley.studies.side_by_side import run_side_by_side
from motley.studies.sweep import (
    SCALES,
    Cell,
    PlannedRun,
    missing_in_motley,
    num_runs,
    plan_cells,
)

_SCALES = "; ".join(f"{name}: {meaning.summary}" for name, meaning in SCALES.items())
_FIRST = "demo"


def study(
    name: str = typer.Argument("", help="A study (motley study --list) or your own .toml file."),
    list_: bool = typer.Option(False, "--list", help="List the studies and exit."),
    scale: str = typer.Option(
        "",
        help=f"{_SCALES}. Default: full for your own files and the demo, quick for papers.",
    ),
    data: list[str] = typer.Option([], help="Only this data set; repeatable."),
    case: list[str] = typer.Option([], help="Only this case, such as 'alpha 0.5'; repeatable."),
    method: list[str] = typer.Option([], help="Only this line of the table; repeatable."),
    seeds: int = typer.Option(
        0, min=0, help="At most this many seeds; 0: as many as the scale has."
    ),
    set_: list[str] = typer.Option(
        [], "--set", metavar="TABLE.KEY=VALUE", help="Override a setting of every run."
    ),
    score: str = typer.Option(
        "",
        metavar="MEASURE",
        help="Show this measure instead of the study's: last, best, mean-of-last-k, client-mean, "
        "client-worst, personalized-mean, ... The scores of clients need --set "
        "evaluation.per_client=all.",
    ),
    jobs: int = typer.Option(
        1,
        min=1,
        help="Runs at once, each in a process of its own. Several GPUs are shared out among them.",
    ),
    plan_only: bool = typer.Option(
        False, "--plan", help="Print which runs are left and which are missing, and exit."
    ),
    out: Path = typer.Option(
        Path("runs/studies"), help="Folder for runs and tables. Studies share their runs."
    ),
) -> None:
    """Compare methods over data sets and seeds: the demo, a paper's table or your own file.

    Runs that are already finished are not repeated.
    """
    # Names in a user's file may look like rich's markup. They are printed as they are.
    console = Console(markup=False, emoji=False)
    if list_ or not name:
        console.print(_list())
        console.print(
            f"\nStart here: motley study {_FIRST}  (two minutes, no data needed)", highlight=False
        )
        return
    import_beside(Path(name) if name.endswith(".toml") else None)
    declared = load_study(name)
    scale = scale or declared.scale
    cells = plan_cells(
        declared,
        scale,
        data=data,
        cases=case,
        methods=method,
        seeds=seeds,
        overrides=parse_overrides(set_),
        score=score,
    )
    todo = unfinished_runs(cells, out)
    _announce(console, declared, scale, cells, todo)
    _announce_changed_code(console, todo, out)
    if plan_only:
        return
    if not any(cell.runs for cell in cells):
        raise MotleyError(
            f"study {declared.name!r}: none of it can run here. The list above says why."
        )
    with output_folder(out):
        pass  # raises before the first run if the folder cannot be written

    def save_results() -> list[Result]:
        results = collect(cells, out)
        save(declared, scale, cells, results, out)
        return results

    _run(console, todo, out, jobs, save_results)
    for cell in cells:
        warn_about(*(run_path(out, run) for run in cell.runs if finished(out, run)))
    _print_results(console, save_results())
    folder = results_folder(declared, scale, out)
    _print_plain(console, f"kept in {folder}")
    _print_plain(console, f"as a page: motley report {folder}")


def _run(
    console: Console,
    todo: Sequence[tuple[Cell, PlannedRun]],
    out: Path,
    jobs: int,
    save_results: Callable[[], object],
) -> None:
    """Run the unfinished runs. On Ctrl-C, say how to continue, and exit."""
    try:
        save_results()
        with _Watcher(console, todo, save_results) as watcher:
            if jobs == 1:
                run_study(todo, out, watcher)
            else:
                run_side_by_side(todo, out, watcher, jobs)
    except KeyboardInterrupt:
        again = shlex.join(["motley", *sys.argv[1:]])
        _print_plain(console, f"\nStopped. The same command continues: {again}")
        raise SystemExit(130) from None


def _print_plain(console: Console, text: str | Text) -> None:
    """Print text as it is: without markup or highlighted numbers, wrapped by the terminal."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _list() -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("study", style="bold", no_wrap=True)
    table.add_column("description")
    table.add_column("cells x seeds", justify="right")
    table.add_column("missing")
    declared_studies = studies()
    names = [_FIRST, *(name for name in declared_studies if name != _FIRST)]
    for name in names:
        declared = declared_studies[name]
        columns_ = [column for column in declared.data if not column.optional]
        count = len(declared.methods) * len(columns_) * len(declared.cases) * len(declared.seeds)
        absent = ", ".join(part.name for part in missing_in_motley(declared))
        table.add_row(name, declared.summary, str(count), absent)
    return table


def _announce(
    console: Console,
    study: Study,
    scale: str,
    cells: Sequence[Cell],
    todo: Sequence[tuple[Cell, PlannedRun]],
) -> None:
    _print_plain(console, Text.assemble((study.name, "bold"), f": {study.summary}"))
    if study.note:
        _print_plain(console, study.note)
    for reason, names in missing(cells).items():
        _print_plain(console, f"missing: {', '.join(names)}: {reason}")
    runs = num_runs(cells)
    rounds = sum(run.config.training.rounds for _, run in todo)
    _print_plain(
        console,
        f"scale {scale} ({SCALES[scale].summary}): {runs} runs, {runs - len(todo)} finished, "
        f"{len(todo)} to go ({rounds:,} rounds)",
    )
    if scale != "full":
        _print_plain(
            console,
            "This is a shortened study: its numbers will differ from those at --scale full "
            f"({SCALES['full'].summary}).",
        )


def _announce_changed_code(
    console: Console, todo: Sequence[tuple[Cell, PlannedRun]], out: Path
) -> None:
    """Say which runs do not count because the user's own code has changed since they began."""
    others = runs_of_other_code(todo, out)
    if not others:
        return
    folder, sentence = others[0]
    more = f", and {len(others) - 1} more" if len(others) > 1 else ""
    _print_plain(
        console,
        f"other code: {folder}{more}: {sentence} Such runs are kept but do not count; these "
        "settings are run again with the code as it is now.",
    )


class _Watcher(StudyWatcher):
    """The progress of the whole study, counted in rounds.

    It prints one line per run, and draws a bar if the terminal can be redrawn.
    """

    def __init__(
        self,
        console: Console,
        todo: Sequence[tuple[Cell, PlannedRun]],
        save_results: Callable[[], object],
    ) -> None:
        self.console, self.runs, self.number = console, len(todo), 0
        self.save_results = save_results
        #: Run -> rounds that it has yet to run.
        self.left = {run.key: run.config.training.rounds for _, run in todo}
        #: Rounds that were run since the study began or continued.
        self.completed = 0
        self.started: set[str] = set()
        self.began = time.perf_counter()
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[left]} left"),
        )
        redrawable = console.is_interactive and console.file.isatty()
        self.bar = Progress(*columns, console=console, transient=True, disable=not redrawable)
        self.task = self.bar.add_task("", total=self._rounds_left(), left="?")

    def __enter__(self) -> _Watcher:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_run(self, cell: Cell, run: PlannedRun) -> None:
        self.number += 1
        where = f"run {self.number}/{self.runs}"
        _print_plain(
            self.console,
            f"{where}: {cell.method}, {cell.column}, seed {run.seed} ({self._time_left()} left)",
        )
        self.bar.update(self.task, description=f"{where}: {cell.method}")

    def on_progress(self, cell: Cell, run: PlannedRun, rounds: int) -> None:
        left = run.config.training.rounds - rounds
        if run.key in self.started:
            self.completed += self.left[run.key] - left
        # The rounds that a run had before it was continued take no time now.
        self.started.add(run.key)
        self.left[run.key] = left
        total = self.completed + self._rounds_left()
        self.bar.update(self.task, total=total, completed=self.completed, left=self._time_left())

    def on_finished(self, cell: Cell, run: PlannedRun) -> None:
        # Saved after every run, so that `motley watch` and `motley report` can show a study that is
        # still running, and nothing is lost if it is stopped.
        self.left[run.key] = 0
        self.save_results()

    def on_failure(self, cell: Cell, run: PlannedRun, reason: str) -> None:
        self.left[run.key] = 0
        _print_plain(
            self.console, f"  left out: {cell.method}, {cell.column}, seed {run.seed}: {reason}"
        )

    def _rounds_left(self) -> int:
        return sum(self.left.values())

    def _time_left(self) -> str:
        if not self.completed:
            return "?"
        seconds_per_round = (time.perf_counter() - self.began) / self.completed
        seconds = round(seconds_per_round * self._rounds_left())
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02d}:{seconds % 60:02d}"


def _print_results(console: Console, results: Sequence[Result]) -> None:
    """Print one table per column of the study, without missing lines and empty columns."""
    for title, members in columns(results):
        rows = [table_row(result) for result in members if not result.cell.missing]
        used = used_columns(rows)
        table = Table(
            *(COLUMNS[number] for number in used),
            title=title,
            title_justify="left",
            title_style="bold",
        )
        for row in rows:
            table.add_row(*(row[number] for number in used))
        if rows:
            console.print(table)
