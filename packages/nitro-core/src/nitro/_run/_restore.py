"""Reads a record for a handle that is being built, and refuses what does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nitro._checkpoint import Record, open_record, read_index
from nitro._experiment import Experiment, Residency, field_names
from nitro._logs import plain
from nitro._trees import describe_array, named_leaves
from nitro.errors import CheckpointError, ConfigError, NitroWarning


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a handle's weights come from.

    Attributes:
        record: The record, or None for what `build_model` made.
        is_resume: Whether to go on exactly, or to take weights only.
    """

    record: Record | None
    is_resume: bool

    @property
    def display(self) -> str:
        """In words, for the binding report."""
        if self.record is None:
            return "built by `build_model`"
        return f"{'resumed' if self.is_resume else 'restored'} from {self.record.path}"


def find_source(*, resume: Any, checkpoint: Any, run_dir: Path) -> Source:
    """The record that `resume` or `checkpoint` names.

    Raises:
        ConfigError: Both are given, or a value of the wrong type.
        CheckpointError: No such record.
    """
    if resume in (False, None):
        return Source(record=checkpoint and open_record(checkpoint), is_resume=False)
    if checkpoint is not None:
        raise ConfigError(
            f"Both `resume={resume!r}` and `checkpoint={checkpoint!r}` are given.",
            expected="one source for the weights",
            fix="`resume` goes on exactly; `checkpoint` takes weights only",
        )
    if not isinstance(resume, str | Path):
        raise ConfigError(
            f"`resume` is {resume!r}.", expected='"auto", or a record as `checkpoint` names it'
        )
    if resume != "auto":
        return Source(record=open_record(resume), is_resume=True)
    if not read_index(run_dir / "checkpoints"):
        warnings.warn(
            f'`resume="auto"` found no record in `{run_dir}`; the run starts anew.',
            NitroWarning,
            stacklevel=5,
        )
        return Source(record=None, is_resume=False)
    return Source(record=open_record(f"{run_dir}@latest"), is_resume=True)


def check_config(record: Record, experiment: Experiment) -> None:
    """Refuses a record of an experiment with other structural values.

    Raises:
        CheckpointError: Lists every changed, added and removed GraphConst field.
    """
    saved = {name: record.meta["config"].get(name) for name in record.meta["graph_const"]}
    names = field_names(experiment, Residency.GRAPH_CONST)
    now = {name: loggable(getattr(experiment, name)) for name in names}
    lines = [
        f"{name}: {_shown(saved, name)} in the record, {_shown(now, name)} now"
        for name in sorted(saved.keys() | now.keys())
        if plain(saved.get(name)) != plain(now.get(name))
    ]
    if lines:
        owner = type(experiment).__name__
        raise CheckpointError(
            f"The record `{record.path}` was trained with other GraphConst values: "
            + "; ".join(lines)
            + ".",
            expected="the same structure: these values decide the program and the weights",
            fix=f"build `{owner}(...)` with the record's values, or train anew",
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
        warnings.warn(
            f"`seed={seed}` is not used: the resumed run has the seed {saved}.",
            NitroWarning,
            stacklevel=4,
        )
    return saved


def _shown(values: Mapping[str, Any], name: str) -> str:
    return repr(values[name]) if name in values else "absent"


def loggable(value: Any) -> Any:
    """A field as JSON; the arrays in it by dtype and shape, however deep."""
    if isinstance(value, Mapping):
        return {str(name): loggable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [loggable(item) for item in value]
    is_array = hasattr(value, "shape") and hasattr(value, "dtype") and len(value.shape) > 0
    return describe_array(value) if is_array else plain(value)
