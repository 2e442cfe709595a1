"""Builds everything that a handle needs, cheapest failures first."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._checkpoint import TopK
from nitro._code import why_not_by_content
from nitro._data import Batch
from nitro._devices import checked_n_devices, ensure_cache
from nitro._experiment import (
    UNSET,
    Experiment,
    Residency,
    RunOptions,
    field_values,
    has_hook,
    read_routes,
    require_hooks,
    resolve_option,
    resolve_options,
    resolve_source,
)
from nitro._logs import JSONLinesLogger, Logger, NullLogger, check_ready, checked_logger
from nitro._optim import ManualOptimizers, Optimizer, frozen_names
from nitro._programs import RunPrograms, TracedHooks, checked_compile_options
from nitro._progress import make_reporter
from nitro._state import TrainState
from nitro._trees import Flat, jax_dtype, too_wide
from nitro.errors import ConfigError

from ._derive import derive
from ._noise import warn_of_noise
from ._position import check_position
from ._refusals import check_anchors, check_code, check_config, check_logger
from ._restore import Source, check_resumed_seed, find_source
from ._retention import checked_checkpointer, checked_restore_best
from ._sizes import check_sizes
from ._splits import build_splits, first_batches, sample_text, warn_near_misses
from ._start import start_model, start_optimizer
from ._step_record import step_record
from ._stopping import Stopper, check_stopper
from ._weights import Fit


@dataclass(kw_only=True)
class Setup:
    """What a handle was built with; nothing here changes afterwards.

    Attributes:
        experiment: The user's declaration.
        options: The plain run options.
        splits: The data by split; empty on a serving handle.
        hooks: The traced hooks.
        optimizer: None on a handle without a training split.
        programs: The handle's programs.
        state: The state that training starts from.
        device: The Device fields, on the device.
        checkpointer: The retention policy, or None.
        stopper: Decides on early stopping, or None.
        logger: Where metrics go.
        first: The first batch of each split that setup looked at.
        source: Where the weights came from.
        fit: How handed-over weights fit, or None.
        moves_in_epoch: Whether the training source can go on in the middle of an epoch.
        w0: What a decay toward "init" means, by parameter; empty for `build_model`'s weights.
        restores_best: Whether a run ends with the weights of its best record.
        derived: The field values that `derive` returned, or that came with the weights.
        preset: The preset that the handle was built from, or None.
        owns_data: Whether `build_data` made the splits for this handle.
        sources: Where logger, checkpointer and early stopping came from, as for options.
        notes: Lines of the binding report that belong to no table.
    """

    experiment: Experiment
    options: RunOptions
    splits: dict[str, Any]
    hooks: TracedHooks
    optimizer: Optimizer | ManualOptimizers | None
    programs: RunPrograms
    state: TrainState
    device: Flat
    checkpointer: TopK | None
    stopper: Stopper | None
    logger: Logger
    first: dict[str, Batch]
    source: Source
    fit: Fit | None = None
    moves_in_epoch: bool = True
    w0: Flat = field(default_factory=dict[str, Any])
    restores_best: bool = False
    derived: dict[str, Any] = field(default_factory=dict[str, Any])
    preset: str | None = None
    owns_data: bool = False
    sources: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list)

    @property
    def logs_nothing(self) -> bool:
        """Whether the logger is None."""
        return isinstance(self.logger, NullLogger)

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the parameters that training leaves alone."""
        return frozen_names(self.optimizer)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch; 0 on a handle without a training split."""
        return len(self.splits.get("train", ())) // self.options.accum

    @property
    def num_steps(self) -> int:
        """The horizon, in optimizer steps."""
        return self.options.max_epochs * self.steps_per_epoch

    @property
    def owner(self) -> str:
        """The experiment's class name, for messages."""
        return type(self.experiment).__name__


