"""InCo against a scalar reference, hand-computed cases, and the promises of its docstring."""

from __future__ import annotations

import itertools
import math
import tomllib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from motley.core.errors import MotleyError
from motley.models import CrossLayer
from motley.server.inco import INCO, Coefficients, IncoOff, IncoSettings, inco
from motley.settings import validate

PAIR = [CrossLayer("shallow", "deep")]
PLAIN = {"variant": "official", "theta_max": "off", "element_max": "off", "epsilon": 1e-30}
"""The released code's formula without its guards, so that hand arithmetic is exact."""


def random(*shape: int, seed: int = 0, scale: float = 0.1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def refine(g_0: Tensor, g_k: Tensor, **options) -> tuple[Tensor, Coefficients]:
    changed, coefficients = inco({"shallow": g_0, "deep": g_k}, PAIR, IncoSettings(**options))
    return changed["deep"], coefficients["deep"]


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.int32), other.view(torch.int32))


# The reference: Python floats, one kernel at a time.


def scalar_inco(
    g_0: list[float], g_k: list[float], s: IncoSettings
) -> tuple[list[float], float, float, float]:
    """One theta for the values given: (refined values, theta, alpha, beta)."""
    norm_0 = math.sqrt(math.fsum(x * x for x in g_0))
    norm_k = math.sqrt(math.fsum(x * x for x in g_k))
    unit_0 = [x / (norm_0 + s.epsilon) for x in g_0]
    unit_k = [x / (norm_k + s.epsilon) for x in g_k]
    p_0, p_k = (g_0, g_k) if s.products == "raw" else (unit_0, unit_k)
    alpha = math.fsum(x * x for x in p_0)
    beta = math.fsum(x * y for x, y in zip(p_0, p_k, strict=True))
    if not s.optimize:
        theta, step = 1.0, 1.0
    else:
        theta = beta / (alpha + s.epsilon)
        if s.theta_max != "off":
            theta = math.copysign(min(abs(theta), s.theta_max), theta)
        if s.sign == "plus":
            theta = abs(theta)
            step = theta
        elif s.sign == "minus":
            step = -theta
        else:
            theta = theta if beta < 0 else 0.0
            step = -theta
    if s.normalize:
        refined = [
            (k + step * z) * (norm_k + norm_0) / 2 for z, k in zip(unit_0, unit_k, strict=True)
        ]
    else:
        refined = [k + step * z for z, k in zip(g_0, g_k, strict=True)]
    if s.element_max != "off":
        refined = [max(-s.element_max, min(s.element_max, x)) for x in refined]
    return refined, theta, alpha, beta


def reference(g_0: Tensor, g_k: Tensor, s: IncoSettings) -> tuple[Tensor, list[float]]:
    """Loop over the groups that have one theta each: (refined tensor, [theta, alpha, beta, positive])."""
    result = torch.empty(g_k.shape, dtype=torch.float64)
    seen = []
    by_kernel = s.granularity == "kernel" and g_k.ndim == 4
    places = (
        [(o, i) for o in range(g_k.shape[0]) for i in range(g_k.shape[1])] if by_kernel else [...]
    )
    for place in places:
        values, theta, alpha, beta = scalar_inco(
            g_0[place].flatten().tolist(), g_k[place].flatten().tolist(), s
        )
        result[place] = torch.tensor(values, dtype=torch.float64).reshape(g_k[place].shape)
        seen.append((theta, alpha, beta, 1.0 if beta > 0 else 0.0))
    return result, [math.fsum(column) / len(seen) for column in zip(*seen, strict=True)]


