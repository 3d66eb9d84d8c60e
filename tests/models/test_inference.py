"""What is inferred about a model: against declarations, against hand-made cases, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from motley.config.schema import ModelSettings
from motley.core.errors import MotleyError
from motley.core.part import take
from motley.models import MODELS, ArrayShape, ImageShape, ModelSpec, TokenShape
from motley.models.channels import CLASSES, Axis, axes
from motley.models.facts import blocks_of, channels_of, classifiers_of, cross_layers_of, head_of
from motley.models.inference import InferenceError, facts, inference_of
from motley.models.projection import with_projection
from motley.models.spec import Stage
from motley.models.stages import chain_of, owned, run
from motley.models.user import spec_of_factory
from motley.splits import SPLITS, Split
from tests.models import foreign

IMAGE = ImageShape(1, 8, 8)
CLASS_COUNT = 5


def made(factory: Any, shape: Any = IMAGE, classes: int = CLASS_COUNT) -> nn.Module:
    torch.manual_seed(0)
    return spec_of_factory(factory).make(None, shape, classes)


def width_split(factory: Any, shape: Any = IMAGE, rate: float = 0.5) -> Split:
    build = partial(spec_of_factory(factory).make, None, shape, CLASS_COUNT)
    width = SPLITS["width"]
    return width({"net": build}, width.Settings(rates=(1.0, rate)))


# ---- agreement with the declarations of the built-in families

SETTINGS = {
    "resnet14": {"width": 0.0625},
    "resnet50": {"width": 0.0625},
    "vit2": {"patch": 4, "dim": 12, "heads": 3},
    "mlp3": {"hidden": 6},
    "heterofl-resnet18": {"width": 0.0625},
    "cnn": {},
    "vgg9": {},
}


SLOW = ("resnet50", "heterofl-resnet18")


def both_specs(name: str) -> tuple[ModelSpec, nn.Module, nn.Module]:
    """Return a built-in declaration, its model, and the same model without any declaration."""
    spec = MODELS[name]
    settings = getattr(ModelSettings(sizes=(name,), **{spec.family: SETTINGS[name]}), spec.family)
    arguments = settings, IMAGE, CLASS_COUNT
    return spec, spec.make(*arguments), ModelSpec(spec.build).make(*arguments)


def without_names(tensor_axes: dict[str, tuple[Axis | None, ...]]) -> dict[str, Any]:
    """Return streams by numbers, so that names do not matter. Classes are never cut."""
    numbers: dict[str, int] = {}
    result = {}
    for name, dims in tensor_axes.items():
        numbered = []
        for axis in dims:
            if axis is None or axis.stream == CLASSES:
                numbered.append(None)
            else:
                numbers.setdefault(axis.stream, len(numbers))
                numbered.append((numbers[axis.stream], axis[1:]))
        result[name] = numbered
    return result


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SETTINGS],
)
def test_inference_agrees_with_the_declarations_of_our_own_models(name: str) -> None:
    spec, declared, inferred = both_specs(name)
    assert head_of(inferred) == spec.head
    state = declared.state_dict()
    assert without_names(axes(channels_of(inferred), state)) == without_names(
        axes(channels_of(declared), state)
    )
    if spec.blocks and name != "vgg9":  # its blocks are named, but they do not repeat a shape
        assert blocks_of(inferred) == spec.blocks
    assert set(cross_layers_of(inferred)) == set(cross_layers_of(declared))
    # Stages are the same or finer: no inferred stage has parameters of two declared ones.
    declared_owners = {}
    for stage in chain_of(declared):
        for parameter in owned(declared, [stage]):
            declared_owners[parameter] = stage.name
    chain = chain_of(inferred)
    for stage in chain:
        assert len({declared_owners[parameter] for parameter in owned(inferred, [stage])}) <= 1
    assert sorted(owned(inferred, chain)) == sorted(declared_owners)


# ---- stages


class FunctionalDropout(nn.Module):
    """Operations between modules, some of which depend on the mode and on the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.shift = nn.Parameter(torch.zeros(4))
        self.second = nn.Linear(256, 24)
        self.head = nn.Linear(6, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x)) + self.shift.view(1, -1, 1, 1)
        x = self.second(F.dropout(x, 0.5, self.training).view(len(x), -1))
        x = x.reshape(4 * x.shape[0], 6).view(len(x), 4, 6)
        return F.log_softmax(self.head(x.sum(1)), 1)


