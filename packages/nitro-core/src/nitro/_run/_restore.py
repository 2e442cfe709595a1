"""Where a handle's weights come from, and what is read from there."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nitro._checkpoint import Record, RecordEntry, newest, open_record, read_index
from nitro._journal import RUN_FILE_NAME, read_run_file
from nitro._logs import plain
from nitro._trees import Flat, describe_array, named_leaves
from nitro.errors import CheckpointError, ConfigError, warn

from ._outline import is_outlining
from ._weights import Fit, GivenWeights, is_artifact, read_weights


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a handle's weights come from.

    Attributes:
        record: The record, or None.
        is_resume: Whether to go on exactly, or to take weights only.
        weights: The weights that were handed over, or None.
        run: The id of the run that goes on; None for a run of its own.
        parent: The record that a new run branches from, as "<run>/<name>".
        starts_over: Whether it should have gone on, and there was no record yet.
    """

    record: Record | None = None
    is_resume: bool = False
    weights: GivenWeights | None = None
    run: str | None = None
    parent: str | None = None
    starts_over: bool = False

    @property
    def display(self) -> str:
        """In words, for the binding report."""
        if self.weights is not None:
            return self.weights.display
        if self.record is None:
            return "built by `build_model`"
        verb = "resumed" if self.is_resume else "restored"
        where = f"{verb} from {self.record.path}"
        if not self.is_resume:
            return where
        branch = "" if self.parent is None else f", as a branch of {self.parent}"
        return f"{where}, epoch {self.record.entry.epoch}, step {self.record.entry.step}{branch}"

    @property
    def replaces_weights(self) -> bool:
        """Whether what `build_model` makes is replaced, at least in part."""
        return self.record is not None or self.weights is not None

    @property
    def resumed(self) -> Record | None:
        """The record, if the handle goes on from it exactly."""
        return self.record if self.is_resume else None

    def load(
        self, params: Flat, model_state: Flat, *, rng_names: Collection[str]
    ) -> tuple[Flat, Flat, Fit | None]:
        """The weights and the model state to start from, and how handed-over ones fit.

        Args:
            params: The weights as `build_model` made them, or their shapes and dtypes; what is
                not replaced comes back as it is.
            model_state: The model's other variables, likewise.
            rng_names: Which of these are random keys and counters.

        Raises:
            CheckpointError: A record that does not fit, or is damaged.
            ConfigError: Handed-over weights that do not fit.
        """
        if self.weights is not None:
            return self.weights.fitted(params, model_state, rng_names=rng_names)
        if self.record is None or is_outlining():
            return params, model_state, None
        converts = not self.is_resume
        return (
            self.record.read("params", params, converts=converts),
            self.record.read("model_state", model_state, converts=converts),
            None,
        )


def find_source(*, given: Mapping[str, Any], run_dir: Path) -> Source:
    """What `resume`, `checkpoint` or `weights` names.

    Raises:
        ConfigError: More than one of them is given, or a value of the wrong type.
        CheckpointError: No such record.
    """
    resume, checkpoint, weights = given["resume"], given["checkpoint"], given["weights"]
    _check_one_source(resume, checkpoint, weights)
    if isinstance(weights, str | os.PathLike) and not is_artifact(weights):
        checkpoint, weights = weights, None
    if checkpoint is not None:
        return _named(checkpoint, run_dir)
    if weights is not None:
        return Source(weights=read_weights(weights, run_dir=run_dir))
    if resume in (False, None):
        return Source()
    return _resumed(resume, run_dir)


def _named(checkpoint: Any, run_dir: Path) -> Source:
    try:
        return Source(record=open_record(checkpoint, run_dir=run_dir))
    except CheckpointError:
        # Inside the `build_model` of a handle whose weights come from somewhere else: these here
        # are not needed, and may be gone.
        if is_outlining():
            return Source()
        raise


def _check_one_source(resume: Any, checkpoint: Any, weights: Any) -> None:
    values = {"resume": resume, "checkpoint": checkpoint, "weights": weights}
    given = [name for name, value in values.items() if value is not None and value is not False]
    if len(given) > 1:
        raise ConfigError(
            f"Both `{given[0]}` and `{given[1]}` are given.",
            expected="one source for the weights",
            fix="`resume` goes on exactly; `checkpoint` and `weights` take weights only",
        )
    if resume not in (False, None) and not isinstance(resume, str | os.PathLike):
        raise ConfigError(
            f"`resume` is {resume!r}.",
            expected='"auto", or a record as `checkpoint` names it',
            fix='write `resume="auto"` to go on from the newest record in `run_dir`',
        )


def _resumed(resume: str | os.PathLike[str], run_dir: Path) -> Source:
    directory = run_dir.absolute() / "checkpoints"
    if resume == "auto":
        if not read_index(directory):
            warn(f'`resume="auto"` found no record in `{run_dir}`; the run starts anew.')
            return Source(starts_over=True)
        resume = run_dir
    record = open_record(resume, default="latest", run_dir=run_dir)
    entry = record.entry
    named = Path(str(resume).removesuffix("@latest").removesuffix("@best"))
    if named.is_dir() and named.absolute() != record.path.absolute():
        _tell_other_run(entry, record.path.parent.parent)
    own = [e for e in read_index(directory) if e.run == entry.run]
    # An older record of the run, or of another directory: what came after it stays.
    goes_on = record.path.parent == directory and own and newest(own).name == entry.name
    return Source(
        record=record,
        is_resume=True,
        run=entry.run if goes_on else None,
        parent=entry.parent if goes_on else f"{entry.run}/{entry.name}",
    )


def _tell_other_run(entry: RecordEntry, run_dir: Path) -> None:
    """Warns where a directory's last run has left no checkpoint, so that another one resumes."""
    if not (run_dir / RUN_FILE_NAME).exists():
        return
    last = read_run_file(run_dir)
    if last.run is not None and last.run != entry.run:
        warn(
            f"The last run in `{run_dir}` ({last.in_words}) left no checkpoint: the run "
            f"{entry.run} resumes, from epoch {entry.epoch}, step {entry.step}.\n"
            f'  fix: say which run is meant: `resume="{run_dir}#{entry.run}"`'
        )


def read_opt_state(record: Record, template: Any) -> Any:
    """A record's optimizer state in the structure of one that was just built.

    Raises:
        CheckpointError: A leaf is missing, new, or of another shape or dtype.
    """
    names = named_leaves(template)
    flat = record.read("opt_state", names)
    return jax.tree.unflatten(jax.tree.structure(template), [flat[name] for name in names])


def check_resumed_seed(record: Record, seed: int, source: str) -> int:
    """The record's seed, which wins; says so where another one was asked for."""
    saved: int = record.meta["seed"]
    if seed != saved and source == "keyword":
        warn(f"`seed={seed}` is not used: the resumed run has the seed {saved}.")
    return saved


def loggable(value: Any) -> Any:
    """A field as JSON; the arrays in it by dtype and shape, however deep."""
    if isinstance(value, Mapping):
        return {str(name): loggable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [loggable(item) for item in value]
    is_array = hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0
    return describe_array(value) if is_array else plain(value)
