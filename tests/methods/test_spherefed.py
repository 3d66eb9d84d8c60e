"""SphereFed: its fixed layer, its training, and its calibration."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from motley.core.errors import MotleyError
from motley.methods.spherefed import SphereFed, fixed_layer, least_squares
from motley.models.spec import declare, spec_of
from motley.models.stages import features
from tests.methods.test_ccvr import LAST, collected, features_of
from tests.methods.test_reference import batches_of
from tests.methods.turns import SGD, after, federation_of, jobs_of

MLP = ("model.sizes=['mlp2']", "split.name=homogeneous", "model.mlp.hidden=12")


@pytest.mark.parametrize(("classes", "width"), [(10, 10), (10, 64), (3, 7)])
def test_the_fixed_layer_is_orthonormal(classes: int, width: int) -> None:
    layer = fixed_layer(1, classes, width)
    torch.testing.assert_close(layer @ layer.t(), torch.eye(classes), rtol=0, atol=1e-5)
    assert torch.equal(layer, fixed_layer(1, classes, width))
    assert not torch.equal(layer, fixed_layer(2, classes, width))


def test_rounds_are_those_of_plain_torch() -> None:
    federation = federation_of(*MLP, *SGD, "method.scale=3", name="spherefed")
    server = federation.initial_state()
    fixed = fixed_layer(1, 10, 12)
    model = federation.split.build("mlp2")
    model.load_state_dict(server.state)
    for _ in range(2):
        trained = []
        for job in jobs_of(federation, server):
            client = copy.deepcopy(model)
            optimizer = torch.optim.SGD(client.parameters(), lr=0.05)
            for images, labels in batches_of(federation, job):
                z = features(client, images)
                error = z / z.norm(dim=1, keepdim=True) @ fixed.t() - torch.eye(10)[labels]
                optimizer.zero_grad()
                (3 * error.square().sum() / len(labels)).backward()
                optimizer.step()
            trained.append(client.state_dict())
        server, _ = federation.run_round(server)
        mean = {name: torch.stack([one[name] for one in trained]).mean(0) for name in trained[0]}
        model.load_state_dict({**mean, "head.weight": fixed, "head.bias": torch.zeros(10)})
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(server.state[name], tensor, rtol=1e-4, atol=1e-6)


def test_clients_leave_their_last_layer_alone() -> None:
    federation, server = after(1, "training.optimizer.weight_decay=0.1", name="spherefed")
    for update in federation.engine.train(jobs_of(federation, server), lambda client: None):
        assert not update.delta["fc.weight"].any() and not update.delta["fc.bias"].any()
        assert update.delta["conv1.weight"].any()


@pytest.mark.parametrize("split", ["depth", "grouped"])
def test_the_calibrated_layer_is_the_least_squares_solution_over_all_features(split: str) -> None:
    settings = (*LAST, f"split.name={split}", "method.ridge=0")
    federation, server = after(2, *settings, "method.calibrate=false", name="spherefed")
    _, calibrated = after(2, *settings, name="spherefed")
    groups = (
        [list(federation.split.sizes)]
        if split == "depth"
        else [[s] for s in federation.split.sizes]
    )
    for sizes in groups:
        rows, targets = [], []
        for client, size in enumerate(federation.sizes):
            if size in sizes:
                z, labels = features_of(federation, server, client)
                rows.append(F.normalize(z, dim=1).double().numpy())
                targets.append(np.eye(10)[labels.numpy()])
        z, y = np.concatenate(rows), np.concatenate(targets)
        name = "fc.weight" if split == "depth" else f"{sizes[0]}/fc.weight"
        solution = calibrated.state[name].double().numpy().T
        expected, *_ = np.linalg.lstsq(z, y, rcond=1e-7)
        np.testing.assert_allclose(z @ solution, z @ expected, atol=2e-3)
        assert (
            np.square(z @ solution - y).sum()
            < np.square(z @ server.state[name].numpy().T - y).sum()
        )
    others = {n for n in server.state if not torch.equal(server.state[n], calibrated.state[n])}
    assert others and all(n.endswith("fc.weight") for n in others)


def test_least_squares_of_sums_is_that_of_rows() -> None:
    random = np.random.default_rng(1)
    z, y = random.normal(size=(50, 6)), random.normal(size=(50, 3))
    z[:, 5] = z[:, 4]  # singular: the shortest solution
    gram, products = np.zeros((6, 6)), np.zeros((6, 3))
    for rows in np.split(np.arange(50), [3, 20, 21]):
        gram += z[rows].T @ z[rows]
        products += z[rows].T @ y[rows]
    solution = least_squares(torch.from_numpy(gram), torch.from_numpy(products), 0.0)
    expected, *_ = np.linalg.lstsq(z, y, rcond=None)
    np.testing.assert_allclose(solution.numpy(), expected, atol=1e-8)


def test_clients_send_sums_over_unit_features() -> None:
    federation, server = after(1, name="spherefed")
    for answer in collected(federation, server):
        z, labels = features_of(federation, server, answer.client)
        unit = F.normalize(z, dim=1)
        torch.testing.assert_close(
            answer.values["gram"].float(), unit.t() @ unit, rtol=1e-4, atol=1e-4
        )
        products = unit.t() @ torch.eye(10)[labels]
        torch.testing.assert_close(
            answer.values["products"].float(), products, rtol=1e-4, atol=1e-4
        )


def test_calibrations_on_the_way_do_not_change_training() -> None:
    settings = ("training.rounds=3", "evaluation.every=3")
    _, plain = after(3, *settings, "method.calibrate=false", name="spherefed")
    _, twice = after(2, *settings, "method.every=1", name="spherefed")
    _, other = after(3, *settings, "method.every=1", name="spherefed")
    fixed = fixed_layer(1, 10, twice.state["fc.weight"].shape[1])
    assert torch.equal(plain.state["fc.weight"], fixed)
    assert not torch.equal(twice.state["fc.weight"], fixed)
    assert {n for n in plain.state if not torch.equal(plain.state[n], other.state[n])} == {
        "fc.weight"
    }


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ("model.sizes=['mlp1']", "model.mlp.hidden=9"),
            "'mlp1' has 9 features for 10 classes",
        ),
        (
            ("split.name=width", "split.rates=[1,0.5]", "model.sizes=['resnet14']"),
            "computes whole last layers, and .* holds a slice of 'fc.weight'",
        ),
        (
            (
                "split.name=grid",
                "split.cuts=[2,6]",
                "split.rates=[1,1]",
                "model.sizes=['resnet14']",
            ),
            "declares no chain of stages",
        ),
    ],
    ids=["classes", "width", "exits"],
)
def test_settings_it_cannot_work_with_are_refused(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(MotleyError, match=reason):
        federation_of(*overrides, name="spherefed")


def test_a_model_without_a_linear_last_layer_is_refused() -> None:
    federation = federation_of(*MLP, name="spherefed")
    module = federation.split.blueprints["mlp2"].module
    declare(module, replace(spec_of(module), head=None))
    with pytest.raises(MotleyError, match="'mlp2' declares no single linear one"):
        SphereFed(federation.config.method, federation.method.info)
