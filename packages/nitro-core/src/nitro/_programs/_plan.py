"""Chooses how many steps one call of the step program takes: statically, never by a clock."""

from __future__ import annotations

import math
from typing import Any

import jax

from nitro.errors import ConfigError

from ._jaxpr import matmul_flops, primitives
from ._step import StepPlan

LOOPS_BADLY_ON_CPU = frozenset({"conv_general_dilated"})
"""Primitives that XLA's CPU back end runs many times slower inside a loop.

Measured with jaxlib 0.12: a convolution in a while loop is about 20 times slower.
"""

MAX_STEPS_HOST_FED = 32
MAX_STEPS_ON_DEVICE = 256
MAX_UNROLLED_ACCUM = 8

_FLOPS_PER_CALL = 4e9
"""A call of this much work takes a tenth of a second or so on two cores: long against a
dispatch, short against a person's patience with Ctrl-C."""

_BYTES_PER_CALL = 64 * 2**20
"""How much of the host's batches one call may gather."""


def choose_plan(
    *,
    jaxpr: Any,
    accum: int,
    steps_per_call: int | None,
    steps_per_epoch: int,
    bytes_per_step: int,
    on_device: bool,
) -> StepPlan:
    """Chooses the plan of the step program.

    Args:
        jaxpr: One step, traced.
        accum: Micro-batches in a step.
        steps_per_call: The user's choice, or None.
        steps_per_epoch: A call never reaches over the end of an epoch.
        bytes_per_step: What the host feeds for one step.
        on_device: Whether only indices are fed.
    """
    if loops_badly(jaxpr):
        _check_unrolled(accum, steps_per_call)
        return StepPlan(steps_per_call=steps_per_call or 1, accum=accum, is_looped=False)
    if steps_per_call is not None:
        return StepPlan(steps_per_call=steps_per_call, accum=accum, is_looped=True)
    by_work = _FLOPS_PER_CALL / max(matmul_flops(jaxpr), 1.0)
    by_bytes = math.inf if on_device else _BYTES_PER_CALL / max(bytes_per_step, 1)
    limit = MAX_STEPS_ON_DEVICE if on_device else MAX_STEPS_HOST_FED
    steps = max(1, min(int(min(by_work, by_bytes)), limit, steps_per_epoch))
    return StepPlan(steps_per_call=steps, accum=accum, is_looped=True)


def loops_badly(jaxpr: Any) -> bool:
    """Whether a program must not be looped on this platform."""
    return jax.default_backend() == "cpu" and bool(primitives(jaxpr) & LOOPS_BADLY_ON_CPU)


_FIXES = {
    "accum": "lower `accum` and raise the batch size by as much",
    "steps_per_call": "leave `steps_per_call` out: one step a call is the fastest here",
}


def _check_unrolled(accum: int, steps_per_call: int | None) -> None:
    if accum * (steps_per_call or 1) > MAX_UNROLLED_ACCUM:
        given = {"accum": accum, "steps_per_call": steps_per_call or 1}
        above_one = {name: value for name, value in given.items() if value > 1}
        what = " and ".join(f"`{name}` = {value}" for name, value in above_one.items())
        raise ConfigError(
            f"{what} would unroll {accum * (steps_per_call or 1)} convolutional steps into one "
            "program: on the CPU a convolution in a loop runs 20 times slower.",
            expected=f"at most {MAX_UNROLLED_ACCUM} on this platform",
            fix="; ".join(_FIXES[name] for name in above_one),
        )
