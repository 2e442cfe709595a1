"""Refuses to go on from a record where the run would not be the same any more."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from nitro._checkpoint import Record, listed
from nitro._code import arrived_since, describes_code, moved_since
from nitro._experiment import Experiment, Residency, field_values
from nitro._logs import Logger, plain
from nitro._optim import frozen_names
from nitro._programs import StepRecord
from nitro._trees import Flat
from nitro.errors import CheckpointError, warn

from ._restore import loggable

if TYPE_CHECKING:
    from nitro._optim import Optimizer

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def check_config(record: Record, experiment: Experiment) -> None:
    """Refuses a record of an experiment with other structural values.

    Raises:
        CheckpointError: Lists every changed, added and removed GraphConst field.
    """
    saved = {name: record.meta["config"].get(name) for name in record.meta["graph_const"]}
    values = field_values(experiment, Residency.GRAPH_CONST)
    now = {name: loggable(value) for name, value in values.items()}
    lines = [
        f"{name}: {_shown(saved, name)} in the record, {_shown(now, name)} now"
        for name in sorted(saved.keys() | now.keys())
        if plain(saved.get(name)) != plain(now.get(name))
    ]
    if lines:
        raise CheckpointError(
            f"The record `{record.path}` was trained with other GraphConst values:\n"
            + listed(lines),
            expected="the same structure: these values decide the program and the weights",
            fix=f"build `{type(experiment).__name__}(...)` with the record's values, or train anew",
        )


def check_logger(record: Record, logger: Logger) -> None:
    """Refuses a logger that cannot go on with what the record's logger wrote.

    Raises:
        CheckpointError: Names both types.
    """
    saved, now = record.meta["logger"], type(logger).__name__
    if saved["state"] is not None and saved["type"] != now:
        raise CheckpointError(
            f"The record `{record.path}` was logged by {saved['type']}, this handle logs by {now}.",
            expected="the same kind of logger, which goes on where the record was written",
            fix=f"pass a {saved['type']}, or {_weights_only(record)}",
        )


def check_frozen(record: Record, params: Flat, optimizer: Any) -> None:
    """Refuses a run that trains other parameters than the record's did.

    Raises:
        CheckpointError: Names each parameter that was frozen or thawed since.
    """
    now = frozen_names(optimizer)
    saved = set(record.meta.get("frozen", ()))
    lines = [
        f"`{name}`: trained in the record, frozen now" for name in params if name in now - saved
    ]
    lines += [
        f"`{name}`: frozen in the record, trained now" for name in params if name in saved - now
    ]
    if lines:
        raise CheckpointError(
            f"The record `{record.path}` was trained with other frozen groups:\n" + listed(lines),
            expected="the same groups frozen: the optimizer has no state for a frozen one",
            fix="return `nitro.FROZEN` from `learning_rate` for the same groups; or, to thaw or "
            f"freeze a part from here on, {_weights_only(record)}",
        )


def check_anchors(record: Record, optimizer: Any) -> None:
    """Refuses a run whose decay would pull toward other weights than before.

    Raises:
        CheckpointError: Names each group with both checksums.
    """
    saved: Mapping[str, str] = record.meta["anchors"]
    now = anchor_checksums(optimizer)
    lines = [
        f"group `{name}`: {saved.get(name, 'no anchor')[:12]} in the record, "
        f"{now.get(name, 'no anchor')[:12]} now"
        for name in sorted(saved.keys() | now.keys())
        if saved.get(name) != now.get(name)
    ]
    if lines:
        raise CheckpointError(
            f"The record `{record.path}` was trained with other decay anchors (SHA-256):\n"
            + listed(lines),
            expected="anchors with the same arrays: the decay pulls the weights toward them",
            fix="return the same arrays from `decay_anchor`, give the same `w0=`, or "
            + _weights_only(record),
        )


def anchor_checksums(optimizer: Any) -> dict[str, str]:
    """SHA-256 of what each group decays toward, for the groups that have an anchor."""
    groups = getattr(optimizer, "groups", ())
    toward = optimizer.anchors().toward if groups else {}
    anchored = {group.name: [n for n in group.leaves if n in toward] for group in groups}
    return {name: _checksum(toward, leaves) for name, leaves in anchored.items() if leaves}


def _checksum(toward: Mapping[str, Any], leaves: list[str]) -> str:
    total = hashlib.sha256()
    for name in sorted(leaves):
        array = np.asarray(toward[name])
        total.update(f"{name} {array.dtype}{array.shape}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def check_code(record: Record, step: StepRecord, *, allow: bool) -> None:
    """Refuses a step that computes something else than when the record was written.

    The same program goes on, whatever was renamed, moved or reformatted. Where programs
    cannot be compared (another version of a library, other shapes), code and values are, as
    far as they can be seen. With `allow` a change is a warning. So are other versions: they
    may change the last bits, and cannot be helped.

    Raises:
        CheckpointError: Names what moved, with both values.
    """
    saved: Mapping[str, Any] = record.meta["code"]
    moved_versions = list(_moved_versions(record.meta["versions"]))
    if not describes_code(saved):
        moved_versions.append("a Nitro that described code otherwise, so that an edit goes unseen")
    if moved_versions:
        warn(
            f"The record `{record.path}` was written with " + ", ".join(moved_versions) + ".\n"
            "  The run goes on; its last bits may differ from those of a run that never stopped. "
            "Whether it is the same step was judged by its code and values, not by its program."
        )
    same_python = record.meta["versions"]["python"] == versions()["python"]
    same_program = _same_program(saved, step, can_compare=not moved_versions)
    if same_program:
        return
    lines = moved_since(saved, step.words, reads_code=same_python)
    if same_program is False and not lines:
        lines = arrived_since(saved, step.words) or [
            "no code or value that can be seen: something that a hook reads in another way, such "
            "as an environment variable, a file, or a name put together at run time"
        ]
    if not lines:
        return
    what = f"What the step program is made of has changed since the record `{record.path}`:\n"
    if allow:
        warn(what + listed(lines))
        return
    raise CheckpointError(
        what + listed(lines),
        expected="the same code, model and optimizer, or the run is not the same run any more",
        fix=f"accept it: `Nitro(..., allow_code_change=True)`; or {_weights_only(record)}",
    )


def _same_program(saved: Mapping[str, Any], step: StepRecord, *, can_compare: bool) -> bool | None:
    """Whether the step is the same program; None where that cannot be told."""
    if saved.get("program") is None or step.program is None:
        return None
    if saved["program"] == step.program:
        return True
    return False if can_compare and saved["arguments"] == step.arguments else None


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide bits."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), **dict(_installed())}


def _installed() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _moved_versions(saved: Mapping[str, str]) -> Iterator[str]:
    now = versions()
    for name in now.keys() & saved.keys():
        if saved[name] != now[name] and name != "orbax-checkpoint":
            yield f"{name} {saved[name]} (now {now[name]})"


def report_horizon(
    record: Record, optimizer: Optimizer | Any, pace: Mapping[str, int]
) -> list[str]:
    """Says what a longer or shorter run means; warns where it moves a schedule.

    Args:
        record: The record that the run goes on from.
        optimizer: The optimizer with the new horizon.
        pace: What `pace` returned for the new handle.

    Raises:
        CheckpointError: An epoch has other steps than before, and the record stands in the
            middle of one.
    """
    saved: Mapping[str, int] = record.meta["pace"]
    _check_epoch_length(record, saved, pace)
    before, after = saved["num_steps"], pace["num_steps"]
    if before == after:
        return []
    line = f"horizon: {before} steps in the record, {after} now"
    names = ", ".join(f"`{name}`" for name in optimizer.schedules)
    if names:
        warn(
            f"The {line}. The schedules of {names} are evaluated anew for all {after} steps, so "
            f"their values jump at step {record.meta['step']}, and the run is not the one that "
            f"{after} steps from the start would have been.\n"
            "  fix: for a run that can be prolonged, use a schedule that does not depend on its "
            "total"
        )
    return [line]


def _check_epoch_length(record: Record, saved: Mapping[str, int], pace: Mapping[str, int]) -> None:
    moved = [
        f"{name}: {saved[name]} in the record, {pace[name]} now"
        for name in pace
        if name != "num_steps" and saved.get(name, pace[name]) != pace[name]
    ]
    if not moved:
        return
    text = f"An epoch is not what it was for the record `{record.path}`:\n{listed(moved)}"
    if record.meta["steps_in_epoch"]:
        raise CheckpointError(
            text,
            expected=f"the same: the record stands behind step {record.meta['steps_in_epoch']} of "
            f"epoch {record.meta['epoch'] + 1}",
            fix="use the same data, batch size, order and `accum`, or resume from the end of an "
            "epoch",
        )
    warn(text)


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "absent"


def _weights_only(record: Record) -> str:
    return f'start from the weights: `Nitro(..., checkpoint="{record.path}")`'
