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
from flax import nnx

from nitro._checkpoint import TopK
from nitro._data import ArrayLoader, Batch, checked_splits, first_batch, num_rows, routed_fields
from nitro._devices import checked_n_devices, ensure_cache
from nitro._experiment import (
    UNSET,
    Experiment,
    Residency,
    Route,
    RunOptions,
    field_values,
    has_hook,
    read_routes,
    require_hooks,
    resolve_option,
    resolve_options,
    resolve_source,
)
from nitro._logs import JSONLinesLogger, Logger, NullLogger, checked_logger
from nitro._optim import ManualOptimizers, Optimizer, make_manual_optimizers, make_optimizer
from nitro._programs import (
    RunPrograms,
    TracedHooks,
    checked_compile_options,
    run_pure,
    why_not_by_content,
)
from nitro._progress import make_reporter
from nitro._state import ModelLayout, TrainState, split_model
from nitro._trees import Flat
from nitro.errors import ConfigError, DataError, warn

from ._derive import derive
from ._position import check_position
from ._refusals import check_anchors, check_code, check_config, check_logger
from ._restore import Source, check_resumed_seed, find_source, read_opt_state
from ._retention import checked_checkpointer
from ._stopping import Stopper, check_stopper
from ._weights import anchor_weights


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
    splits = _build_splits(experiment, options, given["data"])
    experiment, derived = derive(experiment, splits, source)
    if derived:
        _check_structural_content(experiment)
    if source.record is not None:
        check_config(source.record, experiment)
    device = place_device_fields(experiment)
    started = _start_model(experiment, given, options=options, source=source)
    hooks = TracedHooks(
        experiment=experiment,
        layout=started.layout,
        routes=routes,
        has_device_metrics=_residency(experiment, "metrics") == "device" and "metrics" in routes,
    )
    first = _checked_first_batches(hooks, splits)
    checkpointer = checked_checkpointer(
        experiment, given["checkpointer"], options=options, splits=splits
    )
    optimizer, opt_state = None, ()
    if "train" in splits:
        optimizer, opt_state = _make_optimizer(
            hooks, given, options=options, started=started, device=device, splits=splits
        )
    if _takes_opt_state(source, given, optimizer) and source.record is not None:
        opt_state = read_opt_state(source.record, opt_state)
    programs = RunPrograms(
        hooks,
        optimizer=optimizer,
        compile_options=compile_options,
        max_constant_bytes=_or_infinite(options.max_constant_bytes),
        slow_compile_s=options.slow_compile_s,
    )
    _warn_unfingerprinted(programs)
    stopper = _checked_stopper(experiment, splits, given["early_stop"])
    _warn_near_misses(routes, first)
    moves_in_epoch, notes = check_position(source, splits, writes_records=checkpointer is not None)
    if source.resumed is not None and optimizer is not None:
        check_anchors(source.resumed, optimizer)
        check_code(source.resumed, programs.step_code(), allow=given["allow_code_change"])
    # Last: a setup that fails leaves no run behind in whatever the logger writes to.
    logger = _make_logger(experiment, options, given["logger"])
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
        moves_in_epoch=moves_in_epoch,
        notes=notes,
        w0=started.anchored(optimizer),
        restores_best=_checked_restore_best(given["restore_best"], checkpointer, splits),
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


@dataclass(frozen=True, kw_only=True)
class _Started:
    """A model, and the weights that training starts from.

    Attributes:
        model: The module as `build_model` made it.
        layout: What it is besides its arrays.
        params: The weights to start from.
        model_state: Its other variables.
        initial: What decay toward "init" means.
        is_own: Whether that is what `build_model` made, which can be made again.
    """

    model: nnx.Module
    layout: ModelLayout
    params: Flat
    model_state: Flat
    initial: Flat
    is_own: bool

    def anchored(self, optimizer: Any) -> Flat:
        """Copies of `initial` where a record must keep it: training overwrites its weights."""
        is_used = any(group.anchor == "init" for group in getattr(optimizer, "groups", ()))
        if self.is_own or not is_used:
            return {}
        return {name: np.array(array) for name, array in self.initial.items()}


def _start_model(
    experiment: Any, given: Mapping[str, Any], *, options: RunOptions, source: Source
) -> _Started:
    model = experiment.build_model(nnx.Rngs(options.seed))
    hook = f"{type(experiment).__name__}.build_model"
    layout, built, model_state = split_model(model, hook=hook)
    params, model_state = source.load(built, model_state)
    initial = _read_initial(source, given["w0"], built=built, started=params)
    return _Started(
        model=model,
        layout=layout,
        params=params,
        model_state=model_state,
        initial=initial,
        is_own=initial is built,
    )


def _make_optimizer(
    hooks: TracedHooks,
    given: Mapping[str, Any],
    *,
    options: RunOptions,
    started: _Started,
    device: Flat,
    splits: Mapping[str, Any],
) -> tuple[Optimizer | ManualOptimizers, Any]:
    """The optimizer of a handle that trains, and its state at the start."""
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


def _read_initial(source: Source, w0: Any, *, built: Flat, started: Flat) -> Flat:
    """What a decay toward "init" means; a record holds it where it cannot be built again."""
    if source.resumed is not None and source.resumed.holds("w0"):
        return source.resumed.read("w0", built)
    has_source = source.record is not None or source.weights is not None
    return anchor_weights(w0, built=built, started=started, has_source=has_source)


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


