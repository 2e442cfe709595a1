"""The one training loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from nitro._metrics import flat_scalars
from nitro._trees import Flat
from nitro.data import Batch, checked_batch, num_rows, routed_fields
from nitro.errors import DataError, DivergenceError

from ._session import Session
from ._setup import traced_names


def train(session: Session) -> None:
    """Runs epochs until the horizon.

    An epoch is: its steps, then validation, history, log, record.
    """
    setup = session.setup
    session.evaluator.warm_up(session.state, session.device)
    steps_per_epoch = len(setup.splits["train"]) // setup.options.accum
    session.reporter.begin(
        total_steps=setup.options.max_epochs * steps_per_epoch,
        done_steps=session.step,
        max_epochs=setup.options.max_epochs,
    )
    while session.epoch < setup.options.max_epochs:
        epoch = session.epoch + 1
        mean_loss = _train_epoch(session, epoch)
        session.epoch = epoch
        metrics = _validate(session)
        row = {"epoch": epoch, "step": session.step, "loss": mean_loss, **(metrics or {})}
        session.history.append(row)
        session.reporter.epoch_end(epoch=epoch, metrics={"loss": mean_loss, **(metrics or {})})
        _save(session, metrics)


def _train_epoch(session: Session, epoch: int) -> float:
    losses: list[float] = []
    pending: tuple[int, Any] | None = None
    row = np.asarray([session.setup.optimizer.row()], np.float32)  # pyright: ignore[reportOptionalMemberAccess] - training
    for batches in _grouped(session, epoch):
        arguments = (session.state, session.device, row, batches, np.int32(1))
        session.state, scalars = session.setup.programs.step(*arguments)(*arguments)
        session.step += 1
        # The loss is read one step late, so that the device never waits for the host.
        if pending is not None:
            losses.append(_report(session, epoch, *pending))
        pending = (session.step, scalars)
    if pending is not None:
        losses.append(_report(session, epoch, *pending))
    return float(np.mean(losses))


def _grouped(session: Session, epoch: int) -> Iterator[Flat]:
    """The routed fields of each optimizer step, each (1, accum, batch, ...)."""
    accum = session.setup.options.accum
    group: list[Flat] = []
    for fields in _routed_batches(session, epoch):
        group.append(fields)
        if len(group) == accum:
            yield jax.tree.map(lambda *leaves: np.stack(leaves)[None], *group)
            group = []


def _routed_batches(session: Session, epoch: int) -> Iterator[Flat]:
    setup = session.setup
    source = setup.splits["train"]
    names = traced_names(setup.hooks, setup.first["train"], with_loss=True)
    width = num_rows({n: setup.first["train"][n] for n in names}, where="the first batch of `train`")
    batches = source.batches(epoch - 1) if hasattr(source, "batches") else source
    for index, item in enumerate(batches, start=1):
        where = f"batch {index} of `train`"
        batch = checked_batch(item, where=where)
        yield _checked_width(routed_fields(_with(batch, names, where), names, where=where), width, where)


def _with(batch: Batch, names: tuple[str, ...], where: str) -> Batch:
    missing = [name for name in names if name not in batch]
    if missing:
        raise DataError(
            f"{where} has the fields {sorted(batch)}; `{missing[0]}` is gone.",
            expected=f"the fields of the first batch, {list(names)}, in every batch",
        )
    return batch


def _checked_width(fields: Flat, width: int, where: str) -> Flat:
    rows = num_rows(fields, where=where)
    if rows != width:
        raise DataError(
            f"{where} has {rows} samples.",
            expected=f"{width}, as the first batch: one program is compiled for one batch size",
            fix="let the training loader drop its last partial batch (`drop_last=True`)",
        )
    return jax.tree.map(np.asarray, fields)


def _report(session: Session, epoch: int, step: int, scalars: Any) -> float:
    values = {name: float(value[0]) for name, value in jax.device_get(scalars).items()}
    loss = values["loss"]
    if session.setup.options.check_divergence and not math.isfinite(loss):
        raise DivergenceError(
            f"The loss is {loss} at step {step} of epoch {epoch}.",
            expected="a finite loss",
            fix="start again from the last record with a lower learning rate, or clip the gradient",
        )
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    session.setup.logger.metrics(finite, context="train", step=step, epoch=epoch)
    session.reporter.advance(step=step, epoch=epoch, loss=loss)
    return loss


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
        session.state, step=session.step, epoch=session.epoch, metrics=metrics, meta=session.record_meta(metrics)
    )
