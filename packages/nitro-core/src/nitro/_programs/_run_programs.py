"""The programs of one handle: traced on first use, found in the store, then held."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from nitro._code import Words, describe, read_words, value_digest
from nitro._experiment import Residency, field_values, group_code
from nitro._optim import ManualOptimizers, Optimizer
from nitro._state import TrainState

from ._constants import TracedCode, check_constants
from ._drift import DriftWatch
from ._hooks import TracedHooks
from ._key import KeyPart, abstract_arguments, arguments_text, environment
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
"""The hooks that each program traces."""

_WITHOUT_MODEL = ("loss", "metrics")

_Make = Callable[[set[str]], Callable[..., Any]]
_MakeFor = Callable[[TracedHooks], _Make]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What a record says of the step program.

    Attributes:
        program: The digest of one step's trace; None where another process would come to
            another one.
        arguments: The digest of what the step takes. Only where that is the same do
            different programs mean that something was changed.
        words: What the step rests on.
    """

    program: str | None
    arguments: str
    words: Words


class RunPrograms:
    """Traces each program once, and keeps it for as long as the handle lives.

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
        self._steps: dict[Any, tuple[TracedStep, StepRecord]] = {}
        roles = [role for role in _HOOKS_OF if optimizer is not None or role != "train step"]
        roles = [role for role in roles if role != "loss" or "loss" in hooks.routes]
        roles = [role for role in roles if role != "metrics" or hooks.has_device_metrics]
        self._watch = DriftWatch(hooks, roles, self._read_words)

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
        step = self._trace_step(state, inputs, chunk_for(single))[0]
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

    def step_record(self, state: TrainState, inputs: StepInputs, chunk: Chunk) -> StepRecord:
        """What a record says of the step program, which is traced for it if need be.

        Args:
            state: The state, concrete or abstract.
            inputs: The other inputs of the program.
            chunk: A chunk of one step.
        """
        return self._trace_step(state, inputs, chunk)[1]

    def _trace_step(
        self, state: TrainState, inputs: StepInputs, chunk: Chunk
    ) -> tuple[TracedStep, StepRecord]:
        optimizer = self._optimizer
        assert optimizer is not None
        accum = jax.tree.leaves(chunk.batches)[0].shape[1]
        first = jax.tree.map(lambda field: field[0], (chunk.rows, chunk.batches))
        arguments = abstract_arguments((state, inputs, *first))
        held = _held_key("train step", arguments)
        if held not in self._steps:

            def trace(hooks: TracedHooks) -> TracedStep:
                return trace_step(make_step(hooks, optimizer, accum), arguments)

            step = trace(self.hooks)
            digest = step.traced.digest
            record = StepRecord(
                program=digest.text if digest.is_lasting else None,
                arguments=hashlib.sha256(arguments_text(arguments).encode()).hexdigest(),
                words=self._read_words("train step", self.hooks).without_values(),
            )
            self._steps[held] = step, record
            self._watch.add(
                "train step", digest.text, lambda hooks: trace(hooks).traced.digest.text
            )
        return self._steps[held]

    def forward(self, *arguments: Any) -> Program:
        """The forward program: `fn(params, model_state, device, batch)` → outputs."""

        def make(hooks: TracedHooks, reads: set[str]) -> Callable[..., Any]:
            def program(params: Any, model_state: Any, device: Any, batch: Any) -> Any:
                return hooks.eval_outputs(hooks.view(device, reads), params, model_state, batch)

            return program

        return self._get_plain("forward", lambda hooks: partial(make, hooks), arguments)

    def loss(self, *arguments: Any) -> Program:
        """The loss program: `fn(device, pieces, batch, rows)` → loss of one batch; see `metrics`."""

        def make(hooks: TracedHooks, reads: set[str]) -> Callable[..., Any]:
            def program(device: Any, pieces: Any, batch: Any, rows: Any) -> Any:
                outputs = _first_rows(pieces, rows.shape[0])
                return hooks.loss(hooks.view(device, reads), outputs, batch)

            return program

        return self._get_plain("loss", lambda hooks: partial(make, hooks), arguments)

    def metrics(self, *arguments: Any) -> Program:
        """The metrics program: `fn(device, pieces, batch, rows)` → metrics of one batch.

        The pieces are what the forward program returned, the last of them padded; `rows`
        is an array whose length is the number of real samples. Padding is cut off before
        the hook sees anything.
        """

        def make(hooks: TracedHooks, reads: set[str]) -> Callable[..., Any]:
            def program(device: Any, pieces: Any, batch: Any, rows: Any) -> Any:
                real = rows.shape[0]
                outputs = _first_rows(pieces, real)
                return hooks.metrics(hooks.view(device, reads), outputs, batch, real)

            return program

        return self._get_plain("metrics", lambda hooks: partial(make, hooks), arguments)

    def held(self) -> list[Program]:
        """The programs that the handle has used so far."""
        return list(self._held.values())

    def drift(self) -> list[str]:
        """What a new handle would compute otherwise, and was not told before, a line each.

        The handle keeps the programs that it holds; one that it has not traced yet is
        traced from the code as it is then.
        """
        return self._watch.look()

    def _get_plain(self, role: str, make_for: _MakeFor, arguments: tuple[Any, ...]) -> Program:
        abstract = abstract_arguments(arguments)

        def trace(hooks: TracedHooks) -> TracedProgram:
            return trace_program(make_for(hooks), abstract)

        def trace_first() -> TracedProgram:
            traced = trace(self.hooks)
            self._watch.add(role, traced.digest.text, lambda hooks: trace(hooks).digest.text)
            return traced

        return self._get(role, trace_first, arguments)

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
                code=self._read_words(role, self.hooks).without_values(),
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
        self.check_constants(jaxpr, role=role, roots=self._roots(role, self.hooks), baked={})

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

    def _read_words(self, role: str, hooks: TracedHooks) -> Words:
        """What a trace of these hooks rests on now."""
        cls = type(hooks.experiment)
        fields = field_values(hooks.experiment, Residency.GRAPH_CONST)
        roots = {f"{cls.__name__}.{name}": value for name, value in fields.items()}
        return read_words({**self._roots(role, hooks), **roots}, owner=cls)

    def _roots(self, role: str, hooks: TracedHooks) -> dict[str, Any]:
        cls = type(hooks.experiment)
        names = _HOOKS_OF[role]
        if role == "train step" and isinstance(self._optimizer, ManualOptimizers):
            names = ("train_step",)
        roots: dict[str, Any] = {
            f"{cls.__name__}.{name}": getattr(cls, name) for name in names if name in hooks.routes
        }
        roots |= group_code(cls)
        if role == "train step" and self._optimizer is not None:
            roots |= self._optimizer.code()
        if role not in _WITHOUT_MODEL:
            layout = hooks.layout
            is_training = role == "train step"
            roots["model"] = layout.train_modules if is_training else layout.eval_modules
        return roots

    def _graph_parts(self) -> dict[str, KeyPart]:
        values = field_values(self.hooks.experiment, Residency.GRAPH_CONST)
        return {name: KeyPart(value_digest(v), describe(v)) for name, v in values.items()}


def _held_key(role: str, arguments: tuple[Any, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(arguments)
    return role, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _first_rows(pieces: Any, rows: int) -> Any:
    """The outputs for the real samples of a batch, of the pieces that it was cut into."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[:rows], *pieces)
