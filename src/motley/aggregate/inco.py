"""InCo Aggregation: the merged change of a shallow layer refines those of the deeper layers of its shape.

Chan, Zhou, Zhao, Jiang and Ngai, "Internal Cross-layer Gradients for Extending Homogeneity to Heterogeneity in
Federated Learning", ICLR 2024.

It runs after the merge and before any server optimiser, so it combines with every method that merges weights. The
paper and its released code differ: each difference is a setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from motley.core.part import State
from motley.models import CrossLayer
from motley.settings import Choice, Limit, Positive, Settings


class IncoOff(Settings):
    """InCo Aggregation on top of the method. The keys below are for every variant but "off"."""

    lasting = ()

    variant: Literal["off", "paper", "official"] = "off"
    """off, or InCo as the paper describes it (paper) or as its authors released it (official). The other keys override
    the variant's values.
    """

    @property
    def active(self) -> bool:
        """Whether InCo changes anything."""
        return self.variant != "off"


class IncoSettings(IncoOff):
    """A variant of InCo, and the values that differ from it.

    The fields' defaults are what the authors' released code does ("official"). "paper" is Algorithm 1 to the
    letter: no clamps, no epsilon (1e-30 only avoids 0/0), and raw products. The products are raw because line 8 takes
    alpha and beta from Theorem 3.1, whose g carry no prime, though line 7 has just defined normalised g'; and because
    Section 5.4 explains a falling beta by shrinking gradients, which a cosine would not show. `products = "normalized"`
    is the reading by the order of lines 7 and 8: there line 9 is an exact projection.
    """

    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "official": {},
        "paper": {"granularity": "tensor", "sign": "minus", "theta_max": "off", "element_max": "off", "epsilon": 1e-30},
    }

    variant: Literal["paper", "official"] = "official"
    granularity: Literal["kernel", "tensor"] = "kernel"
    """kernel: one theta per (out, in) kernel of a 4-D weight, and one per tensor of any other weight. tensor: one per
    tensor throughout.
    """
    sign: Literal["plus", "minus", "theorem"] = "plus"
    """plus: +|theta| (released code). minus: -theta (Algorithm 1). theorem: -theta only where beta < 0 (Theorem 3.1,
    Eq. 2).
    """
    products: Literal["raw", "normalized"] = "raw"
    """The gradients that alpha and beta are computed from: raw or normalized."""
    normalize: bool = True
    """Normalise gradients before they are combined. False is the paper's ablation "w/o N"."""
    optimize: bool = True
    """Use the optimal theta. False is the paper's ablation "w/o O": theta is 1, unclamped, and layer 0 is added
    whatever `sign` says.
    """
    theta_max: Limit = 5.0
    """Maximum |theta|."""
    element_max: Limit = 0.1
    """Maximum absolute value of an element of the resulting delta."""
    epsilon: Positive = 1e-7
    """Added to alpha and to both norms before dividing by them."""


INCO = Choice("off", {"off": IncoOff, "paper": IncoSettings, "official": IncoSettings}, key="variant")


class Coefficients(NamedTuple):
    """Figure 9 and Table 3 for one target: means of theta, alpha, beta and (beta > 0) over its covered kernels."""

    theta: Tensor  # as used: |theta| under "plus", 0 where Theorem 3.1 leaves g_k alone, 1 without optimisation
    alpha: Tensor
    beta: Tensor
    positive: Tensor


def inco(
    change: Mapping[str, Tensor],
    pairs: Sequence[CrossLayer],
    settings: IncoSettings,
    covered: Mapping[str, Tensor | None] | None = None,
) -> tuple[State, dict[str, Coefficients]]:
    """Return the change with every pair's target refined by its source, and the coefficients of each target.

    Sources are always the changes as given, so the order of pairs is free. A pair of which nobody held one layer is
    skipped. `covered` says which coordinates somebody held (None: all). What takes part, and is changed, are the
    kernels (where theta is one a tensor: the coordinates) that are covered in both source and target.
    """
    refined, coefficients = dict(change), {}
    for alike in _alike(change, pairs, covered or {}).values():
        deep, shallow = (torch.stack([change[getattr(pair, end)] for pair, _ in alike]) for end in ("target", "source"))
        held = torch.stack([mask for _, mask in alike if mask is not None]) if alike[0][1] is not None else None
        mixed, values = _refine(deep, shallow, held, settings)
        for (pair, _), tensor, *row in zip(alike, mixed, *values, strict=True):
            refined[pair.target], coefficients[pair.target] = tensor, Coefficients(*row)
    return refined, coefficients


