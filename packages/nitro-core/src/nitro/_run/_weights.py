"""Weights that are handed over: what of them is taken, under which names, and what is not."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from nitro._checkpoint import leaf_differences, listed, open_record
from nitro._plugins import backend_of
from nitro._trees import Flat, describe_array, is_rng_key, named_leaves, rng_key_impl
from nitro.errors import ConfigError, did_you_mean
from nitro.hooks import WeightHolder


@dataclass(frozen=True)
class Weights:
    """Weights that fit a model in part, and what to do about the rest: `Nitro(weights=...)`.

    Nothing is left out silently: what was taken, renamed, skipped and initialised is in the
    binding report, and in each checkpoint of the run.

    Attributes:
        source: Where they come from: what `Nitro(weights=)` takes, such as a run's directory,
            another handle, a bundle or arrays by dotted name.
        rename: New names by old ones. A key is a dotted name or the beginning of one, up to a
            dot; the longest that fits counts. "" stands for no beginning: `{"": "body"}` puts
            everything below `body`, `{"module": ""}` takes `module.` away.
        skip: Patterns of names in the model, after renaming, with `*` for any text: what the
            source has there is not taken, and the model keeps its own.
        missing: "error" refuses a source that lacks a parameter of the model; "init" keeps
            what `build_model` made of it.

    Raises:
        ConfigError: A `missing` that is neither, or one pattern as `skip`.

    Example:
        >>> Weights({"head.kernel": 0}, skip=("head.*",)).missing
        'error'
    """

    source: Any
    rename: Mapping[str, str] = field(default_factory=dict[str, str], kw_only=True)
    skip: Sequence[str] = field(default=(), kw_only=True)
    missing: Literal["error", "init"] = field(default="error", kw_only=True)

    def __post_init__(self) -> None:
        if self.missing not in ("error", "init"):
            raise ConfigError(
                f"`missing` of `nitro.Weights` is {self.missing!r}.",
                expected='"error", or "init" for what `build_model` made',
            )
        if isinstance(self.skip, str):
            raise ConfigError(
                f"`skip` of `nitro.Weights` is {self.skip!r}.",
                expected="a tuple of patterns",
                fix=f"write `skip=({self.skip!r},)`",
            )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What became of handed-over weights, by name.

    Attributes:
        display: Where they come from, in words.
        taken: What the model took.
        renamed: The model's names of what the source calls otherwise, by the source's names.
        skipped: What the source has and the model did not take, by the names after renaming.
        initialised: What the model keeps as `build_model` made it.
    """

    display: str
    taken: tuple[str, ...]
    renamed: Mapping[str, str]
    skipped: tuple[str, ...]
    initialised: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the binding report."""
        renamed = [f"{old} → {new}" for old, new in self.renamed.items()]
        kinds = {
            "renamed": renamed,
            "skipped": self.skipped,
            "as `build_model` made them": self.initialised,
        }
        lines = [f"{what}: {len(names)}, {_some(names)}" for what, names in kinds.items() if names]
        return [f"taken: {len(self.taken)} arrays", *lines]

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "from": self.display,
            "taken": list(self.taken),
            "renamed": dict(self.renamed),
            "skipped": list(self.skipped),
            "initialised": list(self.initialised),
        }


@dataclass(frozen=True, kw_only=True)
class GivenWeights:
    """Arrays by dotted name, and how they are to fit.

    Attributes:
        arrays: Parameters, and all, some or none of the model's other variables.
        display: Where they come from, in words.
        policy: What may differ; by default nothing.
    """

    arrays: Flat
    display: str
    policy: Weights = field(default_factory=lambda: Weights(None))

    def fitted(
        self, params: Flat, model_state: Flat, *, rng_names: Collection[str] = ()
    ) -> tuple[Flat, Flat, Fit]:
        """Copies with the model's dtypes, and the model's own where nothing is taken.

        Args:
            params: The model's parameters, or their shapes and dtypes.
            model_state: The model's other variables, likewise.
            rng_names: Which of these are random keys and counters.

        Raises:
            ConfigError: Lists the names that are missing, unknown, or of another shape; or a
                `rename` or `skip` that matches nothing.
        """
        renamed = _renamed(self.arrays, self.policy.rename)
        given = {renamed[name]: array for name, array in self.arrays.items()}
        given = _joined(given, {**params, **model_state})
        skipped = self._skipped(given, {**params, **model_state})
        arrays = {name: array for name, array in given.items() if name not in skipped}
        kept = {name for name in params if name in skipped}
        if self.policy.missing == "init":
            kept |= params.keys() - arrays.keys()
        self._check(arrays, {n: a for n, a in params.items() if n not in kept}, model_state)
        both = {**params, **model_state}
        taken = {name: _converted(arrays[name], both[name]) for name in both if name in arrays}
        initialised = [name for name in both if name not in taken and name not in rng_names]
        fit = Fit(
            display=self.display,
            taken=tuple(taken),
            renamed={old: new for old, new in renamed.items() if old != new and new in taken},
            skipped=tuple(name for name in given if name in skipped),
            initialised=tuple(initialised),
        )
        return (
            {name: taken.get(name, leaf) for name, leaf in params.items()},
            {name: taken.get(name, leaf) for name, leaf in model_state.items()},
            fit,
        )

    def _skipped(self, given: Flat, model: Flat) -> set[str]:
        names = [*given, *(name for name in model if name not in given)]
        for pattern in self.policy.skip:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f'`skip` of `nitro.Weights` has the pattern "{pattern}", which matches nothing.',
                    expected=did_you_mean(pattern, names),
                    fix="correct it, or leave it out",
                )
        return {n for n in names if any(fnmatchcase(n, pattern) for pattern in self.policy.skip)}

    def _check(self, arrays: Flat, params: Flat, model_state: Flat) -> None:
        lines = leaf_differences(
            _words({n: a for n, a in arrays.items() if n not in model_state}),
            _words(params),
            converts=True,
            found="given",
            now="in the model",
            gone="not in the model",
        )
        lines += [
            f"`{name}`: {describe_array(arrays[name])} given, {describe_array(leaf)} in the model"
            for name, leaf in model_state.items()
            if name in arrays and not is_rng_key(leaf) and np.shape(arrays[name]) != leaf.shape
        ]
        if lines:
            raise ConfigError(
                f"The weights, {self.display}, do not fit the model:\n{listed(lines)}",
                expected="an array for each parameter, by dotted name or nested",
                fix="say what may differ: `weights=nitro.Weights(..., rename={old: new}, "
                'skip=("head.*",), missing="init")`; `run.params` shows the model\'s names',
            )


def read_weights(weights: Any, *, run_dir: Path | None = None) -> GivenWeights:
    """Handed-over weights as arrays by name.

    Args:
        weights: Another handle, a module, an `nnx.State`, a mapping, flat or nested, a bundle,
            the path of a bundle or a record, or a `Weights` with one of these.
        run_dir: The directory of the handle that asks.

    Raises:
        ConfigError: Anything else.
        CheckpointError: A path where there is neither a record nor an artifact.
    """
    if isinstance(weights, Weights):
        given = read_weights(weights.source, run_dir=run_dir)
        return GivenWeights(arrays=given.arrays, display=given.display, policy=weights)
    session = getattr(weights, "_session", None)
    if session is not None:
        state, setup = session.state, session.setup
        return GivenWeights(
            arrays={**state.params, **state.model_state},
            display=f"taken from {setup.owner} at epoch {session.epoch} ({setup.options.run_dir})",
        )
    if isinstance(weights, str | os.PathLike):
        return _read_path(weights, run_dir)
    kind = type(weights).__name__
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights)
    if isinstance(weights, nnx.State):
        weights = nnx.to_pure_dict(weights)
    if isinstance(weights, WeightHolder):
        return GivenWeights(arrays=dict(weights.weights), display=f"taken from {weights!r}")
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"`weights` is {weights!r} ({kind}).",
            expected="another handle, a module, a bundle, a mapping of arrays by name, or the path "
            "of a run, a record or a bundle",
        )
    return GivenWeights(arrays=named_leaves(dict(weights)), display=f"given as {kind}")


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether an installed backend knows what lies there as one of its artifacts."""
    return backend_of(Path(path)) is not None


