"""How waiting requests are joined, without a server."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nitro_serve", reason="needs nitro-serve: uv sync --group serve")
from nitro_serve._batcher import Batcher, BatchPlan
from nitro_serve._refusals import RefusedError


class Doubler:
    """Doubles its input, refuses 13, notes the rows of each call, and can be held up."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, inputs):
        assert self.may_go.wait(30)
        self.rows.append(len(inputs["x"]))
        if (inputs["x"] == 13).any():
            raise ValueError("13 is not doubled")
        return {"y": inputs["x"] * 2}


def make_batcher(model: Doubler, **changes: Any) -> Batcher:
    plan: dict[str, Any] = {
        "max_rows": 8,
        "input_axes0": {"x": 0},
        "output_axes0": {"y": 0},
        "cost_s": {8: 1.0},
        "max_waiting": 100,
    }
    return Batcher(model, BatchPlan(**{**plan, **changes}), on_call=lambda rows, seconds: None)


async def ask(batcher: Batcher, *values: float, timeout_s: float | None = 30) -> list[float]:
    x = np.float32(values)
    outputs, _ = await batcher.submit({"x": x}, len(x), timeout_s=timeout_s)
    return outputs["y"].tolist()


async def hold(model: Doubler, batcher: Batcher) -> asyncio.Task[list[float]]:
    """Starts a request that the model is held up with, so that others have to wait."""
    model.may_go.clear()
    first = asyncio.create_task(ask(batcher, 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return first


def test_requests_that_wait_are_joined_in_order_up_to_the_largest_size():
    model = Doubler()

    async def run():
        batcher = make_batcher(model)
        first = await hold(model, batcher)
        others = [asyncio.create_task(ask(batcher, n, n)) for n in range(5)]
        await asyncio.sleep(0)
        model.may_go.set()
        return await first, await asyncio.gather(*others)

    assert asyncio.run(run()) == ([2], [[2 * n, 2 * n] for n in range(5)])
    assert model.rows == [1, 8, 2]


def test_an_error_reaches_only_the_request_that_caused_it():
    model = Doubler()

    async def run():
        batcher = make_batcher(model)
        first = await hold(model, batcher)
        others = [asyncio.create_task(ask(batcher, n)) for n in (12, 13, 14)]
        await asyncio.sleep(0)
        model.may_go.set()
        await first
        return await asyncio.gather(*others, return_exceptions=True)

    before, failed, after = asyncio.run(run())
    assert (before, after) == ([24], [28])
    assert isinstance(failed, ValueError)


def test_a_cancelled_request_is_never_computed():
    model = Doubler()

    async def run():
        batcher = make_batcher(model)
        first = await hold(model, batcher)
        gone, stays = (asyncio.create_task(ask(batcher, n)) for n in (5, 6))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        model.may_go.set()
        return await first, await stays

    assert asyncio.run(run()) == ([2], [12])
    assert model.rows == [1, 1]


def test_a_request_whose_time_is_over_is_refused_and_the_next_one_answered():
    model = Doubler()

    async def run():
        batcher = make_batcher(model)
        first = await hold(model, batcher)
        with pytest.raises(RefusedError, match=r"not answered within 0\.01 s") as caught:
            await ask(batcher, 5, timeout_s=0.01)
        model.may_go.set()
        return caught.value.kind.name, await first, await ask(batcher, 6)

    assert asyncio.run(run()) == ("TIMEOUT", [2], [12])


def test_a_full_queue_refuses_the_next_request():
    model = Doubler()

    async def run():
        batcher = make_batcher(model, max_waiting=2)
        first = await hold(model, batcher)
        waiting = [asyncio.create_task(ask(batcher, n)) for n in (5, 6)]
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="2 requests wait") as caught:
            await ask(batcher, 7)
        model.may_go.set()
        return caught.value.kind.name, await first, await asyncio.gather(*waiting)

    assert asyncio.run(run()) == ("OVERLOADED", [2], [[10], [12]])


def test_requests_of_other_shapes_are_not_joined():
    model = Doubler()

    async def run():
        batcher = make_batcher(model)
        first = await hold(model, batcher)
        wide = batcher.submit({"x": np.ones((2, 3))}, 2, timeout_s=30)
        tasks = [asyncio.create_task(wide), asyncio.create_task(ask(batcher, 4))]
        await asyncio.sleep(0)
        model.may_go.set()
        (outputs, _), narrow = await asyncio.gather(*tasks)
        return await first, outputs["y"].shape, narrow

    assert asyncio.run(run()) == ([2], (2, 3), [8])
    assert model.rows == [1, 2, 1]


@pytest.mark.parametrize("cost_s", [{8: 0.0001}, {8: 1.0}], ids=["on the loop", "in a thread"])
def test_nothing_is_lost_between_many_requests(cost_s):
    model = Doubler()

    async def run():
        batcher = make_batcher(model, cost_s=cost_s, max_waiting=1000)
        answers = await asyncio.gather(*(ask(batcher, n) for n in range(14, 514)))
        await batcher.drain()
        return answers

    assert asyncio.run(run()) == [[2 * n] for n in range(14, 514)]
    assert max(model.rows) == 8