def test_stages_follow_the_mode_the_batch_size_and_the_weights_of_the_model() -> None:
    model = made(FunctionalDropout)
    assert [stage.name for stage in chain_of(model)] == ["first", "second", "head"]
    images = torch.randn(5, *IMAGE)
    model.eval()
    assert torch.equal(run(chain_of(model), images), model(images))
    with torch.no_grad():
        model.shift.fill_(3.0)
        model.first = nn.Conv2d(1, 4, 3, padding=1)
    assert torch.equal(run(chain_of(model), images), model(images))
    model.train()
    outputs = []
    for function in (model, partial(run, chain_of(model))):
        torch.manual_seed(1)
        outputs.append(function(images))
    assert torch.equal(*outputs) and not torch.equal(outputs[0], model.eval()(images))
    assert owned(model, chain_of(model)[:1]) == ["shift", "first.weight", "first.bias"]


class Masked(nn.Module):
    """A model that writes into a tensor by index, within a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, 3)
        self.head = nn.Linear(4, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        x[:, :, 0] = 0.0
        x = self.b(x)
        x[:, :2] = F.relu(x[:, 2:])
        return self.head(x.mean((2, 3)))


def test_stages_repeat_assignments_to_parts_of_a_tensor() -> None:
    model = made(Masked)
    assert [stage.name for stage in chain_of(model)] == ["a", "b", "head"]
    images = torch.randn(3, *IMAGE)
    assert torch.equal(run(chain_of(model), images), model(images))


def test_stages_get_gradients_and_run_with_other_weights() -> None:
    model = made(foreign.vit).eval()
    images = torch.randn(3, *IMAGE)
    run(chain_of(model), images).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model(images).sum().backward()
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.allclose(expected[name], parameter.grad, atol=1e-6), name
    doubled = {name: 2 * p.detach() for name, p in model.named_parameters()}

    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return run(chain_of(self.model), x)

    prefixed = {f"model.{name}": tensor for name, tensor in doubled.items()}
    chained = torch.func.functional_call(Chained(), prefixed, (images,))
    assert torch.equal(chained, torch.func.functional_call(model, doubled, (images,)))


def test_a_u_net_is_not_cut_where_a_skip_connection_crosses() -> None:
    names = [stage.name for stage in chain_of(made(foreign.unet))]
    # down2, bottom and the decoder's first half run inside one stage: skip connections cross.
    assert names == ["down1.0", "down1.3", "conv1.0", "conv1.3", "head"]


class NoChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(8, CLASS_COUNT)
        self.d = nn.Linear(64, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.c(self.a(x) * self.b(x)) + self.d(x)


def test_models_without_a_single_last_layer_are_refused_with_what_to_declare() -> None:
    model = made(NoChain)
    with pytest.raises(InferenceError, match=r"add in the model's own forward.*ModelSpec\.head"):
        head_of(model)
    with pytest.raises(MotleyError, match="needs a chain of stages"):
        chain_of(model)
    assert classifiers_of(model) == ()
    assert inference_of(model).streams.widths == {"a": 8}


def test_models_with_several_outputs_are_refused() -> None:
    model = made(foreign.two_heads)
    for fact in (head_of, channels_of, blocks_of, chain_of):
        with pytest.raises(MotleyError, match="TwoHeads returns a tuple of 2"):
            fact(model)


class ConvNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class ResidualOfLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(ConvNorm(), ConvNorm())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class StageOfBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(ResidualOfLayers(), ResidualOfLayers())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 1)
        self.stages = nn.ModuleList(StageOfBlocks() for _ in range(2))
        self.head = nn.Linear(4, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def test_blocks_are_neither_stages_nor_single_layers() -> None:
    model = made(Nested)
    blocks = tuple(f"stages.{stage}.blocks.{block}" for stage in (0, 1) for block in (0, 1))
    assert blocks_of(model) == blocks
    assert [stage.name for stage in chain_of(model)] == ["stem", *blocks, "tail", "head"]


# ---- declarations


def test_declared_facts_are_kept_and_the_others_inferred() -> None:
    stages = (Stage("body", lambda model, x: model.pool(F.relu(model.conv1(x))), ("conv1",)),)
    bare = spec_of_factory(foreign.tutorial)
    spec = replace(bare, stages=stages, head="fc2", blocks=("conv1", "conv2"))
    model = spec.make(None, IMAGE, CLASS_COUNT)
    assert [stage.name for stage in chain_of(model)] == ["body"]
    assert head_of(model) == "fc2" and blocks_of(model) == ("conv1", "conv2")
    # The channels of the declared head are classes, which are never cut.
    assert set(inference_of(model).streams.widths) == {"conv1", "conv2", "fc1"}


def test_nothing_is_inferred_unless_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("a model was recorded")

    monkeypatch.setattr(facts, "record", fail)
    spec = spec_of_factory(foreign.tutorial)
    builds = {"net": partial(spec.make, None, IMAGE, 3)}
    split = SPLITS["depth"](builds, SPLITS["depth"].Settings())
    assert take(split.initial(0), split.part("net"))


def test_copies_and_models_of_the_same_factory_share_what_was_inferred() -> None:
    first = made(partial(foreign.vit, depth=1))
    again = made(partial(foreign.vit, depth=1))
    other = made(partial(foreign.vit, depth=2))
    assert inference_of(first) is inference_of(again)
    assert inference_of(first) is not inference_of(other)


def test_a_projection_is_inferred_anew() -> None:
    model = made(foreign.tutorial)
    assert chain_of(model)[-1].members == ("fc3",)
    with_projection(model, 4)
    images = torch.randn(2, *IMAGE)
    assert torch.equal(run(chain_of(model.eval()), images), model(images))
    assert classifiers_of(model) == ("fc3.classify",)
    assert {"fc3.project.0", "fc3.project.2"} <= set(inference_of(model).streams.widths)


# ---- channels


@pytest.mark.parametrize(
    ("factory", "shape"),
    [(foreign.tutorial, IMAGE), (foreign.lstm, TokenShape(6, 20))],
    ids=["cnn", "lstm"],
)
def test_a_narrow_model_is_the_whole_model_without_the_other_channels(
    factory: Callable[..., Any], shape: Any
) -> None:
    """Without norms, channels whose weights are all zero are as good as absent."""
    split = width_split(factory, shape)
    state = split.initial(1)
    part = split.part("net-w0.5")
    zeroed = {}
    for name, tensor in state.items():
        zeroed[name] = torch.zeros_like(tensor)
        index = part[name].index or (slice(None),) * tensor.dim()
        grid = torch.meshgrid(
            *(torch.arange(n)[at] for n, at in zip(tensor.shape, index, strict=True)), indexing="ij"
        )
        zeroed[name][grid] = tensor[grid]
    whole, narrow = split.build("net-w1").eval(), split.build("net-w0.5").eval()
    whole.load_state_dict(zeroed)
    narrow.load_state_dict(take(state, part))
    inputs = facts.random_inputs(shape, 4)
    assert torch.allclose(whole(inputs), narrow(inputs), atol=1e-6)


class HardCodedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(8, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).view(len(x), 8, -1, 4)  # heads of 4 channels, whatever the width
        return self.head(self.mix(x.flatten(2)).mean(1))


def test_widths_in_the_code_of_a_model_are_refused_with_the_operation() -> None:
    message = r"view in the model's own forward gives \(2, 8, 2, 4\).*\(2, 8, 4, 2\) is needed"
    with pytest.raises(MotleyError, match=message):
        width_split(HardCodedHeads, ArrayShape((8, 8)))


class Neighbours(nn.Module):
    """A norm over neighbouring channels, of which the order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 4, 3)
        self.head = nn.Linear(4, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.local_response_norm(F.relu(self.a(x)), 3, alpha=1.0)
        return self.head(F.relu(self.b(x)).mean((2, 3)))


def test_streams_that_fail_the_check_are_not_cut() -> None:
    streams = inference_of(made(Neighbours)).streams
    assert streams.widths == {"b": 4}
    assert [channels.name for channels in streams.fixed] == ["a.weight", "a.bias"]
    assert "permuting these channels changes" in streams.fixed[0].reason


class PooledByNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.linalg.vector_norm(self.a(x).flatten(2), 1, 2))


