"""InCo Aggregation: the delta of a shallow layer refines the deltas of deeper layers of its shape.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-layer Gradients for Extending Homogeneity to
Heterogeneity in Federated Learning", ICLR 2024.

The stage runs after the aggregation and before any server optimizer, so it combines with every
method that exchanges weights. The paper and its released code differ: each difference is a setting
(`server.inco`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from motley.core.errors import MotleyError
from motley.core.merge import Aggregate
from motley.core.part import State
from motley.core.update import ClientUpdate
from motley.models import CrossLayer
from motley.server.pipeline import StageResult
from motley.server.state import ServerState
from motley.settings import Choice, Limit, Positive, Settings


class IncoOff(Settings):
    """InCo Aggregation on top of the method. Only `variant` exists if it is "off"."""

    lasting = ()

    variant: Literal["off", "paper", "official"] = "off"
    """off, or InCo as the paper describes it (paper) or as its authors released it (official). The
    other keys override the variant's values.
    """

    @property
    def active(self) -> bool:
        """Whether InCo is on."""
        return self.variant != "off"


class IncoSettings(IncoOff):
    """A variant of InCo, and the values that differ from it.

    The fields' defaults follow the authors' released code ("official"). "paper" is Algorithm
    1 to the letter: no clamps, no epsilon (1e-30 only prevents 0/0), and raw products. Line 8 takes
    alpha and beta from Theorem 3.1, whose g carry no prime, although line 7 has just defined the
    normalized g'. Section 5.4 explains a falling beta by shrinking gradients, which a cosine would
    not show. `products = "normalized"` is the reading by the order of lines 7 and 8; with it line 9
    is an exact projection.
    """

    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "official": {},
        "paper": {
            "granularity": "tensor",
            "sign": "minus",
            "theta_max": "off",
            "element_max": "off",
            "epsilon": 1e-30,
        },
    }

    variant: Literal["paper", "official"] = "official"
    layers: Literal["released", "same-shape"] = "released"
    """The layers that are refined. released: as in the authors' code; in a ResNet the
    convolutions of a stage's later blocks, by conv2 of its first block, and in a ViT the weight of
    each norm2, by norm1. In an LSTM or a transformer for text, which they do not have, the weights
    of later layers, by the first layer of that shape. same-shape: all layers of one shape in a
    stage, by the first of them, as Section 3.2 has it; biases and norms too.
    """
    granularity: Literal["kernel", "tensor"] = "kernel"
    """kernel: one theta per (out, in) kernel of a convolution (a 3-D or 4-D weight), and one per
    tensor of any other weight. tensor: one per tensor throughout. The gates of an LSTM, and query,
    key and value of an attention, count as tensors.
    """
    sign: Literal["plus", "minus", "theorem"] = "plus"
    """plus: +|theta| (released code). minus: -theta (Algorithm 1). theorem: -theta only where
    beta < 0 (Theorem 3.1, Eq. 2).
    """
    products: Literal["raw", "normalized"] = "raw"
    """The gradients that alpha and beta are computed from: raw or normalized."""
    normalize: bool = True
    """Normalize gradients before they are combined. False is the paper's ablation "w/o N"."""
    optimize: bool = True
    """Use the optimal theta. False is the paper's ablation "w/o O": theta is 1, unclamped, and
    layer 0 is added whatever `sign` says.
    """
    theta_max: Limit = 5.0
    """Maximum |theta|."""
    element_max: Limit = 0.1
    """Maximum absolute value of an element of the resulting delta."""
    epsilon: Positive = 1e-7
    """Added to alpha and to both norms before dividing by them."""


#: Chosen by server.inco.variant.
INCO = Choice(
    "off", {"off": IncoOff, "paper": IncoSettings, "official": IncoSettings}, key="variant"
)


