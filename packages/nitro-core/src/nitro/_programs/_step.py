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
from ._loss import LossTerm, divided, joined

Scalars = dict[str, jax.Array]


class StepChecks(NamedTuple):
    """What the host looks at after each step, besides the scalars that it logs.

    Attributes:
        count: float32: what the loss was divided by; None where it is a mean by itself.
        is_finite: bool: whether the loss and the updated weights are.
    """

    count: Any
    is_finite: Any


class StepResult(NamedTuple):
    """What a step gives besides the new state; from a program, (steps_per_call,) of each.

    Attributes:
        scalars: Loss and train metrics by name.
        checks: What the host looks at.
    """

    scalars: Scalars
    checks: StepChecks


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
    """Makes the maker of one step: `fn(state, inputs, row, batches)` → state, result.

    `row` is the step's row of the optimizer's table, and `batches` are its micro-batches, or
    their indices, each (accum, batch, ...).
    """

    def make(reads: set[str]) -> Callable[..., Any]:
        def step(
            state: TrainState, inputs: StepInputs, row: Any, batches: Any
        ) -> tuple[TrainState, StepResult]:
            view = hooks.view(optimizer.scheduled_fields(inputs.device, row), reads)
            micro_batches = [_micro_batch(inputs, batches, k) for k in range(accum)]
            if isinstance(optimizer, ManualOptimizers):
                return _manual_step(hooks, optimizer, view, state, micro_batches[0], row)
            assert isinstance(inputs.anchors, DecayInputs)
            trained, frozen = optimizer.divide(state.params)
            grads, model_state, scalars, count = _accumulate(
                hooks, view, state._replace(params=trained), frozen, micro_batches
            )
            params, opt_state = optimizer.update(
                grads, state.opt_state, state.params, inputs.anchors, row, view
            )
            moved = {name: params[name] for name in trained}
            checks = StepChecks(count, _is_finite(moved, scalars["loss"]))
            return TrainState(params, model_state, opt_state), StepResult(scalars, checks)

        return step

    return make


def make_step_program(
    step: Callable[..., Any], results: Any, plan: StepPlan
) -> Callable[[TrainState, StepInputs, Chunk], tuple[TrainState, StepResult]]:
    """Makes the step program out of one step.

    The program is `fn(state, inputs, chunk)`; the `TrainState` is donated. It returns
    the new state and the `StepResult`s, each of their arrays (steps_per_call,). The same
    program serves every count, so results do not depend on how a run is cut into chunks.

    Args:
        step: What `make_step` makes; jitted, so that its trace is used again.
        results: The `StepResult` of a step, by shape and dtype.
        plan: How many steps, and whether in a loop.
    """

    def program(
        state: TrainState, inputs: StepInputs, chunk: Chunk
    ) -> tuple[TrainState, StepResult]:
        def take_step(state: TrainState, index: Any) -> tuple[TrainState, StepResult]:
            batches = jax.tree.map(lambda field: field[index], chunk.batches)
            return step(state, inputs, chunk.rows[index], batches)

        if plan.is_looped:
            return _loop(take_step, state, results, plan.steps_per_call, chunk.count)
        return _unrolled(take_step, state, plan.steps_per_call, chunk.count)

    return program


def _manual_step(
    hooks: TracedHooks,
    optimizers: ManualOptimizers,
    view: Any,
    state: TrainState,
    batch: Flat,
    row: jax.Array,
) -> tuple[TrainState, StepResult]:
    """The user's own step, on modules that it may mutate."""
    model = hooks.layout.merge(hooks.layout.train, state.params, state.model_state)
    opt = optimizers.merge(state.opt_state, row)
    scalars = hooks.train_step(view, model, opt, batch)
    params, model_state = hooks.layout.split(model)
    checks = StepChecks(None, _is_finite(params, scalars["loss"]))
    new_state = TrainState(params, model_state, optimizers.flatten(opt))
    return new_state, StepResult(scalars, checks)


def _micro_batch(inputs: StepInputs, batches: Any, micro: int) -> Flat:
    one = jax.tree.map(lambda field: field[micro], batches)
    return jax.tree.map(lambda field: field[one], inputs.data) if inputs.data else one


