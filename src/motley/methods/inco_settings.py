"""The settings of InCo Aggregation (`method.inco`). The algorithm is in `motley.server.inco`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

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

    The fields' defaults are what the authors' released code does ("official"). "paper" is Algorithm
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
    granularity: Literal["kernel", "tensor"] = "kernel"
    """kernel: one theta per (out, in) kernel of a 4-D weight, and one per tensor of any other
    weight. tensor: one per tensor throughout.
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


#: Chosen by method.inco.variant.
INCO = Choice(
    "off", {"off": IncoOff, "paper": IncoSettings, "official": IncoSettings}, key="variant"
)