class Coefficients(NamedTuple):
    """Figure 9 and Table 3 for one target: means over its covered kernels.

    `theta` is the value as used: |theta| with sign = "plus", 0 where Theorem 3.1 leaves g_k alone,
    and 1 without optimization. `positive` is the fraction of kernels with beta > 0.
    """

    theta: Tensor
    alpha: Tensor
    beta: Tensor
    positive: Tensor


@dataclass(frozen=True)
class InCo:
    """Refine the deltas of deep layers. `pairs` are the layers that match, from shallow to deep."""

    pairs: Sequence[CrossLayer]
    settings: IncoSettings
    name: str = "inco"

    def __post_init__(self) -> None:
        if not self.pairs:
            raise MotleyError(
                f"server.inco.variant = {self.settings.variant!r}: the models (model.sizes) have "
                "no layers of one shape behind each other, so there is nothing to mix."
            )

    def __call__(
        self, server: ServerState, aggregate: Aggregate, updates: Sequence[ClientUpdate]
    ) -> StageResult:
        """Return the refined delta.

        The metrics are LAYER/COEFFICIENT for every layer that was refined.
        """
        delta, coefficients = inco(aggregate.delta, self.pairs, self.settings, aggregate.covered)
        metrics = {}
        for layer, row in coefficients.items():
            for name, value in row._asdict().items():
                metrics[f"{layer}/{name}"] = value
        return StageResult(server, aggregate.with_delta(delta), metrics)


def inco(
    delta: Mapping[str, Tensor],
    pairs: Sequence[CrossLayer],
    settings: IncoSettings,
    covered: Mapping[str, Tensor | None] | None = None,
) -> tuple[State, dict[str, Coefficients]]:
    """Return the delta with every target refined by its source, and every target's coefficients.

    Sources are always the deltas as given, so the order of pairs does not matter. A pair is skipped
    if nobody held one of its layers. `covered` says which coordinates somebody held (None: all of
    them). Only kernels that are covered in both source and target take part and are changed; if
    theta is per tensor, only such coordinates.
    """
    refined = dict(delta)
    coefficients: dict[str, Coefficients] = {}
    for group in _groups_of_one_shape(delta, pairs, covered or {}):
        # All pairs of one shape are computed together, in a stack: a few kernels instead of a few
        # per pair.
        deep = torch.stack([delta[pair.target] for pair, _ in group])
        shallow = torch.stack([delta[pair.source] for pair, _ in group])
        masks = [mask for _, mask in group if mask is not None]
        mask = torch.stack(masks) if masks else None
        chunks = group[0][0].chunks
        mixed, values = _refine_chunks(deep, shallow, mask, chunks, settings)
        for (pair, _), tensor, *row in zip(group, mixed, *values, strict=True):
            refined[pair.target] = tensor
            coefficients[pair.target] = Coefficients(*row)
    return refined, coefficients


PairAndMask = tuple[CrossLayer, Tensor | None]


def _groups_of_one_shape(
    delta: Mapping[str, Tensor], pairs: Sequence[CrossLayer], covered: Mapping[str, Tensor | None]
) -> list[list[PairAndMask]]:
    """Return the pairs of which both layers were held, each with its mask of coordinates.

    A group holds the pairs of one shape and number of chunks, and either all of them have a mask
    or none has.
    """
    groups: dict[object, list[PairAndMask]] = {}
    for pair in pairs:
        if pair.source not in delta or pair.target not in delta:
            continue
        source, target = covered.get(pair.source), covered.get(pair.target)
        if source is not None and target is not None:
            mask: Tensor | None = source & target
        else:
            mask = target if source is None else source
        group = delta[pair.target].shape, pair.chunks, mask is None
        groups.setdefault(group, []).append((pair, mask))
    return list(groups.values())


