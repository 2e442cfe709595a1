"""Drives the step program: what it is fed, with which rows of the table, call by call."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from nitro._optim import ManualOptimizers, Optimizer
from nitro._programs import Chunk, MemoryPlan, Program, StepInputs, StepPlan, tree_bytes
from nitro._trees import Flat
from nitro.errors import ConfigError

from ._feed import EpochCut, Feed, make_feed
from ._memory_plan import make_memory_plan
from ._session import Session
from ._splits import train_names


def _check_one_step(steps_per_call: int | None) -> None:
    if steps_per_call not in (None, 1):
        raise ConfigError(
            f"`steps_per_call` is {steps_per_call}, and the split `train` declares several shapes.",
            expected="1, or None: the steps of one call have one shape",
            fix="leave `steps_per_call` out",
        )


@dataclass(frozen=True)
class Call:
    """One call of the step program that was started.

    Attributes:
        first: Its first step, counted from 1 over the whole run.
        count: How many steps it takes.
        scalars: What they give, each (steps_per_call,), still on the device.
        checks: What to look at of each step, likewise.
        rows_of: The rows of one of its steps, counted from 0; see `Feed.rows_of`.
    """

    first: int
    count: int
    scalars: Any
    checks: Any
    rows_of: Callable[[int], tuple[Flat, np.ndarray | None]]


class StepRunner:
    """Drives the step program over an epoch, a chunk of steps per call."""

    def __init__(self, session: Session, optimizer: Optimizer | ManualOptimizers) -> None:
        setup = session.setup
        source, first = setup.splits["train"], setup.first["train"]
        self._session = session
        self._optimizer = optimizer
        self._feed: Feed = make_feed(
            source,
            first,
            train_names(setup.hooks, first),
            memory_bytes=setup.options.memory_limit_bytes,
        )
        self._anchors = optimizer.anchors()
        self._plan, self._programs = self._choose()
        # The source moves once, to where the session stands; then each epoch follows the last.
        self._move_to = session.loader_state
        self._epoch_started: float | None = None
        self._waited_s = 0.0

    def run_epoch(self) -> Generator[Call]:
        """Takes the steps of the epoch that the session stands in, from where it stands.

        The session's state and counts are moved before each call is yielded.
        """
        session = self._session
        cut = EpochCut(
            epoch=session.epoch,
            first_step=session.steps_in_epoch,
            steps_before=session.step - session.steps_in_epoch,
            every=session.setup.options.checkpoint_every_steps,
            loader_state=self._move_to,
        )
        self._move_to = None
        chunks = self._feed.chunks(self._plan, cut)
        try:
            while (fed := self._waited(chunks)) is not None:
                first = session.step + 1
                chunk = Chunk(self._rows(session.step), fed.batches, np.int32(fed.count))
                session.state, result = self._programs[fed.shape](
                    session.state, self._inputs(), chunk
                )
                session.step += fed.count
                session.steps_in_epoch += fed.count
                session.device = self._optimizer.device_at(session.device, session.step)
                session.loader_state = fed.loader_state
                rows_of = partial(self._feed.rows_of, fed.batches)
                yield Call(first, fed.count, result.scalars, result.checks, rows_of)
        finally:
            chunks.close()

    def _waited(self, chunks: Iterator[Any]) -> Any:
        """The next chunk; counts the time spent waiting for it, but for the first."""
        started = time.perf_counter()
        fed = next(chunks, None)
        now = time.perf_counter()
        if self._epoch_started is None:
            self._epoch_started = now
        else:
            self._waited_s += now - started
        return fed

    @property
    def has_drawn(self) -> bool:
        """Whether data was drawn since the last call of `take_data_wait`."""
        return self._epoch_started is not None

    def take_data_wait(self) -> tuple[float, float]:
        """The seconds spent waiting for data, and their share since the last call."""
        waited, started = self._waited_s, self._epoch_started
        self._epoch_started, self._waited_s = None, 0.0
        if started is None:
            return 0.0, 0.0
        return waited, waited / max(time.perf_counter() - started, 1e-9)

    def data_wait_share(self) -> float:
        """The share of the epoch so far that was spent waiting for data, 0 to 1."""
        if self._epoch_started is None:
            return 0.0
        return self._waited_s / max(time.perf_counter() - self._epoch_started, 1e-9)

    def memory_plan(self) -> MemoryPlan:
        """What the run will hold, before any of its data is on the device."""
        return make_memory_plan(
            self._session,
            self._input_shapes(),
            self._largest_example(),
            chunks_ahead=self._feed.chunks_ahead,
        )

    def _choose(self) -> tuple[StepPlan, list[Program]]:
        """The plan, and the program of each shape; several shapes take one step a call."""
        chosen = [self._choose_for(shape) for shape in range(self._feed.num_shapes)]
        return chosen[0][0], [program for _, program in chosen]

    def _choose_for(self, shape: int) -> tuple[StepPlan, Program]:
        session, options = self._session, self._session.setup.options
        steps_per_call = options.steps_per_call
        if self._feed.num_shapes > 1:
            _check_one_step(steps_per_call)
            steps_per_call = 1
        return session.setup.programs.choose_step(
            session.state,
            self._input_shapes(),
            lambda plan: self._example(plan, shape),
            accum=options.accum,
            steps_per_call=steps_per_call,
            steps_per_epoch=session.setup.steps_per_epoch,
            bytes_per_step=options.accum * self._feed.bytes_per_micro_batch,
            on_device=bool(self._feed.data_shapes),
        )

    def _example(self, plan: StepPlan, shape: int = 0) -> Chunk:
        return Chunk(self._rows(0, plan), self._feed.example(plan, shape), np.int32(0))

    def _largest_example(self) -> Chunk:
        shapes = range(self._feed.num_shapes)
        return max((self._example(self._plan, shape) for shape in shapes), key=tree_bytes)

    def _input_shapes(self) -> StepInputs:
        return StepInputs(self._session.device, self._anchors, self._feed.data_shapes)

    def _inputs(self) -> StepInputs:
        return StepInputs(self._session.device, self._anchors, self._feed.data)

    def _rows(self, step: int, plan: StepPlan | None = None) -> np.ndarray:
        length = (plan or self._plan).steps_per_call
        return self._optimizer.table[np.arange(step, step + length)]
