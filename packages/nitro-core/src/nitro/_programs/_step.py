"""The training step as one pure program that takes a chunk of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nitro._optim import DecayInputs, ManualOptimizers, Optimizer
from nitro._state import TrainState
from nitro._trees import Flat

from ._hooks import TracedHooks

Scalars = dict[str, jax.Array]


class StepInputs(NamedTuple):
    """What the step program reads besides the state; nothing of it is donated.

    Attributes:
        device: The Device fields.
        anchors: Which weights decay, and toward what.
        data: The whole training split on the device, by field; empty where batches are
            fed from the host.
    """

    device: Flat
    anchors: DecayInputs | Flat
    data: Flat


class Chunk(NamedTuple):
    """The steps of one call.

    Attributes:
        rows: float32 (steps_per_call, columns): the optimizer's table.
        batches: Batch fields, each (steps_per_call, accum, batch, ...); or, with the data
            on the device, int32 sample indices (steps_per_call, accum, batch).
        count: int32 (): how many of the steps to take. The rest is ignored.
    """

    rows: Any
    batches: Any
    count: Any


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What shapes the step program, apart from the hooks.

    Attributes:
        steps_per_call: How many optimizer steps one call takes at most.
        accum: Micro-batches in one optimizer step.
        is_looped: Whether the steps of a call run in a loop inside XLA. A program that
            loops badly takes its steps one by one, or unrolled.
    """

    steps_per_call: int
    accum: int
    is_looped: bool

    @property
    def display(self) -> str:
        """In words, for `explain_compiles`."""
        loop = "looped" if self.is_looped else "unrolled"
        return f"{self.steps_per_call} steps per call, {loop}, accum {self.accum}"


def make_step(
    hooks: TracedHooks, optimizer: Optimizer | ManualOptimizers, accum: int
) -> Callable[[set[str]], Callable[..., Any]]:
    """Makes the maker of one step: `fn(state, inputs, row, batches)` → state, scalars.

    `row` is the step's row of the optimizer's table, and `batches` are its micro-batches, or
    their indices, each (accum, batch, ...).
    """

    def make(reads: set[str]) -> Callable[..., Any]:
        def step(
            state: TrainState, inputs: StepInputs, row: Any, batches: Any
        ) -> tuple[TrainState, Scalars]:
            view = hooks.view(optimizer.scheduled_fields(inputs.device, row), reads)
            micro_batches = [_micro_batch(inputs, batches, k) for k in range(accum)]
            if isinstance(optimizer, ManualOptimizers):
                return _manual_step(hooks, optimizer, view, state, micro_batches[0], row)
            assert isinstance(inputs.anchors, DecayInputs)
            trained, frozen = optimizer.divide(state.params)
            grads, model_state, scalars = _accumulate(
                hooks, view, state._replace(params=trained), frozen, micro_batches
            )
            params, opt_state = optimizer.update(
                grads, state.opt_state, state.params, inputs.anchors, row, view
            )
            return TrainState(params, model_state, opt_state), scalars

        return step

    return make


def make_step_program(
    step: Callable[..., Any], scalars: Any, plan: StepPlan
) -> Callable[[TrainState, StepInputs, Chunk], tuple[TrainState, Scalars]]:
    """Makes the step program out of one step.

    The program is `fn(state, inputs, chunk)`; the `TrainState` is donated. It returns
    the new state and scalars by name, each (steps_per_call,). The same program serves
    every count, so results do not depend on how a run is cut into chunks.

    Args:
        step: What `make_step` makes; jitted, so that its trace is used again.
        scalars: The scalars of a step, by shape and dtype.
        plan: How many steps, and whether in a loop.
    """

    def program(state: TrainState, inputs: StepInputs, chunk: Chunk) -> tuple[TrainState, Scalars]:
        def take_step(state: TrainState, index: Any) -> tuple[TrainState, Scalars]:
            batches = jax.tree.map(lambda field: field[index], chunk.batches)
            return step(state, inputs, chunk.rows[index], batches)

        if plan.is_looped:
            return _loop(take_step, state, scalars, plan.steps_per_call, chunk.count)
        return _unrolled(take_step, state, plan.steps_per_call, chunk.count)

    return program