def _accumulate(
    hooks: TracedHooks, view: Any, state: TrainState, frozen: Flat, micro_batches: list[Flat]
) -> tuple[Flat, Flat, Scalars, Any]:
    """The gradient and scalars of all micro-batches, the model state after the last, the count.

    The gradient is that of `state.params`; `frozen` holds the model's other parameters. The loss
    is the mean of the micro-batches', or all of their sums over all of their counts; the other
    scalars are means.
    """
    model_state = state.model_state
    grads: Any = None
    terms: list[LossTerm] = []
    per_batch: list[Scalars] = []
    for batch in micro_batches:
        micro_grads, (term, model_state, metrics) = _gradient(
            hooks, view, state.params, frozen, model_state, batch, is_whole=len(micro_batches) == 1
        )
        terms.append(term)
        per_batch.append(metrics)
        grads = micro_grads if grads is None else jax.tree.map(jnp.add, grads, micro_grads)
    whole, metrics = joined(terms), per_batch[0]
    if len(micro_batches) > 1:
        grads = divided(grads, terms)
        metrics = jax.tree.map(lambda *s: jnp.stack(s).mean(), *per_batch)
    return grads, model_state, {"loss": whole.value32, **metrics}, whole.count


def _gradient(
    hooks: TracedHooks,
    view: Any,
    trained: Flat,
    frozen: Flat,
    model_state: Flat,
    batch: Mapping[str, Any],
    *,
    is_whole: bool,
) -> tuple[Flat, tuple[LossTerm, Flat, Scalars]]:
    """The gradient of a batch's loss; of its sum alone where the batch is not the whole step."""

    def objective(trained: Flat) -> tuple[jax.Array, tuple[LossTerm, Flat, Scalars]]:
        model = hooks.layout.merge(hooks.layout.train, {**frozen, **trained}, model_state)
        outputs = hooks.forward(view, model, batch)
        hooks.check_batched(outputs, jax.tree.leaves(batch)[0].shape[0])
        term = hooks.loss(view, outputs, batch)
        metrics = hooks.train_metrics(view, outputs, batch)
        to_minimise = term.value if is_whole else term.total
        return to_minimise, (term, hooks.layout.model_state_of(model), metrics)

    return jax.grad(objective, has_aux=True)(trained)


def _is_finite(params: Flat, loss: jax.Array) -> jax.Array:
    """Whether a finite loss has left all weights finite; False where it is not finite itself."""
    leaves = [leaf for leaf in params.values() if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        return jnp.isfinite(loss)
    # 0 times a number is 0, and times anything else NaN. As products of matrices, because
    # XLA's CPU back end takes several times as long to reduce an array.
    return jnp.isfinite(jnp.concatenate([_times_zero(leaf, 0 * loss) for leaf in leaves])).all()


def _times_zero(leaf: jax.Array, zero: jax.Array) -> jax.Array:
    matrix = leaf.reshape(-1, leaf.shape[-1]) if leaf.ndim > 1 else leaf.reshape(1, -1)
    product = jnp.full(len(matrix), zero, leaf.dtype) @ matrix
    return product.real.astype(jnp.float32) + product.imag.astype(jnp.float32)


_TakeStep = Callable[[TrainState, Any], tuple[TrainState, StepResult]]


def _loop(
    take_step: _TakeStep, state: TrainState, results: Any, length: int, count: jax.Array
) -> tuple[TrainState, StepResult]:
    # The count is traced even where it is always 1: one program for every count.
    empty = jax.tree.map(lambda s: jnp.zeros((length, *s.shape), s.dtype), results)

    def body(index: Any, carry: tuple[TrainState, StepResult]) -> tuple[TrainState, StepResult]:
        state, rows = carry
        state, new = take_step(state, index)
        return state, jax.tree.map(lambda a, one: a.at[index].set(one), rows, new)

    return jax.lax.fori_loop(0, count, body, (state, empty))


def _unrolled(
    take_step: _TakeStep, state: TrainState, length: int, count: jax.Array
) -> tuple[TrainState, StepResult]:
    if length == 1:
        state, result = take_step(state, 0)
        return state, jax.tree.map(lambda value: value[None], result)
    per_step: list[StepResult] = []
    for index in range(length):
        new_state, result = take_step(state, index)
        keep = index < count
        state = jax.tree.map(lambda new, old: _select(keep, new, old), new_state, state)  # noqa: B023 - used at once
        per_step.append(result)
    return state, jax.tree.map(lambda *values: jnp.stack(values), *per_step)


def _select(condition: Any, new: Any, old: Any) -> Any:
    return jnp.where(condition, new, old)
