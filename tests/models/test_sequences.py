"""Built-in models for signals, tokens and tables: sizes, parts in depth and width, pairs, stages."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from motley.config import ModelSettings
from motley.core.errors import MotleyError
from motley.core.part import State, select, take
from motley.models import MODELS, CrossLayer
from motley.models.channels import CLASSES, positions
from motley.models.chunks import chunks_of
from motley.models.inputs import InputShape, SignalShape, TableShape, TokenShape
from motley.models.lstm import LSTM, LSTMLayer, in_one_block
from motley.models.same_shape import same_shape_layers
from motley.models.stages import chain_of, features, owned, run
from motley.settings import validate
from motley.splits import Width
from motley.splits.base import Split
from motley.splits.depth import Depth
from motley.splits.ordered import Ordered, OrderedSettings
from motley.splits.width import WidthSettings

SIGNAL, TOKENS, TABLE = SignalShape(3, 20), TokenShape(7, 11), TableShape(4, (3, 5))
CLASSES_OUT = 5


class Case(NamedTuple):
    """A family of models on one kind of input."""

    sizes: tuple[str, ...]
    shape: InputShape
    settings: dict[str, Any]
    output: tuple[int, ...] = (CLASSES_OUT,)


DIMS = {"dim": 12, "heads": 3, "mlp_ratio": 2.0}
CASES = {
    "cnn1d": Case(("cnn1d-1", "cnn1d-2", "cnn1d-4"), SIGNAL, {"width": 8, "kernel": 3}),
    "cnn1d-group": Case(("cnn1d-2", "cnn1d-3"), SIGNAL, {"width": 8, "norm": "group"}),
    "lstm-tokens": Case(
        ("lstm1", "lstm2", "lstm3"), TOKENS, {"embedding": 4, "hidden": 6, "output": "last"}
    ),
    "lstm-every": Case(
        ("lstm1", "lstm3"),
        TOKENS,
        {"embedding": 6, "hidden": 6, "output": "every"},
        (7, CLASSES_OUT),
    ),
    "lstm-signal": Case(("lstm1", "lstm2"), SIGNAL, {"hidden": 6, "output": "mean"}),
    "decoder": Case(("decoder1", "decoder2", "decoder4"), TOKENS, DIMS, (7, CLASSES_OUT)),
    "decoder-last": Case(("decoder1", "decoder3"), TOKENS, {**DIMS, "output": "last"}),
    "encoder": Case(("encoder1", "encoder2", "encoder6"), TOKENS, DIMS),
    "table": Case(("table1", "table2", "table3"), TABLE, {"hidden": 6, "embedding": 4}),
    "logistic": Case(("logistic",), TABLE, {}),
}
WIDE = [name for name in CASES if name != "logistic"]


def inputs_of(shape: InputShape, count: int = 3, seed: int = 0) -> Tensor:
    """Return random inputs of a shape."""
    numbers = torch.Generator().manual_seed(seed)
    if isinstance(shape, SignalShape):
        return torch.randn(count, shape.channels, shape.length, generator=numbers)
    if isinstance(shape, TokenShape):
        return torch.randint(shape.vocabulary, (count, shape.length), generator=numbers)
    assert isinstance(shape, TableShape)
    columns = [torch.randn(count, shape.numbers, generator=numbers)]
    for values in shape.categories:
        columns.append(torch.randint(values, (count, 1), generator=numbers).float())
    return torch.cat(columns, 1)


def build(case: str, size: str | None = None) -> nn.Module:
    """Return a model of a case, by default the deepest one."""
    sizes, shape, settings, _ = CASES[case]
    spec = MODELS[size or sizes[-1]]
    tables = ModelSettings.model_validate({"sizes": sizes, spec.family: settings})
    return spec.make(getattr(tables, spec.family), shape, CLASSES_OUT)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


SUMMARIES: list[tuple[str, InputShape, int]] = [
    ("cnn1d", SignalShape(9, 128), 6),
    ("lstm", TokenShape(80, 80), 80),
    ("decoder", TokenShape(80, 80), 80),
    ("encoder", TokenShape(80, 80), 2),
    ("table", TableShape(10), 2),
]


@pytest.mark.parametrize(("family", "shape", "classes"), SUMMARIES)
def test_summaries_state_the_number_of_parameters(
    family: str, shape: InputShape, classes: int
) -> None:
    names = [entry.name for entry in MODELS if entry.item.family == family]
    assert len(names) >= 3
    for name in names:
        settings = getattr(ModelSettings.model_validate({"sizes": [name]}), family)
        with torch.device("meta"):
            model = MODELS[name].make(settings, shape, classes)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert f"{count:,} parameters" in MODELS.entry(name).summary


@pytest.mark.parametrize("case", CASES)
def test_every_size_returns_logits_and_trains_all_of_its_parameters(case: str) -> None:
    sizes, shape, _, output = CASES[case]
    for size in sizes:
        model = build(case, size)
        logits = model(inputs_of(shape))
        assert logits.shape == (3, *output)
        logits.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("case", WIDE)
def test_a_shallow_size_is_inside_a_deeper_one(case: str) -> None:
    sizes = CASES[case].sizes
    for shallow, deep in pairwise(sizes):
        inner, outer = (
            {(name, tensor.shape) for name, tensor in build(case, size).state_dict().items()}
            for size in (shallow, deep)
        )
        assert inner < outer


@pytest.mark.parametrize("case", CASES)
def test_a_chain_of_stages_is_the_whole_model(case: str) -> None:
    model, x = build(case).eval(), inputs_of(CASES[case].shape)
    chain = chain_of(model)
    owners = Counter(name for stage in chain for name in owned(model, [stage]))
    assert owners == Counter(name for name, _ in model.named_parameters())
    for at in range(1, len(chain)):
        assert torch.equal(run(chain[at:], run(chain[:at], x)), model(x))
    head = model.get_submodule(str(MODELS[CASES[case].sizes[-1]].head))
    assert torch.equal(head(features(model, x)), model(x))


@pytest.mark.parametrize("case", WIDE)
def test_pairs_are_weights_of_one_shape_in_different_blocks(case: str) -> None:
    model = build(case)
    spec = MODELS[CASES[case].sizes[-1]]
    pairs = spec.cross_layers(model)
    assert pairs
    for source, target, chunks in (*pairs, *same_shape_layers(model)):
        shape = model.get_parameter(source).shape
        assert shape == model.get_parameter(target).shape and shape[0] % chunks == 0
    for source, target, _ in pairs:
        blocks = [block for block in spec.blocks if source.startswith(f"{block}.")]
        assert blocks and not target.startswith(f"{blocks[0]}.")


def test_gates_are_paired_from_the_first_layer_of_their_shape() -> None:
    """Layer 0 reads the embedding, so its weights on inputs have another shape."""
    assert MODELS["lstm3"].cross_layers(build("lstm-tokens", "lstm3")) == [
        CrossLayer("layers.1.weight_ih_l0", "layers.2.weight_ih_l0", 4),
        CrossLayer("layers.0.weight_hh_l0", "layers.1.weight_hh_l0", 4),
        CrossLayer("layers.0.weight_hh_l0", "layers.2.weight_hh_l0", 4),
    ]
    same = MODELS["lstm3"].cross_layers(build("lstm-every", "lstm3"))
    assert CrossLayer("layers.0.weight_ih_l0", "layers.1.weight_ih_l0", 4) in same


@pytest.mark.parametrize("case", ["decoder", "encoder", "lstm-every"])
def test_layers_of_one_shape_have_the_chunks_of_the_released_pairs(case: str) -> None:
    """Whatever the layers are chosen by, query, key and value, and gates, are tensors of their own."""
    model = build(case)
    released = {
        pair.target: pair.chunks for pair in MODELS[CASES[case].sizes[-1]].cross_layers(model)
    }
    by_shape = {pair.target: pair.chunks for pair in same_shape_layers(model)}
    common = released.keys() & by_shape.keys()
    assert common and all(by_shape[name] == released[name] for name in common)
    assert max(by_shape.values()) > 1
    if case != "lstm-every":
        assert by_shape["blocks.1.attn.qkv.bias"] == 3
        assert by_shape["blocks.1.attn.proj.weight"] == 1


def test_chunks_of_torchs_own_layers() -> None:
    model = nn.ModuleDict(
        {
            "lstm": nn.LSTM(6, 5, num_layers=2, proj_size=3),
            "gru": nn.GRU(6, 4),
            "rnn": nn.RNN(6, 4),
            "attention": nn.MultiheadAttention(6, 2, add_bias_kv=True),
            "block": nn.ModuleDict({"qkv": nn.Linear(6, 18), "proj": nn.Linear(18, 18)}),
        }
    )
    chunks = {name: chunks_of(model, name) for name, _ in model.named_parameters()}
    assert {name for name, count in chunks.items() if count == 3} == {
        *(f"gru.{name}" for name, _ in model["gru"].named_parameters()),
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "block.qkv.weight",
        "block.qkv.bias",
    }
    four = {name for name, count in chunks.items() if count == 4}
    assert len(four) == 8 and not any("weight_hr" in name for name in four)
    for name, parameter in model.named_parameters():
        assert parameter.shape[0] % chunks[name] == 0


# ---- widths


def width_split(case: str, channels: str = "leading", rates: tuple[float, ...] = ()) -> Width:
    size = CASES[case].sizes[-1]
    settings = WidthSettings(channels=channels, rates=rates or (1.0, 0.5, 0.25))  # type: ignore[arg-type]
    return Width({size: partial(build, case, size)}, settings, 0)


def lively(split: Width) -> State:
    """Return a state in which no norm is the identity."""
    numbers = torch.Generator().manual_seed(1)
    state = split.initial(1)
    for name, tensor in state.items():
        if tensor.dim() == 1 and tensor.is_floating_point():
            state[name] = 0.5 + torch.rand(tensor.shape, generator=numbers)
    return state


def answer(model: nn.Module, state: State, shape: InputShape) -> Tensor:
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(inputs_of(shape))


@pytest.mark.parametrize("case", WIDE)
def test_a_permutation_of_every_stream_leaves_the_function_as_it_is(case: str) -> None:
    split, shape = width_split(case), CASES[case].shape
    state, numbers = lively(split), torch.Generator().manual_seed(2)
    streams = {}
    for axes in split.axes.values():
        streams |= {axis.stream: axis.width for axis in axes if axis is not None}
    if case == "cnn1d-group":
        # A permutation across groups changes what a group norm computes.
        streams = {name: width for name, width in streams.items() if name == CLASSES}
    model = split.whole.build()
    for permuted_stream in [*streams, None]:
        if permuted_stream == CLASSES:
            continue
        order = {name: torch.arange(width) for name, width in streams.items()}
        for name, width in streams.items():
            if permuted_stream in (name, None) and name != CLASSES:
                order[name] = torch.randperm(width, generator=numbers)
        permuted = {}
        for name, tensor in state.items():
            index: list[Any] = []
            for axis in split.axes[name]:
                known = axis is not None and axis.stream in order
                index.append(positions(axis, order[axis.stream]) if axis and known else slice(None))
            permuted[name] = select(tensor, tuple(index))
        expected = answer(model, state, shape)
        torch.testing.assert_close(answer(model, permuted, shape), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("channels", ["leading", "rolling", "random"])
@pytest.mark.parametrize("case", WIDE)
def test_a_narrow_size_runs_on_its_part(case: str, channels: str) -> None:
    split = width_split(case, channels)
    state, shape = lively(split), CASES[case].shape
    for size in split.sizes:
        part = take(state, split.part(size, 3, 1))
        outputs = answer(split.build(size), part, shape)
        assert outputs.shape == (3, *CASES[case].output)
        assert torch.equal(outputs, answer(split.blueprints[size].build(), part, shape))


def test_a_narrow_transformer_keeps_all_of_its_heads() -> None:
    split = width_split("decoder", rates=(1.0, 0.5))
    attention: Any = split.build("decoder4-w0.5").get_submodule("blocks.0.attn")
    assert attention.heads == 3 and attention.proj.in_features == 6
    assert attention.qkv.weight.shape == (18, 6)


def test_a_narrow_lstm_has_the_leading_units_of_every_gate() -> None:
    split = width_split("lstm-tokens", rates=(1.0, 0.5))
    state = split.initial(0)
    narrow = take(state, split.part("lstm3-w0.5"))["layers.1.weight_hh_l0"]
    gates = state["layers.1.weight_hh_l0"].view(4, 6, 6)
    assert torch.equal(narrow.view(4, 3, 3), gates[:, :3, :3])


def test_depth_splits_hold_the_layers_of_each_size() -> None:
    sizes = CASES["lstm-tokens"].sizes
    split: Split = Depth(
        {size: partial(build, "lstm-tokens", size) for size in sizes}, Depth.Settings(), 0
    )
    state = split.initial(0)
    for size in sizes:
        model = split.build(size)
        model.load_state_dict(take(state, split.part(size)))
    assert split.cross_layers[0].chunks == 4


def test_ordered_widths_of_a_signal_network_are_its_narrow_networks() -> None:
    settings = OrderedSettings(rates=(1.0, 0.5))
    split = Ordered({"cnn1d-2": partial(build, "cnn1d", "cnn1d-2")}, settings, 0)
    model = split.build("cnn1d-2-w1")
    model.load_state_dict(take(split.initial(0), split.part("cnn1d-2-w1")))
    assert model(inputs_of(SIGNAL)).shape == (3, CLASSES_OUT)
    with pytest.raises(MotleyError, match=r"'ordered': LSTMLayer passes its units"):
        Ordered({"lstm2": partial(build, "lstm-tokens", "lstm2")}, settings, 0)


def test_the_scaler_is_refused_for_recurrent_layers() -> None:
    settings = WidthSettings(rates=(1.0, 0.5), scaler=True)
    with pytest.raises(MotleyError, match=r"split\.scaler = true: is not defined for recurrent"):
        Width({"lstm2": partial(build, "lstm-tokens", "lstm2")}, settings, 0)


def test_torchs_own_recurrent_layers_can_be_made_narrower() -> None:
    from motley.splits.narrow import narrow

    model = nn.GRU(6, 4, batch_first=True)
    state = model.state_dict()
    shapes = {name: (6, *(2 for _ in tensor.shape[1:])) for name, tensor in state.items()}
    shapes["weight_ih_l0"] = (6, 3)
    narrow(model, shapes)
    assert model(torch.randn(2, 5, 3))[0].shape == (2, 5, 2)
    with pytest.raises(MotleyError, match="LSTM with a projection"):
        narrow(nn.LSTM(6, 4, proj_size=2), {})


# ---- against torch's own layers and formulas


def test_an_lstm_layer_is_torchs() -> None:
    ours, torchs = LSTMLayer(5, 4), nn.LSTM(5, 4, batch_first=True)
    torchs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 6, 5)
    assert torch.equal(ours(x), torchs(x)[0])


def test_weights_in_one_block_give_the_same_outputs_and_gradients() -> None:
    layer, x = LSTMLayer(5, 4), torch.randn(2, 6, 5)
    weights = list(layer.parameters())
    block = in_one_block(weights)
    begin = block[0].data_ptr()
    for copied, weight in zip(block, weights, strict=True):
        assert torch.equal(copied, weight) and copied.data_ptr() == begin
        begin += copied.nbytes
    zeros = torch.zeros(1, 2, 4)
    outputs = torch.lstm(x, (zeros, zeros), block, True, 1, 0.0, True, False, True)[0]
    plain = layer(x)
    assert torch.equal(outputs, plain)
    expected = torch.autograd.grad(plain.square().sum(), weights)
    found = torch.autograd.grad(outputs.square().sum(), weights)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_other_weights_can_be_lent_to_an_lstm() -> None:
    """MOON and other methods run a model with the weights of another round."""
    model = build("lstm-tokens")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    addresses = [parameter.data_ptr() for parameter in (*model.parameters(), *other.parameters())]
    x = inputs_of(TOKENS)
    expected = other(x)
    before = model(x)
    assert torch.equal(functional_call(model, dict(other.named_parameters()), (x,)), expected)
    assert torch.equal(model(x), before)
    after = [parameter.data_ptr() for parameter in (*model.parameters(), *other.parameters())]
    assert after == addresses


def test_an_lstm_reads_its_last_position_all_of_them_or_their_mean() -> None:
    x = inputs_of(TOKENS)
    model = build("lstm-every")
    assert isinstance(model, LSTM)
    every = model(x)
    model.output = "last"
    torch.testing.assert_close(model(x), every[:, -1])
    model.output = "mean"
    torch.testing.assert_close(model(x), every.mean(1))


def test_a_decoder_does_not_see_later_tokens_and_an_encoder_does() -> None:
    x = inputs_of(TOKENS)
    changed = x.clone()
    changed[:, 4] = (changed[:, 4] + 1) % TOKENS.vocabulary
    model = build("decoder").eval()
    before, after = model(x), model(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert not torch.allclose(after[:, 4:], before[:, 4:])
    last = build("decoder-last").eval()
    assert not torch.allclose(last(x), last(changed))
    encoder = build("encoder").eval()
    assert not torch.allclose(encoder(x), encoder(changed))


def test_logistic_regression_has_one_column_per_value_of_a_category() -> None:
    model: Any = build("logistic")
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 2.0, 0.0]])
    columns = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert model.columns(x).tolist() == [columns]
    assert model(x).shape == (1, CLASSES_OUT)


def test_a_category_chooses_its_embedding() -> None:
    model: Any = build("table")
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 2.0, 0.0]])
    first, second = model.embeddings
    assert (first.embedding_dim, second.embedding_dim) == (3, 4)
    expected = torch.cat([x[0, :4], first.weight[2], second.weight[0]])
    assert torch.equal(model.embed(x)[0], expected)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("cnn1d", {"kernel": 4}, r"kernel = 4: must be odd"),
        ("cnn1d", {"norm": "group", "groups": 3}, r"groups = 3: must divide width = 64"),
        ("decoder", {"heads": 5}, r"heads = 5: must divide dim = 128"),
        ("lstm", {"output": "first"}, r"output = 'first'"),
    ],
)
def test_wrong_settings_are_named(family: str, values: dict[str, object], message: str) -> None:
    size = {"cnn1d": "cnn1d-2", "decoder": "decoder2", "lstm": "lstm2"}[family]
    with pytest.raises(MotleyError, match=rf"model\.{family}\.{message}"):
        validate(ModelSettings, {"sizes": [size], family: values}, "model")