def set_up(experiment: Any, given: Mapping[str, Any], *, preset: str | None = None) -> Setup:
    """Checks the configuration, builds data and model, and restores weights.

    The order is contractual: options, data, derived values, record, model, weights,
    routing and batches, checkpointer, optimizer, logger.
    """
    require_hooks(experiment)
    ensure_cache()
    options = _checked_options(experiment, given)
    compile_options = checked_compile_options(given["compile_options"])
    routes = read_routes(type(experiment))
    source, options = _found_source(experiment, given, options)
    splits = build_splits(experiment, options, given["data"])
    experiment, derived = derive(experiment, splits, source)
    if derived:
        _check_structural_content(experiment)
    if source.record is not None:
        check_config(source.record, experiment)
    device = place_device_fields(experiment)
    started = start_model(
        experiment,
        given,
        options=options,
        source=source,
        sample=lambda: sample_text(routes["forward"], splits),
        needs_module="train" in splits and "train_step" in routes,
    )
    hooks = TracedHooks(
        experiment=experiment,
        layout=started.layout,
        routes=routes,
        has_device_metrics=_residency(experiment, "metrics") == "device" and "metrics" in routes,
    )
    first = first_batches(hooks, splits)
    warn_of_noise(
        hooks,
        params=started.params,
        model_state=started.model_state,
        device=device,
        first=first,
    )
    check_sizes(hooks, splits, first)
    stopper = _checked_stopper(experiment, splits, given["early_stop"])
    checkpointer = checked_checkpointer(
        experiment, given["checkpointer"], options=options, splits=splits, stopper=stopper
    )
    optimizer, opt_state = start_optimizer(
        hooks,
        given,
        options=options,
        started=started,
        device=device,
        source=source,
        splits=splits,
    )
    programs = RunPrograms(
        hooks,
        optimizer=optimizer,
        compile_options=compile_options,
        max_constant_bytes=_or_infinite(options.max_constant_bytes),
        slow_compile_s=options.slow_compile_s,
    )
    warn_near_misses(routes, first)
    moves_in_epoch, notes = check_position(source, splits, writes_records=checkpointer is not None)
    if source.resumed is not None and optimizer is not None:
        check_anchors(source.resumed, optimizer)
        step = step_record(
            programs,
            optimizer,
            state=TrainState(started.params, started.model_state, opt_state),
            device=device,
            splits=splits,
            first=first,
            options=options,
        )
        check_code(source.resumed, step, allow=given["allow_code_change"])
    # Last: a setup that fails leaves no run behind in whatever the logger writes to.
    logger = _make_logger(experiment, options, given["logger"])
    if "train" in splits:
        check_ready(logger)
    if source.resumed is not None:
        check_logger(source.resumed, logger)
    return Setup(
        experiment=experiment,
        options=options,
        splits=splits,
        hooks=hooks,
        optimizer=optimizer,
        programs=programs,
        state=TrainState(started.params, started.model_state, opt_state),
        device=device,
        checkpointer=checkpointer,
        stopper=stopper,
        logger=logger,
        first=first,
        source=source,
        fit=started.fit,
        moves_in_epoch=moves_in_epoch,
        notes=notes,
        w0=started.anchored(optimizer),
        restores_best=checked_restore_best(given["restore_best"], checkpointer, splits),
        derived=derived,
        preset=preset,
        owns_data=given["data"] is None,
        sources={
            name: resolve_source(experiment, name, given[name])
            for name in ("logger", "checkpointer", "early_stop")
        },
    )


def _checked_options(experiment: Any, given: Mapping[str, Any]) -> RunOptions:
    """The plain options, after everything that can be refused without building anything."""
    options = resolve_options(experiment, given)
    make_reporter(progress=options.progress)
    _check_structural_content(experiment)
    checked_n_devices(resolve_option(experiment, "n_devices", given["n_devices"], 1)[0])
    _residency(experiment, "train_metrics")
    _residency(experiment, "metrics")
    return options