def test_the_order_of_a_vector_norm_is_not_taken_for_a_dimension() -> None:
    assert inference_of(made(PooledByNorm)).streams.widths == {"a": 6}


class Assorted(nn.Module):
    """Many ways to write a network: groups, splits, concatenations, einsum, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.grouped = nn.Conv2d(12, 24, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(2, 24)
        self.other = nn.Conv2d(12, 12, 1)
        self.gate = nn.Linear(36, 72)
        self.attention = nn.MultiheadAttention(36, 4, batch_first=True)
        self.tied = nn.Parameter(torch.randn(36, 36))
        self.register_buffer("table", torch.randn(1, 36), persistent=False)
        self.rnn = nn.GRU(36, 6, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        x = torch.cat([self.norm(self.grouped(x)), self.other(x)], dim=1)
        x = F.max_pool2d(x, 4).flatten(2).transpose(1, 2) + self.table
        a, b = self.gate(x).chunk(2, dim=-1)
        x = a * torch.sigmoid(b)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.einsum("btc,cd->btd", x, self.tied)
        outputs, _ = self.rnn(x)
        return self.head(outputs.amax(1))


class RecurrentBlock(nn.Module):
    """A recurrent layer in a block, with a projection of its outputs."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, levels, batch_first=True, proj_size=5)
        self.out = nn.Linear(5, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.rnn(x)[0])