def _read_path(path: str | os.PathLike[str], run_dir: Path | None) -> GivenWeights:
    backend = backend_of(Path(path))
    if backend is None:
        record = open_record(path, run_dir=run_dir)
        arrays = {**record.read_all("params"), **record.read_all("model_state")}
        return GivenWeights(arrays=arrays, display=f"taken from {record.path}")
    artifact = backend.load(Path(path))
    if not isinstance(artifact, WeightHolder):
        raise ConfigError(
            f"`{path}` is an artifact of the backend `{backend.name}`, whose weights cannot be read.",
            expected="a bundle, or a run's directory",
            fix="take the weights of the run that it was exported from",
        )
    return GivenWeights(arrays=dict(artifact.weights), display=f"taken from {path}")


def anchor_weights(w0: Any, *, built: Flat, started: Flat, has_source: bool) -> Flat:
    """The weights that a decay toward `"init"` means.

    Args:
        w0: `"build_model"`, `"weights"`, or what `read_weights` takes.
        built: The weights as `build_model` made them.
        started: The weights that training starts from.
        has_source: Whether those come from somewhere else.

    Raises:
        ConfigError: Another value, `"weights"` without any, or arrays that do not fit.
    """
    if isinstance(w0, str) and w0 == "build_model":
        return built
    if isinstance(w0, str) and w0 == "weights":
        if not has_source:
            raise ConfigError(
                '`w0="weights"`, but the handle takes its weights from `build_model`.',
                fix="pass `weights=` or `checkpoint=`, or leave `w0` out",
            )
        return started
    if isinstance(w0, str) or w0 is None:
        raise ConfigError(
            f"`w0` is {w0!r}.", expected='"build_model", "weights", or a tree of arrays by name'
        )
    return read_weights(w0).fitted(started, {})[0]


