"""Noise on the way to the server: as strong as asked, keyed, and on parameters only."""

from __future__ import annotations

import torch

from motley.federation import Federation
from motley.runs.checkpoint import fingerprint
from motley.server.exchange import complete_update
from motley.server.uplink import perturbed
from tests.conftest import refused, tiny_config


def test_noise_has_the_changes_own_standard_deviation_times_the_factor() -> None:
    change = {
        "a": 3 * torch.randn(200, 200, generator=torch.Generator().manual_seed(0)) + 1,
        "b": torch.ones(1),
    }
    noisy = perturbed(change, change, 0.5, seed=4)
    noise = noisy["a"] - change["a"]
    assert abs(float(noise.std()) - 0.5 * float(change["a"].std())) < 0.03
    assert abs(float(noise.mean())) < 0.03
    assert torch.equal(noisy["b"], change["b"]), "one number has no standard deviation"


def test_noise_is_keyed_and_only_on_what_is_named() -> None:
    change = {"a": torch.arange(4.0), "b": torch.arange(4.0)}
    one = perturbed(change, ["a"], 1.0, seed=4)
    assert torch.equal(one["b"], change["b"]) and not torch.equal(one["a"], change["a"])
    torch.rand(3)
    assert torch.equal(perturbed(change, ["a"], 1.0, seed=4)["a"], one["a"])
    assert not torch.equal(perturbed(change, ["a"], 1.0, seed=5)["a"], one["a"])
    both = perturbed(change, change, 1.0, seed=4)
    assert not torch.equal(both["a"], both["b"]), "each tensor has noise of its own"


def test_a_federations_noise_is_each_clients_and_rounds_own() -> None:
    federation = Federation(tiny_config("uplink.noise=0.5"))
    server = federation.initial_state()
    jobs = [federation.job(server, number, client) for number, client in ((1, 0), (1, 1), (2, 0))]
    upload = federation.engine.train(jobs[:1], lambda client: None)[0]
    noises = []
    for job in jobs:
        change = complete_update(federation.context, job, upload).delta
        noises.append(change["conv1.weight"] - upload.delta["conv1.weight"])
        buffers = change.keys() - federation.split.parameters_of(job.size)
        assert buffers and all(torch.equal(change[name], upload.delta[name]) for name in buffers)
    assert all(noise.any() for noise in noises)
    assert not torch.equal(noises[0], noises[1]) and not torch.equal(noises[0], noises[2])
    again = complete_update(federation.context, jobs[0], upload).delta
    assert fingerprint(dict(again)) == fingerprint(
        dict(complete_update(federation.context, jobs[0], upload).delta)
    )


def test_noise_is_not_negative() -> None:
    assert refused("uplink.noise=-1") == "uplink.noise = -1: should be greater than or equal to 0."
