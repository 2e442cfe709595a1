"""Which compiled sizes serve a request."""

from __future__ import annotations

import itertools

import pytest

from nitro_export_stablehlo._index import Cost
from nitro_export_stablehlo._plan import Planner


def _planner(*sizes: int, flops_per_row: float = 1e6, size_bytes: int = 0) -> Planner:
    return Planner(
        {size: Cost(flops=flops_per_row * size, size_bytes=size_bytes) for size in sizes}
    )


def test_a_small_model_is_filled_up_rather_than_called_often():
    assert _planner(1, 32, flops_per_row=1e3).plan(7) == (32,)


def test_a_large_model_is_split_rather_than_filled_up():
    assert _planner(1, 32, flops_per_row=1e9).plan(7) == (1,) * 7


def test_a_large_request_uses_the_largest_size_and_fills_up_the_rest():
    assert _planner(1, 32, flops_per_row=1e3).plan(100) == (32, 32, 32, 32)


@pytest.mark.parametrize("rows", [1, 5, 13, 30])
def test_no_plan_is_cheaper(rows):
    planner = _planner(1, 3, 8, flops_per_row=2e6)
    every = (
        plan
        for length in range(1, rows + 1)
        for plan in itertools.combinations_with_replacement((1, 3, 8), length)
        if sum(plan) >= rows and length <= 10
    )

    cost = planner._total(planner.plan(rows))

    assert cost <= min(map(planner._total, every)) + 1e-12


@pytest.mark.parametrize("rows", [0, 1, 4095, 10_000, 1_000_003])
@pytest.mark.parametrize("sizes", [(1,), (1, 32), (7, 64, 5000), (1, 100_000)])
def test_every_request_is_covered_quickly_and_never_dearer_than_one_that_fits(rows, sizes):
    planner = _planner(*sizes)

    plan = planner.plan(rows)

    assert sum(plan) >= rows
    assert list(plan) == sorted(plan, reverse=True)
    # No call computes filling only.
    assert not plan or sum(plan[:-1]) < rows
    fitting = [size for size in sizes if size >= rows]
    if fitting:
        assert planner._total(plan) <= planner._total([min(fitting)])