CHOICES = {
    "granularity": ("kernel", "tensor"),
    "sign": ("plus", "minus", "theorem"),
    "products": ("raw", "normalized"),
    "normalize": (True, False),
    "optimize": (True, False),
    "theta_max": ("off", 0.4),
    "element_max": ("off", 0.09),
}
EVERY = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
SHAPES = [(4, 3, 3, 3), (5, 7), (11,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_combination_equals_the_scalar_reference(shape):
    """A large epsilon, so that each of its three places shows."""
    g_0, g_k = random(*shape, seed=1), random(*shape, seed=2)
    for chosen in EVERY:
        s = IncoSettings(variant="official", epsilon=0.01, **chosen)
        changed, coefficients = inco({"shallow": g_0, "deep": g_k}, PAIR, s)
        expected, means = reference(g_0, g_k, s)
        assert changed["deep"].dtype == torch.float32
        assert torch.allclose(changed["deep"].double(), expected, rtol=1e-6, atol=1e-8), s
        for got, wanted in zip(coefficients["deep"], means, strict=True):
            assert got.shape == () and got.item() == pytest.approx(wanted, rel=1e-6, abs=1e-9), s


@pytest.mark.parametrize("key", CHOICES)
def test_each_setting_changes_the_result(key):
    """So that the comparison above can tell the combinations apart."""
    g_0, g_k = random(4, 3, 3, 3, seed=1), random(4, 3, 3, 3, seed=2)
    base = {
        "variant": "official",
        "sign": "minus",
        "epsilon": 0.01,
        "theta_max": "off",
        "element_max": "off",
    }
    results = [refine(g_0, g_k, **{**base, key: value})[0] for value in CHOICES[key]]
    for one, other in itertools.combinations(results, 2):
        assert (one - other).abs().max() > 1e-3


# Hand-computed.


def test_vector_by_hand():
    """g_0 = (3, 4): |g_0| = 5, alpha = 25. g_k = (0, 10): |g_k| = 10, beta = 40. theta = 40/25 = 1.6, mean norm 7.5.

    plus:    ((0, 1) + 1.6 (0.6, 0.8)) 7.5 = (0.96, 2.28) 7.5 = (7.2, 17.1)
    minus:   ((0, 1) - 1.6 (0.6, 0.8)) 7.5 = (-0.96, -0.28) 7.5 = (-7.2, -2.1)
    theorem: beta > 0, so theta = 0: (0, 1) 7.5 = (0, 7.5)
    """
    g_0, g_k = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 10.0])
    for sign, expected, theta in (
        ("plus", [7.2, 17.1], 1.6),
        ("minus", [-7.2, -2.1], 1.6),
        ("theorem", [0, 7.5], 0),
    ):
        got, coefficients = refine(g_0, g_k, **PLAIN, sign=sign)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32))
        assert [c.item() for c in coefficients] == pytest.approx([theta, 25, 40, 1])


def test_opposed_vector_by_hand():
    """g_k = (0, -10): beta = -40, theta = -1.6; all three signs add 1.6 g_0': (0.96, 0.28) 7.5 = (7.2, 2.1)."""
    g_0, g_k = torch.tensor([3.0, 4.0]), torch.tensor([0.0, -10.0])
    for sign, theta in (("plus", 1.6), ("minus", -1.6), ("theorem", -1.6)):
        got, coefficients = refine(g_0, g_k, **PLAIN, sign=sign)
        torch.testing.assert_close(got, torch.tensor([7.2, 2.1]))
        assert [c.item() for c in coefficients] == pytest.approx([theta, 25, -40, 0])


def test_normalized_products_by_hand():
    """g_0' = (0.6, 0.8), g_k' = (0, 1): alpha = 1, beta = theta = 0.8 (the cosine).

    plus:  ((0, 1) + 0.8 (0.6, 0.8)) 7.5 = (0.48, 1.64) 7.5 = (3.6, 12.3)
    minus: ((0, 1) - 0.8 (0.6, 0.8)) 7.5 = (-0.48, 0.36) 7.5 = (-3.6, 2.7), orthogonal to g_0: -10.8 + 10.8 = 0
    """
    g_0, g_k = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 10.0])
    for sign, expected in (("plus", [3.6, 12.3]), ("minus", [-3.6, 2.7])):
        got, coefficients = refine(g_0, g_k, **PLAIN, sign=sign, products="normalized")
        torch.testing.assert_close(got, torch.tensor(expected))
        assert [c.item() for c in coefficients] == pytest.approx([0.8, 1, 0.8, 1])


@pytest.mark.parametrize("sign", ["plus", "minus", "theorem"])
def test_ablations_by_hand(sign):
    """Without O theta is 1 and added: ((0, 1) + (0.6, 0.8)) 7.5 = (4.5, 13.5). Without N & O: (0, 10) + (3, 4).

    Without N alone: (0, 10) + 1.6 (3, 4) = (4.8, 16.4); minus: (-4.8, 3.6); theorem: g_k as it is.
    """
    g_0, g_k = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 10.0])
    without_o, coefficients = refine(
        g_0, g_k, **{**PLAIN, "theta_max": 0.5}, sign=sign, optimize=False
    )
    torch.testing.assert_close(without_o, torch.tensor([4.5, 13.5]))
    assert coefficients.theta == 1
    without_both, _ = refine(g_0, g_k, **PLAIN, sign=sign, optimize=False, normalize=False)
    torch.testing.assert_close(without_both, torch.tensor([3.0, 14.0]))
    without_n, _ = refine(g_0, g_k, **PLAIN, sign=sign, normalize=False)
    expected = {"plus": [4.8, 16.4], "minus": [-4.8, 3.6], "theorem": [0.0, 10.0]}[sign]
    torch.testing.assert_close(without_n, torch.tensor(expected))