def _renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    """The name in the model of each name in the source.

    Raises:
        ConfigError: A key that no name begins with, or two names that become one.
    """
    used: set[str] = set()
    renamed = {name: _new_name(name, rename, used) for name in names}
    unused = [key for key in rename if key not in used]
    if unused:
        raise ConfigError(
            f'`rename` of `nitro.Weights` has the key "{unused[0]}", which no name of the source '
            "begins with.",
            expected=did_you_mean(unused[0], _beginnings(renamed)),
            fix="write a name of the source, or the beginning of one up to a dot",
        )
    by_new: dict[str, str] = {}
    for old, new in renamed.items():
        if new in by_new:
            raise ConfigError(
                f"`rename` of `nitro.Weights` makes `{by_new[new]}` and `{old}` both `{new}`.",
                expected="a name of its own for each array",
                fix="rename one of them to something else",
            )
        by_new[new] = old
    return renamed


def _new_name(name: str, rename: Mapping[str, str], used: set[str]) -> str:
    parts = name.split(".")
    for length in range(len(parts), -1, -1):
        start = ".".join(parts[:length])
        if start in rename:
            used.add(start)
            return ".".join(filter(None, [rename[start], *parts[length:]]))
    return name


def _beginnings(names: Iterable[str]) -> list[str]:
    split = [name.split(".") for name in names]
    starts = {".".join(parts[:length]) for parts in split for length in range(1, len(parts) + 1)}
    return sorted(starts)


def _joined(given: Flat, model: Flat) -> Flat:
    """The same, with the halves that an export makes of a complex weight put together."""
    halves = {
        name: (f"{name}.real", f"{name}.imag")
        for name, leaf in model.items()
        if name not in given and not is_rng_key(leaf) and np.dtype(leaf.dtype).kind == "c"
    }
    whole = {
        name: np.asarray(given[real]) + 1j * np.asarray(given[imag])
        for name, (real, imag) in halves.items()
        if real in given and imag in given
    }
    gone = {half for name in whole for half in halves[name]}
    return {**{name: array for name, array in given.items() if name not in gone}, **whole}


def _some(names: Sequence[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"`{name}`" for name in names[:limit]) + more


def _words(flat: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe_array(_arraylike(leaf)) for name, leaf in flat.items()}


def _arraylike(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _converted(value: Any, like: Any) -> Any:
    # Copies, by way of the host: the step program overwrites its state, the source keeps its
    # own, and what is spread over a mesh or on another device comes to where the model is.
    home = like.sharding if isinstance(like, jax.Array) else None
    if is_rng_key(like):
        data = jax.random.key_data(value) if is_rng_key(_arraylike(value)) else value
        placed = jax.device_put(np.array(data), home)
        return jax.random.wrap_key_data(placed, impl=rng_key_impl(like))
    return jax.device_put(np.array(value).astype(like.dtype), home)
