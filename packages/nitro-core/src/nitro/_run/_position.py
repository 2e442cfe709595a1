"""Where a training source stands inside an epoch, and how it gets there again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nitro._data import is_read_from_anywhere
from nitro.errors import CheckpointError, warn

from ._restore import Source


class OpenEpoch(NamedTuple):
    """An epoch of a source that is being read.

    Attributes:
        batches: Its batches, from where it was opened.
        position: Where the source stands; `position(True)` behind the last batch.
    """

    batches: Iterator[Any]
    position: Callable[[bool], Any]


def open_epoch(source: Any, *, epoch: int, start: int, state: Any) -> OpenEpoch:
    """Opens an epoch of a source.

    A source with `batches(epoch, start)`, and a sequence, are asked for the batches from
    `start` on. Others keep a state: the source itself, over all epochs, or the iterator of
    one epoch, as Grain's do.

    Args:
        source: The training split.
        epoch: The epoch, counted from 0.
        start: How many of its batches were read before.
        state: What `position` returned there; None to open the next epoch.
    """
    if is_read_from_anywhere(source):
        return OpenEpoch(iter(source.batches(epoch, start)), _no_state)
    if isinstance(source, Sequence):
        return OpenEpoch(itertools.islice(iter(source), start, None), _no_state)
    if _keeps_state(source):
        if state is not None:
            source.set_state(state)
        return OpenEpoch(iter(source), lambda _: source.get_state())
    iterator: Any = iter(source)
    if not _keeps_state(iterator):
        return OpenEpoch(iterator, _no_state)
    if state is not None:
        iterator.set_state(state)
    # The next epoch has an iterator of its own.
    return OpenEpoch(iterator, lambda at_end: None if at_end else iterator.get_state())


def can_move(source: Any) -> bool:
    """Whether a source can go on in the middle of an epoch."""
    if is_read_from_anywhere(source) or isinstance(source, Sequence) or _keeps_state(source):
        return True
    return _keeps_state(iter(source))


def check_position(
    source: Source, splits: Mapping[str, Any], *, writes_records: bool
) -> tuple[bool, list[str]]:
    """Whether the training source can go on in the middle of an epoch; says so where not.

    Args:
        source: Where the weights come from.
        splits: The data by split.
        writes_records: Whether the handle writes records.

    Returns:
        Whether it can, and lines for the binding report.

    Raises:
        CheckpointError: It cannot, and the record stands in the middle of an epoch.
    """
    if "train" not in splits or can_move(splits["train"]):
        return True, []
    kind = type(splits["train"]).__name__
    fix = "give the loader `get_state` and `set_state`, or use an ArrayLoader or Grain"
    if source.resumed is not None and _is_inside_epoch(source.resumed.meta):
        raise CheckpointError(
            f"The record `{source.resumed.path}` was written in the middle of epoch "
            f"{source.resumed.meta['epoch'] + 1}, and the training source {kind} cannot say or take "
            "a position.",
            expected="an ArrayLoader, a Grain dataset, or a loader with `get_state`/`set_state`",
            fix=f"resume from a record at the end of an epoch, or {fix}",
        )
    line = f"the training source {kind} has no position: runs resume at epoch starts only"
    if writes_records:
        warn(
            f"{line[0].upper()}{line[1:]}. Nothing is recorded inside an epoch, and a run that is "
            f"stopped there goes on from the end of the epoch before; what the loader shuffles or draws "
            f"by itself may start anew, so that a resumed run differs from one that never stopped.\n"
            f"  fix: {fix}"
        )
    return False, [line]


def _is_inside_epoch(meta: Mapping[str, Any]) -> bool:
    """Whether a record has some steps of an epoch, and lacks others."""
    pace = meta["pace"]
    return 0 < meta["steps_in_epoch"] < pace["batches_per_epoch"] // pace["accum"]


def _keeps_state(holder: Any) -> bool:
    return hasattr(holder, "get_state") and hasattr(holder, "set_state")


def _no_state(at_end: bool) -> None:  # noqa: FBT001 - called by position
    del at_end
