"""The programs of one handle: found in the store on first use, then held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from nitro._experiment import Residency, field_names
from nitro._optim import Optimizer
from nitro._state import TrainState

from ._code import describe, trace_closure, value_digest
from ._hooks import TracedHooks
from ._key import KeyPart, abstract_arguments
from ._plan import choose_plan
from ._step import Chunk, StepInputs, StepPlan, make_step_program
from ._store import Program, ProgramRequest, store

_CONFIG = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_debug_nans",
    "jax_platforms",
)


class RunPrograms:
    """Finds or compiles each program once, and keeps it for as long as the handle lives.

    Args:
        hooks: The traced hooks.
        optimizer: The optimizer; None on an evaluation handle.
        compile_options: Options for XLA, for every program.
    """

    def __init__(
        self,
        hooks: TracedHooks,
        *,
        optimizer: Optimizer | None,
        compile_options: Mapping[str, Any],
    ) -> None:
        self.hooks = hooks
        self._optimizer = optimizer
        self._compile_options = compile_options
        self._held: dict[Any, Program] = {}

    def choose_step(
        self,
        state: TrainState,
        inputs: StepInputs,
        chunk_for: Callable[[StepPlan], Chunk],
        **choice: Any,
    ) -> tuple[StepPlan, Program]:
        """Chooses the plan of the step program and compiles it.

        Args:
            state: The state, concrete or abstract.
            inputs: The other inputs of the program.
            chunk_for: A chunk of the right shapes for a plan.
            choice: What else `choose_plan` wants.
        """
        optimizer = self._optimizer
        assert optimizer is not None

        def trace(plan: StepPlan) -> Any:
            program = make_step_program(self.hooks, optimizer, plan)(set())
            return jax.make_jaxpr(program)(state, inputs, chunk_for(plan))

        plan = choose_plan(trace=trace, **choice)
        parts = {
            **self._code("forward", "loss"),
            **{label: _part(value) for label, value in optimizer.code().items()},
            "model (train)": _part(self.hooks.layout.train),
            "step plan": _part(plan),
        }
        make = make_step_program(self.hooks, optimizer, plan)
        arguments = (state, inputs, chunk_for(plan))
        return plan, self._get("train step", parts, make, arguments, donate=(0,))

    def forward(self, *arguments: Any) -> Program:
        """The forward program: `fn(params, model_state, device, batch)` → outputs."""

        def make(reads: set[str]) -> Callable[..., Any]:
            def program(params: Any, model_state: Any, device: Any, batch: Any) -> Any:
                view = self.hooks.view(device, reads)
                return self.hooks.eval_outputs(view, params, model_state, batch)

            return program

        parts = {
            **self._code("forward"),
            "model (eval)": _part(self.hooks.layout.eval),
        }
        return self._get("forward", parts, make, arguments)

    def loss(self, *arguments: Any) -> Program:
        """The loss program: `fn(device, outputs, batch)` → loss."""

        def make(reads: set[str]) -> Callable[..., Any]:
            def program(device: Any, outputs: Any, batch: Any) -> Any:
                return self.hooks.loss(self.hooks.view(device, reads), outputs, batch)

            return program

        return self._get("loss", self._code("loss"), make, arguments)

    def _get(
        self,
        role: str,
        parts: Mapping[str, KeyPart],
        make: Callable[[set[str]], Callable[..., Any]],
        arguments: tuple[Any, ...],
        donate: tuple[int, ...] = (),
    ) -> Program:
        leaves, treedef = jax.tree.flatten(abstract_arguments(arguments))
        held = (role, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if held not in self._held:
            request = ProgramRequest(
                role=role,
                parts={**parts, **_jax_config()},
                graph=self._graph(),
                make=make,
                arguments=arguments,
                donate=donate,
                compile_options=self._compile_options,
            )
            self._held[held] = store.get(request)
        return self._held[held]

    def _graph(self) -> dict[str, KeyPart]:
        experiment = self.hooks.experiment
        names = field_names(experiment, Residency.GRAPH_CONST)
        return {name: _part(getattr(experiment, name)) for name in names}

    def _code(self, *hooks: str) -> dict[str, KeyPart]:
        cls = type(self.hooks.experiment)
        closure = trace_closure(
            {f"{cls.__name__}.{name}": getattr(cls, name) for name in hooks}, owner=cls
        )
        return {"code": KeyPart(closure.digest, ", ".join(closure.entries))}


def _part(value: Any) -> KeyPart:
    return KeyPart(value_digest(value), describe(value))


def _jax_config() -> dict[str, KeyPart]:
    values = {name: getattr(jax.config, name, None) for name in _CONFIG}
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return {"jax configuration": KeyPart(text, text)}
