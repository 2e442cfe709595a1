"""Leaves a checkpoint where training stood when something raised."""

from __future__ import annotations

from typing import Any

import jax

from nitro._checkpoint import newest
from nitro.errors import DivergenceError, warn

from ._divergence import not_finite, refuse_not_finite
from ._session import Session


def rescue(session: Session, error: BaseException, *, begun: int) -> None:
    """Writes a record of the last step boundary, and says in a note where it is.

    Not after a divergence, whose weights nobody wants, nor where no step was taken since the
    newest record. Whatever fails on the way is a warning: `error` stays the error.

    Args:
        session: The session, which stands at the boundary.
        error: What ended training.
        begun: The step at which training began.
    """
    records = session.records
    if records is None or not isinstance(error, Exception) or isinstance(error, DivergenceError):
        return
    if session.step == begun or not may_record(session):
        return
    try:
        records.wait()
        if not _is_recorded(session):
            if any(_is_gone(leaf) for leaf in jax.tree.leaves(session.state)):
                return
            refuse_not_finite(session)
            if session.setup.options.check_divergence and not_finite(session):
                return
            session.save_record(None, None)
            records.wait()
        if not _is_recorded(session):
            return
    except Exception as second:  # noqa: BLE001 - it must not hide why training failed
        if type(second) is type(error):
            return  # a record was what could not be written, and cannot be now
        warn(
            f"Training failed, and its state at step {session.step} could not be kept: "
            f"{type(second).__name__}: {second}"
        )
        return
    name = newest(records.own()).name
    error.add_note(
        f"The state after step {session.step} is in `{records.directory / name}`: "
        f'`Nitro(..., resume="auto")` goes on from there'
    )


def may_record(session: Session) -> bool:
    """Whether a record of now could be resumed; warns where not."""
    is_inside = 0 < session.steps_in_epoch < session.setup.steps_per_epoch
    if is_inside and not session.setup.moves_in_epoch:
        warn(
            f"No record of step {session.step}: the training source cannot go on inside an epoch. "
            f"A run that is resumed repeats epoch {session.epoch + 1} from its start."
        )
        return False
    return True


def _is_recorded(session: Session) -> bool:
    own = [] if session.records is None else session.records.own()
    return bool(own) and newest(own).step >= session.step


def _is_gone(leaf: Any) -> bool:
    """Whether the call that failed had taken an array over."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()
