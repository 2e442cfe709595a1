"""Tells what a resumed run does otherwise than before, and keeps it in its records."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from nitro._checkpoint import listed
from nitro._optim import ManualOptimizers, Optimizer
from nitro.errors import warn

from ._setup import Setup

_SILENT = (
    "max_constant_bytes",
    "memory_limit_bytes",
    "preset",
    "progress",
    "run_dir",
    "seed",
    "slow_compile_s",
    "steps_per_call",
)
"""Options that change no number of a run, or that the record decides."""

_QUIET = ("accum", "checkpoint_every_steps", "checkpointer", "early_stop", "max_epochs")
"""What is kept and not warned of: it moves no weight, or the horizon and the length of an epoch
tell of it."""


class Change(NamedTuple):
    """A value that is another one since a run was resumed; JSON values."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.old} → {self.new}"


def steering_values(setup: Setup, params: Mapping[str, Any]) -> dict[str, Any]:
    """What steers a run and is no part of its programs, as JSON values by name.

    Args:
        setup: What the handle was built with.
        params: The fields and the run options.
    """
    # What `derive` gives is told where it is called.
    silent = {*_SILENT, *setup.derived}
    described = {name: value for name, value in params.items() if name not in silent}
    digests = {name: _digest(np.asarray(value)) for name, value in _arrays(setup)}
    return {
        **described,
        **{n: f"{described[n]} {digest}" for n, digest in digests.items() if n in described},
        "checkpointer": repr(setup.checkpointer),
        "early_stop": None if setup.stopper is None else type(setup.stopper).__name__,
        **dict(_of_stopper(setup.stopper)),
        **dict(_of_optimizer(setup.optimizer)),
    }


def changes_since(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The values that both have, and that differ, sorted by name."""
    return [
        Change(name, saved[name], now[name])
        for name in sorted(saved.keys() & now.keys())
        if saved[name] != now[name] and not _is_object(saved[name], now[name])
    ]


def tell_changes(changes: list[Change], *, path: Any, step: int) -> None:
    """Warns of the values that a resumed run has from now on."""
    told = [str(c) for c in changes if c.name.split(".")[0] not in _QUIET and not _is_stretched(c)]
    if told:
        warn(
            f"Resumed from `{path}` with other values, from step {step} on:\n{listed(told)}\n"
            "  The run goes on with the new ones, and its records and `nitro show` tell of them."
        )


def lineage_lines(lineage: list[dict[str, Any]]) -> list[str]:
    """What was changed at each resume, a line each."""
    return [
        f"resumed at step {entry['step']} with "
        + ", ".join(str(Change(*change)) for change in entry["changes"])
        for entry in lineage
    ]


def _arrays(setup: Setup) -> Iterator[tuple[str, Any]]:
    """The Device fields that are one array, of which the configuration has shapes only."""
    for name, value in setup.device.items():
        if getattr(value, "ndim", 0) > 0:
            yield name, value


def _of_stopper(stopper: Any) -> Iterator[tuple[str, Any]]:
    for name in ("metric", "mode", "patience", "min_delta"):
        value = getattr(stopper, name, None)
        if isinstance(value, bool | int | float | str):
            yield f"early_stop.{name}", value


def _of_optimizer(optimizer: Optimizer | ManualOptimizers | None) -> Iterator[tuple[str, Any]]:
    """Rates and decays by group, and what is scheduled."""
    if optimizer is None:
        return
    table = optimizer.table[np.arange(len(optimizer.table))]
    scheduled = set(optimizer.schedules)
    for name, (start, stop) in optimizer.layout.columns.items():
        field = name.rpartition(".")[2]
        if {name, f"opt.{field}"} & scheduled:
            yield _shown(name), _described(table[:, start:stop])
    if isinstance(optimizer, ManualOptimizers):
        return
    for group in optimizer.groups:
        for field in ("learning_rate", "weight_decay"):
            name = f"opt.{group.name}.{field}"
            if not {name, f"opt.{field}"} & scheduled:
                yield _shown(name), getattr(group, field)


def _shown(name: str) -> str:
    """A column in the words of a user: those of the default group have no group."""
    return name.removeprefix("opt.").removeprefix("default.")


def _described(values: np.ndarray) -> Any:
    """A schedule in a few words that differ where a value does."""
    first, last = (float(str(value)) for value in (values[0].ravel()[0], values[-1].ravel()[0]))
    if (values == values[0]).all() and values.shape[1] == 1:
        return first
    return f"{first:g} to {last:g} in {len(values)} steps ({_digest(values)})"


def _is_stretched(change: Change) -> bool:
    """Whether a schedule has other steps in all, of which the horizon's warning tells."""
    old, new = (re.fullmatch(_CURVE, str(value)) for value in (change.old, change.new))
    return bool(old and new and old["first"] == new["first"] and old["steps"] != new["steps"])


_CURVE = r"(?P<first>\S+) to \S+ in (?P<steps>\d+) steps \(\w+\)"


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:6]


def _is_object(*values: Any) -> bool:
    """Whether a value is told by its address, which is another one in each process."""
    return any(isinstance(value, str) and " at 0x" in value for value in values)