def _manual_step(
    hooks: TracedHooks,
    optimizers: ManualOptimizers,
    view: Any,
    state: TrainState,
    batch: Flat,
    row: jax.Array,
) -> tuple[TrainState, Scalars]:
    """The user's own step, on modules that it may mutate."""
    model = hooks.layout.merge(hooks.layout.train, state.params, state.model_state)
    opt = optimizers.merge(state.opt_state, row)
    scalars = hooks.train_step(view, model, opt, batch)
    params, model_state = hooks.layout.split(model)
    return TrainState(params, model_state, optimizers.flatten(opt)), scalars


def _micro_batch(inputs: StepInputs, batches: Any, micro: int) -> Flat:
    one = jax.tree.map(lambda field: field[micro], batches)
    return jax.tree.map(lambda field: field[one], inputs.data) if inputs.data else one


def _accumulate(
    hooks: TracedHooks, view: Any, state: TrainState, frozen: Flat, micro_batches: list[Flat]
) -> tuple[Flat, Flat, Scalars]:
    """The mean gradient and scalars over micro-batches, and the model state after the last.

    The gradient is that of `state.params`; `frozen` holds the model's other parameters.
    """
    model_state = state.model_state
    grads: Any = None
    per_batch: list[Scalars] = []
    for batch in micro_batches:
        (loss, (model_state, metrics)), micro_grads = _loss_and_grads(
            hooks, view, state.params, frozen, model_state, batch
        )
        per_batch.append({"loss": loss.astype(jnp.float32), **metrics})
        grads = micro_grads if grads is None else jax.tree.map(jnp.add, grads, micro_grads)
    if len(micro_batches) == 1:
        return grads, model_state, per_batch[0]
    grads = jax.tree.map(lambda total: total / len(micro_batches), grads)
    return grads, model_state, jax.tree.map(lambda *s: jnp.stack(s).mean(), *per_batch)


def _loss_and_grads(
    hooks: TracedHooks,
    view: Any,
    trained: Flat,
    frozen: Flat,
    model_state: Flat,
    batch: Mapping[str, Any],
) -> Any:
    def objective(trained: Flat) -> tuple[jax.Array, tuple[Flat, Scalars]]:
        model = hooks.layout.merge(hooks.layout.train, {**frozen, **trained}, model_state)
        outputs = hooks.forward(view, model, batch)
        loss = hooks.loss(view, outputs, batch)
        metrics = hooks.train_metrics(view, outputs, batch)
        return loss, (hooks.layout.model_state_of(model), metrics)

    return jax.value_and_grad(objective, has_aux=True)(trained)


_TakeStep = Callable[[TrainState, Any], tuple[TrainState, Scalars]]


def _loop(
    take_step: _TakeStep, state: TrainState, scalars: Any, length: int, count: jax.Array
) -> tuple[TrainState, Scalars]:
    # The count is traced even where it is always 1: one program for every count.
    empty = jax.tree.map(lambda s: jnp.zeros((length, *s.shape), s.dtype), scalars)

    def body(index: Any, carry: tuple[TrainState, Scalars]) -> tuple[TrainState, Scalars]:
        state, rows = carry
        state, new = take_step(state, index)
        return state, jax.tree.map(lambda a, one: a.at[index].set(one), rows, new)

    return jax.lax.fori_loop(0, count, body, (state, empty))


def _unrolled(
    take_step: _TakeStep, state: TrainState, length: int, count: jax.Array
) -> tuple[TrainState, Scalars]:
    if length == 1:
        state, scalars = take_step(state, 0)
        return state, jax.tree.map(lambda value: value[None], scalars)
    per_step: list[Scalars] = []
    for index in range(length):
        new_state, scalars = take_step(state, index)
        keep = index < count
        state = jax.tree.map(lambda new, old: _select(keep, new, old), new_state, state)  # noqa: B023 - used at once
        per_step.append(scalars)
    return state, jax.tree.map(lambda *values: jnp.stack(values), *per_step)


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jnp.where(condition, new, old)
