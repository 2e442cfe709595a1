"""Joins requests that wait for a model into one call, and takes the answers apart again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ._refusals import Kind, RefusedError

logger = logging.getLogger("nitro.serve")

Arrays = Mapping[str, np.ndarray]

_QUICK_S = 0.001
"""A call that takes less runs on the event loop: handing it to a thread and back costs about
a tenth of a millisecond, and a thousandth of a second keeps nobody waiting."""


_TURN_S = 0.005
"""How long short calls may follow each other before the loop reads and writes again."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a request waited and was computed.

    Attributes:
        queue_s: From its arrival to the call that answered it, in seconds.
        compute_s: The time of that call, in seconds.
        rows: The rows of that call, those of other requests included.
    """

    queue_s: float
    compute_s: float
    rows: int


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How requests to one model are joined.

    Attributes:
        max_rows: The most rows of one call; 0 where requests cannot be joined.
        input_axes0: The batch axis of each input, from 0.
        output_axes0: The batch axis of each output, from 0.
        cost_s: The seconds that a call of so many rows takes, by compiled size.
        max_waiting: How many requests may wait.
    """

    max_rows: int
    input_axes0: Mapping[str, int]
    output_axes0: Mapping[str, int]
    cost_s: Mapping[int, float]
    max_waiting: int

    def is_quick(self, rows: int) -> bool:
        """Whether a call of so many rows is short enough for the event loop."""
        fitting = [cost for size, cost in self.cost_s.items() if size >= rows]
        return bool(fitting) and min(fitting) < _QUICK_S


@dataclass(eq=False)
class _Waiting:
    inputs: Arrays
    rows: int
    shape: object
    arrived_s: float
    answer: asyncio.Future[tuple[Arrays, Timing]] = field(repr=False)


class Batcher:
    """Runs one model for many requests, from one event loop.

    A request that finds the model idle runs at once. Those that arrive while it computes are
    joined, along the batch axis and in order of arrival, up to the largest compiled size. A
    call that fails is repeated request by request, so an error reaches only who caused it.

    Args:
        predict: Runs the model: named arrays in, named arrays out. Called by one thread at a
            time.
        plan: How requests are joined.
        on_call: Told of each call: its rows, and the seconds that it took.
    """

    def __init__(
        self,
        predict: Callable[[Arrays], Arrays],
        plan: BatchPlan,
        *,
        on_call: Callable[[int, float], None],
    ) -> None:
        self._predict = predict
        self._plan = plan
        self._on_call = on_call
        self._waiting: deque[_Waiting] = deque()
        self._is_running = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nitro-serve-model")

    async def submit(
        self, inputs: Arrays, rows: int, *, timeout_s: float | None
    ) -> tuple[Arrays, Timing]:
        """Returns the outputs for one request that was checked before.

        A caller that is cancelled takes its request out of the queue.

        Args:
            inputs: The arrays.
            rows: Their number of rows.
            timeout_s: How long to wait for the answer, in seconds; None for any time.

        Raises:
            RefusedError: Too many requests wait, or the time is over.
            Exception: What the model raised for these inputs.
        """
        if len(self._waiting) >= self._plan.max_waiting:
            raise RefusedError(
                Kind.OVERLOADED,
                f"{len(self._waiting)} requests wait for this model already.",
                expected=f"at most {self._plan.max_waiting}",
                fix="send again later, or to another server; the limit is --max-waiting",
            )
        loop = asyncio.get_running_loop()
        shapes = tuple(
            (name, _without(array.shape, self._plan.input_axes0.get(name)))
            for name, array in inputs.items()
        )
        request = _Waiting(inputs, rows, shapes, time.perf_counter(), loop.create_future())
        self._waiting.append(request)
        if not self._is_running:
            self._is_running = True
            self._idle.clear()
            # Not at once: what else this turn of the loop has read can join.
            loop.call_soon(self._take_next)
        try:
            async with asyncio.timeout(timeout_s):
                return await request.answer
        except TimeoutError:
            raise RefusedError(
                Kind.TIMEOUT,
                f"The request was not answered within {timeout_s:g} s.",
                fix="allow it more time, send fewer at once, or serve from more instances",
            ) from None

    async def drain(self) -> None:
        """Waits until every request is answered."""
        await self._idle.wait()

    def close(self) -> None:
        """Ends the model's thread."""
        self._pool.shutdown(wait=False)

    def _take_next(self) -> None:
        """Runs what waits: short calls here, for one turn of the loop, and long ones in a thread."""
        loop = asyncio.get_running_loop()
        turn_ends_s = time.perf_counter() + _TURN_S
        while group := self._next_group():
            started = time.perf_counter()
            if not self._plan.is_quick(sum(request.rows for request in group)):
                running = loop.run_in_executor(self._pool, self._answers, group)
                running.add_done_callback(partial(self._finish, group, started))
                return
            self._deliver(group, self._answers(group), started)
            if time.perf_counter() > turn_ends_s:
                loop.call_soon(self._take_next)
                return
        self._is_running = False
        self._idle.set()

    def _finish(
        self,
        group: Sequence[_Waiting],
        started: float,
        done: asyncio.Future[list[Arrays | Exception]],
    ) -> None:
        self._deliver(group, done.result(), started)
        self._take_next()

    def _next_group(self) -> list[_Waiting]:
        """The first request that still waits, and those behind it that can join it."""
        group: list[_Waiting] = []
        rows = 0
        passed: list[_Waiting] = []
        while self._waiting:
            request = self._waiting.popleft()
            if request.answer.done():
                continue  # its client is gone, or its time is over
            if not group:
                group, rows = [request], request.rows
            elif rows + request.rows > self._plan.max_rows:
                passed.append(request)
                break
            elif request.shape != group[0].shape:
                passed.append(request)
            else:
                group.append(request)
                rows += request.rows
        self._waiting.extendleft(reversed(passed))
        return group

    def _answers(self, group: Sequence[_Waiting]) -> list[Arrays | Exception]:
        """What each request of a group gets; never raises."""
        if len(group) > 1:
            try:
                return list(self._predict_joined(group))
            except Exception:
                logger.debug("a joined call failed; its requests run one by one", exc_info=True)
        return [self._answer(request) for request in group]

    def _answer(self, request: _Waiting) -> Arrays | Exception:
        try:
            return self._predict(request.inputs)
        except Exception as error:  # noqa: BLE001 - it goes to the client that caused it
            return error

    def _predict_joined(self, group: Sequence[_Waiting]) -> Sequence[Arrays]:
        axes = self._plan.input_axes0
        joined = {
            name: np.concatenate([request.inputs[name] for request in group], axis=axes[name])
            for name in group[0].inputs
        }
        outputs = self._predict(joined)
        ends = np.cumsum([request.rows for request in group])[:-1]
        parts = {
            name: np.split(array, ends, axis=self._plan.output_axes0[name])
            for name, array in outputs.items()
        }
        return [{name: parts[name][at] for name in parts} for at in range(len(group))]

    def _deliver(
        self, group: Sequence[_Waiting], answers: Sequence[Arrays | Exception], started: float
    ) -> None:
        compute_s = time.perf_counter() - started
        rows = sum(request.rows for request in group)
        self._on_call(rows, compute_s)
        for request, answer in zip(group, answers, strict=True):
            if request.answer.done():
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
                continue
            timing = Timing(queue_s=started - request.arrived_s, compute_s=compute_s, rows=rows)
            request.answer.set_result((answer, timing))


def _without(shape: tuple[int, ...], axis0: int | None) -> tuple[int, ...]:
    return shape if axis0 is None else (*shape[:axis0], *shape[axis0 + 1 :])
