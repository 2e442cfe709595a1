"""Records on Orbax: written in the background, retained by a policy, read by item."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from nitro._state import TrainState
from nitro._trees import Flat, describe_array, named_leaves
from nitro.errors import CheckpointError

from ._index import FORMAT_VERSION, RecordEntry, read_index, write_index
from ._policy import TopK


class RecordWriter:
    """Writes the records of one run; a save returns while Orbax writes.

    Args:
        directory: Where the records go.
        policy: Which of them stay.
    """

    def __init__(self, directory: Path, policy: TopK) -> None:
        self.directory = directory.absolute()
        self.policy = policy
        # From the system's entropy: two runs with one seed are still two runs.
        self._run = secrets.token_hex(4)
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._pending: RecordEntry | None = None

    def save(
        self,
        state: TrainState,
        *,
        step: int,
        epoch: int,
        metrics: Mapping[str, float] | None,
        meta: Mapping[str, Any],
    ) -> None:
        """Starts writing a record; waits for the one before it.

        Args:
            state: What to save; may be donated as soon as the call returns.
            step: Finished optimizer steps.
            epoch: Finished epochs.
            metrics: The validation's scalars; None without a validation.
            meta: JSON values that are kept with the record.

        Raises:
            CheckpointError: The ranking metric was not emitted.
        """
        score = None if metrics is None else self.policy.score(metrics)
        self.wait()
        entry = RecordEntry(
            name=self._free_name(f"epoch{epoch:04d}-step{step:08d}"),
            run=self._run,
            step=step,
            epoch=epoch,
            metric=None if score is None else self.policy.metric,
            mode=None if score is None else self.policy.mode,
            score=score,
        )
        items = {name: flat for name, flat in flat_items(state).items() if flat}
        arguments: dict[str, Any] = {n: ocp.args.StandardSave(v) for n, v in items.items()}
        arguments["meta"] = ocp.args.JsonSave(
            {
                "format_version": FORMAT_VERSION,
                "step": step,
                "epoch": epoch,
                "leaves": {name: _described(flat) for name, flat in items.items()},
                **meta,
            }
        )
        self._orbax().save(self.directory / entry.name, args=ocp.args.Composite(**arguments))
        self._pending = entry

    def wait(self) -> None:
        """Waits until the last record is on disk, lists it, and drops what is not kept.

        Records of other runs in the directory stay as they are.
        """
        if self._pending is None:
            return
        entry, self._pending = self._pending, None
        self._orbax().wait_until_finished()
        entries = [*read_index(self.directory), entry]
        own = [e for e in entries if e.run == self._run]
        dropped = [e for e in own if e not in self.policy.kept(own)]
        # Listed before anything is deleted: a kill in between leaves a stray directory,
        # never an entry without its record.
        write_index(self.directory, [e for e in entries if e not in dropped])
        for old in dropped:
            shutil.rmtree(self.directory / old.name, ignore_errors=True)

    def close(self) -> None:
        """Waits for the last record and ends Orbax's threads."""
        self.wait()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def _free_name(self, name: str) -> str:
        """The name, or with this run's id where another run's record has it."""
        return f"{name}-{self._run}" if (self.directory / name).exists() else name

    def _orbax(self) -> ocp.AsyncCheckpointer:
        if self._checkpointer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        return self._checkpointer


def flat_items(state: TrainState) -> dict[str, Flat]:
    """A state as one flat mapping of arrays for each item; RNG keys as their data."""
    return {
        "params": _savable(state.params),
        "model_state": _savable(state.model_state),
        "opt_state": _savable(named_leaves(state.opt_state)),
    }


