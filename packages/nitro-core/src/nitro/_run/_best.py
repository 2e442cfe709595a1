"""Ends a run with the weights of its best record."""

from __future__ import annotations

from typing import Any

from nitro._checkpoint import open_record
from nitro.errors import ConfigError, warn

from ._session import Session


def restore_best(session: Session) -> None:
    """Loads the weights and the model state of this run's best record.

    Step, epoch and history stay. Without a scored record the weights stay, too, with a
    warning.
    """
    path = session.best_record()
    if path is None:
        warn(
            "`restore_best=True`, but the run has no record with a score; the weights stay as "
            "training left them."
        )
        return
    record = open_record(path)
    session.state = session.state._replace(
        params=record.read("params", session.state.params),
        model_state=record.read("model_state", session.state.model_state),
    )
    session.restored_best = record.entry
    session.setup.notes.append(f"weights of the best record: {path}")


def check_weights(weights: Any) -> None:
    """Refuses a name that stands for no weights of a run.

    Raises:
        ConfigError: Neither "current" nor "best".
    """
    if weights not in ("current", "best"):
        raise ConfigError(
            f"`weights` is {weights!r}.",
            expected='"current" or "best"',
            fix="for those of another record, build a handle: `Nitro(..., checkpoint=...)`",
        )


def evaluate_best(session: Session, split: str) -> dict[str, Any]:
    """The finalised metrics of a split with the weights of the run's best record.

    The session's own state stays. Scheduled Device fields are those of the record's step.

    Raises:
        ConfigError: The run has no record with a score.
    """
    if session.records is not None:
        session.records.wait()
    path = session.best_record()
    if path is None:
        raise ConfigError(
            "The run has no record with a score, so none is the best.",
            expected="a checkpointer, and an epoch that was validated",
            fix='pass `checkpointer=nitro.TopK(...)` and train; or take `weights="current"`',
        )
    record = open_record(path)
    session.reporter.note(f"weights of the best record: epoch {record.entry.epoch}")
    kept = session.state, session.device
    state = session.state._replace(
        params=record.read("params", session.state.params),
        model_state=record.read("model_state", session.state.model_state),
    )
    optimizer = session.setup.optimizer
    try:
        session.state = state
        if optimizer is not None:
            session.device = optimizer.device_at(session.device, record.entry.step)
        return session.evaluate(split, by_user=True)
    finally:
        session.state, session.device = kept


def refuse_restored_best(session: Session) -> None:
    """Refuses to train on with weights that do not belong to the optimizer's state.

    Raises:
        ConfigError: Shows three ways to train on.
    """
    entry = session.restored_best
    if entry is None or session.records is None:
        return
    owner, run_dir = session.setup.owner, session.setup.options.run_dir
    best = session.records.directory / entry.name
    raise ConfigError(
        f"The weights are those of the best record (epoch {entry.epoch}), but the optimizer stands "
        f"at step {session.step}: training on, or a record, would mix the two.",
        expected="a new handle that says where to go on",
        fix=f'one of\n    Nitro({owner}(...), checkpoint="{best}")  # a fresh optimizer\n'
        f'    Nitro({owner}(...), checkpoint="{best}", restore_optimizer=True)  # the record\'s\n'
        f'    Nitro({owner}(...), resume="{run_dir}@latest", max_epochs=...)  # as it was',
    )