def _refine_chunks(
    deep: Tensor, shallow: Tensor, mask: Tensor | None, chunks: int, settings: IncoSettings
) -> tuple[Tensor, Coefficients]:
    """Refine a stack of pairs of tensors, each of which consists of several along its rows.

    The coefficients are means over the chunks of a pair.
    """
    if chunks == 1:
        return _refine(deep, shallow, mask, settings)
    pairs = len(deep)
    apart = (pairs * chunks, deep.shape[1] // chunks, *deep.shape[2:])
    mixed, values = _refine(
        deep.reshape(apart),
        shallow.reshape(apart),
        None if mask is None else mask.reshape(apart),
        settings,
    )
    means = Coefficients(*(value.view(pairs, chunks).mean(1) for value in values))
    return mixed.reshape(deep.shape), means


def _refine(
    deep: Tensor, shallow: Tensor, mask: Tensor | None, settings: IncoSettings
) -> tuple[Tensor, Coefficients]:
    """Combine each g_k (`deep`) and g_0 (`shallow`) of a stack of pairs as Algorithm 1, line 9:

    (g_k' -+ theta g_0') (|g_k| + |g_0|) / 2, where g' = g / (|g| + eps); without normalization g_k
    -+ theta g_0. In double precision no finite float32 input overflows, so nothing here can become
    NaN.
    """
    # The weights of convolutions, in a stack: (pairs, out, in, kernel...).
    per_kernel = settings.granularity == "kernel" and deep.dim() in (4, 5)
    shape, dims = deep.shape, tuple(range(3, deep.dim())) if per_kernel else (-1,)
    if not per_kernel:
        deep, shallow = deep.reshape(len(deep), -1), shallow.reshape(len(deep), -1)
    if mask is not None:
        mask = mask.all(dims, keepdim=True) if per_kernel else mask.reshape(len(deep), -1)
    g_k, g_0 = deep.double(), shallow.double()
    if mask is not None:
        g_k, g_0 = g_k.where(mask, 0.0), g_0.where(mask, 0.0)
    alpha = (g_0 * g_0).sum(dims, keepdim=True)
    beta = (g_0 * g_k).sum(dims, keepdim=True)
    norm_0 = alpha.sqrt()
    norm_k = g_k.square().sum(dims, keepdim=True).sqrt()
    divisor_0, divisor_k = norm_0 + settings.epsilon, norm_k + settings.epsilon
    if settings.products == "normalized":
        alpha, beta = alpha / divisor_0 / divisor_0, beta / divisor_0 / divisor_k
    theta = _theta(alpha, beta, settings)
    signed = theta if settings.sign == "plus" or not settings.optimize else -theta
    if settings.normalize:
        mixed = (g_k / divisor_k + signed * (g_0 / divisor_0)) * ((norm_k + norm_0) / 2)
    else:
        mixed = g_k + signed * g_0
    if isinstance(settings.element_max, float):
        mixed = mixed.clamp(-settings.element_max, settings.element_max)
    mixed = mixed.to(deep.dtype)
    if mask is not None:
        mixed = torch.where(mask, mixed, deep)
    positive = (beta > 0).double()
    coefficients = Coefficients(*(_mean(value, mask) for value in (theta, alpha, beta, positive)))
    return mixed.reshape(shape), coefficients


def _theta(alpha: Tensor, beta: Tensor, settings: IncoSettings) -> Tensor:
    """Return theta = beta / alpha, where alpha = <g_0, g_0> and beta = <g_0, g_k>.

    Theorem 3.1; in matrix form, Eq. 20.
    """
    if not settings.optimize:
        return torch.ones_like(beta)
    theta = beta / (alpha + settings.epsilon)
    if settings.sign == "plus":
        theta = theta.abs()
    elif settings.sign == "theorem":
        theta = theta.clamp(max=0)
    if isinstance(settings.theta_max, float):
        theta = theta.clamp(-settings.theta_max, settings.theta_max)
    return theta


def _mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Return each pair's mean over its covered kernels."""
    value = value.flatten(1)
    if mask is None:
        return value.mean(1).float()
    mask = mask.flatten(1)
    return ((value * mask).sum(1) / mask.sum(1).clamp(min=1)).float()
