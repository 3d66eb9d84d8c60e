"""Late evaluations: on a GPU, a round may still be evaluated while the next one trains."""

from __future__ import annotations

import pytest

from motley.evaluate import Evaluation
from motley.federation import Federation
from motley.runs.callbacks import Callback
from motley.runs.run import run_rounds
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import tiny_config


class Recorder(Callback):
    """Records the events, and interrupts the run after a number of clients."""

    def __init__(self, interrupt_after: int = 10**9) -> None:
        self.seen: list[tuple[str, int]] = []
        self.scores: list[dict[str, float]] = []
        self.clients = 0
        self.interrupt_after = interrupt_after

    def on_client(self, client: int) -> None:
        self.clients += 1
        if self.clients > self.interrupt_after:
            raise KeyboardInterrupt

    def on_round(self, server: ServerState, record: RoundRecord) -> None:
        assert server.round_number == record.round_number
        self.seen.append(("round", record.round_number))
        self.scores.append({size: score.accuracy for size, score in record.scores.items()})

    def on_stop(self, server: ServerState) -> None:
        self.seen.append(("stop", server.round_number))


def run_with(recorder: Recorder) -> Recorder:
    federation = Federation(tiny_config("training.rounds=3"))
    run_rounds(federation, federation.initial_state(), [recorder])
    return recorder


@pytest.mark.parametrize("ready", [True, False])
def test_every_round_is_seen_once_in_order_and_with_its_scores(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_with(Recorder())
    monkeypatch.setattr(Evaluation, "ready", property(lambda self: ready))
    late = run_with(Recorder())
    assert late.seen == expected.seen == [("round", 1), ("round", 2), ("round", 3), ("stop", 3)]
    assert late.scores == expected.scores and all(late.scores)


def test_an_interruption_keeps_the_round_whose_evaluation_was_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Evaluation, "ready", property(lambda self: False))
    clients_per_round = len(Federation(tiny_config()).sample(1))
    recorder = Recorder(interrupt_after=2 * clients_per_round + 1)
    with pytest.raises(KeyboardInterrupt):
        run_with(recorder)
    assert recorder.seen == [("round", 1), ("round", 2), ("stop", 2)]


def test_a_late_round_is_delivered_as_soon_as_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def ready(self: Evaluation) -> bool:
        nonlocal calls
        calls += 1
        # Not ready when the round ends, but when the first client of the next round has finished.
        return calls > 1

    monkeypatch.setattr(Evaluation, "ready", property(ready))
    seen_before: list[int] = []

    class Order(Recorder):
        def on_client(self, client: int) -> None:
            super().on_client(client)
            seen_before.append(len(self.seen))

    run_with(Order())
    clients_per_round = len(Federation(tiny_config()).sample(1))
    assert seen_before[:clients_per_round] == [0] * clients_per_round
    assert seen_before[clients_per_round] == 1
