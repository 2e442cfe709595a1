"""Calls the hooks that configure the optimizer, on the host, and checks what they return."""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import numpy as np

from nitro._experiment import Experiment
from nitro.errors import ConfigError, ExperimentError, HookError

_SIGNATURES = {
    "optimizer": "optimizer(self, group)",
    "learning_rate": "learning_rate(self, group=None)",
    "weight_decay": "weight_decay(self, group)",
    "decay_anchor": "decay_anchor(self, group)",
    "no_decay": "no_decay(self, path, leaf)",
    "param_group": "param_group(self, path)",
}


def call_hook(experiment: Experiment, name: str, *arguments: Any) -> Any:
    """Calls a hook of the experiment.

    Raises:
        ExperimentError: It does not take these arguments.
    """
    hook = getattr(experiment, name)
    owner = type(experiment).__name__
    if not callable(hook):
        raise ExperimentError(
            f"`{owner}.{name}` is {hook!r}.",
            expected=f"the hook `{_SIGNATURES[name]}`",
            fix=f"rename the field, or write `def {_SIGNATURES[name]}: ...`",
        )
    try:
        inspect.signature(hook).bind(*arguments)
    except TypeError as error:
        raise ExperimentError(
            f"`{owner}.{name}{inspect.signature(hook)}` cannot be called: {error}.",
            expected=f"`{_SIGNATURES[name]}`",
        ) from error
    return hook(*arguments)


def hook_number(
    experiment: Experiment, name: Literal["learning_rate", "weight_decay"], group: str | None
) -> float:
    """The rate or the decay of a group; None asks for the base rate.

    A field of this name stands for a hook that returns it for every group.

    Raises:
        HookError: Not a finite number of at least 0.
    """
    declared = getattr(experiment, name)
    value = call_hook(experiment, name, group) if callable(declared) else declared
    if isinstance(value, bool) or np.ndim(value) != 0 or not _is_number(value):
        raise _not_a_number(experiment, name, group, value)
    return float(value)


def group_rate(experiment: Experiment, group: str) -> float | None:
    """The rate of a group; None for one that is frozen.

    Raises:
        HookError: Neither None nor a finite number of at least 0.
    """
    declared = experiment.learning_rate
    # A field stands for every group, and None for them all is refused as the base rate.
    if callable(declared) and call_hook(experiment, "learning_rate", group) is None:
        return None
    return hook_number(experiment, "learning_rate", group)


def is_declared(experiment: Experiment, name: str) -> bool:
    """Whether the experiment says something of its own under a hook's name."""
    return name in experiment.fields() or getattr(type(experiment), name) is not getattr(
        Experiment, name
    )


def base_rate(experiment: Experiment) -> float:
    """The rate that groups are ratios of.

    Raises:
        ConfigError: It is 0.
    """
    rate = hook_number(experiment, "learning_rate", None)
    if rate == 0:
        owner = type(experiment).__name__
        raise ConfigError(
            f"`{owner}.learning_rate` is 0 as the base rate: the groups' rates are ratios of it.",
            expected="a base rate above 0",
            fix="to freeze one group, return `nitro.FROZEN` for that group alone: "
            "`learning_rate(group)`",
        )
    return rate


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(value) and value >= 0
    except (TypeError, ValueError):
        return False


def _not_a_number(experiment: Experiment, name: str, group: str | None, value: Any) -> HookError:
    called = f"{type(experiment).__name__}.{name}" + ("" if group is None else f'("{group}")')
    if name == "learning_rate" and value is None:
        # None means frozen, and there is a base rate also where each group has its own.
        return HookError(
            f"`{called}` is None for the base rate, `learning_rate(None)`, of which the groups' "
            "rates are ratios.",
            expected="a finite number above 0 where `group` is None, and `nitro.FROZEN` (None) "
            "only for the groups to freeze",
            fix='compare with the group by name: `nitro.FROZEN if group == "body" else 1e-3`',
        )
    return HookError(
        f"`{called}` is {value!r} ({type(value).__name__}).",
        expected="a finite number of at least 0",
        fix="let it change with the step through `schedules`",
    )
