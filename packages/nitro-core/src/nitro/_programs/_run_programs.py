"""The programs of one handle: found in the store on first use, then held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from nitro._experiment import Residency, field_names
from nitro._optim import Optimizer

from ._code import describe, trace_closure, value_digest
from ._hooks import TracedHooks
from ._key import KeyPart, abstract_arguments
from ._step import StepPlan, make_step_program
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
        plan: The shape of the step program.
        compile_options: Options for XLA, for every program.
    """

    def __init__(
        self,
        hooks: TracedHooks,
        *,
        optimizer: Optimizer | None,
        plan: StepPlan,
        compile_options: Mapping[str, Any],
    ) -> None:
        self.hooks = hooks
        self.plan = plan
        self._optimizer = optimizer
        self._compile_options = compile_options
        self._held: dict[Any, Program] = {}

    def step(self, *arguments: Any) -> Program:
        """The step program for these arguments; see `make_step_program`."""
        assert self._optimizer is not None
        parts = {
            **self._code("forward", "loss"),
            **self._value("optimizer", self._optimizer.factory),
            **self._value("model (train)", self.hooks.layout.train),
            **self._value("step plan", self.plan),
        }
        make = make_step_program(self.hooks, self._optimizer, self.plan)
        return self._get("train step", parts, make, arguments, donate=(0,))

    def forward(self, *arguments: Any) -> Program:
        """The forward program: `fn(params, model_state, device, batch)` → outputs."""

        def make(reads: set[str]) -> Callable[..., Any]:
            def program(params: Any, model_state: Any, device: Any, batch: Any) -> Any:
                view = self.hooks.view(device, reads)
                return self.hooks.eval_outputs(view, params, model_state, batch)

            return program

        parts = {
            **self._code("forward"),
            **self._value("model (eval)", self.hooks.layout.eval),
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

    def _value(self, label: str, value: Any) -> dict[str, KeyPart]:
        return {label: _part(value)}


def _part(value: Any) -> KeyPart:
    return KeyPart(value_digest(value), describe(value))


def _jax_config() -> dict[str, KeyPart]:
    values = {name: getattr(jax.config, name, None) for name in _CONFIG}
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return {"jax configuration": KeyPart(text, text)}
