"""Every way to run clients gives the same result, bit for bit on a CPU."""

from __future__ import annotations

import pytest
import torch

from motley.client.job import Job
from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.runs.run import run_rounds
from tests.conftest import tiny_config

AUGMENTED = ("data.transform.crop_padding=1", "data.transform.flip=true", "data.transform.cutout=2")
REGULARIZED = (
    "data.transform.rotate=20",
    "data.transform.jitter=0.2",
    "training.mixup=0.3",
    "training.label_smoothing=0.1",
    "training.logit_adjustment=1",
)


def final_hashes(*overrides: str) -> tuple[str, str]:
    federation = Federation(tiny_config("training.rounds=2", *overrides))
    server = run_rounds(federation, federation.initial_state(), [])
    return fingerprint(server.state), fingerprint(server.method_state)


@pytest.mark.parametrize("method", ["fedavg", "noisy", "every-hook"])
@pytest.mark.parametrize(
    "more",
    [
        (),
        AUGMENTED,
        REGULARIZED,
        ("training.optimizer.name=sgd", "training.optimizer.momentum=0.9"),
    ],
)
def test_one_slot_several_slots_and_debug_agree(method: str, more: tuple[str, ...]) -> None:
    settings = (f"method.name={method}", *more)
    plain = final_hashes("engine.name=debug", *settings)
    assert final_hashes("engine.slots=1", *settings) == plain
    assert final_hashes("engine.slots=3", *settings) == plain


def test_messages_that_change_shape_and_back() -> None:
    settings = ("method.name=alternating", "training.rounds=4", "training.steps=2")
    plain = final_hashes("engine.name=debug", *settings)
    assert final_hashes("engine.slots=2", *settings) == plain


def test_a_seed_changes_the_result() -> None:
    assert final_hashes("seed=2") != final_hashes("seed=1")


def test_training_leaves_the_callers_generator_alone() -> None:
    federation = Federation(tiny_config("method.name=noisy"))
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    federation.run_round(federation.initial_state())
    assert torch.equal(torch.rand(3), expected)


def test_a_round_changes_nothing_in_place() -> None:
    federation = Federation(tiny_config("method.name=every-hook", "server.ema_decay=0.9"))
    first, _ = federation.run_round(federation.initial_state())
    before = fingerprint(first.state), fingerprint(first.method_state), fingerprint(first.ema or {})
    federation.run_round(first)
    assert (
        fingerprint(first.state),
        fingerprint(first.method_state),
        fingerprint(first.ema or {}),
    ) == before


def test_jobs_do_not_depend_on_company_or_order() -> None:
    federation = Federation(tiny_config("method.name=noisy"))
    server = federation.initial_state()
    jobs = [federation.job(server, 1, client) for client in range(6)]
    together = {
        upload.client: upload for upload in federation.engine.train(jobs, lambda client: None)
    }
    for job in reversed(jobs):
        (alone,) = federation.engine.train([job], lambda client: None)
        assert fingerprint(alone.delta) == fingerprint(together[job.client].delta)
        assert alone.loss == together[job.client].loss


def test_uploads_come_in_the_order_of_ids_and_done_is_called_for_each() -> None:
    federation = Federation(tiny_config("engine.slots=2"))
    server = federation.initial_state()
    finished: list[int] = []
    jobs = [federation.job(server, 1, client) for client in (5, 0, 3)]
    uploads = federation.engine.train(jobs, finished.append)
    assert [upload.client for upload in uploads] == [0, 3, 5]
    assert sorted(finished) == [0, 3, 5]


@pytest.mark.parametrize("engine", ["local", "debug"])
def test_a_client_learns_what_a_hand_written_loop_learns(engine: str) -> None:
    """One client of plain FedAvg against a loop that uses none of the engine's code."""
    config = tiny_config(f"engine.name={engine}", "training.epochs=2", "data.transform.resize=8")
    federation = Federation(config)
    server = federation.initial_state()
    job = federation.job(server, 1, 0)
    (upload,) = federation.engine.train([job], lambda client: None)

    model = federation.split.build(job.size).train()
    model.load_state_dict({name: tensor.clone() for name, tensor in job.state.items()})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    images = torch.from_numpy(federation.dataset.train.inputs).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(federation.dataset.train.targets)
    plan = federation.engine.clients.plan(job)  # type: ignore[attr-defined]
    losses = []
    for step, length in enumerate(plan.lengths):
        rows = plan.rows[step, :length]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert upload.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    for name, tensor in model.state_dict().items():
        assert torch.allclose(
            (tensor - job.state[name]).float(), upload.delta[name].float(), rtol=1e-4, atol=1e-6
        )


def test_a_client_without_a_batch_is_left_out() -> None:
    federation = Federation(tiny_config())
    server = federation.initial_state()
    job = federation.job(server, 1, 0)
    partition = federation.partition
    clients = federation.engine.clients  # type: ignore[attr-defined]
    first = partition.of(0)[:1]
    offsets = torch.tensor([0, 1, *(partition.offsets[2:] - partition.offsets[1] + 1)]).numpy()
    lonely = type(partition)(
        torch.cat(
            [torch.from_numpy(a) for a in (first, partition.indices[partition.offsets[1] :])]
        ).numpy(),
        offsets,
    )
    clients.partition = lonely
    assert len(lonely.of(0)) == 1
    uploads = federation.engine.train([job, federation.job(server, 1, 3)], lambda client: None)
    assert [upload.client for upload in uploads] == [3]


def test_a_room_is_found_again_whatever_the_order_of_names() -> None:
    clients = Federation(tiny_config()).engine.clients  # type: ignore[attr-defined]
    learner = clients.learner("resnet10")
    memory = {"a": torch.zeros(2), "b": torch.zeros(3)}
    learner.hold({}, memory)
    room = learner.client_state
    learner.hold({}, dict(reversed(memory.items())))
    assert learner.client_state is room
    learner.hold({}, {"a": torch.zeros(3), "b": torch.zeros(3)})
    assert learner.client_state is not room


def test_an_interrupted_round_leaves_no_slot_busy() -> None:
    federation = Federation(tiny_config("engine.slots=2"))
    server = federation.initial_state()

    def stop(client: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        federation.run_round(server, stop)
    again, _ = federation.run_round(server)
    fresh = Federation(tiny_config("engine.slots=2"))
    expected, _ = fresh.run_round(fresh.initial_state())
    assert fingerprint(again.state) == fingerprint(expected.state)


def test_collect_sees_every_example_once_without_augmentation() -> None:
    federation = Federation(tiny_config("method.name=every-hook", "training.steps=1", *AUGMENTED))
    server = federation.initial_state()
    clients = federation.engine.clients  # type: ignore[attr-defined]
    federation.method.client.collect = lambda learner, batches: {
        "labels": torch.cat([y for _, y in batches])
    }  # type: ignore[method-assign]
    job: Job = federation.job(server, 1, 2)
    (collection,) = federation.engine.collect([job])
    expected = federation.dataset.train.targets[federation.partition.of(2)]
    assert sorted(collection.values["labels"].tolist()) == sorted(expected.tolist())
    assert collection.samples == len(expected) == clients.samples(2)