def _found_source(
    experiment: Any, given: Mapping[str, Any], options: RunOptions
) -> tuple[Source, RunOptions]:
    """Where the weights come from, and the options with the seed of a run that goes on."""
    source = find_source(given=given, run_dir=options.run_dir)
    if source.record is None:
        return source, options
    if not source.record.meta.get("derived"):
        check_config(source.record, experiment)
    if source.is_resume:
        seed = check_resumed_seed(source.record, options.seed, options.sources["seed"])
        options = dataclasses.replace(options, seed=seed)
    return source, options


def place_device_fields(experiment: Experiment) -> Flat:
    """The Device fields as strongly typed arrays on the device.

    Raises:
        ConfigError: A value that is no number, array or tree of them.
    """
    return {
        name: jax.tree.map(
            lambda leaf: _placed(experiment, name, leaf),  # noqa: B023 - used at once
            value,
        )
        for name, value in field_values(experiment, Residency.DEVICE).items()
    }


def _placed(experiment: Experiment, name: str, leaf: Any) -> jax.Array:
    array = np.asarray(leaf)
    dtype = jax_dtype(array.dtype)
    if dtype is None:
        raise ConfigError(
            f"The Device field `{type(experiment).__name__}.{name}` is {leaf!r}.",
            expected="a number, an array, or a tree of them: it becomes a traced input",
            fix=f"mark it GraphConst, or leave `{name}` unmarked to keep it on the host",
        )
    lost = too_wide(array)
    if lost is not None:
        raise ConfigError(
            f"The Device field `{type(experiment).__name__}.{name}` holds {lost}.",
            expected=f"integers that fit {dtype}, in which JAX computes: it would wrap around",
            fix="mark it GraphConst, make it a float, or set `JAX_ENABLE_X64=1`",
        )
    # Through an explicit dtype, so that a Python number is not weakly typed.
    # Of a copy, because JAX may take the memory itself, which is the user's.
    return jnp.asarray(array.astype(dtype))


def _or_infinite(limit: int | None) -> float:
    return math.inf if limit is None else limit


def _check_structural_content(experiment: Experiment) -> None:
    owner = type(experiment).__name__
    for name, value in field_values(experiment, Residency.GRAPH_CONST).items():
        obstacle = why_not_by_content(value)
        if obstacle is not None:
            raise ConfigError(
                f"The GraphConst field `{owner}.{name}` cannot be compared by content: {obstacle}.",
                expected="numbers, strings, tuples, dataclasses, arrays or functions: what equal "
                "contents make equal, so that a program is neither compiled again nor reused "
                "wrongly",
                fix=f"flatten it into plain fields, or leave `{name}` unmarked and read it in "
                "`build_data` or `build_model`",
            )


_PLACES = {"host": "NumPy arrays, any library, no program", "device": "compiled, in `jax.numpy`"}


def _residency(experiment: Experiment, hook: str) -> str:
    place: Any = experiment.metrics_residency(hook)
    where = f'`{type(experiment).__name__}.metrics_residency("{hook}")`'
    if place not in _PLACES:
        raise ConfigError(
            f"{where} is {place!r}.",
            expected="; or ".join(f'"{name}": {what}' for name, what in _PLACES.items()),
        )
    if hook == "train_metrics" and place == "host" and has_hook(experiment, hook):
        raise ConfigError(
            f'{where} is "host", and its outputs are only there inside the step program.',
            expected='"device": it is traced with the loss, and costs no transfer',
            fix="compute in `metrics` what needs the host: it sees each split once per epoch",
        )
    return place


def _checked_stopper(experiment: Experiment, splits: Mapping[str, Any], given: Any) -> Any:
    stopper, _ = resolve_option(experiment, "early_stop", given, None)
    check_stopper(stopper, splits=splits, has_metrics=has_hook(experiment, "metrics"))
    # A copy of its own: what it has seen belongs to this handle.
    return copy.deepcopy(stopper)


def _make_logger(experiment: Experiment, options: RunOptions, given: Any) -> Logger:
    logger, _ = resolve_option(experiment, "logger", given, UNSET)
    return checked_logger(JSONLinesLogger() if logger is UNSET else logger, options.run_dir)
