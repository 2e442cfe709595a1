"""One record on disk: its metadata, and its arrays item by item."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nitro._paths import local_path
from nitro._trees import Flat
from nitro.errors import CheckpointError

from ._arrays import described, placed, restore_args, savable, without_empty
from ._find import Which, find_record, records_dir
from ._index import RecordEntry, entry_from, read_index, read_meta

_MAX_LINES = 6


@dataclass(frozen=True)
class Record:
    """One record on disk, its metadata read and checked.

    Attributes:
        path: The record's directory.
        meta: Its JSON values: step, epoch, config, the layout of its leaves, and so on.
    """

    path: Path
    meta: Mapping[str, Any]

    @property
    def entry(self) -> RecordEntry:
        """What the index says of it, from its own metadata."""
        return entry_from({**self.meta["entry"], "name": self.path.name})

    def holds(self, item: str) -> bool:
        """Whether it has arrays of this name."""
        return bool(self.meta["leaves"].get(item))

    def read(
        self,
        item: str,
        template: Mapping[str, Any],
        *,
        converts: bool = False,
        is_part: bool = False,
    ) -> Flat:
        """One item, with the names, shapes, dtypes and shardings of a template.

        Args:
            item: The name of the item.
            template: Arrays by name.
            converts: Whether a floating dtype may become another one.
            is_part: Whether the record may hold more leaves than the template.

        Raises:
            CheckpointError: The record holds other leaves, and says which; or its files are
                damaged.
        """
        saved = self.meta["leaves"].get(item, {})
        if is_part:
            saved = {name: saved[name] for name in template if name in saved}
        self._check_leaves(item, saved, template, converts=converts)
        stored = without_empty({item: savable(template)}).get(item, {})
        arrays = self._arrays(item, stored)
        arrays |= {n: np.zeros(a.shape, a.dtype) for n, a in template.items() if not a.size}
        return {name: placed(arrays[name], template[name]) for name in template}

    def read_all(self, item: str) -> Flat:
        """One item as it is: NumPy arrays, random keys as their data.

        Raises:
            CheckpointError: Its files are damaged.
        """
        words = self.meta["leaves"].get(item, {})
        # Orbax stores no array without elements.
        empty = [name for name, text in words.items() if 0 in _shape_in(text)]
        arrays = self._arrays(item, {n: text for n, text in words.items() if n not in empty})
        arrays |= {n: np.zeros(_shape_in(words[n]), words[n].partition("(")[0]) for n in empty}
        return {name: arrays[name] for name in words}

    def _arrays(self, item: str, wanted: Mapping[str, Any]) -> dict[str, np.ndarray]:
        if not wanted:
            return {}
        import orbax.checkpoint as ocp  # a handle that restores nothing does without it

        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                arguments = ocp.args.Composite(arrays=restore_args(item, wanted))
                arrays = checkpointer.restore(self.path, args=arguments)["arrays"][item]
            return {name: np.asarray(arrays[name]) for name in wanted}
        # Orbax and TensorStore tell damaged files by many types of exception.
        except Exception as error:
            raise CheckpointError(
                f"The record `{self.path}` is damaged: its item `{item}` cannot be read: "
                f"{str(error).partition(chr(10))[0][:300]}",
                expected="all the files that Nitro wrote, as it wrote them",
                fix=f"use another record: {_others(self.path)}",
            ) from error

    def _check_leaves(
        self,
        item: str,
        saved: Mapping[str, str],
        template: Mapping[str, Any],
        *,
        converts: bool,
    ) -> None:
        lines = leaf_differences(saved, described(savable(template)), converts=converts)
        if lines:
            raise CheckpointError(
                f"The record `{self.path}` does not fit {_OWNER_OF.get(item, 'the model')}:\n"
                + listed(lines),
                expected="a record of the same structure",
                fix=_FIX_OF.get(item, _FIX) + self._way_in_part(item, lines),
            )

    def _way_in_part(self, item: str, lines: Sequence[str]) -> str:
        """The call that takes what fits of the weights, and leaves out what these lines name."""
        if item not in ("params", "model_state"):
            return ""
        # A line begins with the name in backquotes; what the record lacks need not be skipped.
        names = [line.split("`")[1] for line in lines if "`: not in the record" not in line]
        skip = f"skip=({', '.join(map(repr, names))},), " if names else ""
        return f'; or take what fits: `weights=nitro.Weights("{self.path}", {skip}missing="init")`'


_OWNER_OF = {
    "params": "the model's parameters",
    "model_state": "the model's state",
    "opt_state": "the optimizer's state",
}
_FIX = "give the experiment the field values and the model that the record was trained with"
_FIX_OF = {
    "opt_state": "use the record's optimizer, or start from the weights alone with a fresh one: "
    "`Nitro(..., checkpoint=...)`"
}


def open_record(
    source: str | os.PathLike[str], *, default: Which = "best", run_dir: Path | None = None
) -> Record:
    """The record that a user named; see `find_record`.

    Raises:
        CheckpointError: No such record, not one of ours, or of another format version.
    """
    path = find_record(source, default=default, run_dir=run_dir)
    return Record(path, read_meta(path))


def checkpoints(directory: str | Path) -> list[RecordEntry]:
    """Lists the records in a directory, oldest first, without opening one.

    Args:
        directory: A run's directory, or its `checkpoints`.

    Returns:
        One entry for each record, which `Nitro(checkpoint=...)` and `Nitro(resume=...)` take
        as it is; none for a directory without records.

    Raises:
        CheckpointError: The index is damaged, or of another format version.
    """
    place = records_dir(local_path(directory, name="directory")).absolute()
    return [dataclasses.replace(e, path=place / e.name) for e in read_index(place)]


def checkpoint_info(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Everything that a record says of itself, without reading its arrays.

    Args:
        source: A record, as `Nitro(checkpoint=...)` names one.

    Returns:
        JSON values by name. Among them: `entry` (what `checkpoints` lists of it), `config`
        and `seed`, `step`, `epoch` and `steps_in_epoch`, `metrics` and `history`,
        `versions`, and `leaves`, the dtype and shape of each array by item and name.

    Raises:
        CheckpointError: No such record, or one that cannot be read.
    """
    return dict(open_record(source).meta)


