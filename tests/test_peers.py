"""The comparisons with other libraries: Motley and the control do the same work, and the page shows what was measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.peers.baselines import by_hand, motley
from benchmarks.peers.compare import (
    Contender,
    busy_seconds,
    for_gpu,
    seconds_of_children,
    standard_contenders,
)
from benchmarks.peers.draw import RESULTS, Comparison, gpu_tables, read, was_busy
from benchmarks.peers.federation import MLP, RESNET, ROOT, Workload, clients_of_round, rows_of
from motley.server.sampling import ClientSampler

#: With one batch per epoch, the order of the examples makes no difference.
FULL_BATCH = replace(
    MLP, clients=8, clients_per_round=3, examples_per_client=40, batch_size=40, lr=0.5
)


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2}, {"vmap_clients": 3}], ids=str)
def test_motley_does_the_steps_of_the_control(options: dict[str, int]) -> None:
    rounds = 40
    control, outcome = by_hand(FULL_BATCH, rounds), motley(FULL_BATCH, rounds, **options)
    assert control.steps == outcome.steps == rounds * FULL_BATCH.steps_per_round
    assert len(control.ends) == len(outcome.ends) == rounds
    assert control.accuracy > 0.5
    assert abs(control.accuracy - outcome.accuracy) < 0.01


@pytest.mark.parametrize("workload", [MLP, RESNET], ids=lambda workload: workload.name)
def test_clients_are_disjoint_and_sampled_as_motley_samples_them(workload: Workload) -> None:
    rows = [row for client in range(workload.clients) for row in rows_of(workload, client)]
    assert len(set(rows)) == workload.clients * workload.examples_per_client
    sampler = ClientSampler(workload.clients, workload.clients_per_round, seed=1, rule="fedml")
    for round_number in range(1, 6):
        assert clients_of_round(workload, round_number) == sampler(round_number)


def test_the_page_agrees_with_the_results() -> None:
    command = [sys.executable, "-m", "benchmarks.peers.draw", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("others", "busy"), [(0.02, False), (0.3, True), (None, True)])
def test_a_page_says_whether_other_programs_were_running(others: float | None, busy: bool) -> None:
    quiet = Comparison("one", {"others, cores": 0.0}, [])
    assert was_busy([quiet, Comparison("other", {"others, cores": others}, [])]) == busy


def test_the_processor_time_of_others_is_noticed() -> None:
    before = busy_seconds()
    if before is None:
        pytest.skip("the system does not tell how busy it is")
    own_before = seconds_of_children()
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    busy_after = busy_seconds()
    assert busy_after is not None
    # The process is this one's child, so both measures contain it. A tick is 0.01 s long.
    assert seconds_of_children() - own_before >= 0.5
    assert busy_after - before >= 0.45


def test_on_a_gpu_every_library_runs_once_and_motley_in_two_settings() -> None:
    peers = [Contender("peer", by_hand, "1 process"), Contender("peer", by_hand, "2", processes=2)]
    names = [contender.name for contender in for_gpu([*standard_contenders(), *peers], MLP)]
    assert names == [
        "by hand, 1 thread",
        "peer, 1 process",
        "Motley, default",
        "Motley, vmap_clients=50",
    ]


def test_results_of_a_gpu_have_tables_of_their_own() -> None:
    assert gpu_tables([]) == ["Not measured yet."]
    text = "\n".join(gpu_tables(read(RESULTS)))
    for part in (MLP.title, RESNET.title, "pfl-research", "vmap_clients=50", "by hand"):
        assert part in text
