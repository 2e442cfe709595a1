"""The training step as one pure program that takes a chunk of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nitro._optim import Optimizer
from nitro._state import TrainState
from nitro._trees import Flat

from ._hooks import TracedHooks

Scalars = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What shapes the step program, apart from the hooks.

    Attributes:
        steps_per_call: How many optimizer steps one call takes at most.
        accum: Micro-batches in one optimizer step.
        looped: Whether the steps of a call run in a loop inside XLA.
    """

    steps_per_call: int
    accum: int
    looped: bool


def make_step_program(
    hooks: TracedHooks, optimizer: Optimizer, plan: StepPlan
) -> Callable[[set[str]], Callable[..., Any]]:
    """Makes the maker of the step program, as the store wants it.

    The program is `fn(state, device, rows, batches, count)`:

    - `state`: a `TrainState`, donated.
    - `device`: the Device fields.
    - `rows`: float32 (steps_per_call, hyperparameters), what the optimizer reads.
    - `batches`: batch fields, each (steps_per_call, accum, batch, ...).
    - `count`: int32 (), how many of the steps to take.

    It returns the new state and scalars by name, each (steps_per_call,).
    """

    def make(reads: set[str]) -> Callable[..., Any]:
        def program(
            state: TrainState, device: Flat, rows: jax.Array, batches: Flat, count: jax.Array
        ) -> tuple[TrainState, Scalars]:
            view = hooks.view(device, reads)

            def take_step(state: TrainState, index: Any) -> tuple[TrainState, Scalars]:
                micro = [_pick(batches, index, k) for k in range(plan.accum)]
                return _one_step(hooks, optimizer, view, state, rows[index], micro)

            if not plan.looped:
                state, scalars = take_step(state, 0)
                return state, jax.tree.map(lambda value: value[None], scalars)
            return _loop(take_step, state, plan.steps_per_call, count)

        return program

    return make


def _pick(batches: Flat, step: Any, micro: int) -> Flat:
    return jax.tree.map(lambda field: field[step, micro], batches)


def _one_step(
    hooks: TracedHooks,
    optimizer: Optimizer,
    view: Any,
    state: TrainState,
    row: jax.Array,
    micro_batches: list[Flat],
) -> tuple[TrainState, Scalars]:
    model_state = state.model_state
    grads: Any = None
    losses: list[jax.Array] = []
    for batch in micro_batches:
        (loss, model_state), micro_grads = _loss_and_grads(
            hooks, view, state.params, model_state, batch
        )
        losses.append(loss.astype(jnp.float32))
        grads = micro_grads if grads is None else jax.tree.map(jnp.add, grads, micro_grads)
    if len(micro_batches) > 1:
        grads = jax.tree.map(lambda g: g / len(micro_batches), grads)
    params, opt_state = optimizer.update(grads, state.opt_state, state.params, row)
    loss = losses[0] if len(losses) == 1 else jnp.stack(losses).mean()
    return TrainState(params, model_state, opt_state), {"loss": loss}


def _loss_and_grads(
    hooks: TracedHooks, view: Any, params: Flat, model_state: Flat, batch: Mapping[str, Any]
) -> Any:
    def objective(params: Flat) -> tuple[jax.Array, Flat]:
        model = hooks.layout.merge(hooks.layout.train, params, model_state)
        outputs = hooks.forward(view, model, batch)
        loss = hooks.loss(view, outputs, batch)
        return loss, hooks.layout.model_state_of(model)

    return jax.value_and_grad(objective, has_aux=True)(params)


def _loop(
    take_step: Callable[[TrainState, Any], tuple[TrainState, Scalars]],
    state: TrainState,
    length: int,
    count: jax.Array,
) -> tuple[TrainState, Scalars]:
    shapes = jax.eval_shape(take_step, state, 0)[1]
    empty = jax.tree.map(lambda s: jnp.zeros((length, *s.shape), s.dtype), shapes)

    def body(index: Any, carry: tuple[TrainState, Scalars]) -> tuple[TrainState, Scalars]:
        state, scalars = carry
        state, new = take_step(state, index)
        scalars = jax.tree.map(lambda all_, one: all_.at[index].set(one), scalars, new)
        return state, scalars

    return jax.lax.fori_loop(0, count, body, (state, empty))
