"""Goes on from a record: the same bits as never having stopped."""

from __future__ import annotations

from typing import Any

import jax

from nitro._checkpoint import Record, read_index
from nitro._trees import dotted, named_leaves
from nitro.errors import warn

from ._changes import changes_since, lineage_lines, steering_values, tell_changes
from ._record_meta import declared_digests, decoded_state, pace
from ._refusals import report_horizon
from ._session import Session


def resume_session(session: Session, record: Record) -> None:
    """Moves a session to where a record was written: counts, history, stopper, log.

    The log itself is cut when training begins: a handle that only looks changes no file.

    Raises:
        CheckpointError: The record stands inside an epoch that is another one now.
    """
    meta, setup = record.meta, session.setup
    setup.notes += report_horizon(record, setup.optimizer, pace(setup))
    _take_lineage(session, record)
    session.step, session.epoch = meta["step"], meta["epoch"]
    session.steps_in_epoch = meta["steps_in_epoch"]
    session.loader_state = decoded_state(meta["loader_state"])
    session.epoch_loss.set_state(meta["epoch_loss"])
    for name, state in meta.get("epoch_metrics", {}).items():
        session.epoch_metrics[name].set_state(state)
    session.history.rows = [dict(row) for row in meta["history"]]
    set_state = getattr(setup.stopper, "set_state", None)
    if set_state is not None and meta["stopper"] is not None:
        set_state(meta["stopper"])
    _restore_device_fields(session, record)
    session.reattach_to = meta["logger"]["state"]
    session.cuts_other_run = setup.source.run is None
    session.told_params = meta["params"]
    _warn_if_ended(session, record)


def _take_lineage(session: Session, record: Record) -> None:
    """Tells of what is another value now, and adds it to what earlier resumes have changed."""
    meta = record.meta
    now = steering_values(session.setup, session.declared_params())
    changes = changes_since(meta.get("steering", {}), now)
    step = meta["step"]
    tell_changes(changes, path=record.path, step=step)
    session.lineage = [*meta.get("lineage", [])]
    if changes:
        entry = {"step": step, "epoch": meta["epoch"], "record": record.path.name}
        session.lineage.append({**entry, "changes": [list(change) for change in changes]})
    session.setup.notes += lineage_lines(session.lineage)


def start_session(session: Session) -> None:
    """Prepares a run of its own, and tells of the records of others beside it."""
    blank_state = getattr(session.setup.logger, "blank_state", None)
    if session.setup.source.starts_over and blank_state is not None:
        # What is logged there was killed before its first record.
        session.reattach_to, session.cuts_other_run = blank_state(), True
    if session.records is None:
        return
    others = [e for e in read_index(session.records.directory) if e.run != session.records.run]
    if others:
        runs = len({entry.run for entry in others})
        session.setup.notes.append(
            f"run {session.records.run} is new beside {len(others)} records of {runs} earlier "
            "runs in this directory, which stay"
        )


def _restore_device_fields(session: Session, record: Record) -> None:
    """Takes each Device field's value from the record, unless its declaration has changed."""
    saved, now = record.meta["declared"], declared_digests(session.setup)
    same = {name: session.device[name] for name in now if saved.get(name) == now[name]}
    moved = sorted(name for name in now if name not in same)
    arrays = record.read("device", named_leaves(same), is_part=True)
    restored: Any = jax.tree_util.tree_map_with_path(lambda path, _: arrays[dotted(path)], same)
    optimizer = session.setup.optimizer
    session.device = {**session.device, **restored}
    if optimizer is not None:
        session.device = optimizer.device_at(session.device, session.step)
    if moved:
        session.setup.notes.append(
            "Device fields whose values are not the record's: " + ", ".join(moved)
        )


def _warn_if_ended(session: Session, record: Record) -> None:
    reason, max_epochs = record.entry.stop_reason, session.setup.options.max_epochs
    if session.epoch >= max_epochs:
        fix = f"pass a `max_epochs` above {session.epoch} to train on"
    elif reason == "early_stop" and _still_stops(session.setup.stopper):
        session.has_ended = True
        fix = "pass `early_stop=None`, or one with more patience, to train on"
    else:
        return
    warn(
        f"The resumed run has ended: epoch {session.epoch} of max_epochs={max_epochs}"
        + (f" ({reason})" if reason else "")
        + "; `train` returns at once.\n"
        f"  fix: {fix}, or take the weights only: `checkpoint=`"
    )


def _still_stops(stopper: Any) -> bool:
    """Whether a stopper that stopped the run would do so again; only Nitro's own can say no."""
    return stopper is not None and getattr(stopper, "is_over", True)
