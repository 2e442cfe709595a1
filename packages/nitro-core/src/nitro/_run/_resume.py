"""Goes on from a record: the same bits as never having stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nitro._checkpoint import Record
from nitro.errors import CheckpointError

from ._session import Session


def resume_session(session: Session, record: Record) -> None:
    """Moves a session to where a record was written: counts, history, stopper, log.

    Raises:
        CheckpointError: The record's logger is of another kind, or the source cannot go
            on from the middle of an epoch.
    """
    meta = record.meta
    _check_logger(session, record)
    _check_position(session, meta)
    session.step, session.epoch = meta["step"], meta["epoch"]
    session.steps_in_epoch = meta["steps_in_epoch"]
    session.loader_state = meta["loader_state"]
    session.epoch_loss.set_state(meta["epoch_loss"])
    session.history.rows = [dict(row) for row in meta["history"]]
    set_state = getattr(session.setup.stopper, "set_state", None)
    if set_state is not None and meta["stopper"] is not None:
        set_state(meta["stopper"])
    if meta["logger"]["state"] is not None:
        session.setup.logger.reattach(meta["logger"]["state"])


def _check_logger(session: Session, record: Record) -> None:
    saved, now = record.meta["logger"], type(session.setup.logger).__name__
    if saved["state"] is not None and saved["type"] != now:
        raise CheckpointError(
            f"The record `{record.path}` was logged by {saved['type']}, this handle logs by {now}.",
            expected="the same kind of logger, which goes on where the record was written",
            fix=f"pass a {saved['type']}, or take the weights only: "
            f'`Nitro(..., checkpoint="{record.path}")`',
        )


def _check_position(session: Session, meta: Mapping[str, Any]) -> None:
    source = session.setup.splits.get("train")
    if not meta["steps_in_epoch"] or meta["loader_state"] is not None:
        return
    if not hasattr(source, "batches"):
        raise CheckpointError(
            f"The record was written in the middle of epoch {meta['epoch'] + 1}, and the training "
            f"source {type(source).__name__} cannot say or take a position.",
            expected="an ArrayLoader, a Grain dataset, or a loader with `get_state`/`set_state`",
            fix="resume from a record at the end of an epoch, or give the loader both methods",
        )
