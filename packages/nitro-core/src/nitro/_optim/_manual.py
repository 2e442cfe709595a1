"""Optimizers that the user's own `train_step` drives: `nnx.Optimizer`s by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from nitro._experiment import Experiment
from nitro._trees import Flat, variable_name
from nitro.errors import HookError

from ._curves import Evaluate
from ._schedule_keys import Schedule, read_manual_schedules
from ._schedules import device_values, device_widths, fill_table, rate_values
from ._table import RowLayout, StepTable, device_at

_HYPER = ".hyperparams."


@dataclass(frozen=True, kw_only=True)
class ManualOptimizers:
    """What `build_optimizers` returned, as a graph and flat arrays.

    The step program sees the same surface as of an `Optimizer`, but for the update, which
    is the user's.

    Attributes:
        owner: The experiment's class.
        graph: The static part of the mapping of optimizers.
        names: The dotted names of its arrays, in the order of `treedef`.
        treedef: The structure of its arrays.
        layout: What lies where in a row.
        table: The values of everything that is scheduled.
        schedules: The schedules by what they bind to.
    """

    owner: type[Experiment]
    graph: Any
    names: tuple[str, ...]
    treedef: Any
    layout: RowLayout
    table: StepTable
    schedules: Mapping[str, Schedule]

    def merge(self, opt_state: Flat, row: jax.Array) -> Any:
        """The optimizers by name, with what the row schedules; safe to mutate in a trace."""
        leaves = [self._at_row(name, opt_state[name], row) for name in self.names]
        return nnx.merge(self.graph, jax.tree.unflatten(self.treedef, leaves), copy=True)

    def flatten(self, optimizers: Any) -> Flat:
        """The arrays of the optimizers, by dotted name.

        Raises:
            HookError: `train_step` changed their structure.
        """
        leaves, treedef = jax.tree.flatten(nnx.split(optimizers)[1])
        if treedef != self.treedef:
            raise HookError(
                f"`{self.owner.__name__}.train_step` changed the structure of the optimizers.",
                expected="the optimizers that `build_optimizers` made, updated in place",
            )
        return dict(zip(self.names, leaves, strict=True))

    def anchors(self) -> Flat:
        """Nothing: decay is the user's own."""
        return {}

    def code(self) -> dict[str, Any]:
        """What a trace of the optimizers depends on, by label."""
        return {
            "optimizers": self.graph,
            "values that a schedule may set": ", ".join(self.layout.columns),
        }

    def scheduled_fields(self, device: Flat, row: jax.Array) -> Flat:
        """The Device fields of one step: the scheduled ones come out of the row."""
        return self.layout.device_fields(row, device)

    def device_at(self, device: Flat, step: int) -> Flat:
        """The Device fields after `step` finished steps."""
        scheduled = [name for name in device if f"device.{name}" in self.schedules]
        return device_at(self.layout, self.table, scheduled, device, step)

    def _at_row(self, name: str, value: Any, row: jax.Array) -> Any:
        column = self.layout.columns.get(f"opt.{_short(name)}") if _HYPER in name else None
        if column is None:
            return value
        scheduled = row[column[0]].astype(value.dtype)
        # A column that no schedule fills holds NaN: one program for both.
        return jnp.where(jnp.isnan(row[column[0]]), value, scheduled)


def make_manual_optimizers(
    experiment: Experiment,
    *,
    model: Any,
    device: Flat,
    num_steps: int,
    schedules: Any,
    evaluate: Evaluate,
) -> tuple[ManualOptimizers, Flat]:
    """Builds the optimizers of a manual `train_step`, and their state by dotted name.

    A schedule `opt.<name>.<field>` needs an optimizer with that hyperparameter in its
    state: `optax.inject_hyperparams(optax.adam)(learning_rate=...)`.

    Raises:
        HookError: `build_optimizers` returned something else than optimizers by name.
        ConfigError: A schedule that binds to nothing.
    """
    hook = f"{type(experiment).__name__}.build_optimizers"
    optimizers = _checked(experiment.build_optimizers(model), hook)  # pyright: ignore[reportAttributeAccessIssue] - a hook
    graph, state = nnx.split(optimizers)
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    # Copies: an optimizer may hold the model's own arrays, which training overwrites.
    flat = {variable_name(path): jnp.array(leaf) for path, leaf in paths}
    fields = [_short(name) for name in flat if _HYPER in name]
    bound = read_manual_schedules(experiment, schedules, fields)
    layout = RowLayout.make(
        {**{f"opt.{field}": 1 for field in fields}, **device_widths(device, bound)}
    )
    values: dict[str, Any] = {
        target: rate_values(schedule, num_steps, evaluate)
        for target, schedule in bound.items()
        if target.startswith("opt.")
    }
    values |= device_values(bound, device, num_steps, evaluate)
    manual = ManualOptimizers(
        owner=type(experiment),
        graph=graph,
        names=tuple(flat),
        treedef=treedef,
        layout=layout,
        table=fill_table(layout, values, num_steps),
        schedules=bound,
    )
    return manual, flat


def _short(name: str) -> str:
    """`gen.opt_state.hyperparams.learning_rate` as `gen.learning_rate`."""
    optimizer, _, rest = name.partition(".")
    return f"{optimizer}.{rest.rpartition(_HYPER)[2]}"


def _checked(optimizers: Any, hook: str) -> dict[str, nnx.Optimizer[Any]]:
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise HookError(
            f"`{hook}` returned {type(optimizers).__name__}.",
            expected='a mapping of optimizers, such as {"gen": nnx.Optimizer(model.gen, ...)}',
        )
    for name, optimizer in optimizers.items():
        if not isinstance(name, str) or "." in name or not isinstance(optimizer, nnx.Optimizer):
            raise HookError(
                f"`{hook}` returned {name!r}: {type(optimizer).__name__}.",
                expected="plain names and `nnx.Optimizer`s",
                fix="write `nnx.Optimizer(model.part, optax.adam(1e-3), wrt=nnx.Param)`",
            )
    return dict(optimizers)
