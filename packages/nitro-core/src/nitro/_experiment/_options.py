"""Run options: keyword to `Nitro(...)`, else an attribute of the experiment, else the default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nitro._paths import local_path
from nitro.errors import ConfigError

from ._declaration import Experiment
from ._fields import Residency, leaves_of
from ._source import locate
from ._values import type_name


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"


UNSET: Any = _Unset()
"""The value of an option that was not given: `None` is itself a legal value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a handle was configured with, resolved once.

    Attributes:
        seed: The root of every random stream.
        run_dir: Where the log and the records go.
        max_epochs: How many epochs `train` runs to.
        accum: Micro-batches folded into one optimizer step.
        gradient_clip_norm: The largest norm of all gradients together; 0 clips nothing.
        check_divergence: Whether a non-finite loss stops the run.
        steps_per_call: Optimizer steps in one call of the compiled program; None chooses.
        checkpoint_every_steps: Also write a record each time so many steps are done.
        progress: None, True, False, or a reporter.
        max_constant_bytes: The bytes of arrays that a program may hold; None for any.
        slow_compile_s: A compile that takes longer, in seconds, is reported.
        memory_limit_bytes: The memory of a device; None asks the device.
        sources: Where each option came from: "keyword", "experiment" or "default".
    """

    seed: int
    run_dir: Path
    max_epochs: int
    accum: int
    gradient_clip_norm: float
    check_divergence: bool
    steps_per_call: int | None
    checkpoint_every_steps: int | None
    progress: Any
    max_constant_bytes: int | None
    slow_compile_s: float
    memory_limit_bytes: int | None
    sources: Mapping[str, str]


def resolve_options(experiment: Experiment, given: Mapping[str, Any]) -> RunOptions:
    """Resolves and checks the plain run options.

    Raises:
        ConfigError: A value of the wrong type or range, or a run option that the
            experiment marks `GraphConst`.
    """
    _refuse_structural(experiment)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, (default, check) in _OPTIONS.items():
        value, source = resolve_option(experiment, name, given.get(name, UNSET), default)
        values[name] = check(name, value)
        sources[name] = source
    if values["run_dir"] is None:
        values["run_dir"] = Path("runs") / type(experiment).__name__
    return RunOptions(**values, sources=sources)


def resolve_option(
    experiment: Experiment, name: str, keyword: Any, default: Any
) -> tuple[Any, str]:
    """One option's value and its source: "keyword", "experiment" or "default"."""
    if keyword is not UNSET:
        return keyword, "keyword"
    value = getattr(experiment, name, UNSET)
    if value is UNSET:
        return default, "default"
    return (value() if callable(value) and hasattr(value, "__self__") else value), "experiment"


def resolve_source(experiment: Experiment, name: str, keyword: Any) -> str:
    """Where an option comes from, without calling what may build it."""
    if keyword is not UNSET:
        return "keyword"
    return (
        "experiment" if hasattr(type(experiment), name) or name in vars(experiment) else "default"
    )


def _refuse_structural(experiment: Experiment) -> None:
    entries = experiment.__nitro_entries__
    marked = [
        name
        for name in DRIVER_OPTIONS
        if name in entries
        and any(
            field.residency is Residency.GRAPH_CONST for field in leaves_of({name: entries[name]})
        )
    ]
    if marked:
        cls = type(experiment)
        raise ConfigError(
            f"`{cls.__name__}` ({locate(cls)}) marks {', '.join(marked)} as GraphConst: every "
            "value would compile all programs again, and no program reads it.",
            expected="run options are host-only",
            fix=f"write `{marked[0]}: {type_name(entries[marked[0]].type)}` without a marker",
        )


def _positive_int(name: str, value: Any) -> int:
    return _int_from(name, value, 1)


def _positive_int_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _int_from(name, value, 1)


def _natural_or_none(name: str, value: Any) -> int | None:
    return None if value is None else _int_from(name, value, 0)


def _natural(name: str, value: Any) -> int:
    return _int_from(name, value, 0)


def _int_from(name: str, value: Any, low: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < low:
        raise ConfigError(f"`{name}` is {value!r}.", expected=f"an integer of at least {low}")
    return int(value)


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"`{name}` is {value!r}.", expected="True or False")
    return value


def _anything(name: str, value: Any) -> Any:
    del name
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"`{name}` is {value!r}.", expected="seconds: a number of at least 0")
    return float(value)


def _norm(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ConfigError(
            f"`{name}` is {value!r} ({type(value).__name__}).",
            expected="a finite number of at least 0, on the host; 0 clips nothing",
        )
    return float(value)


def _path(name: str, value: Any) -> Path | None:
    if value is not None and not isinstance(value, str | Path):
        raise ConfigError(f"`{name}` is {value!r}.", expected="a path")
    return None if value is None else local_path(value, name=name)


_OPTIONS: dict[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "seed": (0, _natural),
    "run_dir": (None, _path),
    "max_epochs": (1, _positive_int),
    "accum": (1, _positive_int),
    "gradient_clip_norm": (0.0, _norm),
    "check_divergence": (True, _boolean),
    "steps_per_call": (None, _positive_int_or_none),
    "checkpoint_every_steps": (None, _positive_int_or_none),
    "progress": (None, _anything),
    "max_constant_bytes": (2**20, _natural_or_none),
    "slow_compile_s": (30.0, _seconds),
    "memory_limit_bytes": (None, _positive_int_or_none),
}

DRIVER_OPTIONS = (
    *(name for name in _OPTIONS if name not in ("accum", "gradient_clip_norm")),
    "n_devices",
    "logger",
    "checkpointer",
    "early_stop",
)
"""Options that only the driver reads; `accum` and the clip really are baked."""