def test_official_guards_by_hand():
    """Two 1x1 kernels. First: g_0 = 0.01, g_k = 0.2: theta = 0.002 / 0.0001 = 20 -> 5 (with eps 19.98 -> 5);
    (1 + 5) (0.21 / 2) = 0.63 -> 0.1. Second: g_0 = 0.0003, g_k = -0.0003: alpha = 9e-8, so eps counts:
    theta = 9e-8 / (9e-8 + 1e-7) = 9/19; norms 0.0003 over 0.0003001: (-1 + 9/19) 0.0003 / 1.000333 = -1.5784e-4.
    """
    g_0 = torch.tensor([0.01, 0.0003]).reshape(1, 2, 1, 1)
    g_k = torch.tensor([0.2, -0.0003]).reshape(1, 2, 1, 1)
    got, coefficients = refine(g_0, g_k, variant="official")
    torch.testing.assert_close(
        got.flatten(), torch.tensor([0.1, (-10 / 19) * 0.0003**2 / 0.0003001])
    )
    assert coefficients.theta.item() == pytest.approx((5 + 9 / 19) / 2)
    assert coefficients.alpha.item() == pytest.approx((1e-4 + 9e-8) / 2)
    assert coefficients.beta.item() == pytest.approx((2e-3 - 9e-8) / 2)
    assert coefficients.positive.item() == 0.5


def test_kernel_granularity_is_tensor_granularity_of_each_kernel():
    g_0, g_k = random(3, 2, 3, 3, seed=5), random(3, 2, 3, 3, seed=6)
    got, _ = refine(g_0, g_k, variant="official")
    for o, i in itertools.product(range(3), range(2)):
        alone, _ = refine(g_0[o, i], g_k[o, i], variant="official", granularity="tensor")
        torch.testing.assert_close(got[o, i], alone)


def test_single_entry_kernels_reduce_to_the_scalar_form():
    """Stage 4 on 1x1 maps: only centre taps move; theta = |g_k|/|g_0| and u = (sign g_k + theta sign g_0) mean norm."""
    g_0, g_k = torch.zeros(6, 5, 3, 3), torch.zeros(6, 5, 3, 3)
    g_0[..., 1, 1], g_k[..., 1, 1] = random(6, 5, seed=3, scale=1), random(6, 5, seed=4, scale=1)
    got, _ = refine(g_0, g_k, **PLAIN)
    z, k = g_0[..., 1, 1], g_k[..., 1, 1]
    torch.testing.assert_close(
        got[..., 1, 1], (k.sign() + k.abs() / z.abs() * z.sign()) * (k.abs() + z.abs()) / 2
    )
    got[..., 1, 1] = 0
    assert not got.any()


# Promises.


def test_zero_theta_keeps_the_direction_of_the_deep_layer():
    """Orthogonal gradients, and any pair with theta clamped to next to nothing."""
    g_0, g_k = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, -3.0, 0.0])
    got, coefficients = refine(g_0, g_k, **PLAIN)
    assert coefficients.theta == coefficients.positive == 0
    torch.testing.assert_close(got, g_k / 3 * (3 + math.sqrt(5)) / 2)
    g_0, g_k = random(4, 3, 3, 3, seed=1), random(4, 3, 3, 3, seed=2)
    got, _ = refine(g_0, g_k, **{**PLAIN, "theta_max": 1e-12})
    torch.testing.assert_close(
        torch.cosine_similarity(got.flatten(2), g_k.flatten(2), dim=2), torch.ones(4, 3)
    )
    assert not torch.allclose(got, g_k)


