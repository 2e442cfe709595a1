"""The programs of one handle: found in the store on first use, then held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nitro._experiment import Residency, field_values, group_code
from nitro._optim import ManualOptimizers, Optimizer
from nitro._state import TrainState

from ._code_record import CodeFingerprint
from ._constants import TracedCode, check_constants
from ._fingerprint import Closure, describe, trace_closure, value_digest
from ._hooks import TracedHooks
from ._key import KeyPart, abstract_arguments, environment
from ._plan import choose_plan
from ._step import Chunk, StepInputs, StepPlan, make_step
from ._store import Program, ProgramRequest, store
from ._traced_step import TracedStep, trace_step
from ._tracing import TracedProgram, trace_program

_HOOKS_OF = {
    "train step": ("forward", "loss", "train_metrics"),
    "forward": ("forward",),
    "loss": ("loss",),
    "metrics": ("metrics",),
}
"""The hooks that each program traces; it is keyed on these alone."""

_WITHOUT_MODEL = ("loss", "metrics")

_Make = Callable[[set[str]], Callable[..., Any]]


class RunPrograms:
    """Finds or compiles each program once, and keeps it for as long as the handle lives.

    Args:
        hooks: The traced hooks.
        optimizer: The optimizer; None on an evaluation handle.
        compile_options: Options for XLA, for every program.
        max_constant_bytes: The bytes of arrays that a program may hold.
        slow_compile_s: A compile that takes longer is reported.
    """

    def __init__(
        self,
        hooks: TracedHooks,
        *,
        optimizer: Optimizer | ManualOptimizers | None,
        compile_options: Mapping[str, Any],
        max_constant_bytes: float,
        slow_compile_s: float,
    ) -> None:
        self.hooks = hooks
        self._optimizer = optimizer
        self._compile_options = compile_options
        self._max_constant_bytes = max_constant_bytes
        self._slow_compile_s = slow_compile_s
        self._held: dict[Any, Program] = {}
        self._steps: dict[Any, TracedStep] = {}
        self._graph = self._graph_parts()
        roles = [role for role in _HOOKS_OF if optimizer is not None or role != "train step"]
        roles = [role for role in roles if role != "loss" or "loss" in hooks.routes]
        roles = [role for role in roles if role != "metrics" or hooks.has_device_metrics]
        self._code: dict[str, Closure] = {role: self._trace_code(role) for role in roles}
        self._told: set[str] = set()

    def choose_step(
        self,
        state: TrainState,
        inputs: StepInputs,
        chunk_for: Callable[[StepPlan], Chunk],
        **choice: Any,
    ) -> tuple[StepPlan, Program]:
        """Chooses the plan of the step program and finds or compiles it.

        Args:
            state: The state, concrete or abstract.
            inputs: The other inputs of the program.
            chunk_for: A chunk of the right shapes for a plan.
            choice: What else `choose_plan` wants.
        """
        single = StepPlan(steps_per_call=1, accum=choice["accum"], is_looped=False)
        step = self.trace_step(state, inputs, chunk_for(single))
        plan = choose_plan(jaxpr=step.traced.jaxpr, **choice)
        arguments = (state, inputs, chunk_for(plan))
        program = self._get(
            "train step",
            lambda: step.planned(plan, arguments),
            arguments,
            parts={"step plan": KeyPart(repr(plan), plan.display)},
            donate=(0,),
        )
        step.scope.forget()
        return plan, program

    def trace_step(self, state: TrainState, inputs: StepInputs, chunk: Chunk) -> TracedStep:
        """Traces one step, once for each kind of arguments.

        Args:
            state: The state, concrete or abstract.
            inputs: The other inputs of the program.
            chunk: A chunk of one step.
        """
        optimizer = self._optimizer
        assert optimizer is not None
        accum = jax.tree.leaves(chunk.batches)[0].shape[1]
        first = jax.tree.map(lambda field: field[0], (chunk.rows, chunk.batches))
        arguments = abstract_arguments((state, inputs, *first))
        held = _held_key("step", arguments)
        if held not in self._steps:
            self._steps[held] = trace_step(make_step(self.hooks, optimizer, accum), arguments)
        return self._steps[held]

    def forward(self, *arguments: Any) -> Program:
        """The forward program: `fn(params, model_state, device, batch)` → outputs."""

        def make(reads: set[str]) -> Callable[..., Any]:
            def program(params: Any, model_state: Any, device: Any, batch: Any) -> Any:
                view = self.hooks.view(device, reads)
                return self.hooks.eval_outputs(view, params, model_state, batch)

            return program

        return self._make("forward", make, arguments)

    def loss(self, *arguments: Any) -> Program:
        """The loss program: `fn(device, pieces, batch, rows)` → loss of one batch; see `metrics`."""

        def make(reads: set[str]) -> Callable[..., Any]:
            def program(device: Any, pieces: Any, batch: Any, rows: Any) -> Any:
                outputs = _first_rows(pieces, rows.shape[0])
                return self.hooks.loss(self.hooks.view(device, reads), outputs, batch)

            return program

        return self._make("loss", make, arguments)

    def metrics(self, *arguments: Any) -> Program:
        """The metrics program: `fn(device, pieces, batch, rows)` → metrics of one batch.

        The pieces are what the forward program returned, the last of them padded; `rows`
        is an array whose length is the number of real samples. Padding is cut off before
        the hook sees anything.
        """

        def make(reads: set[str]) -> Callable[..., Any]:
            def program(device: Any, pieces: Any, batch: Any, rows: Any) -> Any:
                real = rows.shape[0]
                outputs = _first_rows(pieces, real)
                return self.hooks.metrics(self.hooks.view(device, reads), outputs, batch, real)

            return program

        return self._make("metrics", make, arguments)

    def held(self) -> list[Program]:
        """The programs that the handle has used so far."""
        return list(self._held.values())

    def step_code(self) -> CodeFingerprint:
        """What the step program rests on, as it is now: code, model and optimizer."""
        code = self._code["train step"]
        return CodeFingerprint(self._trace_code("train step") if code.check() else code)

    def drift(self) -> list[str]:
        """What has moved since the handle was built and was not told before, a line each.

        The handle keeps the programs that it holds; one that it has not traced yet is
        traced from the code as it is then.
        """
        changes = {str(change): None for code in self._code.values() for change in code.check()}
        changes |= dict.fromkeys(self._moved_fields())
        new = [line for line in changes if line not in self._told]
        self._told.update(new)
        return new

    def _moved_fields(self) -> Iterator[str]:
        for name, part in self._graph_parts().items():
            before = self._graph[name]
            if part.digest != before.digest:
                owner = type(self.hooks.experiment).__name__
                yield f"{owner}.{name}: {before.display} → {part.display}"

    def _make(self, role: str, make: _Make, arguments: tuple[Any, ...]) -> Program:
        abstract = abstract_arguments(arguments)
        return self._get(role, lambda: trace_program(make, abstract), arguments)

    def _get(
        self,
        role: str,
        trace: Callable[[], TracedProgram],
        arguments: tuple[Any, ...],
        *,
        parts: Mapping[str, KeyPart] | None = None,
        donate: tuple[int, ...] = (),
    ) -> Program:
        held = _held_key(role, arguments)
        if held not in self._held:
            request = ProgramRequest(
                role=role,
                owner=type(self.hooks.experiment).__name__,
                traced=trace(),
                parts={**(parts or {}), **environment()},
                code=self._current_code(role),
                graph=self._graph_parts(),
                arguments=abstract_arguments(arguments),
                donate=donate,
                compile_options=self._compile_options,
                check=partial(self._check_constants, role),
                slow_compile_s=self._slow_compile_s,
            )
            self._held[held] = self._checked(store.get(request), request)
        return self._held[held]

    def _checked(self, program: Program, request: ProgramRequest) -> Program:
        """Checks a program that may have been compiled for a handle that allows more."""
        if program.facts.constant_bytes > self._max_constant_bytes:
            request.check(request.traced.jaxpr)
        return program

    def _check_constants(self, role: str, jaxpr: Any) -> None:
        self.check_constants(jaxpr, role=role, roots=self._roots(role), baked={})

    def check_constants(
        self, jaxpr: Any, *, role: str, roots: Mapping[str, Any], baked: Mapping[str, Any]
    ) -> None:
        """Refuses a traced program that would hold large constants.

        Args:
            jaxpr: The traced program.
            role: Its name, for messages.
            roots: The hooks that it traces, and what else it starts from, by name.
            baked: What it holds by design besides the structural fields, by name.

        Raises:
            ProgramError: Names each large constant, its hook, and what it came through.
        """
        owner = type(self.hooks.experiment)
        values = field_values(self.hooks.experiment, Residency.GRAPH_CONST)
        fields = {
            f"GraphConst field {owner.__name__}.{name}": value for name, value in values.items()
        }
        code = TracedCode(owner=owner, roots=roots, baked={**fields, **baked})
        check_constants(jaxpr, code, role=role, limit_bytes=self._max_constant_bytes)

    def _current_code(self, role: str) -> Closure:
        """The code as it is now, which is what a trace would see."""
        code = self._code[role]
        return self._trace_code(role) if code.check() else code

    def _trace_code(self, role: str) -> Closure:
        return trace_closure(self._roots(role), owner=type(self.hooks.experiment))

    def _roots(self, role: str) -> dict[str, Any]:
        cls = type(self.hooks.experiment)
        hooks = _HOOKS_OF[role]
        if role == "train step" and isinstance(self._optimizer, ManualOptimizers):
            hooks = ("train_step",)
        hooks = tuple(name for name in hooks if name in self.hooks.routes)
        roots: dict[str, Any] = {f"{cls.__name__}.{n}": getattr(cls, n) for n in hooks}
        roots |= group_code(cls)
        if role == "train step" and self._optimizer is not None:
            roots |= self._optimizer.code()
        if role not in _WITHOUT_MODEL:
            roots["model"] = self._modules(role)
        return roots

    def _modules(self, role: str) -> Mapping[str, Any]:
        layout = self.hooks.layout
        return layout.train_modules if role == "train step" else layout.eval_modules

    def _graph_parts(self) -> dict[str, KeyPart]:
        values = field_values(self.hooks.experiment, Residency.GRAPH_CONST)
        return {name: KeyPart(value_digest(v), describe(v)) for name, v in values.items()}


def _held_key(role: str, arguments: tuple[Any, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(arguments)
    return role, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _first_rows(pieces: Any, rows: int) -> Any:
    """The outputs for the real samples of a batch, of the pieces that it was cut into."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:rows], *pieces)
