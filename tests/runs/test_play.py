"""The run loop where evaluations are late: on a GPU a round may be counted while the next one trains."""

from __future__ import annotations

import pytest

from motley.evaluate import Evaluation
from motley.federation import Federation
from motley.runs.play import Callback, play
from motley.server.record import RoundRecord
from motley.server.state import ServerState
from tests.conftest import tiny_config


class Watch(Callback):
    """Notes what it sees, and may interrupt at a client of a round."""

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


def played(watch: Watch) -> Watch:
    federation = Federation(tiny_config("training.rounds=3"))
    play(federation, federation.initial_state(), [watch])
    return watch


@pytest.mark.parametrize("ready", [True, False])
def test_every_round_is_seen_once_in_order_and_with_its_scores(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = played(Watch())
    monkeypatch.setattr(Evaluation, "ready", property(lambda self: ready))
    late = played(Watch())
    assert late.seen == wanted.seen == [("round", 1), ("round", 2), ("round", 3), ("stop", 3)]
    assert late.scores == wanted.scores and all(late.scores)


def test_an_interruption_keeps_the_round_whose_evaluation_was_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluation, "ready", property(lambda self: False))
    a_round = len(Federation(tiny_config()).sample(1))
    watch = Watch(interrupt_after=2 * a_round + 1)
    with pytest.raises(KeyboardInterrupt):
        played(watch)
    assert watch.seen == [("round", 1), ("round", 2), ("stop", 2)]


def test_a_late_round_is_seen_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def ready(self: Evaluation) -> bool:
        asked.append(True)
        return len(asked) > 1  # not when the round is over, but when the next one's first client is done

    monkeypatch.setattr(Evaluation, "ready", property(ready))
    seen_before: list[int] = []

    class Order(Watch):
        def on_client(self, client: int) -> None:
            super().on_client(client)
            seen_before.append(len(self.seen))

    played(Order())
    a_round = len(Federation(tiny_config()).sample(1))
    assert seen_before[:a_round] == [0] * a_round and seen_before[a_round] == 1
