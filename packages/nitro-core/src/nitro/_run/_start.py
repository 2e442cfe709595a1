"""What training starts from: the model, its weights, and an optimizer with its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx

from nitro._experiment import RunOptions
from nitro._optim import ManualOptimizers, Optimizer, make_manual_optimizers, make_optimizer
from nitro._programs import TracedHooks, run_pure
from nitro._state import ModelLayout, split_model
from nitro._trees import Flat
from nitro.errors import ConfigError

from ._outline import build_or_outline
from ._refusals import check_frozen
from ._restore import Source, read_opt_state
from ._weights import Fit, anchor_weights


@dataclass(frozen=True, kw_only=True)
class Started:
    """A model, and the weights that training starts from.

    Attributes:
        model: The module as `build_model` made it; None where only its shapes were needed.
        layout: What it is besides its arrays.
        params: The weights to start from.
        model_state: Its other variables.
        initial: What decay toward "init" means.
        is_own: Whether that is what `build_model` made, which can be made again.
        fit: How handed-over weights fit, or None.
    """

    model: nnx.Module | None
    layout: ModelLayout
    params: Flat
    model_state: Flat
    initial: Flat
    is_own: bool
    fit: Fit | None = None

    def anchored(self, optimizer: Any) -> Flat:
        """Copies of `initial` where a record must keep it: training overwrites its weights."""
        is_used = any(group.anchor == "init" for group in getattr(optimizer, "groups", ()))
        if self.is_own or not is_used:
            return {}
        return {name: np.array(array) for name, array in self.initial.items()}


def start_model(
    experiment: Any,
    given: Mapping[str, Any],
    *,
    options: RunOptions,
    source: Source,
    sample: Callable[[], str],
    needs_module: bool,
) -> Started:
    """The model as `build_model` makes it, with the weights that its source gives.

    Args:
        experiment: The experiment, with its derived values.
        given: The keywords of the handle.
        options: The plain options.
        source: Where the weights come from.
        sample: Makes an expression for what `forward` takes, for messages.
        needs_module: Whether the module itself is needed, for optimizers of the user's own.

    Raises:
        HookError: `build_model` returned no `nnx.Module`, or names that clash.
        CheckpointError: A record that does not fit.
        ConfigError: Weights or a `w0` that do not fit.
    """
    built = build_or_outline(
        experiment.build_model,
        seed=options.seed,
        split=functools.partial(
            split_model, hook=f"{type(experiment).__name__}.build_model", sample=sample
        ),
        is_replaced=source.replaces_weights and not needs_module,
    )
    params, model_state, fit = source.load(
        built.params, built.model_state, rng_names=built.layout.rng_names
    )
    params, model_state = built.filled(params, model_state)
    own = built.own_params()
    initial = _read_initial(source, given["w0"], built=own, started=params)
    return Started(
        model=built.model,
        layout=built.layout,
        params=params,
        model_state=model_state,
        initial=initial,
        is_own=initial is own,
        fit=fit,
    )


def _read_initial(source: Source, w0: Any, *, built: Flat, started: Flat) -> Flat:
    """What a decay toward "init" means; a record holds it where it cannot be built again."""
    if source.resumed is not None and source.resumed.holds("w0"):
        return source.resumed.read("w0", started)
    has_source = source.record is not None or source.weights is not None
    return anchor_weights(w0, built=built, started=started, has_source=has_source)


def start_optimizer(
    hooks: TracedHooks,
    given: Mapping[str, Any],
    *,
    options: RunOptions,
    started: Started,
    device: Flat,
    source: Source,
    splits: Mapping[str, Any],
) -> tuple[Optimizer | ManualOptimizers | None, Any]:
    """The optimizer and its state at the start; none on a handle without a split `train`.

    Raises:
        ConfigError: An option, a hook's value or a combination that cannot be used.
        HookError: A hook returned something else than it should.
        ExperimentError: A hook does not take the arguments that it gets.
        CheckpointError: A record whose optimizer state does not fit.
    """
    optimizer, opt_state = None, ()
    if "train" in splits:
        optimizer, opt_state = _make_optimizer(
            hooks, given, options=options, started=started, device=device, splits=splits
        )
    if source.resumed is not None and optimizer is not None:
        check_frozen(source.resumed, started.params, optimizer)
    if _takes_opt_state(source, given, optimizer) and source.record is not None:
        opt_state = read_opt_state(source.record, opt_state)
    return optimizer, opt_state


def _make_optimizer(
    hooks: TracedHooks,
    given: Mapping[str, Any],
    *,
    options: RunOptions,
    started: Started,
    device: Flat,
    splits: Mapping[str, Any],
) -> tuple[Optimizer | ManualOptimizers, Any]:
    experiment = hooks.experiment
    common: dict[str, Any] = {
        "device": device,
        "num_steps": options.max_epochs * (len(splits["train"]) // options.accum),
        "schedules": given["schedules"],
        "evaluate": run_pure,
    }
    if "train_step" in hooks.routes:
        _check_manual(type(experiment).__name__, options, hooks.routes, splits)
        return make_manual_optimizers(experiment, model=started.model, **common)
    return make_optimizer(
        experiment,
        params=started.params,
        initial=started.initial,
        clip=options.gradient_clip_norm,
        **common,
    )


def _check_manual(
    owner: str, options: RunOptions, routes: Mapping[str, Any], splits: Mapping[str, Any]
) -> None:
    """Refuses options that a `train_step` of the user's own leaves without effect."""
    for name, off in (("accum", 1), ("gradient_clip_norm", 0)):
        if getattr(options, name) != off:
            raise ConfigError(
                f"`{name}` is {getattr(options, name)!r}, and `{owner}.train_step` takes the steps "
                "by itself.",
                expected=f"{off}",
                fix=f"do in `train_step` what `{name}` would do, and leave the option out",
            )
    if "val" in splits and not {"loss", "metrics"} & routes.keys():
        raise ConfigError(
            f"`{owner}` has a split `val`, and neither a `metrics` nor a `loss` hook.",
            fix="add one of the two, or leave `val` out of `build_data`",
        )


def _takes_opt_state(source: Source, given: Mapping[str, Any], optimizer: Any) -> bool:
    """Whether the optimizer goes on from a record's state.

    Raises:
        ConfigError: `restore_optimizer` without a record, with `resume`, or without training.
    """
    if not given["restore_optimizer"]:
        return source.is_resume and optimizer is not None
    if source.record is None or source.is_resume:
        raise ConfigError(
            "`restore_optimizer=True`, but "
            + ("`resume` restores it anyway." if source.is_resume else "no record is given."),
            expected="`checkpoint=` with a record, whose optimizer state is taken too",
            fix="pass `checkpoint=`, or leave `restore_optimizer` out",
        )
    if optimizer is None:
        raise ConfigError(
            "`restore_optimizer=True` on a handle without a split `train`.",
            expected="a handle that trains: no other one has an optimizer",
            fix="leave `restore_optimizer` out",
        )
    return True
