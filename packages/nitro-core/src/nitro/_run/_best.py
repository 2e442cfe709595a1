"""Ends a run with the weights of its best record."""

from __future__ import annotations

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