class RecurrentBlocks(nn.Module):
    """Two such blocks on the rows of an image."""

    def __init__(self, levels: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(IMAGE[2], 16)
        self.blocks = nn.Sequential(RecurrentBlock(levels), RecurrentBlock(levels))
        self.head = nn.Linear(16, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x[:, 0])).mean(1))


def test_gates_in_blocks_are_tensors_of_their_own() -> None:
    pairs = {pair.target: pair.chunks for pair in cross_layers_of(made(RecurrentBlocks))}
    assert pairs == {
        "blocks.1.rnn.weight_ih_l0": 4,
        "blocks.1.rnn.weight_hh_l0": 4,
        "blocks.1.rnn.weight_hr_l0": 1,
        "blocks.1.out.weight": 1,
    }


def test_a_recurrent_layer_of_several_levels_in_blocks_is_helped_once() -> None:
    pairs = cross_layers_of(made(partial(RecurrentBlocks, levels=2)))
    assert {pair.target for pair in pairs if pair.target.startswith("blocks.1.")}
    assert len(pairs) == len({pair.target for pair in pairs})


def test_many_operations_are_cut_and_still_fit() -> None:
    split = width_split(Assorted, rate=0.25)
    narrow = split.build("net-w0.25").eval()
    narrow.load_state_dict(take(split.initial(0), split.part("net-w0.25")))
    assert narrow(torch.randn(3, *IMAGE)).shape == (3, CLASS_COUNT)
    assert inference_of(made(Assorted)).streams.fixed == []
    counts = [
        sum(p.numel() for p in split.blueprints[size].module.parameters()) for size in split.sizes
    ]
    assert counts[1] < 0.25 * counts[0]


class TiedTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASS_COUNT, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASS_COUNT, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.body(self.embed(tokens))))


def test_tied_weights_stay_tied_when_they_are_cut() -> None:
    split = width_split(TiedTokens, TokenShape(4, CLASS_COUNT))
    narrow = split.build("net-w0.5")
    assert isinstance(narrow, TiedTokens) and narrow.head.weight is narrow.embed.weight
    assert narrow.head.weight.shape == (CLASS_COUNT, 4)
    assert head_of(made(TiedTokens, TokenShape(4, CLASS_COUNT))) == "head"


class LinearOverTokens(nn.Module):
    """Linear layers whose channels are in the last of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASS_COUNT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(x)))).mean(1))


def test_ordered_dropout_is_refused_if_a_wide_model_does_not_contain_a_narrow_one() -> None:
    build = partial(spec_of_factory(LinearOverTokens).make, None, ArrayShape((6, 4)), CLASS_COUNT)
    ordered = SPLITS["ordered"]
    with pytest.raises(MotleyError, match="does not compute the same at its smallest width"):
        ordered({"net": build}, ordered.Settings(rates=(1.0, 0.5)))