@pytest.mark.parametrize("variant", ["official", "paper"])
@pytest.mark.parametrize("shape", [*SHAPES, ()], ids=str)
def test_zero_gradients_give_zero_terms(variant, shape):
    """A zero source halves the target under normalisation, (g_k/|g_k|) |g_k|/2; a zero target stays zero: beta = 0."""
    zero, g = torch.zeros(shape), random(*shape, seed=2, scale=0.02)
    for products in ("raw", "normalized"):
        got, coefficients = refine(zero, g, variant=variant, products=products)
        torch.testing.assert_close(got, g / 2, rtol=1e-4, atol=1e-7)
        assert coefficients.theta == coefficients.alpha == coefficients.beta == 0
        for options in ({}, {"normalize": False}):
            assert not refine(g, zero, variant=variant, products=products, **options)[0].any()
            assert not refine(zero, zero, variant=variant, products=products, **options)[0].any()
        assert same_bits(refine(zero, g, variant=variant, products=products, normalize=False)[0], g)


def test_without_optimisation_a_zero_target_takes_half_the_source():
    got, _ = refine(torch.tensor([3.0, 4.0]), torch.zeros(2), **PLAIN, optimize=False)
    torch.testing.assert_close(got, torch.tensor([1.5, 2.0]))


def test_pairs_with_a_missing_layer_are_skipped():
    change = {"a": random(3, seed=1), "b": random(3, seed=2)}
    pairs = [CrossLayer("a", "gone"), CrossLayer("gone", "b"), CrossLayer("gone", "gone too")]
    changed, coefficients = inco(change, pairs, IncoSettings(variant="official"))
    assert changed == change and coefficients == {}


def test_only_targets_change_and_inputs_are_never_modified():
    change = {
        "stem": random(2, seed=0),
        "shallow": random(2, 2, 3, 3, seed=1),
        "deep": random(2, 2, 3, 3, seed=2),
    }
    before = {name: tensor.clone() for name, tensor in change.items()}
    changed, coefficients = inco(change, PAIR, IncoSettings(variant="official"))
    assert list(changed) == list(change) and set(coefficients) == {"deep"}
    assert changed["stem"] is change["stem"] and changed["shallow"] is change["shallow"]
    assert not torch.equal(changed["deep"], before["deep"])
    assert all(same_bits(change[name], before[name]) for name in change)


def test_sources_are_the_unmodified_changes_in_any_order():
    """Every layer is both a source and a target: each sees the others as they were merged."""
    change = {name: random(2, 2, 3, 3, seed=seed) for seed, name in enumerate("abc")}
    pairs = [CrossLayer("a", "b"), CrossLayer("b", "c"), CrossLayer("c", "a")]
    s = IncoSettings(variant="official")
    alone = {pair.target: inco(change, [pair], s)[0][pair.target] for pair in pairs}
    for order in itertools.permutations(pairs):
        changed, _ = inco(change, order, s)
        assert all(same_bits(changed[name], alone[name]) for name in "abc")


