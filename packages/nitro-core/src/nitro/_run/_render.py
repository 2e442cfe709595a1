"""Draws samples with the user's `visualize`, and saves what it returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro._data import Batch, checked_batch, num_rows
from nitro._experiment import Route, has_hook, read_route
from nitro._metrics import widened
from nitro.errors import ConfigError, DataError, ExperimentError, HookError, did_you_mean

from ._figures import close_figure
from ._phases import Phase
from ._session import Session


@dataclass(frozen=True, kw_only=True)
class RenderRequest:
    """What to draw.

    Attributes:
        split: The split to draw from.
        batch: A batch to draw instead of a split.
        predictions: Whether `visualize` gets outputs, or None.
        worst: How many samples of the highest loss to draw, worst first; None draws all.
        batches: How many batches to look at; None for the whole split.
        limit: The most figures to draw; None for any number.
        out_dir: Where to save them.
        tag: What their names start with.
    """

    split: str
    batch: Any
    predictions: bool
    worst: int | None
    batches: int | None
    limit: int | None
    out_dir: Path
    tag: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample on the host, without its batch axis.

    Attributes:
        index: Its place in what was looked at, from 0.
        outputs: The outputs for it, or None.
        fields: The batch fields that `visualize` wants.
        loss: Its loss, or None.
    """

    index: int
    outputs: Any
    fields: dict[str, Any]
    loss: float | None


def render(session: Session, request: RenderRequest) -> list[Path]:
    """Draws and saves samples; returns the paths, in the order drawn.

    Raises:
        ExperimentError: There is no `visualize`, or nothing that saves what it returns.
        ConfigError: A number out of its range, or no such split.
        DataError: The data lacks a field.
    """
    experiment: Any = session.setup.experiment
    route = _checked_route(session)
    _check_request(session, request)
    samples = _samples(session, request, route)
    if request.worst is not None:
        ranked = sorted(samples, key=lambda s: (-(s.loss or 0.0), s.index))
        samples = iter(ranked[: request.worst])
    paths: list[Path] = []
    request.out_dir.mkdir(parents=True, exist_ok=True)
    for sample in itertools.islice(samples, request.limit):
        figure = experiment.visualize(sample.outputs, **sample.fields)
        try:
            stem = request.out_dir / f"{request.tag}_{sample.index:05d}"
            paths.append(_saved(experiment, figure, stem))
        finally:
            close_figure(figure)
    return paths


def _checked_route(session: Session) -> Route:
    cls = type(session.setup.experiment)
    if not has_hook(cls, "visualize"):
        raise ExperimentError(
            f"`{cls.__name__}` has no hook `visualize`, so there is nothing to draw with.",
            expected="`visualize(self, outputs, *, ...)`, which returns a figure for one sample",
            fix="add it; `outputs` is None where `render(predictions=False)` draws data only",
        )
    return read_route(cls.__name__, "visualize", getattr(cls, "visualize"))  # noqa: B009 - a hook


def _check_request(session: Session, request: RenderRequest) -> None:
    for name in ("worst", "batches", "limit"):
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or value < 1):
            raise ConfigError(
                f"`{name}` is {value!r}.", expected="an integer of at least 1, or None"
            )
    splits = session.setup.splits
    if request.batch is None and request.split not in splits:
        raise ConfigError(
            f"There is no split `{request.split}` to draw from.",
            expected=did_you_mean(request.split, splits),
            fix="" if splits else "pass `batch=`, or build the handle with data",
        )
    if request.worst is None:
        return
    if not request.predictions:
        raise ConfigError("`worst` ranks by the loss, which needs `predictions=True`.")
    if "loss" not in session.setup.hooks.routes:
        raise ConfigError(
            f"`worst` ranks by the loss, and `{session.setup.owner}` has no hook `loss`."
        )


def _samples(session: Session, request: RenderRequest, route: Route) -> Iterator[Sample]:
    if request.batch is not None:
        batches: Any = [request.batch]
    else:
        source = session.setup.splits[request.split]
        batches = itertools.islice(source, request.batches or len(source))
    start = 0
    for number, item in enumerate(batches, start=1):
        where = (
            "the batch given to `render`"
            if request.batch is not None
            else f"batch {number} of `{request.split}`"
        )
        batch = checked_batch(item, where=where)
        fields = {name: _on_host(value) for name, value in route.pick(batch).items()}
        outputs = _outputs(session, batch, where) if request.predictions else None
        rows = _count_rows(fields, outputs, where)
        losses = (
            session.evaluator.sample_losses(session.device, outputs, batch)
            if request.worst is not None
            else None
        )
        for row in range(rows):
            yield Sample(
                index=start + row,
                outputs=None if outputs is None else widened(_sample(outputs, row)),
                fields={name: _sample(value, row) for name, value in fields.items()},
                loss=None if losses is None else losses[row],
            )
        start += rows


def _outputs(session: Session, batch: Batch, where: str) -> Any:
    with session.in_phase(Phase.PREDICTING):
        return session.evaluator.outputs(session.state, session.device, batch, where=where)


def _on_host(value: Any) -> Any:
    # A list is a field of texts or numbers, not a tree of fields.
    is_list = isinstance(value, list | tuple)
    return np.array(value) if is_list else jax.tree.map(np.asarray, value)


def _sample(tree: Any, row: int) -> Any:
    """A copy of one sample: a hook may change what it gets."""
    return jax.tree.map(lambda leaf: np.array(leaf[row])[()], tree)


def _count_rows(fields: dict[str, Any], outputs: Any, where: str) -> int:
    trees = {**fields, "the outputs": outputs} if outputs is not None else fields
    if not trees:
        raise DataError(
            "`visualize` names no batch field, and gets no outputs.",
            fix="name the fields that it draws: `visualize(self, outputs, *, img)`",
        )
    return num_rows(trees, where=where)


def _saved(experiment: Any, figure: Any, stem: Path) -> Path:
    """Saves by the experiment's `save_figure`, else what knows how to save itself."""
    owner = type(experiment).__name__
    save = getattr(experiment, "save_figure", None)
    if callable(save):
        path = save(figure, stem)
        if not isinstance(path, str | Path):
            raise HookError(
                f"`{owner}.save_figure` returned {type(path).__name__}.",
                expected="the path that it wrote: only the hook knows what suffix it gave it",
            )
        return Path(path)
    path = stem.with_name(f"{stem.name}.png")
    # matplotlib's figures have `savefig`; PIL's images and others have `save`.
    for method in ("savefig", "save"):
        if callable(getattr(figure, method, None)):
            getattr(figure, method)(path)
            return path
    raise ExperimentError(
        f"`{owner}.visualize` returned {type(figure).__name__}, which Nitro cannot save.",
        expected="a matplotlib figure, or anything with `savefig(path)` or `save(path)`",
        fix="return the figure alone, or add `save_figure(self, figure, stem)`, which saves it "
        "under `stem` with a suffix and returns the path",
    )
