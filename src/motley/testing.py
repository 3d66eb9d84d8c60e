"""Tests for users' own methods: the promises that every method of Motley keeps."""

from __future__ import annotations

from typing import Any

import torch

from motley.core.part import State
from motley.federation import Federation
from motley.methods import Method
from motley.server.state import ServerState
from motley.settings import Configured


def check_method(method: type[Method] | Configured | str, **arguments: Any) -> None:
    """Check a method on a small federation, and raise AssertionError if it breaks a promise.

    - Its `requirements` agree with the hooks it overrides (else MotleyError).
    - The same round from the same state gives the same bits: a method's memory is in the
      client state and in the server state, and nowhere else. So runs can be resumed, and rounds
      repeated.
    - The debug engine, which builds everything anew for every client, and the local engine, which
      uses models and optimizers again, give the same bits.
    - No update is rejected, and the global state stays finite.

    The federation has clients of two sizes and trains for three rounds on a CPU. `arguments` are
    passed to `motley.Federation`, such as `models` or `settings`, if the method needs others.
    """
    federations = {engine: _federation(method, engine, arguments) for engine in ("debug", "local")}
    states = {}
    for engine, federation in federations.items():
        server = federation.initial_state()
        for _ in range(3):
            after, record = federation.run_round(server)
            if record.refused:
                client, reason = next(iter(record.refused.items()))
                raise AssertionError(f"round {after.round_number}: client {client}: {reason}")
            again, _ = federation.run_round(server)
            _require_equal(
                after,
                again,
                f"round {after.round_number}, run twice from the same state ({engine} engine)",
            )
            server = after
        federation.end_workers()
        states[engine] = server
    _require_equal(states["debug"], states["local"], "the debug engine and the local engine")
    for name, tensor in states["local"].state.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise AssertionError(f"{name!r} has values that are not finite after three rounds.")


def _federation(
    method: type[Method] | Configured | str, engine: str, arguments: dict[str, Any]
) -> Federation:
    defaults: dict[str, Any] = {
        "models": ["mlp1", "mlp2"],
        "data": "digits",
        "clients": 6,
        "clients_per_round": 4,
        "training": {"rounds": 3, "steps": 3, "batch_size": 16},
        "settings": {"engine": {"device": "cpu"}},
    }
    return Federation(method=method, engine=engine, **{**defaults, **arguments})


def _require_equal(one: ServerState, other: ServerState, what: str) -> None:
    _require_equal_states(one.state, other.state, what, "the global state")
    _require_equal_states(one.method_state, other.method_state, what, "the method's server state")


def _require_equal_states(one: State, other: State, what: str, where: str) -> None:
    for name in (*one, *other):
        if name not in one or name not in other:
            raise AssertionError(f"{what}: {where} has {name!r} in one of the two only.")
        if not torch.equal(one[name], other[name]):
            raise AssertionError(f"{what}: {where} differs, first in {name!r}.")
