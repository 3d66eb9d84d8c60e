"""The exact Wasserstein distance of order 1 between two sets of vectors.

For two sets of n equally likely vectors it is the smallest mean distance of n pairs, each vector in
one pair. This is the assignment problem, which the Hungarian algorithm solves (Kuhn 1955).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def exact_wasserstein(one: Tensor, other: Tensor) -> float:
    """Return the distance between two sets of as many vectors, (examples, ...)."""
    first = one.detach().flatten(1).double().cpu()
    second = other.detach().flatten(1).double().cpu()
    costs = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist").numpy()
    columns = assign(costs)
    return float(costs[np.arange(len(costs)), columns].mean())


def assign(costs: np.ndarray) -> np.ndarray:
    """Return the column of each row such that the sum of the costs is smallest; all differ.

    Rows are added one by one. Each is connected to a free column by a shortest augmenting path in
    reduced costs, costs - row_price - column_price, which stay at least 0 (Jonker and Volgenant,
    1987). The time is cubic in the number of rows.
    """
    count = len(costs)
    row_prices, column_prices = np.zeros(count), np.zeros(count)
    #: Column -> its row, or -1 if the column is free.
    rows = np.full(count, -1)
    for start in range(count):
        # Dijkstra's algorithm over columns: the length of the shortest path to each, the column
        # before it on that path, and the columns whose path is final.
        lengths = np.full(count, np.inf)
        previous = np.full(count, -1)
        is_final = np.zeros(count, dtype=bool)
        row, column, length = start, -1, 0.0
        while row >= 0:
            reduced = length + costs[row] - row_prices[row] - column_prices
            is_shorter = ~is_final & (reduced < lengths)
            lengths[is_shorter] = reduced[is_shorter]
            previous[is_shorter] = column
            column = int(np.argmin(np.where(is_final, np.inf, lengths)))
            is_final[column] = True
            length = lengths[column]
            row = rows[column]
        # New prices keep reduced costs at least 0, and make those along the path 0.
        gains = length - lengths[is_final]
        row_prices[start] += length
        matched = rows[is_final]
        row_prices[matched[matched >= 0]] += gains[matched >= 0]
        column_prices[is_final] -= gains
        # Give every column on the path the row of the column before it.
        while column >= 0:
            before = previous[column]
            rows[column] = start if before < 0 else rows[before]
            column = before
    columns = np.empty(count, dtype=int)
    columns[rows] = np.arange(count)
    return columns