def find_record(source: str | Path) -> Path:
    """The directory of the record that a user named.

    Args:
        source: A record's directory; or a run's directory, which means its best record,
            or with `@best` or `@latest` behind it. Of several runs in one directory, the
            last one counts.

    Raises:
        CheckpointError: No such record; says what is there.
    """
    text, _, which = str(source).rpartition("@")
    if which not in ("best", "latest"):
        text, which = str(source), ""
    path = Path(text).absolute()
    if not which and (path / "meta").is_dir():
        return path
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    entries = read_index(directory)
    if not entries:
        raise CheckpointError(
            f"`{source}` holds no record.",
            expected='a run directory, "<run directory>@best" or "@latest", or a record\'s directory',
            fix=f"look into `{directory}`"
            if directory.exists()
            else f"`{path}` does not exist: check the path",
        )
    return directory / _chosen(entries, which, source).name


def _chosen(entries: list[RecordEntry], which: str, source: object) -> RecordEntry:
    newest = entries[-1]
    scored = [e for e in entries if e.score is not None and e.run == newest.run]
    if which == "latest" or (not which and not scored):
        return newest
    if not scored:
        raise CheckpointError(
            f"`{source}` has no scored record: its run had no validation split.",
            fix=f"use `{str(source).removesuffix('@best')}@latest`",
        )
    last = scored[-1]
    mode = "max" if last.mode == "max" else "min"
    return TopK(k=1, metric=last.metric or "", mode=mode).best(scored)[0]


@dataclass(frozen=True)
class Record:
    """One record on disk, its metadata read and checked.

    Attributes:
        path: The record's directory.
        meta: Its JSON values: step, epoch, config, the layout of its leaves, and so on.
    """

    path: Path
    meta: Mapping[str, Any]

    def read(self, item: str, template: Mapping[str, Any]) -> Flat:
        """One item, with the names, shapes and dtypes of a template.

        Raises:
            CheckpointError: The record holds other leaves; names each with both shapes.
        """
        self._check_leaves(item, template)
        if not template:
            return {}
        abstract = {
            key: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
            for key, a in _savable(template).items()
        }
        restored = _restore(self.path, **{item: ocp.args.StandardRestore(abstract)})[item]
        return {key: _as_in_template(restored[key], template[key]) for key in template}

    def _check_leaves(self, item: str, template: Mapping[str, Any]) -> None:
        saved = self.meta["leaves"].get(item, {})
        wanted = _described(_savable(template))
        lines = [f"the record lacks `{name}`" for name in wanted.keys() - saved.keys()]
        lines += [f"the model lacks `{name}`" for name in saved.keys() - wanted.keys()]
        lines += [
            f"`{name}` is {saved[name]} in the record and {wanted[name]} in the model"
            for name in wanted.keys() & saved.keys()
            if saved[name] != wanted[name]
        ]
        if lines:
            raise CheckpointError(
                f"The record `{self.path}` does not fit the model's {item}: "
                + "; ".join(sorted(lines)[:6]),
                expected="a record of a model with the same structure",
                fix="give the experiment the field values that the record was trained with",
            )


def open_record(source: str | Path) -> Record:
    """The record that a user named; see `find_record`.

    Raises:
        CheckpointError: No such record, not one of ours, or of another format version.
    """
    path = find_record(source)
    try:
        meta: dict[str, Any] = dict(_restore(path, meta=ocp.args.JsonRestore())["meta"])
    except (FileNotFoundError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"`{path}` is no record that can be read: {error}.",
            expected="a directory that a Nitro run wrote",
        ) from error
    if meta.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"The record `{path}` has format version {meta.get('format_version')}.",
            expected=f"version {FORMAT_VERSION}, which this Nitro reads",
        )
    return Record(path, meta)


def _restore(path: Path, **items: Any) -> Any:
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.Composite(**items))


def _described(flat: Mapping[str, Any]) -> dict[str, str]:
    return {name: describe_array(array) for name, array in flat.items()}


def _is_key(value: Any) -> bool:
    return jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _savable(flat: Mapping[str, Any]) -> Flat:
    return {n: jax.random.key_data(v) if _is_key(v) else v for n, v in flat.items()}


def _as_in_template(value: Any, like: Any) -> Any:
    if not _is_key(like):
        return value
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like))