@pytest.mark.parametrize("granularity", ["kernel", "tensor"])
@pytest.mark.parametrize("whole", ["neither", "shallow", "deep"])
def test_uncovered_kernels_keep_their_change_and_do_not_count(granularity, whole):
    """Each layer covers a corner of its channels; the result on the common corner is that of the corner alone."""
    g_0, g_k = random(4, 4, 3, 3, seed=1), random(4, 4, 3, 3, seed=2)
    covered: dict[str, Tensor | None] = {"shallow": torch.zeros(4, 4, 3, 3, dtype=torch.bool)}
    covered["deep"] = covered["shallow"].clone()
    covered["shallow"][:3, :2] = True
    covered["deep"][:2, :3] = True
    rows, columns = 2, 2
    if whole == "shallow":
        covered["shallow"], columns = None, 3
    if whole == "deep":
        rows = 3
        del covered["deep"]
    s = IncoSettings(variant="official", granularity=granularity)
    changed, coefficients = inco({"shallow": g_0, "deep": g_k}, PAIR, s, covered)
    corner, expected = refine(
        g_0[:rows, :columns], g_k[:rows, :columns], variant="official", granularity=granularity
    )
    torch.testing.assert_close(changed["deep"][:rows, :columns], corner, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(torch.stack(coefficients["deep"]), torch.stack(expected))
    outside = torch.ones(4, 4, 3, 3, dtype=torch.bool)
    outside[:rows, :columns] = False
    assert same_bits(changed["deep"][outside], g_k[outside])


def test_coverage_of_vectors_is_by_coordinate():
    """One coordinate in each is not held; the value there (large, and beyond element_max) neither counts nor moves."""
    g_0, g_k = torch.tensor([0.03, 0.04, 7.0, 0.0]), torch.tensor([0.0, 0.1, 0.5, -9.0])
    covered = {
        "shallow": torch.tensor([True, True, False, True]),
        "deep": torch.tensor([True, True, True, False]),
    }
    changed, _ = inco({"shallow": g_0, "deep": g_k}, PAIR, IncoSettings(**PLAIN), covered)
    torch.testing.assert_close(changed["deep"][:2], torch.tensor([0.072, 0.171]))
    assert same_bits(changed["deep"][2:], g_k[2:])


def test_a_partly_covered_kernel_is_left_alone():
    g_0, g_k = random(1, 2, 3, 3, seed=1), random(1, 2, 3, 3, seed=2)
    mask = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    mask[0, 0, 2, 2] = False
    s = IncoSettings(variant="official")
    changed, _ = inco({"shallow": g_0, "deep": g_k}, PAIR, s, {"deep": mask})
    assert same_bits(changed["deep"][0, 0], g_k[0, 0])
    assert same_bits(changed["deep"][0, 1], refine(g_0, g_k, variant="official")[0][0, 1])


@pytest.mark.parametrize("granularity", ["kernel", "tensor"])
def test_nothing_covered_changes_nothing(granularity):
    g_0, g_k = random(2, 2, 3, 3, seed=1), random(2, 2, 3, 3, seed=2)
    mask = torch.zeros(2, 2, 3, 3, dtype=torch.bool)
    s = IncoSettings(variant="official", granularity=granularity)
    changed, coefficients = inco({"shallow": g_0, "deep": g_k}, PAIR, s, {"shallow": mask})
    assert same_bits(changed["deep"], g_k)
    assert not torch.stack(coefficients["deep"]).any()


@pytest.mark.parametrize("masked", [False, True])
def test_no_value_is_ever_read_on_the_host(masked):
    """A meta tensor has no values: reading one, or branching on one, raises. So a GPU never has to wait."""
    change = {name: torch.empty(4, 4, 3, 3, device="meta") for name in ("shallow", "deep")}
    covered = {"deep": torch.empty(4, 4, 3, 3, dtype=torch.bool, device="meta")} if masked else None
    for chosen in EVERY:
        changed, coefficients = inco(
            change, PAIR, IncoSettings(variant="official", **chosen), covered
        )
        assert changed["deep"].device.type == "meta" and changed["deep"].dtype == torch.float32
        assert all(c.device.type == "meta" and c.shape == () for c in coefficients["deep"])


any_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(
    values=st.integers(1, 4).flatmap(
        lambda n: st.lists(any_float32, min_size=2 * n, max_size=2 * n)
    ),
    chosen=st.sampled_from(EVERY),
    epsilon=st.sampled_from([1e-7, 1e-30, 5e-324]),
)
@settings(max_examples=300, deadline=None)
def test_finite_gradients_never_give_nan(values, chosen, epsilon):
    g_0, g_k = torch.tensor(values).reshape(2, 1, 1, -1, 1)
    got, coefficients = refine(g_0, g_k, **{"variant": "official", **chosen, "epsilon": epsilon})
    assert not got.isnan().any() and not torch.stack(coefficients).isnan().any()


small = st.floats(-10, 10, width=32)


@given(values=st.integers(1, 8).flatmap(lambda n: st.lists(small, min_size=2 * n, max_size=2 * n)))
@settings(max_examples=300, deadline=None)
def test_the_theorem_solves_its_problem(values):
    """Eq. 1: g_opt is g_k where <g_k, g_0> >= 0 already and else orthogonal to g_0, up to its rounding to float32."""
    g_0, g_k = torch.tensor(values).reshape(2, -1)
    got, _ = refine(g_0, g_k, **{**PLAIN, "epsilon": 5e-324}, sign="theorem", normalize=False)
    before, after = (
        math.fsum(a * b for a, b in zip(g_0.tolist(), g.tolist(), strict=True)) for g in (g_k, got)
    )
    lengths = [math.hypot(*g.tolist()) for g in (g_0, g_k, got)]
    slack = lengths[0] * (2**-23 * lengths[2] + 1e-14 * lengths[1] + 1e-44)
    assert after >= -slack
    if before > slack:
        assert torch.equal(got, g_k)
    elif before < 0:
        assert after <= slack


# Settings.


def test_official_is_what_the_released_code_does():
    assert IncoSettings(variant="official").model_dump() == {
        "variant": "official",
        "layers": "released",
        "granularity": "kernel",
        "sign": "plus",
        "products": "raw",
        "normalize": True,
        "optimize": True,
        "theta_max": 5.0,
        "element_max": 0.1,
        "epsilon": 1e-7,
    }


def test_paper_is_algorithm_1():
    assert IncoSettings(variant="paper").model_dump() == {
        "variant": "paper",
        "layers": "released",
        "granularity": "tensor",
        "sign": "minus",
        "products": "raw",
        "normalize": True,
        "optimize": True,
        "theta_max": "off",
        "element_max": "off",
        "epsilon": 1e-30,
    }


def test_default_is_off_and_variants_are_active():
    assert INCO.validate({}) == IncoOff() and not IncoOff().active
    assert IncoSettings(variant="paper").active and IncoSettings(variant="official").active


def test_a_given_field_overrides_its_variant_and_nothing_else():
    changed = IncoSettings(variant="paper", theta_max=2, granularity="kernel").model_dump()
    assert changed == {
        **IncoSettings(variant="paper").model_dump(),
        "theta_max": 2.0,
        "granularity": "kernel",
    }
    assert IncoSettings(variant="official", theta_max="off").theta_max == "off"


def to_toml(values: dict) -> str:
    spelled = {True: "true", False: "false"}
    return "\n".join(
        f"{key} = {spelled[value] if isinstance(value, bool) else repr(value)}"
        for key, value in values.items()
    )


@pytest.mark.parametrize("variant", ["paper", "official"])
@pytest.mark.parametrize(
    "override", [{}, {"theta_max": "off"}, {"element_max": 0.5, "sign": "theorem"}]
)
def test_resolved_settings_round_trip_through_toml(variant, override):
    resolved = IncoSettings(variant=variant, **override)
    dumped = resolved.model_dump()
    assert None not in dumped.values()
    assert IncoSettings(**tomllib.loads(to_toml(dumped))) == resolved


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"variant": "oficial"}, ["inco.variant", "'oficial'", "'official'"]),
        ({"variant": ["paper"]}, ["inco.variant"]),
        ({"variant": "paper", "sign": "+"}, ["inco.sign", "'+'", "'theorem'"]),
        ({"theta_max": 0}, ["inco.theta_max = 0", "above 0", '"off"']),
        ({"element_max": "none"}, ["inco.element_max = 'none'", "above 0", '"off"']),
        ({"theta_max": float("nan")}, ["inco.theta_max"]),
        ({"theta_max": None}, ["inco.theta_max = None"]),
        ({"epsilon": 0.0}, ["inco.epsilon", "greater than 0"]),
        ({"granularty": "kernel"}, ["inco.granularty", "Did you mean 'granularity'?"]),
    ],
)
def test_a_wrong_setting_names_its_key_and_what_is_allowed(values, parts):
    with pytest.raises(MotleyError) as error:
        validate(IncoSettings, values, "inco")
    message = str(error.value)
    assert all(part in message for part in parts), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("masked", [False, True])
