"""The splits of a handle, and the first batch of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nitro._data import (
    Batch,
    RowLoader,
    checked_splits,
    first_batch,
    num_rows,
    routed_fields,
    shape_examples,
)
from nitro._experiment import Route, RunOptions
from nitro._programs import TracedHooks
from nitro._trees import jax_dtype
from nitro.errors import DataError, warn

from ._odd_values import odd_fields


def build_splits(experiment: Any, options: RunOptions, data: Any) -> dict[str, Any]:
    """The data by split, from `build_data` or as given; loaders take the run's seed.

    Raises:
        DataError: Not a mapping of splits, or an epoch that `accum` does not divide.
    """
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
    if not isinstance(source, RowLoader):
        return source
    return source.bound(seed=seed, drop_last=split == "train")


def first_batches(hooks: TracedHooks, splits: Mapping[str, Any]) -> dict[str, Batch]:
    """The first batch of each split, whose fields fit what a run does with the split.

    Training takes steps on `train` and validates on `val`; other splits need what `forward`
    names, until they are evaluated.

    Raises:
        DataError: A field is missing, no array, or of another number of samples.
    """
    first: dict[str, Batch] = {}
    for split, source in splits.items():
        batch = first_batch(split, source)
        where = f"the first batch of `{split}`"
        if split == "train":
            names = train_names(hooks, batch, where=where)
        elif split == "val" and "train" in splits:
            names = check_evaluated(hooks, batch, split)
        else:
            names = _names_of(("forward",), hooks, batch, where)
        if not names:
            raise DataError(
                f"No hook names a batch field; {where} has {sorted(batch)}.",
                fix="name the inputs as keyword-only arguments: `forward(self, model, *, img)`",
            )
        fields = routed_fields(batch, names, where=where)
        num_rows(fields, where=where)
        _warn_odd(fields, where)
        shape_examples(source, fields, split=split)
        first[split] = batch
    return first


def sample_text(route: Route, splits: Mapping[str, Any]) -> str:
    """An expression for one sample of each field that `forward` takes: for a message to paste."""
    for split, source in splits.items():
        batch = first_batch(split, source)
        fields = [batch[name] for name in route.required if name in batch]
        if fields:
            return ", ".join(
                f"jnp.zeros({(1, *np.shape(field)[1:])}, jnp.{jax_dtype(np.asarray(field).dtype)})"
                for field in fields
            )
    return "x"


def _warn_odd(fields: Batch, where: str) -> None:
    odd = odd_fields(fields)
    if odd:
        warn(
            f"Not finite in {where}: {odd}.\n  fix: mend or leave out these rows, unless `forward` "
            "and `loss` know what they stand for"
        )


def train_names(
    hooks: TracedHooks, batch: Batch, *, where: str = "the first batch of `train`"
) -> tuple[str, ...]:
    """The batch fields that a training step takes to the device, sorted."""
    if "train_step" in hooks.routes:
        return hooks.routes["train_step"].names(batch, where=where)
    return _names_of(("forward", "loss", "train_metrics"), hooks, batch, where)


def check_evaluated(hooks: TracedHooks, first: Batch, split: str) -> tuple[str, ...]:
    """The batch fields that evaluating a split takes to the device, sorted.

    Raises:
        DataError: A field is missing that scoring the split needs, on the device or the host.
    """
    where = f"the first batch of `{split}`"
    wanted = ["forward"]
    if falls_back_to_loss(hooks):
        wanted.append("loss")
    elif hooks.has_device_metrics:
        wanted.append("metrics")
    else:
        hooks.routes["metrics"].names(first, where=where)
    return _names_of(wanted, hooks, first, where)


def _names_of(
    wanted: Sequence[str], hooks: TracedHooks, batch: Batch, where: str
) -> tuple[str, ...]:
    """The batch fields that these hooks name, sorted."""
    routes = [hooks.routes[hook] for hook in wanted if hook in hooks.routes]
    return tuple(sorted({name for route in routes for name in route.names(batch, where=where)}))


def falls_back_to_loss(hooks: TracedHooks) -> bool:
    """Whether evaluation falls back to `val_loss`."""
    return "metrics" not in hooks.routes


def warn_near_misses(routes: Mapping[str, Route], first: Mapping[str, Batch]) -> None:
    """Warns of keywords with a default that match no field, and are close to one."""
    batch = next(iter(first.values()), None)
    if batch is None:
        return
    for route in routes.values():
        for keyword, close in route.near_misses(batch):
            warn(
                f"`{route.hook}` has the keyword `{keyword}`, which matches no batch field and "
                f"takes its default; did you mean `{close}`?"
            )
