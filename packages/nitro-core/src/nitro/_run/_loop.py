"""The one training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from nitro._metrics import flat_scalars
from nitro._optim import Optimizer
from nitro._programs import Chunk, MemoryPlan, Program, StepInputs, StepPlan
from nitro.errors import DivergenceError

from ._feed import Feed, make_feed
from ._memory_plan import check_memory_plan, make_memory_plan
from ._session import Session
from ._setup import traced_names


def train(session: Session) -> None:
    """Runs epochs until the horizon.

    An epoch is: its steps, then validation, history, log, record.
    """
    setup = session.setup
    assert setup.optimizer is not None
    steps = StepRunner(session, setup.optimizer)
    session.evaluator.warm_up(session.state, session.device)
    session.memory = steps.memory_plan()
    check_memory_plan(session.memory, setup.owner)
    session.reporter.begin(
        total_steps=setup.options.max_epochs * steps.per_epoch,
        done_steps=session.step,
        max_epochs=setup.options.max_epochs,
    )
    while session.epoch < setup.options.max_epochs:
        epoch = session.epoch + 1
        mean_loss = _train_epoch(session, steps, epoch)
        session.epoch = epoch
        metrics = _validate(session)
        row = {"epoch": epoch, "step": session.step, "loss": mean_loss, **(metrics or {})}
        session.history.append(row)
        session.reporter.epoch_end(epoch=epoch, metrics={"loss": mean_loss, **(metrics or {})})
        _save(session, metrics)


def plan_memory(session: Session) -> MemoryPlan:
    """The memory plan of a handle, trained or not; compiles the programs that it needs."""
    session.evaluator.warm_up(session.state, session.device)
    optimizer = session.setup.optimizer
    if optimizer is None:
        return make_memory_plan(session)
    return StepRunner(session, optimizer).memory_plan()


class StepRunner:
    """Drives the step program over an epoch, a chunk of steps per call."""

    def __init__(self, session: Session, optimizer: Optimizer) -> None:
        setup = session.setup
        source, first = setup.splits["train"], setup.first["train"]
        self._session = session
        self._feed: Feed = make_feed(
            source, first, traced_names(setup.hooks, first, with_loss=True)
        )
        self.per_epoch = len(source) // setup.options.accum
        self._table = optimizer.table(setup.options.max_epochs * self.per_epoch)
        self._anchors = optimizer.anchors()
        self._plan, self._program = self._choose()

    def run_epoch(self, epoch: int) -> Iterator[tuple[int, int, Any]]:
        """Takes the steps of an epoch (counted from 1).

        Yields, for each call, its first step, how many steps it took, and their scalars,
        which are still on the device.
        """
        session = self._session
        for batches, count in self._feed.chunks(self._plan, epoch - 1, 0):
            first = session.step + 1
            chunk = Chunk(self._rows(session.step), batches, np.int32(count))
            session.state, scalars = self._program(session.state, self._inputs(), chunk)
            session.step += count
            yield first, count, scalars

    def memory_plan(self) -> MemoryPlan:
        """What the run will hold, before any of its data is on the device."""
        return make_memory_plan(self._session, self._input_shapes(), self._example(self._plan))

    def _choose(self) -> tuple[StepPlan, Program]:
        session, options = self._session, self._session.setup.options
        return session.setup.programs.choose_step(
            session.state,
            self._input_shapes(),
            self._example,
            accum=options.accum,
            steps_per_call=options.steps_per_call,
            steps_per_epoch=self.per_epoch,
            bytes_per_step=options.accum * self._feed.bytes_per_micro_batch,
            on_device=bool(self._feed.data_shapes),
        )

    def _example(self, plan: StepPlan) -> Chunk:
        return Chunk(self._rows(0, plan), self._feed.example(plan), np.int32(0))

    def _input_shapes(self) -> StepInputs:
        return StepInputs(self._session.device, self._anchors, self._feed.data_shapes)

    def _inputs(self) -> StepInputs:
        return StepInputs(self._session.device, self._anchors, self._feed.data)

    def _rows(self, step: int, plan: StepPlan | None = None) -> np.ndarray:
        length = (plan or self._plan).steps_per_call
        # Rows beyond the horizon belong to steps that are never taken.
        indices = np.minimum(np.arange(step, step + length), len(self._table) - 1)
        return self._table[indices]


def _train_epoch(session: Session, steps: StepRunner, epoch: int) -> float:
    losses: list[float] = []
    pending: tuple[int, int, Any] | None = None
    for call in steps.run_epoch(epoch):
        # Scalars are read one call late, so that the device never waits for the host.
        if pending is not None:
            losses += _report(session, epoch, *pending)
        pending = call
    if pending is not None:
        losses += _report(session, epoch, *pending)
    return float(np.mean(losses))


def _report(session: Session, epoch: int, first: int, count: int, scalars: Any) -> list[float]:
    """Logs the steps of one call and returns their losses."""
    host = {name: values[:count].tolist() for name, values in jax.device_get(scalars).items()}
    log = session.setup.logger.metrics
    for index in range(count):
        values = {name: column[index] for name, column in host.items()}
        _check_loss(session, values["loss"], step=first + index, epoch=epoch)
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        log(finite, context="train", step=first + index, epoch=epoch)
    session.reporter.advance(step=first + count - 1, epoch=epoch, loss=host["loss"][-1])
    return host["loss"]


def _check_loss(session: Session, loss: float, *, step: int, epoch: int) -> None:
    if session.setup.options.check_divergence and not math.isfinite(loss):
        raise DivergenceError(
            f"The loss is {loss} at step {step} of epoch {epoch}.",
            expected="a finite loss",
            fix="start again from the last record with a lower learning rate, or clip the gradient",
        )


def _validate(session: Session) -> dict[str, float] | None:
    if "val" not in session.setup.splits:
        return None
    scalars = flat_scalars(session.evaluate("val"))
    finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
    session.setup.logger.metrics(finite, context="val", step=session.step, epoch=session.epoch)
    return scalars


def _save(session: Session, metrics: dict[str, float] | None) -> None:
    if session.records is None:
        return
    session.records.save(
        session.state,
        step=session.step,
        epoch=session.epoch,
        metrics=metrics,
        meta=session.record_meta(metrics),
    )
