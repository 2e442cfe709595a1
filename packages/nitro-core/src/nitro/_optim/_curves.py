"""Evaluates a schedule once, for the whole horizon."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nitro.errors import ConfigError, warn

Evaluate = Callable[..., Any]
"""`evaluate(label, function, *arguments)` runs a pure function as one compiled program."""

_SLOW_LOOP_S = 1.0


def evaluate_schedule(key: str, value: Any, *, num_steps: int, evaluate: Evaluate) -> Any:
    """The values of a schedule at every step.

    Args:
        key: The schedule's key, for messages.
        value: A constant, or a factory of the horizon.
        num_steps: The horizon, in optimizer steps.
        evaluate: Compiles and runs a function.

    Returns:
        The constant as it is; or a tree of NumPy arrays, each (steps, ...).

    Raises:
        ConfigError: The factory returned no function of the step.
    """
    if not callable(value):
        return value
    schedule = _made(key, value, num_steps)
    steps = np.arange(num_steps, dtype=np.int32)
    if _is_traceable(schedule):
        values = evaluate(f"schedule {key}", jax.vmap(schedule), steps)
        return jax.device_get(values)
    return _evaluated_in_python(key, schedule, num_steps)


def _made(key: str, factory: Callable[..., Any], num_steps: int) -> Callable[..., Any]:
    try:
        schedule = factory(num_steps)
    except Exception as error:
        error.add_note(f"raised by the factory of the schedule `{key}`, called with {num_steps}")
        raise
    if callable(schedule):
        return schedule
    raise ConfigError(
        f"The schedule `{key}`, called with the {num_steps} steps of the run, returned "
        f"{_shown(schedule)}.",
        expected="a function of the step: a schedule is made by a factory of the horizon",
        fix="if you gave the schedule itself, write "
        f'`{{"{key}": lambda total: schedule}}`; a constant is a plain number',
    )


def _is_traceable(schedule: Callable[..., Any]) -> bool:
    try:
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), np.int32))
    except Exception:  # noqa: BLE001 - any code of the user; if it really fails, Python says so
        return False
    return True


def _evaluated_in_python(key: str, schedule: Callable[..., Any], num_steps: int) -> Any:
    started = time.perf_counter()
    values: list[Any] = []
    for step in range(num_steps):
        try:
            values.append(jax.tree.map(np.asarray, schedule(step)))
        except Exception as error:
            if not values:
                error.add_note(f"raised by the schedule `{key}` at its first step, 0")
                raise
            warn(
                f"The schedule `{key}` raised {type(error).__name__} ({error}) at step {step} of "
                f"{num_steps}, counted from 0: it holds its last value from there on."
            )
            values += [values[-1]] * (num_steps - len(values))
            break
    _warn_if_slow(key, time.perf_counter() - started, num_steps)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *values)


def _warn_if_slow(key: str, seconds: float, num_steps: int) -> None:
    if seconds > _SLOW_LOOP_S:
        warn(
            f"The schedule `{key}` does not trace under JAX, so setup called it {num_steps} times "
            f"in Python, which took {seconds:.1f} s. Written in `jax.numpy`, without branches on "
            "the step, it is one compiled call."
        )


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