def _checked_restore_best(given: Any, checkpointer: Any, splits: Mapping[str, Any]) -> bool:
    if not isinstance(given, bool):
        raise ConfigError(f"`restore_best` is {given!r}.", expected="True or False")
    if given and (checkpointer is None or ("train" in splits and "val" not in splits)):
        what = "`checkpointer` is None" if checkpointer is None else "there is no split `val`"
        raise ConfigError(
            f"`restore_best=True`, but {what}, so no record will have a score.",
            fix="add what is missing, or leave `restore_best` out",
        )
    return given


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
    if not (np.issubdtype(array.dtype, np.number) or array.dtype.kind in "bV"):
        raise ConfigError(
            f"The Device field `{type(experiment).__name__}.{name}` is {leaf!r}.",
            expected="a number, an array, or a tree of them: it becomes a traced input",
            fix=f"mark it GraphConst, or leave `{name}` unmarked to keep it on the host",
        )
    # Through an explicit dtype, so that a Python number is not weakly typed.
    return jnp.asarray(array, dtype=jax.dtypes.canonicalize_dtype(array.dtype))


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


def _build_splits(experiment: Any, options: RunOptions, data: Any) -> dict[str, Any]:
    owner = type(experiment).__name__
    hook = "Nitro(data=...)" if data is not None else f"{owner}.build_data"
    splits = checked_splits(experiment.build_data() if data is None else data, hook=hook)
    splits = {name: _bound(source, name, options.seed) for name, source in splits.items()}
    if "train" in splits:
        _check_accum(len(splits["train"]), options.accum)
    return splits


def _check_accum(count: int, accum: int) -> None:
    """Refuses an epoch whose last step would lack micro-batches."""
    rest = count % accum
    if rest:
        near = [number for number in (count - rest, count - rest + accum) if number]
        raise DataError(
            f"The split `train` has {count} batches, which `accum={accum}` does not divide.",
            expected=f"{' or '.join(map(str, near))} batches: a step never crosses an epoch's end",
            fix="change the batch size or `accum`, or leave samples out",
        )


def _bound(source: Any, split: str, seed: int) -> Any:
    if not isinstance(source, ArrayLoader):
        return source
    return source.bound(seed=seed, drop_last=split == "train")


def _checked_first_batches(hooks: TracedHooks, splits: Mapping[str, Any]) -> dict[str, Batch]:
    first: dict[str, Batch] = {}
    for split, source in splits.items():
        batch = first_batch(split, source)
        where = f"the first batch of `{split}`"
        if split == "train":
            names = train_names(hooks, batch)
        else:
            names = traced_names(hooks, batch, with_loss=needs_loss(hooks))
        if not names:
            raise DataError(
                f"No hook names a batch field; {where} has {sorted(batch)}.",
                fix="name the inputs as keyword-only arguments: `forward(self, model, *, img)`",
            )
        num_rows(routed_fields(batch, names, where=where), where=where)
        if "metrics" in hooks.routes:
            hooks.routes["metrics"].names(batch)
        first[split] = batch
    return first


def traced_names(hooks: TracedHooks, batch: Batch, *, with_loss: bool) -> tuple[str, ...]:
    """The batch fields that go to the device, sorted."""
    wanted = {"forward", "loss"} if with_loss else {"forward"}
    wanted &= hooks.routes.keys()
    return tuple(sorted({name for hook in wanted for name in hooks.routes[hook].names(batch)}))


def train_names(hooks: TracedHooks, batch: Batch) -> tuple[str, ...]:
    """The batch fields that a training step takes to the device, sorted."""
    if "train_step" in hooks.routes:
        return hooks.routes["train_step"].names(batch)
    names = set(traced_names(hooks, batch, with_loss=True))
    if "train_metrics" in hooks.routes:
        names.update(hooks.routes["train_metrics"].names(batch))
    return tuple(sorted(names))


def needs_loss(hooks: TracedHooks) -> bool:
    """Whether evaluation falls back to `val_loss`."""
    return "metrics" not in hooks.routes


def _checked_stopper(experiment: Experiment, splits: Mapping[str, Any], given: Any) -> Any:
    stopper, _ = resolve_option(experiment, "early_stop", given, None)
    check_stopper(stopper, splits=splits, has_metrics=has_hook(experiment, "metrics"))
    # A copy of its own: what it has seen belongs to this handle.
    return copy.deepcopy(stopper)


def _make_logger(experiment: Experiment, options: RunOptions, given: Any) -> Logger:
    logger, _ = resolve_option(experiment, "logger", given, UNSET)
    return checked_logger(JSONLinesLogger() if logger is UNSET else logger, options.run_dir)


def _warn_unfingerprinted(programs: RunPrograms) -> None:
    """Tells once per process what traced code reaches that has no content to compare."""
    new = [name for name in programs.unfingerprinted() if name not in _told_unfingerprinted]
    _told_unfingerprinted.update(new)
    if new:
        warn(
            f"Traced code reaches {', '.join(f'`{name}`' for name in new)}, which cannot be compared "
            "by content and counts as itself: a change inside it is not seen, and another object in "
            "its place compiles anew.\n"
            "  fix: pass what the code needs of it as a field, or as a plain value"
        )


_told_unfingerprinted: set[str] = set()


def _warn_near_misses(routes: Mapping[str, Route], first: Mapping[str, Batch]) -> None:
    batch = next(iter(first.values()), None)
    if batch is None:
        return
    for route in routes.values():
        for keyword, close in route.near_misses(batch):
            warn(
                f"`{route.hook}` has the keyword `{keyword}`, which matches no batch field and "
                f"takes its default; did you mean `{close}`?"
            )