def _alike(
    change: Mapping[str, Tensor], pairs: Sequence[CrossLayer], covered: Mapping[str, Tensor | None]
) -> dict[object, list[tuple[CrossLayer, Tensor | None]]]:
    """Return the pairs of which both layers were held, each with its mask, those of one shape together."""
    groups: dict[object, list[tuple[CrossLayer, Tensor | None]]] = {}
    for pair in pairs:
        if pair.source in change and pair.target in change:
            masks = [mask for name in pair if (mask := covered.get(name)) is not None]
            held = masks[0] & masks[-1] if masks else None
            groups.setdefault((change[pair.target].shape, held is None), []).append((pair, held))
    return groups


def _refine(deep: Tensor, shallow: Tensor, held: Tensor | None, settings: IncoSettings) -> tuple[Tensor, Coefficients]:
    """Combine each g_k (`deep`) and g_0 (`shallow`) of a stack of pairs as Algorithm 1, line 9:

    (g_k' -+ theta g_0') (|g_k| + |g_0|) / 2, where g' = g / (|g| + eps); without normalisation g_k -+ theta g_0.
    In double precision, where no finite float32 input overflows: nothing here can become NaN.
    """
    per_kernel = settings.granularity == "kernel" and deep.dim() == 5
    shape, dims = deep.shape, (-2, -1) if per_kernel else (-1,)
    if not per_kernel:
        deep, shallow = deep.reshape(len(deep), -1), shallow.reshape(len(deep), -1)
    if held is not None:
        held = held.all(dims, keepdim=True) if per_kernel else held.reshape(len(deep), -1)
    g_k, g_0 = (g.double() if held is None else g.double().where(held, 0.0) for g in (deep, shallow))
    alpha, beta = ((g_0 * g).sum(dims, keepdim=True) for g in (g_0, g_k))
    n_0, n_k = alpha.sqrt(), g_k.square().sum(dims, keepdim=True).sqrt()
    d_0, d_k = n_0 + settings.epsilon, n_k + settings.epsilon
    if settings.products == "normalized":
        alpha, beta = alpha / d_0 / d_0, beta / d_0 / d_k
    theta = _theta(alpha, beta, settings)
    signed = theta if settings.sign == "plus" or not settings.optimize else -theta
    mixed = (g_k / d_k + signed * (g_0 / d_0)) * ((n_k + n_0) / 2) if settings.normalize else g_k + signed * g_0
    if isinstance(settings.element_max, float):
        mixed = mixed.clamp(-settings.element_max, settings.element_max)
    mixed = mixed.to(deep.dtype)
    coefficients = Coefficients(*(_mean(value, held) for value in (theta, alpha, beta, (beta > 0).double())))
    return (mixed if held is None else torch.where(held, mixed, deep)).reshape(shape), coefficients


def _theta(alpha: Tensor, beta: Tensor, settings: IncoSettings) -> Tensor:
    """Theorem 3.1 (matrix form: Eq. 20): theta = beta / alpha, alpha = <g_0, g_0>, beta = <g_0, g_k>."""
    if not settings.optimize:
        return torch.ones_like(beta)
    theta = beta / (alpha + settings.epsilon)
    if settings.sign == "plus":
        theta = theta.abs()
    elif settings.sign == "theorem":
        theta = theta.clamp(max=0)
    return theta.clamp(-settings.theta_max, settings.theta_max) if isinstance(settings.theta_max, float) else theta


def _mean(value: Tensor, held: Tensor | None) -> Tensor:
    """Return each pair's mean over what was held."""
    value = value.flatten(1)
    if held is None:
        return value.mean(1).float()
    held = held.flatten(1)
    return ((value * held).sum(1) / held.sum(1).clamp(min=1)).float()
