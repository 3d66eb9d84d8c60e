"""Uploads in 16 bits: half the bytes, and what rounding takes away comes with the next upload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from motley.client.encoding import TYPES, Encoding, decoded, encoded
from motley.core.errors import MotleyError
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.metrics import MetricsLog
from motley.runs.run import resume_run, start_run
from tests.conftest import refused, tiny_config

ENCODINGS: tuple[Encoding, ...] = ("fp16", "bf16")
QUIET = "run.tensorboard=false"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_errors_do_not_add_up(encoding: Encoding) -> None:
    """The sum of what was read tracks the sum of true changes within one rounding, however many rounds there are."""
    numbers = torch.Generator().manual_seed(1)
    true, read, plain, memory = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000), State()
    errors, without = [], []
    for _ in range(200):
        change = 1e-3 * (1 + 0.1 * torch.randn(1000, generator=numbers))
        wire, memory = encoded({"w": change}, memory, encoding)
        true = true + change.double()
        read = read + decoded(wire, {"w": change}, encoding)["w"].double()
        plain = plain + change.to(TYPES[encoding]).double()
        errors.append(float((true - read).abs().max()))
        without.append(float((true - plain).abs().max()))
    one = 2e-3 * torch.finfo(TYPES[encoding]).eps
    assert max(errors) <= one, "never more than the rounding of one upload"
    assert without[-1] > 3 * one, "which is not so without feedback"


def test_small_changes_are_not_lost() -> None:
    """A tenth of the smallest number that fp16 knows arrives after enough rounds."""
    tiny, memory, read = torch.full((3,), 6e-9), State(), torch.zeros(3)
    for _ in range(100):
        wire, memory = encoded({"w": tiny}, memory, "fp16")
        read += wire["w"].float()
    torch.testing.assert_close(read, torch.full((3,), 6e-7), rtol=0.1, atol=0)


def test_integers_and_odd_types_stay_as_they_are() -> None:
    change = {"n": torch.tensor(3), "w": torch.ones(2), "d": torch.ones(2, dtype=torch.float64)}
    wire, residual = encoded(change, {}, "bf16")
    assert {name: tensor.dtype for name, tensor in wire.items()} == {
        "n": torch.int64,
        "w": torch.bfloat16,
        "d": torch.float64,
    }
    assert list(residual) == ["residual/w"]
    back = decoded(
        {**wire, "x": torch.ones(1).bfloat16(), "d": torch.ones(2).bfloat16()}, change, "bf16"
    )
    assert back["w"].dtype == torch.float32
    assert back["x"].dtype == back["d"].dtype == torch.bfloat16, (
        "what does not belong there is left to be refused"
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_halve_and_the_run_learns_the_same(tmp_path: Path, encoding: Encoding) -> None:
    lines = {}
    for name in ("fp32", encoding):
        start_run(tiny_config(f"uplink.dtype={name}", QUIET), tmp_path / name)
        lines[name] = MetricsLog(tmp_path / name / "metrics.jsonl").read()
    for whole, half in zip(lines["fp32"], lines[encoding], strict=True):
        assert whole["bytes"]["down"] == half["bytes"]["down"]
        assert 0.5 <= half["bytes"]["up"] / whole["bytes"]["up"] < 0.51, (
            "but for the counters of batch norm"
        )
        assert "refused" not in half
    assert lines["fp32"][0]["train_loss"] == lines[encoding][0]["train_loss"]
    assert lines["fp32"][-1]["train_loss"] == pytest.approx(
        lines[encoding][-1]["train_loss"], rel=0.1
    )


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_resumed_run_remembers_what_rounding_took(tmp_path: Path, method: str) -> None:
    """Client memory of a method's own is beside it, and is none of the method's business."""
    settings = ("uplink.dtype=fp16", f"method.name={method}", QUIET)
    _, whole = start_run(tiny_config(*settings), tmp_path / "whole")
    start_run(tiny_config(*settings, "training.rounds=2"), tmp_path / "half")
    file = tmp_path / "half" / "config.toml"
    file.write_text(file.read_text().replace("rounds = 2\n", "rounds = 3\n"))
    _, resumed = resume_run(tmp_path / "half")
    assert fingerprint(resumed.state) == fingerprint(whole.state)
    _, plain = start_run(tiny_config(f"method.name={method}", QUIET), tmp_path / "plain")
    assert fingerprint(plain.state) != fingerprint(whole.state)


def test_an_upload_that_was_not_taken_leaves_no_residual() -> None:
    federation = Federation(tiny_config("uplink.dtype=fp16"))
    server = federation.initial_state()
    job = federation.jobs(server)[0]

    def upload(round_number: int, remembers: int | None) -> str:
        sent = replace(job, round_number=round_number, client_state_round=remembers)
        (answer,) = federation.engine.train([sent], lambda client: None)
        assert isinstance(answer, ClientUpdate)
        return fingerprint(answer.delta)

    upload(1, None)
    fresh, after_one = upload(2, None), upload(2, 1)
    assert fresh != after_one
    upload(2, 1)
    assert upload(3, 1) != upload(3, 2)
    assert upload(2, None) == fresh


@pytest.mark.parametrize("moving", ["split.channels=rolling", "federation.size_assignment=dynamic"])
def test_parts_that_move_are_refused(moving: str) -> None:
    width = ("split.name=width", "model.sizes=['resnet10']", "split.rates=[0.5,1.0]")
    with pytest.raises(
        MotleyError, match=r"uplink.dtype = 'fp16': clients keep the rounding errors"
    ):
        Federation(tiny_config("uplink.dtype=fp16", *width, moving))


def test_other_encodings_are_named() -> None:
    assert (
        refused("uplink.dtype=int8") == "uplink.dtype = 'int8': should be 'fp32', 'fp16' or 'bf16'."
    )
