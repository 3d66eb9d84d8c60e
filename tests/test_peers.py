"""The comparisons with other libraries: Motley and the control do the same work, and the page shows what was measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.peers.baselines import by_hand, motley
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