def test_each_gate_of_an_lstm_has_its_own_theta(masked):
    """Four tensors stacked along the rows are refined as four pairs of their own."""
    s = IncoSettings(**PLAIN)
    change = {"shallow": random(12, 5), "deep": random(12, 5, seed=1)}
    covered = {}
    if masked:
        covered = {"deep": torch.ones(12, 5, dtype=torch.bool)}
        covered["deep"][:, 3:] = False
    refined, together = inco(change, [CrossLayer("shallow", "deep", 4)], s, covered)
    rows, thetas = [], []
    for gate in range(4):
        part = slice(3 * gate, 3 * gate + 3)
        own = {name: mask[part] for name, mask in covered.items()}
        alone, coefficients = inco({n: t[part] for n, t in change.items()}, PAIR, s, own)
        rows.append(alone["deep"])
        thetas.append(coefficients["deep"].theta)
    assert torch.equal(refined["deep"], torch.cat(rows))
    torch.testing.assert_close(together["deep"].theta, torch.stack(thetas).mean())
    whole, _ = inco(change, PAIR, s, covered)
    assert not torch.equal(whole["deep"], refined["deep"])


def test_a_kernel_of_a_signal_convolution_has_its_own_theta():
    s = IncoSettings(**PLAIN)
    change = {"shallow": random(2, 3, 5), "deep": random(2, 3, 5, seed=1)}
    refined, _ = inco(change, PAIR, s)
    flat = {name: tensor.unsqueeze(2) for name, tensor in change.items()}
    assert torch.equal(refined["deep"], inco(flat, PAIR, s)[0]["deep"].squeeze(2))
