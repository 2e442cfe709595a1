"""Chooses which compiled sizes serve a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from ._index import Cost, Index

# A plan must not change from run to run, or results would change in their last bits; so
# it comes from recorded counts and these round figures of a small server, not from timing.
_FLOPS_PER_S = 5e10
_BYTES_PER_S = 1e10
_CALL_S = 3e-5

_EXACT_ROWS = 4096
_MAX_DOUBLINGS = 12


class Planner:
    """Splits any number of rows into calls of compiled sizes, at the least total cost."""

    def __init__(self, costs: Mapping[int, Cost]) -> None:
        """Takes the cost of each compiled size."""
        self._seconds = {size: _estimate(cost) for size, cost in costs.items()}
        self.plan = lru_cache(maxsize=1024)(self._plan)

    def _plan(self, rows: int) -> tuple[int, ...]:
        """The sizes to call, largest first; they sum to `rows` or, padded, to more.

        Never dearer than the smallest single size that fits. Up to some thousand rows it
        is the cheapest plan of all; beyond, the best size per row takes the bulk.
        """
        candidates = [self._cover(rows, sorted(self._seconds, reverse=True))]
        fitting = [size for size in self._seconds if size >= rows]
        if fitting:
            candidates.append([min(fitting)])
        return tuple(sorted(min(candidates, key=self._total), reverse=True))

    def _total(self, plan: Sequence[int]) -> float:
        return sum(self._seconds[size] for size in plan)

    def _cover(self, rows: int, sizes: Sequence[int]) -> list[int]:
        best = min(sizes, key=lambda size: (self._seconds[size] / size, size))
        bulk = max(0, rows - (_EXACT_ROWS if best <= _EXACT_ROWS else 0)) // best
        rest = rows - bulk * best
        if rest <= 2 * _EXACT_ROWS:
            return [best] * bulk + self._exact(rest, sizes)
        padded = [best]
        others = [size for size in sizes if size != best]
        split = self._cover(rest, others) if others else padded
        return [best] * bulk + min(padded, split, key=self._total)

    def _exact(self, rows: int, sizes: Sequence[int]) -> list[int]:
        """Unbounded knapsack: the cheapest sizes that cover `rows`."""
        costs, choices = [0.0], [0]
        for covered in range(1, rows + 1):
            # Of equal costs the first wins, the larger size: fewer calls.
            cost, choice = min(
                ((self._seconds[size] + costs[max(0, covered - size)], size) for size in sizes),
                key=lambda option: option[0],
            )
            costs.append(cost)
            choices.append(choice)
        plan = list[int]()
        while rows > 0:
            plan.append(choices[rows])
            rows -= choices[rows]
        return plan


def plannable_costs(index: Index) -> Mapping[int, Cost]:
    """The cost of each size that a request may be cut into.

    With a dynamic batch those are powers of two besides the compiled sizes: the costs of
    those tell, by the row, what these cost.
    """
    if not index.dynamic_batch:
        return index.costs
    known = index.batch_sizes[-1]
    cost, values = index.costs[known], index.values(0 if index.input_shapes else None)
    row_bytes = sum(
        math.prod(spec.sizes(1, values)) * spec.numpy_dtype.itemsize
        for spec in (*index.inputs, *index.outputs)
    )
    powers = {
        size: Cost(
            flops=cost.flops * size / known,
            size_bytes=max(0, cost.size_bytes + (size - known) * row_bytes),
        )
        for size in (2**i for i in range(_MAX_DOUBLINGS + 1))
    }
    return {**powers, **index.costs}


def _estimate(cost: Cost) -> float:
    return max(cost.flops / _FLOPS_PER_S, cost.size_bytes / _BYTES_PER_S) + _CALL_S
