"""Finds the record that a user named."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nitro._journal import find_runs
from nitro._paths import local_path
from nitro.errors import CheckpointError, did_you_mean

from ._index import META_FILE, RecordEntry, read_index
from ._policy import TopK

_MOST_LISTED = 8
Which = Literal["best", "latest"]

_FORMS = (
    'a run directory, with or without "#<run id>" and "@best" or "@latest" behind it; '
    "or a record's directory"
)


@dataclass(frozen=True)
class _Name:
    """A source taken apart: `<base>#<run>@<which>`, the last two of which may be missing."""

    text: str
    base: Path
    run: str | None
    which: Which | None


def find_record(
    source: str | os.PathLike[str], *, default: Which = "best", run_dir: Path | None = None
) -> Path:
    """The directory of the record that a user named.

    Args:
        source: A record's directory, or its entry; or a run's directory, with or without `#<run id>` and
            `@best` or `@latest` behind it. Of several runs in one directory, the one that
            wrote last counts. A run id alone is looked for in `run_dir`.
        default: Which record a run's directory alone means; where none has a score, "best"
            is the newest.
        run_dir: The directory of the handle that asks.

    Raises:
        CheckpointError: No such record; says what is there.
    """
    local_path(source, name="checkpoint")
    name = _taken_apart(os.fspath(source), run_dir)
    if name.which is None and name.run is None and (name.base / META_FILE).exists():
        return name.base
    directory = records_dir(name.base)
    entries = read_index(directory)
    if not entries:
        raise CheckpointError(
            f"`{name.text}` holds no record.", expected=_FORMS, fix=_where_to_look(name, run_dir)
        )
    own = _of_run(entries, name, directory)
    if name.which == "latest" or (name.which is None and default == "latest"):
        return directory / newest(own).name
    return directory / _best(own, name).name


def records_dir(path: Path) -> Path:
    """Where the records of a run directory are; the path itself where it holds them."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def newest(entries: Sequence[RecordEntry]) -> RecordEntry:
    """The record with the most steps; of several, the one that was written last."""
    return max(reversed(entries), key=lambda entry: entry.step)


def _taken_apart(text: str, run_dir: Path | None) -> _Name:
    base, _, which = text.rpartition("@")
    if which not in ("best", "latest") or Path(text).exists():
        base, which = text, None
    if Path(base).exists():
        return _Name(text, Path(base).absolute(), None, which)
    folder, mark, run = base.rpartition("#")
    if mark:
        return _Name(text, Path(folder or run_dir or ".").absolute(), run, which)
    if run_dir is not None and re.fullmatch("[0-9a-f]{8}", base):
        return _Name(text, run_dir.absolute(), base, which)
    return _Name(text, Path(base).absolute(), None, which)


def _where_to_look(name: _Name, run_dir: Path | None) -> str:
    if name.text in ("best", "latest", "@best", "@latest") and run_dir is not None:
        return f'write "{run_dir}@{name.text.removeprefix("@")}"'
    if not name.base.exists():
        return f"`{name.base}` does not exist: check the path"
    below = [str(path) for path in find_runs(name.base) if path != name.base]
    if below:
        shown = ", ".join(f"`{path}`" for path in below[:_MOST_LISTED])
        more = len(below) - _MOST_LISTED
        return f"name one of the runs in it: {shown}" + (f", and {more} more" if more > 0 else "")
    return f"train into it first: there is no run in `{name.base}`"


def _of_run(entries: list[RecordEntry], name: _Name, directory: Path) -> list[RecordEntry]:
    """The records of the run that is meant: the named one, else the one that wrote last."""
    run = entries[-1].run if name.run is None else name.run
    own = [entry for entry in entries if entry.run == run]
    if not own:
        raise CheckpointError(
            f"`{directory}` holds no run `{run}`.",
            expected=did_you_mean(run, {entry.run for entry in entries}),
            fix="`nitro.checkpoints(run_dir)` lists the records of all runs",
        )
    return own


def best_of(entries: Sequence[RecordEntry]) -> RecordEntry | None:
    """The best record of one run under the metric that ranked it last; None without a score."""
    scored = [entry for entry in entries if entry.score is not None]
    if not scored:
        return None
    last = scored[-1]
    mode = "max" if last.mode == "max" else "min"
    return TopK(k=1, metric=last.metric or "", mode=mode).best(scored)[0]


def _best(own: list[RecordEntry], name: _Name) -> RecordEntry:
    best = best_of(own)
    if best is not None:
        return best
    if name.which is None:
        return newest(own)
    raise CheckpointError(
        f"`{name.text}` has no scored record: its run had no validation.",
        fix=f"use `{name.text.removesuffix('@best')}@latest`",
    )
