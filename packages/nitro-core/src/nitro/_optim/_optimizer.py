"""The optimizer of a run: one pure update, built inside the trace."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from nitro._experiment import Experiment
from nitro._trees import Flat
from nitro.errors import HookError, NitroError

from ._decay import DecayInputs
from ._factories import checked_chain, clips_norm, refuse_accumulation
from ._groups import FrozenGroup, ParamGroup
from ._hyper import Hyper
from ._opt_state import owned_state
from ._schedule_keys import Schedule
from ._table import RowLayout, StepTable, device_at
from ._weak import call_weakly


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Turns gradients into new parameters; what may move between steps is traced.

    Traced are the rates, the decays, the clip threshold and the scheduled Device fields,
    which lie in the rows of the table, and the decay's anchors and exclusions. All else is
    a constant, so that an update is the same bits as the recipe written by hand in optax.

    Attributes:
        owner: The experiment's class.
        leaves: The names of the parameters that train, in the model's order.
        groups: The groups of these, the default one first.
        frozen: The groups that do not train.
        layout: What lies where in a row.
        clips: Whether the gradient is clipped.
        table: The values of everything that is traced and may change with the step.
        decay_inputs: What the decay of the weights reads.
        schedules: The schedules by what they bind to.
    """

    owner: type[Experiment]
    leaves: tuple[str, ...]
    groups: tuple[ParamGroup, ...]
    frozen: tuple[FrozenGroup, ...]
    layout: RowLayout
    clips: bool
    table: StepTable
    decay_inputs: DecayInputs
    schedules: Mapping[str, Schedule]

    def init(self, params: Flat, view: Any) -> Any:
        """The optimizer's state for these parameters: by group, none of it shared with them.

        Args:
            params: The parameters by name.
            view: The compile view, with the Device fields as arrays.

        Raises:
            HookError: A transformation cannot be made, or cannot start.
            ConfigError: A transformation accumulates by itself, or keeps no arrays.
        """
        scalars, inputs = self._first_inputs()
        states: dict[str, Any] = {}
        for group in self.groups:
            hyper = self._hyper(group, scalars, inputs)
            with _blaming(self._called(group)):
                states[group.name] = self._transformation(group, hyper, view).init(
                    {name: params[name] for name in group.leaves}
                )
            refuse_accumulation(self._called(group), states[group.name])
        return owned_state(states, params)

    def divide(self, params: Flat) -> tuple[Flat, Flat]:
        """The parameters that train, and those that are frozen."""
        trained = {name: params[name] for name in self.leaves}
        return trained, {name: array for name, array in params.items() if name not in trained}

    def unused(self, group: ParamGroup, view: Any) -> set[str]:
        """What the chain of a group leaves unread of its rate and decay."""
        if group.factory is not None:
            return set()
        hyper = self._hyper(group, *self._first_inputs())
        self._transformation(group, hyper, view)
        return {"learning_rate", "weight_decay"} - hyper.reads

    def clips_alone(self, group: ParamGroup, view: Any) -> bool:
        """Whether the group's own optimizer clips the norm of this group's gradients."""
        hyper = self._hyper(group, *self._first_inputs())
        return clips_norm(self._transformation(group, hyper, view))

    def anchors(self) -> DecayInputs:
        """What the decay of the weights reads; an input of the step program."""
        return self.decay_inputs

    def code(self) -> dict[str, Any]:
        """The user's code and constants that a trace of `update` depends on, by label.

        Rates, decays, anchors, the clip threshold, and which parameters decay are inputs of
        the program, so they are not in here.
        """
        columns = self.layout.columns
        # A hook of level 2 may use the exclusions as a static mask.
        masks = {g.name: sorted(g.no_decay) for g in self.groups if g.factory is None}
        code: dict[str, Any] = {
            "step": {
                "groups": _listed({g.name: g.leaves for g in self.groups}),
                "left out of the decay": _listed(masks),
                "gradient clipping": "on" if "clip" in columns else "off",
                # What else lies in a row of the table follows from the groups.
                "fields to schedule": ", ".join(n for n in columns if n.startswith("device.")),
            }
        }
        if self.frozen:
            code["step"]["frozen"] = _listed({g.name: g.leaves for g in self.frozen})
        for group in self.groups:
            if group.factory is not None:
                code[f"optimizer of `{group.name}`"] = group.factory
            else:
                code[f"{self.owner.__name__}.optimizer"] = self.owner.optimizer
        return code

    def scheduled_fields(self, device: Flat, row: jax.Array) -> Flat:
        """The Device fields of one step: the scheduled ones come out of the row."""
        return self.layout.device_fields(row, device)

    def device_at(self, device: Flat, step: int) -> Flat:
        """The Device fields after `step` finished steps, for what runs between two steps.

        Evaluation after step n sees what step n saw; before the first step, what it will see.
        """
        scheduled = [name for name in device if f"device.{name}" in self.schedules]
        if not scheduled:
            return device
        return device_at(self.layout, self.table, scheduled, device, step)

    def update(
        self,
        grads: Flat,
        opt_state: Any,
        params: Flat,
        anchors: DecayInputs,
        row: jax.Array,
        view: Any,
    ) -> tuple[Flat, Any]:
        """One update: the new parameters and optimizer state. Pure; works under jit.

        Args:
            grads: Gradients of the parameters that train, shaped as these.
            opt_state: What `init` or the last `update` returned.
            params: All parameters before the update.
            anchors: What `anchors` returned.
            row: float32 (columns,): the row of the table for this step.
            view: The compile view of this step.
        """

        def updated(scalars: Mapping[str, Any], *trees: Any) -> tuple[Flat, Any]:
            return self._update(view, scalars, *trees)

        return call_weakly(updated, self.layout.scalars(row), grads, opt_state, params, anchors)

    def _update(
        self,
        view: Any,
        scalars: Mapping[str, Any],
        grads: Flat,
        opt_state: Any,
        params: Flat,
        anchors: DecayInputs,
    ) -> tuple[Flat, Any]:
        if self.clips:
            grads = _clipped(grads, scalars["clip"])
        new_params: Flat = {}
        new_state: dict[str, Any] = {}
        for group in self.groups:
            hyper = self._hyper(group, scalars, anchors)
            mine = {name: params[name] for name in group.leaves}
            with _blaming(self._called(group)):
                transformation = self._transformation(group, hyper, view)
                updates, new_state[group.name] = transformation.update(
                    {name: grads[name] for name in group.leaves}, opt_state[group.name], mine
                )
                new: Any = optax.apply_updates(mine, updates)
            if group.factory is not None:
                # Taken off the updated weights rather than added to the updates, so that a
                # decay of 0 leaves the bits alone, whatever XLA fuses into a multiply-add.
                pulls = hyper.pulls(mine)
                new = {name: new[name] - pulls[name] for name in new}
            new_params |= new
        return {name: new_params.get(name, value) for name, value in params.items()}, new_state

    def _first_inputs(self) -> tuple[dict[str, float], DecayInputs]:
        """What the first step reads, without JAX: each of its eager operations would compile."""
        row = self.table[[0]][0]
        scalars = {name: float(value) for name, value in self.layout.scalars(row).items()}
        return scalars, jax.tree.map(np.asarray, self.decay_inputs)

    def _transformation(
        self, group: ParamGroup, hyper: Hyper, view: Any
    ) -> optax.GradientTransformation:
        if group.factory is None:
            return checked_chain(self._called(group), view.optimizer(group.name, hyper))
        return group.factory(learning_rate=hyper.learning_rate)

    def _hyper(self, group: ParamGroup, scalars: Mapping[str, Any], anchors: DecayInputs) -> Hyper:
        applies = dict(zip(self.leaves, anchors.applies, strict=True))
        return Hyper(
            learning_rate=scalars[f"opt.{group.name}.learning_rate"],
            weight_decay=scalars[f"opt.{group.name}.weight_decay"],
            applies={name: applies[name] for name in group.leaves},
            anchor={name: anchors.toward[name] for name in group.leaves if name in anchors.toward},
            no_decay={name: name in group.no_decay for name in group.leaves},
        )

    def _called(self, group: ParamGroup) -> str:
        hyper = ", hyper" if group.factory is None else ""
        return f'{self.owner.__name__}.optimizer("{group.name}"{hyper})'


def frozen_names(optimizer: Any) -> frozenset[str]:
    """The parameters that training leaves alone; none with optimizers of the user's own."""
    groups = optimizer.frozen if isinstance(optimizer, Optimizer) else ()
    return frozenset(name for group in groups for name in group.leaves)


def _listed(names: Mapping[str, Iterable[str]]) -> str:
    return "; ".join(f"{group}: {', '.join(leaves)}" for group, leaves in names.items())


def _clipped(grads: Flat, threshold: Any) -> Flat:
    """Scales all gradients so that their joint norm is at most `threshold`."""
    clip = optax.clip_by_global_norm(threshold)
    return clip.update(grads, clip.init(grads))[0]  # pyright: ignore[reportReturnType] - optax types trees loosely


@contextmanager
def _blaming(called: str) -> Generator[None]:
    """Says which group's optimizer an exception comes from."""
    try:
        yield
    except NitroError:
        raise
    except Exception as error:
        raise HookError(
            f"The optimizer that `{called}` returned fails: {type(error).__name__}: {error}",
            expected="a transformation with a traced rate, whose update takes gradients, state "
            "and parameters, and nothing else",
            fix="use another optimizer, or build the chain in `optimizer(self, group, hyper)`",
        ) from error