def leaf_differences(
    saved: Mapping[str, str],
    wanted: Mapping[str, str],
    *,
    converts: bool = False,
    found: str = "in the record",
    now: str = "now",
    gone: str = "gone now",
) -> list[str]:
    """How two descriptions of leaves by name differ, a line each; empty where they agree.

    Args:
        saved: The leaves that there are, in words.
        wanted: The leaves that are needed, in words.
        converts: Whether another float dtype is no difference.
        found: Where `saved` is, for the lines.
        now: Where `wanted` is.
        gone: What is said of a leaf that nobody needs.
    """
    changed = [
        f"`{name}`: {saved[name]} {found}, {wanted[name]} {now}"
        for name in wanted.keys() & saved.keys()
        if saved[name] != wanted[name]
        and not (converts and _float_shape(saved[name]) == _float_shape(wanted[name]) is not None)
    ]
    unknown = [f"`{name}`: {saved[name]} {found}, {gone}" for name in saved.keys() - wanted]
    missing = [f"`{name}`: not {found}, {wanted[name]} {now}" for name in wanted.keys() - saved]
    # Of a long list only the head is shown, and what is missing is often just the rest.
    return [*sorted(changed), *sorted(unknown), *sorted(missing)]


def listed(lines: list[str]) -> str:
    """Differences below each other, the first few."""
    more = len(lines) - _MAX_LINES
    shown = lines[:_MAX_LINES] + ([f"and {more} more"] if more > 0 else [])
    return "\n".join(f"    {line}" for line in shown)


def _shape_in(leaf: str) -> tuple[int, ...]:
    """The shape in the words for an array, such as `float32(4, 1)`."""
    return tuple(
        int(size) for size in leaf.partition("(")[2].strip("),").split(",") if size.strip()
    )


def _float_shape(leaf: str) -> str | None:
    """The shape in the words for an array of a floating dtype, None for another dtype."""
    dtype, _, shape = leaf.partition("(")
    return shape if "float" in dtype else None


def _others(path: Path) -> str:
    try:
        names = [entry.name for entry in read_index(path.parent) if entry.name != path.name]
    except CheckpointError:
        names = []
    return ", ".join(f"`{path.parent / name}`" for name in names[-3:]) or "there is none beside it"
