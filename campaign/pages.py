"""Draw the tables of docs/results and of the README from the compact files under results/.

    python campaign/pages.py            # rewrite the drawn parts of the pages
    python campaign/pages.py --check    # only say whether they are up to date

A drawn part stands between `<!-- drawn: NAME -->` and `<!-- end of NAME -->`. The prose around it is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from motley.config.layers import from_saved
from motley.studies.declaration import MethodRow, Study, load_study
from motley.studies.measures import whole_model
from motley.studies.statistics import paired, spread

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = ROOT / "docs" / "results"
#: Evaluations in a reported mean. Single rounds differ by several points, and the papers print smoothed curves.
WINDOW = 20
MILESTONES = (50, 100, 150, 200, 250, 350, 500)
#: The authors' own smoothed curves of InCo's Table 2 (CIFAR-10, alpha 0.5), read at `MILESTONES`.
AUTHORS_CURVES = {
    "HeteroAvg": ("44", "52", "58", "60", "60", "64", "64"),
    "InCoAvg": ("49", "54", "61", "63", "65", "67", "67 to 68"),
}

Runs = Mapping[int, dict[str, Any]]


def load_runs(study: str, data: str = "", case: str = "") -> dict[str, Runs]:
    """Return a study's runs by line of the table and by seed, of one data set or case if given."""
    runs: dict[str, dict[int, dict[str, Any]]] = {}
    for file in sorted((RESULTS / study).rglob("seed-*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if data in ("", run["data"]) and case in ("", run["case"]):
            runs.setdefault(run["method"], {})[run["seed"]] = run
    return dict(runs)


def find_study(name: str) -> Study:
    """Return a study of the campaign, or one of the library's."""
    declared_here = ROOT / "campaign" / f"{name}.toml"
    return load_study(str(declared_here) if declared_here.exists() else name)


def window_mean(run: Mapping[str, Any], size: str = "mean", until: int | None = None) -> float:
    """Return the mean accuracy in percent over the last `WINDOW` evaluations up to a round."""
    last = run["rounds"][-1] if until is None else until
    chosen = [
        a for number, a in zip(run["rounds"], run["accuracy"][size], strict=True) if number <= last
    ][-WINDOW:]
    return 100 * sum(chosen) / len(chosen)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paired_difference(study: Study, runs: Mapping[str, Runs], line: MethodRow) -> str:
    """Return a line's difference to the line that it is compared with, over their common seeds.

    It is the difference of the numbers that both lines show, which may be those of other sizes.
    """
    if line.against not in runs:
        return ""
    other = next(row for row in study.methods if row.name == line.against)
    seeds = [seed for seed in runs[line.name] if seed in runs[other.name]]
    ours = [window_mean(runs[line.name][seed], shown_size(line, runs)) for seed in seeds]
    theirs = [window_mean(runs[other.name][seed], shown_size(other, runs)) for seed in seeds]
    difference = paired(ours, theirs)
    return "" if difference is None else f"{difference} vs {line.against}"


def shown_size(line: MethodRow, runs: Mapping[str, Runs]) -> str:
    """Return the size whose accuracy a line shows: "mean" of all, or the whole model's."""
    if not line.whole:
        return line.size or "mean"
    some_run = next(iter(runs[line.name].values()))
    whole = whole_model(from_saved(some_run["config"]))
    assert whole is not None  # or the line could not have run
    return whole


def sizes_of(run: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's sizes."""
    return [size for size in run["accuracy"] if size != "mean"]


def sizes_title(runs: Mapping[str, Runs]) -> str:
    """Return the title of the column with all sizes: "sizes 10/14/18" for resnet10, 14 and 18."""
    titles = set()
    for by_seed in runs.values():
        sizes = sizes_of(next(iter(by_seed.values())))
        titles.add("/".join(size.removeprefix("resnet") for size in sizes))
    # Lines that split a single network have other sizes than the rest.
    return f"sizes {titles.pop()}" if len(titles) == 1 else "each size"


def study_table(name: str, data: str = "cifar10", case: str = "") -> str:
    """Return a column of a study as a table: every line that has run, beside the paper's number.

    The accuracy is a mean over the last evaluations; "best" is that of a single one, averaged over
    seeds.
    """
    study = find_study(name)
    runs = load_runs(name, data, case)
    if not runs:
        return ""
    column = [declared.name for declared in study.cases].index(case) if case else 0
    rows = []
    for line in study.methods:
        if line.name not in runs:
            continue
        own = list(runs[line.name].values())
        shown = shown_size(line, runs)
        means = spread([window_mean(run, shown) for run in own])
        best = sum(100 * max(run["accuracy"][shown]) for run in own) / len(own)
        per_size = []
        for size in sizes_of(own[0]):
            values = [window_mean(run, size) for run in own]
            per_size.append(f"{sum(values) / len(values):.0f}")
        papers = line.paper.get(data)
        paper = papers[column] if papers else None
        rows.append(
            [
                f"{line.name}, whole model" if line.whole else line.name,
                str(means),
                f"{len(own)}",
                f"{best:.1f}",
                " / ".join(per_size) if len(per_size) > 1 else "",
                str(paper) if paper is not None else "",
                paired_difference(study, runs, line),
            ]
        )
    header = [
        "line",
        "accuracy",
        "seeds",
        "best round",
        sizes_title(runs),
        "the paper",
        "paired difference (95 %)",
    ]
    return _table(header, rows)


def inco_table2_curves() -> str:
    """Return the accuracy at equal rounds, beside the authors' own curves."""
    runs = load_runs("inco-table2")
    rows = []
    for line, own in runs.items():
        means = []
        for milestone in MILESTONES:
            values = [window_mean(run, until=milestone) for run in own.values()]
            means.append(f"{sum(values) / len(values):.1f}")
        rows.append([line, *means])
        if line in AUTHORS_CURVES:
            rows.append([f"{line}, the authors' curve", *AUTHORS_CURVES[line]])
    return _table(["round", *(str(milestone) for milestone in MILESTONES)], rows)


def evaluation_precision() -> str:
    """Return one checkpoint's accuracy in three precisions."""
    measured = json.loads((RESULTS / "evaluation-precision.json").read_text(encoding="utf-8"))
    rows = []
    for name, scores in measured["accuracy"].items():
        state, how = name.split(", ")
        rows.append([state, how, *(f"{100 * score:.1f}" for score in scores.values())])
    sizes = list(next(iter(measured["accuracy"].values())))
    return _table(["state", "evaluated in", *sizes], rows)


def robust(study: str, prefix: str = "") -> str:
    """Return the accuracy of every defence against every attack, for cases that begin with `prefix`."""
    kept = json.loads((RESULTS / "robust.json").read_text(encoding="utf-8"))[study]
    cases = [case for case in kept if case.startswith(prefix)]
    rows = []
    for line in kept[cases[0]]:
        cells = []
        for case in cases:
            runs = list(kept[case].get(line, {}).values())
            ended = [number for number in runs if number is not None]
            cell = str(spread(ended)) if ended else ""
            if len(ended) < len(runs):
                cell += f" ({len(runs) - len(ended)} of {len(runs)} stop)"
            cells.append(cell.strip())
        if any(cells):
            rows.append([line, *cells])
    return _table(["defence", *(case.removeprefix(prefix) for case in cases)], rows)


#: The studies whose short runs are on the page of the new methods. They are in results/short.
SHORT_STUDIES = ("fedimpro-table10", "fedin-table1", "unrelated")


def new_methods() -> str:
    """Return the accuracy of the methods that were added last, in short runs, beside the papers'."""
    rows = []
    for name in SHORT_STUDIES:
        study = find_study(name)
        cases = [case.name for case in study.cases]
        papers = {line.name: line.paper for line in study.methods}
        for method, runs in load_runs(f"short/{name}").items():
            for seed, run in runs.items():
                numbers = papers[method].get(run["data"], [])
                paper = str(numbers[cases.index(run["case"])]) if numbers else ""
                *_, previous, last = (100 * accuracy for accuracy in run["accuracy"]["mean"])
                best = 100 * max(run["accuracy"]["mean"])
                accuracies = [f"{accuracy:.1f}" for accuracy in (previous, last, best)]
                length = str(run["rounds"][-1])
                rows.append([name, method, str(seed), length, *accuracies, paper])
    before = "evaluation before the last"
    header = ["study", "line", "seed", "rounds", before, "last round", "best", "the paper"]
    return _table(header, rows)


def beyond() -> str:
    """Return the accuracy of every recipe that was tried, the best first."""
    rows = []
    for line, runs in load_runs("beyond").items():
        own = list(runs.values())
        means = spread([window_mean(run) for run in own])
        sizes = [size for size in own[0]["accuracy"] if size != "mean"]
        per_size = []
        for size in sizes:
            values = [window_mean(run, size) for run in own]
            per_size.append(f"{sum(values) / len(values):.1f}")
        best = sum(100 * max(run["accuracy"]["mean"]) for run in own) / len(own)
        rows.append([line, str(means), f"{len(own)}", f"{best:.1f}", " / ".join(per_size)])
    rows.sort(key=lambda row: row[1], reverse=True)
    return _table(["recipe", "accuracy", "seeds", "best evaluation", "sizes 10/14/18/22/26"], rows)


#: Lines of InCo's Table 2 in the README's table: the paper's name, and what it is.
FRONT_LINES = {
    "HeteroProx": "layers shared, FedProx (HeteroProx)",
    "InCoProx": "the paper's best line: InCo on top (InCoProx)",
    "MotleyProx": "statistics per size and an EMA instead of InCo (MotleyProx)",
}


def front() -> str:
    """Return the README's table: the best of InCo's Table 2 in the paper, the same lines here, and our best recipe."""
    runs = load_runs("inco-table2")
    study = load_study(str(ROOT / "campaign" / "inco-table2.toml"))
    papers = {line.name: line.paper.get("cifar10", [None])[0] for line in study.methods}
    rows = []
    for line, words in FRONT_LINES.items():
        paper = "" if papers[line] is None else str(papers[line])
        rows.append([words, paper, *_accuracy_and_seconds(runs[line])])
    recipes = {}
    for line, own in load_runs("beyond").items():
        if all(is_recipe(run["config"]) for run in own.values()):
            recipes[line] = own

    def accuracy(line: str) -> float:
        return fmean(window_mean(run) for run in recipes[line].values())

    best = max(recipes, key=accuracy)
    words = f"our best recipe so far: SGD, statistics per size, {best}"
    rows.append([words, "", *_accuracy_and_seconds(recipes[best])])
    return _table(["CIFAR-10, five ResNets, 500 rounds", "paper", "here", "seconds per run"], rows)


def is_recipe(config: Mapping[str, Any]) -> bool:
    """Tell whether a run's accuracy can stand beside the papers': at their communication, on their data.

    Not so the ceiling (one client), runs of another number of rounds, and those with public images.
    """
    own_images = config.get("public", {"name": "none"})["name"] == "none"
    rounds, clients = config["training"]["rounds"], config["federation"]["clients"]
    return own_images and rounds == 500 and clients == 100


def _accuracy_and_seconds(runs: Runs) -> list[str]:
    # A run that was cut off and continued has no seconds.
    seconds = sorted(run["seconds"] for run in runs.values() if run["seconds"] is not None)
    median = f"{seconds[len(seconds) // 2]:.0f}" if seconds else ""
    return [str(spread([window_mean(run) for run in runs.values()])), median]


#: Evaluations in a reported mean of the natural data sets, whose runs have 10 to 20 of them.
NATURAL_WINDOW = 3


def natural_mean(run: Mapping[str, Any], size: str = "mean") -> float:
    """Return the mean accuracy in percent over the last evaluations of a run."""
    chosen = run["accuracy"][size][-NATURAL_WINDOW:]
    return 100 * sum(chosen) / len(chosen)


def natural(study_name: str, data: str = "", case: str = "") -> str:
    """Return a natural data set's table: all test examples, and the spread over clients."""
    study = load_study(str(ROOT / "campaign" / f"{study_name}.toml"))
    runs = load_runs(study_name, data, case)
    with_paper = any(data in line.paper for line in study.methods)
    rows = []
    for line in study.methods:
        if line.name not in runs:
            continue
        own = list(runs[line.name].values())
        sizes = [size for size in own[0]["accuracy"] if size != "mean"]
        per_size = []
        for size in sizes:
            values = [natural_mean(run, size) for run in own]
            per_size.append(f"{sum(values) / len(values):.1f}")
        row = [line.name, str(spread([natural_mean(run) for run in own])), str(len(own))]
        row.append(" / ".join(per_size) if len(sizes) > 1 else "")
        for key in ("mean", "std", "worst_tenth"):
            row.append(_client_mean(own, key))
        row.append(_natural_difference(runs, line.name, line.against))
        if with_paper:
            paper = line.paper.get(data, ())
            row.append(str(paper[0]) if paper and paper[0] is not None else "")
        rows.append(row)
    header = [
        "line",
        "accuracy",
        "seeds",
        "per size",
        "clients: mean",
        "spread",
        "worst tenth",
        "paired difference (95 %)",
    ]
    return _table([*header, "FLamby"] if with_paper else header, rows)


def _client_mean(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return a number about clients' own scores in percent, as the mean over runs that have it."""
    values = []
    for run in runs:
        value = run.get("client_scores", {}).get(key)
        if value is not None:
            values.append(100 * value)
    return f"{sum(values) / len(values):.1f}" if values else ""


def _natural_difference(runs: Mapping[str, Runs], line: str, baseline: str) -> str:
    if baseline not in runs:
        return ""
    seeds = [seed for seed in runs[line] if seed in runs[baseline]]
    ours = [natural_mean(runs[line][seed]) for seed in seeds]
    theirs = [natural_mean(runs[baseline][seed]) for seed in seeds]
    difference = paired(ours, theirs)
    return "" if difference is None else f"{difference} vs {baseline}"


def natural_curves(study_name: str, data: str = "", case: str = "") -> str:
    """Return the accuracy of a study's lines at a few rounds, as means over seeds."""
    runs = load_runs(study_name, data, case)
    study = load_study(str(ROOT / "campaign" / f"{study_name}.toml"))
    rows = []
    # About six rounds of the line with the most evaluations, the last one included.
    evaluated: list[int] = []
    for own_runs in runs.values():
        for run in own_runs.values():
            evaluated = max(evaluated, run["rounds"], key=len)
    milestones = evaluated[::-1][:: max(1, len(evaluated) // 6)][::-1]
    for line in study.methods:
        if line.name not in runs:
            continue
        own = list(runs[line.name].values())
        rounds = own[0]["rounds"]
        means = []
        for milestone in milestones:
            # A line may have other rounds: training alone, for example.
            if milestone not in rounds:
                means.append("")
                continue
            values = [100 * run["accuracy"]["mean"][rounds.index(milestone)] for run in own]
            means.append(f"{sum(values) / len(values):.1f}")
        if any(means):
            rows.append([line.name, *means])
    return _table(["round", *(str(milestone) for milestone in milestones)], rows)


#: The line of the unseen writers' table that the others are compared with.
UNSEEN_BASELINE = "FedAvg, layers shared"


def unseen_writers() -> str:
    """Return the scores of writers who did not train (campaign/unseen.py), as means over the sizes."""
    file = RESULTS / "natural-writers" / "unseen.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    runs = load_runs("natural-writers")

    def score(line: str, seed: str, key: str) -> float:
        return 100 * fmean(by_size[key] for by_size in kept[line][seed].values())

    rows = []
    for line, by_seed in kept.items():
        means = [score(line, seed, "mean") for seed in by_seed]
        worst = [score(line, seed, "worst_tenth") for seed in by_seed]
        own = _client_mean([runs[line][int(seed)] for seed in by_seed], "mean")
        difference = ""
        if line != UNSEEN_BASELINE:
            theirs = [score(UNSEEN_BASELINE, seed, "mean") for seed in by_seed]
            difference = f"{paired(means, theirs)} vs {UNSEEN_BASELINE}"
        rows.append(
            [line, str(spread(means)), str(spread(worst)), own, str(len(means)), difference]
        )
    header = [
        "line",
        "unseen writers",
        "worst tenth of them",
        "the training writers' own held-out digits",
        "seeds",
        "paired difference (95 %)",
    ]
    return _table(header, rows)


def shakespeare_baselines() -> str:
    """Return the accuracy of tables of counts (campaign/baselines.py)."""
    file = RESULTS / "natural-shakespeare-cpu" / "baselines.json"
    accuracies = json.loads(file.read_text(encoding="utf-8"))["accuracy"]
    rows = [[name, f"{100 * accuracy:.1f}"] for name, accuracy in accuracies.items()]
    return _table(["prediction without a network", "accuracy"], rows)


#: Name of a drawn part -> its page, relative to docs/results, and the function that draws it.
DRAWN: dict[str, tuple[str, Callable[[], str]]] = {
    "front": ("../../README.md", front),
    "inco-table2": ("inco-table2.md", partial(study_table, "inco-table2")),
    "inco-table2-curves": ("inco-table2.md", inco_table2_curves),
    "inco-fashion-skewed": (
        "inco-fashion.md",
        partial(study_table, "inco-fashion", "fashion-mnist", "skewed labels"),
    ),
    "inco-fashion-iid": (
        "inco-fashion.md",
        partial(study_table, "inco-fashion", "fashion-mnist", "IID labels"),
    ),
    "inco-splits": ("inco-splits.md", partial(study_table, "inco-splits", case="alpha 0.5")),
    "inco-readings": ("inco-splits.md", partial(study_table, "inco-readings")),
    "fedin-table1": ("fedin-table1.md", partial(study_table, "fedin-table1", case="Non-IID")),
    "fedin-readings": ("fedin-table1.md", partial(study_table, "fedin-readings")),
    "fedimpro-table1": (
        "fedimpro-table1.md",
        partial(study_table, "fedimpro-table1", case="a=0.1, E=1, M=10"),
    ),
    "fedimpro-cifar100": (
        "fedimpro-table1.md",
        partial(study_table, "fedimpro-table1", "cifar100", "a=0.1, E=1, M=10"),
    ),
    "precision": ("training-precision.md", partial(study_table, "precision")),
    "new-methods": ("new-methods.md", new_methods),
    "beyond": ("beyond.md", beyond),
    "natural-har": ("natural.md", partial(natural, "natural-har")),
    "natural-har-curves": ("natural.md", partial(natural_curves, "natural-har")),
    "natural-writers": ("natural.md", partial(natural, "natural-writers")),
    "natural-writers-curves": ("natural.md", partial(natural_curves, "natural-writers")),
    "natural-unseen": ("natural.md", unseen_writers),
    "natural-heart-own": ("natural.md", partial(natural, "natural-heart-flamby", "heart")),
    "natural-heart-pooled": (
        "natural.md",
        partial(natural, "natural-heart-flamby", "heart-pooled"),
    ),
    "natural-heart": ("natural.md", partial(natural, "natural-heart")),
    "natural-heart-curves": ("natural.md", partial(natural_curves, "natural-heart")),
    "natural-shakespeare-baselines": ("natural.md", shakespeare_baselines),
    "natural-lstm": ("natural.md", partial(natural, "natural-shakespeare-cpu", case="LSTM")),
    "natural-lstm-curves": (
        "natural.md",
        partial(natural_curves, "natural-shakespeare-cpu", case="LSTM"),
    ),
    "natural-transformer": (
        "natural.md",
        partial(natural, "natural-shakespeare-cpu", case="Transformer"),
    ),
    "natural-transformer-curves": (
        "natural.md",
        partial(natural_curves, "natural-shakespeare-cpu", case="Transformer"),
    ),
    "robust-equal": ("robust.md", partial(robust, "robust-equal")),
    "robust-depth": ("robust.md", partial(robust, "robust-parts", "depth, ")),
    "robust-width": ("robust.md", partial(robust, "robust-parts", "width, ")),
    "evaluation-precision": ("evaluation-precision.md", evaluation_precision),
}


def redraw(text: str, name: str, table: str) -> str:
    """Replace one drawn part of a page."""
    begin, end = f"<!-- drawn: {name} -->", f"<!-- end of {name} -->"
    if begin not in text or end not in text:
        raise SystemExit(
            f"there are results for {name!r}, and its page has no place for them: put {begin} and "
            f"{end} where the table belongs"
        )
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda match: f"{begin}\n{table}\n{end}", text, flags=re.DOTALL)


def stale_pages(write: bool) -> list[str]:
    """Return the pages whose drawn parts differ from the results; bring them up to date if asked.

    A part without results is not expected on its page yet.
    """
    pages: dict[str, str] = {}
    for name, (page, draw) in DRAWN.items():
        table = draw()
        if not table:
            continue
        if not (PAGES / page).exists():
            raise SystemExit(f"there are results for {name!r}, and no page docs/results/{page} yet")
        before = pages.get(page) or (PAGES / page).read_text(encoding="utf-8")
        pages[page] = redraw(before, name, table)
    stale = []
    for page, text in pages.items():
        if text != (PAGES / page).read_text(encoding="utf-8"):
            stale.append(page)
            if write:
                (PAGES / page).write_text(text, encoding="utf-8")
    return stale


def main() -> None:
    """Draw all pages, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a page is out of date"
    )
    check = parser.parse_args().check
    stale = stale_pages(write=not check)
    for page in stale:
        name = (PAGES / page).resolve().relative_to(ROOT)
        print(f"{name}: {'out of date' if check else 'drawn'}")
    if check and stale:
        sys.exit(1)


if __name__ == "__main__":
    main()
