"""One step, traced once: its plan, its identity and its program all come from that trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from ._step import StepPlan, make_step_program
from ._tracing import TracedProgram, TraceScope, trace_program


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step that was traced.

    Attributes:
        traced: The trace of the single step.
        step: The jitted step; inside `scope` JAX takes its trace from there.
        scope: Where it was traced.
    """

    traced: TracedProgram
    step: Callable[..., Any]
    scope: TraceScope

    def planned(self, plan: StepPlan, arguments: tuple[Any, ...]) -> TracedProgram:
        """The step program of a plan; its loop is traced only if it has to be compiled.

        Args:
            plan: How many steps, and whether in a loop.
            arguments: Those of the step program.
        """
        scalars = self.traced.outputs[1]
        program = make_step_program(self.step, scalars, plan)

        def lower() -> Any:
            jitted = jax.jit(program, donate_argnums=0, keep_unused=True)
            with self.scope.entered():
                return jitted.trace(*arguments).lower()

        return dataclasses.replace(self.traced, lower=lower)


def trace_step(
    make: Callable[[set[str]], Callable[..., Any]], arguments: tuple[Any, ...]
) -> TracedStep:
    """Traces one step from the code as it is now.

    Args:
        make: What `make_step` returned.
        arguments: The abstract arguments of the step.
    """
    scope, jitted = TraceScope(), []

    def jit_once(reads: set[str]) -> Any:
        jitted.append(jax.jit(make(reads), inline=True))
        return jitted[0]

    traced = trace_program(jit_once, arguments, scope)
    return TracedStep(traced=traced, step=jitted[0], scope=scope)
