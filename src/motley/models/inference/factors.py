"""Dimensions of tensors as products of factors, and which factors are the same channels.

A dimension is a list of factors: the 1,152 outputs of a ViT's query, key and value are (3, heads,
channels of a head), and the inputs of a linear layer after a flattened map are (channels, pixels).
An index of the dimension is the mixed-radix number of its factors' indices. A dimension starts as
one factor, and is split where an operation, such as a view, shows that it has a structure. Factors
that meet in an addition or a contraction are unified: they hold the same channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias


class Factor:
    """One factor of a dimension. Compare factors by identity, after `resolve`."""

    def __init__(self, size: int, fixed: str = "") -> None:
        self.size = size
        #: Why none of its channels can be left out; empty if they can.
        self._fixed = fixed
        self._same: Factor | None = None
        self._parts: list[Factor] = []

    @property
    def root(self) -> Factor:
        """The factor that stands for all factors that were unified with this one."""
        factor = self
        while factor._same is not None:
            factor = factor._same
        return factor

    @property
    def fixed(self) -> str:
        """Why none of its channels can be left out; empty if they can."""
        return self.root._fixed

    def fix(self, reason: str) -> None:
        """Forbid to leave out channels. The first reason is kept."""
        root = self.root
        if not root._fixed:
            root._fixed = reason
        for part in root._parts:
            part.fix(reason)


Dim: TypeAlias = list[Factor]
Dims: TypeAlias = list[Dim]


def new_dim(size: int, fixed: str = "") -> Dim:
    """Return a dimension of one new factor. A dimension of size 1 has no factors."""
    return [] if size == 1 else [Factor(size, fixed)]


def resolve(dim: Sequence[Factor]) -> Dim:
    """Return a dimension's factors as they are now: split ones are replaced by their parts."""
    factors: Dim = []
    for factor in dim:
        root = factor.root
        if root._parts:
            factors += resolve(root._parts)
        else:
            factors.append(root)
    return factors


def size_of(dim: Sequence[Factor]) -> int:
    """Return the length of a dimension."""
    return math.prod(factor.size for factor in dim)


def fix(dim: Sequence[Factor], reason: str) -> None:
    """Forbid to leave out channels of a dimension."""
    for factor in resolve(dim):
        factor.fix(reason)


def split(factor: Factor, sizes: Sequence[int]) -> None:
    """Split a factor into smaller ones, everywhere it occurs."""
    root = factor.root
    root._parts = [Factor(size, root._fixed) for size in sizes if size != 1]


def unify(a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    """Make two dimensions of one length the same channels. Return False if they do not fit."""
    return _match(a, b, same=True)


def align(a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    """Give two dimensions factors of the same sizes, so that they stay equally long when cut.

    If one of two such factors is fixed, both are.
    """
    return _match(a, b, same=False)


def _match(a: Sequence[Factor], b: Sequence[Factor], same: bool) -> bool:
    """Split two dimensions until their factors have the same sizes, and join them pair by pair.

    Return False if the dimensions do not fit. `same` is True for `unify`, False for `align`.
    """
    at = 0  # the position of the pair in both dimensions
    while True:
        # Splitting a factor changes the dimensions, so they are resolved anew for every pair.
        left, right = resolve(a), resolve(b)
        if at >= len(left) or at >= len(right):
            return len(left) == len(right)
        x, y = left[at], right[at]
        if x.size == y.size:
            if x is not y:
                _join(x, y, same)
            at += 1
        elif x.size % y.size == 0:
            split(x, (y.size, x.size // y.size))
        elif y.size % x.size == 0:
            split(y, (x.size, y.size // x.size))
        else:
            conflict = f"{_described(x)} and {_described(y)} divide the same channels"
            for factor in (*left[at:], *right[at:]):
                factor.fix(conflict)
            return False


def _described(factor: Factor) -> str:
    return f"{factor.size} {factor.fixed or 'channels'}"


def _join(x: Factor, y: Factor, same: bool) -> None:
    reason = x.fixed or y.fixed
    if same:
        y._same = x
    if reason:
        x.fix(reason)
        y.fix(reason)


def regroup(dims: Sequence[Sequence[Factor]], sizes: Sequence[int]) -> Dims | None:
    """Return the dimensions of a tensor that was viewed in other sizes.

    Factors are split where a new dimension begins inside of one. Return None if one does not
    divide.
    """
    flat = [factor for dim in dims for factor in resolve(dim)]
    grouped: Dims = []
    for size in sizes:
        dim: Dim = []
        missing = size
        while missing > 1:
            if not flat:
                return None
            first = flat[0]
            if missing % first.size == 0:
                dim.append(flat.pop(0))
                missing //= first.size
            elif first.size % missing == 0:
                split(first, (missing, first.size // missing))
                flat = resolve(flat)
            else:
                return None
        grouped.append(dim)
    return grouped if not flat else None


def blocks_of(dims: Sequence[Sequence[Factor]]) -> tuple[Dims, Dim]:
    """Split dimensions that are concatenated into blocks of their greatest common divisor.

    All blocks are unified. Return the dimensions and the block. A model that concatenates 64 and 32
    channels has three blocks of 32, which are cut alike.
    """
    sizes = [size_of(resolve(dim)) for dim in dims]
    length = math.gcd(*sizes)
    block = new_dim(length)
    for dim, size in zip(dims, sizes, strict=True):
        count = size // length
        outer = new_dim(count, "concatenated or split in blocks")
        _match(dim, [*outer, *block], same=True)
    return [resolve(dim) for dim in dims], resolve(block)
