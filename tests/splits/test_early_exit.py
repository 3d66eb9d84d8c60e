"""Examples that leave a network at its exits, against the plain pass through all exits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from motley.core.errors import MotleyError
from motley.splits.early_exit import AtExit, choose_exits, exit_costs, exits_of, stop_early
from motley.splits.exits import WithExits
from motley.splits.trained import trained_model
from tests.splits.test_grid import RESNET, VIT, grid
from tests.splits.test_width import lively

FULL_WIDTH = (*VIT, "split.rates=[1,1,1]")
NETWORKS = {
    "resnet": RESNET,
    "resnet, mean": (*RESNET, "split.output=mean"),
    "resnet, linear heads": (*RESNET, "split.head=linear"),
    "vit": FULL_WIDTH,
}


def images(count: int) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def network(*overrides: str) -> WithExits:
    split = grid(*overrides)
    return exits_of(trained_model(split, lively(split), split.sizes[-1]), "a test")


def middle_thresholds(model: WithExits, inputs: Tensor) -> list[float]:
    """Return thresholds at which some examples leave and others stay."""
    with torch.no_grad():
        confidence = model.exit_logits(inputs)[0].softmax(1).amax(1)
    return [float(confidence.quantile(share)) for share in (0.2, 0.5, 0.8)]


@pytest.mark.parametrize("name", NETWORKS)
def test_stopping_early_gives_the_answers_of_the_exits_that_were_reached(name: str) -> None:
    model, inputs = network(*NETWORKS[name]), images(16)
    with torch.no_grad():
        answers = model.exit_logits(inputs)
    used = set()
    for threshold in (0.0, *middle_thresholds(model, inputs), 1.5):
        early = stop_early(model, inputs, threshold)
        plain = choose_exits(answers, threshold, model.ensemble)
        assert early.exits.tolist() == plain.exits.tolist()
        torch.testing.assert_close(early.logits, plain.logits)
        used |= set(early.exits.tolist())
    assert used >= {0, 2}


def test_thresholds_out_of_reach_give_the_models_own_output() -> None:
    for overrides in NETWORKS.values():
        model, inputs = network(*overrides), images(8)
        early = stop_early(model, inputs, 1.5)
        assert early.exits.tolist() == [2] * 8
        torch.testing.assert_close(early.logits, model(inputs).detach())
        assert stop_early(model, inputs, 0.0).exits.tolist() == [0] * 8


def test_blocks_behind_an_exit_see_only_the_examples_that_stayed() -> None:
    model, inputs = network(*FULL_WIDTH), images(16)
    threshold = middle_thresholds(model, inputs)[1]
    seen: list[int] = []
    for block in model.block_chain():
        assert isinstance(block, nn.Module)
        block.register_forward_hook(lambda module, given, output: seen.append(len(output)))
    early = stop_early(model, inputs, threshold)
    left = torch.bincount(early.exits, minlength=3).tolist()
    assert seen[0] == 16 and seen[1] == 16 - left[0] < 16
    assert seen[2:] == ([16 - left[0] - left[1]] if left[2] else [])


@pytest.mark.parametrize("name", ["resnet", "resnet, mean"])
def test_costs_are_the_counted_operations(name: str) -> None:
    """Leaving at an exit costs the network up to there, and the heads before it."""
    model, example = network(*NETWORKS[name]), images(1)
    costs = exit_costs(model, example)
    for number, threshold in ((0, 0.0), (2, 1.5)):
        with FlopCounterMode(display=False) as counter:
            stop_early(model, example, threshold)
        assert costs.at_exits[number] == counter.get_total_flops()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        AtExit(model, 2)(example)
    assert costs.full == counter.get_total_flops()
    assert (costs.at_exits[2] > costs.full) == (not model.ensemble)
    assert costs.mean_fraction(torch.tensor([0, 0, 2, 2])) == pytest.approx(
        (costs.at_exits[0] + costs.at_exits[2]) / 2 / costs.full
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_can_end_at_any_exit(name: str) -> None:
    model, inputs = network(*NETWORKS[name]), images(4)
    with torch.no_grad():
        answers = model.exit_logits(inputs)
        for number in range(3):
            expected = answers[number]
            if model.ensemble:
                expected = torch.stack(answers[: number + 1]).mean(0)
            torch.testing.assert_close(AtExit(model, number)(inputs), expected)


def test_models_without_early_exits_are_refused() -> None:
    split = grid(*RESNET)
    smallest = trained_model(split, lively(split), split.sizes[0])
    for model in (nn.Linear(2, 2), smallest):
        with pytest.raises(MotleyError, match=r"--exit-threshold: this model has no early exit"):
            exits_of(model, "--exit-threshold")


def test_statistics_of_the_batch_are_refused() -> None:
    split = grid(*RESNET, "split.normalization_statistics=batch")
    model = trained_model(split, lively(split), split.sizes[-1])
    with pytest.raises(MotleyError, match=r"split.normalization_statistics = 'batch'"):
        exits_of(model, "--exit-threshold")
