"""Builds the optimizer of a run from the experiment's hooks, and tries it on paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from nitro._experiment import Experiment, compile_view
from nitro._trees import Flat, describe_array
from nitro.errors import HookError

from ._curves import Evaluate
from ._groups import read_groups
from ._hook_calls import base_rate
from ._opt_state import check_same_leaves
from ._optimizer import Optimizer
from ._schedule_keys import read_schedules
from ._schedules import make_layout, make_table


def make_optimizer(
    experiment: Experiment,
    *,
    params: Flat,
    initial: Flat,
    device: Flat,
    num_steps: int,
    clip: float,
    schedules: Any,
    evaluate: Evaluate,
) -> tuple[Optimizer, Any]:
    """Builds the optimizer, evaluates its schedules, and makes its state.

    Args:
        experiment: The real experiment.
        params: The parameters that training starts from.
        initial: The parameters as `build_model` made them: what `"init"` decays toward.
        device: The Device fields, on the device.
        num_steps: The horizon, in optimizer steps.
        clip: The largest norm of all gradients together; 0 clips nothing.
        schedules: What replaces the experiment's schedules, or `UNSET`.
        evaluate: `evaluate(label, function, *arguments)` runs a pure function as one
            compiled program; the rows of programs lie above this one.

    Returns:
        The optimizer and its state.

    Raises:
        ConfigError: A value or a combination that cannot be used.
        HookError: A hook returned something else than it should.
        ExperimentError: A hook does not take the arguments that it gets.
    """
    base_rate(experiment)
    groups = read_groups(experiment, params=params, initial=initial)
    trained = {name: params[name] for group in groups.trained for name in group.leaves}
    _refuse_integers(experiment, trained)
    bound = read_schedules(experiment, schedules, groups)
    layout = make_layout(groups.trained, clips=clip > 0, device=device, schedules=bound)
    table = make_table(
        layout,
        groups=groups.trained,
        clip=clip,
        device=device,
        schedules=bound,
        num_steps=num_steps,
        evaluate=evaluate,
    )
    optimizer = Optimizer(
        owner=type(experiment),
        leaves=tuple(name for name in params if name in trained),
        groups=groups.trained,
        frozen=groups.frozen,
        layout=layout,
        clips=clip > 0,
        table=table,
        decay_inputs=groups.decay_inputs,
        schedules=bound,
    )
    state = optimizer.init(params, compile_view(experiment, device))
    _check_update(optimizer, experiment, params, state, device)
    return optimizer, state


def _refuse_integers(experiment: Experiment, params: Flat) -> None:
    for name, value in params.items():
        if not jax.numpy.issubdtype(value.dtype, jax.numpy.inexact):
            raise HookError(
                f"`{type(experiment).__name__}.build_model` made the parameter `{name}` "
                f"{describe_array(value)}.",
                expected="a float or complex dtype: training takes the gradient of each `nnx.Param`",
                fix="make it a float, or a variable of another kind: `nnx.Variable(...)`",
            )


def _check_update(
    optimizer: Optimizer, experiment: Experiment, params: Flat, state: Any, device: Flat
) -> None:
    """Traces one update, so that what cannot be traced is told at setup, by its group."""

    def update(params: Flat, state: Any, device: Mapping[str, Any], row: Any) -> Any:
        view = compile_view(experiment, device)
        grads, _ = optimizer.divide(params)
        return optimizer.update(grads, state, params, optimizer.anchors(), row, view)

    row = optimizer.table[[0]][0]
    new_params, new_state = jax.eval_shape(update, params, state, device, row)
    check_same_leaves(params, new_params, what="the parameters")
    check_same_leaves(state, new_state, what="the optimizer's state")
