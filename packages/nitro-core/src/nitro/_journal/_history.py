"""What a run has been through: one row per finished epoch."""

from __future__ import annotations

import csv
import importlib
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from nitro._paths import local_path
from nitro.errors import ConfigError, MissingPackageError, did_you_mean

from ._tables import Table, text_width

HISTORY_KEYS = ("epoch", "step", "loss")
"""What every row holds: the counts, and the mean train loss."""

_HTML_ROWS = 40
_HTML_WIDTH = 200
_FEWEST_ROWS = 8


class History:
    """The finished epochs: epoch, step, mean train loss, and the validation's metrics.

    - `history[3]` is epoch 3 as a dict, `history[-1]` the last one;
    - `history[3:7]` holds the epochs 3 to 6, `history[-5:]` the last five;
    - `history["acc"]` and `history.acc` are a column as a list;
    - `history[["loss", "acc"]]` holds these columns only;
    - `history.best` is the best epoch by the metric that ranks records.

    It prints as a table that fits the terminal, with the best row starred.

    Args:
        rows: One mapping per epoch.
        metric: The metric that says which epoch is best.
        mode: Whether `"min"` or `"max"` of it is best.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]] = (),
        *,
        metric: str | None = None,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self.rows = [dict(row) for row in rows]
        self.metric = metric
        self.mode: Literal["min", "max"] = mode

    @property
    def columns(self) -> list[str]:
        """The scalar columns: epoch, step, loss, the ranking metric, then by appearance."""
        first = [*HISTORY_KEYS, *([self.metric] if self.metric else [])]
        names = {name: None for row in self.rows for name in row}
        if not names:
            return list(HISTORY_KEYS)
        ordered = [name for name in first if name in names]
        ordered += [name for name in names if name not in ordered]
        arrays = self.arrays
        return [name for name in ordered if name not in arrays]

    @property
    def arrays(self) -> dict[str, tuple[int, ...]]:
        """The shapes of what is no scalar: kept, read by name, but not tabulated."""
        return {
            name: tuple(value.shape)
            for row in self.rows
            for name, value in row.items()
            if getattr(value, "shape", ())
        }

    @property
    def best(self) -> dict[str, Any]:
        """The best row by the ranking metric, the older one of equals.

        Raises:
            ConfigError: No epoch has been scored; see `has_best`.
        """
        index = self._best_index()
        if index is None:
            raise self._no_best()
        return self.rows[index]

    @property
    def has_best(self) -> bool:
        """Whether an epoch has been scored: whether it has a finite value of the metric."""
        return self._best_index() is not None

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a finished epoch, in place of what is there of it already."""
        if self.rows and self.rows[-1]["epoch"] == row["epoch"]:
            self.rows.pop()
        self.rows.append(dict(row))

    def scalar_rows(self, start: int = 0) -> list[dict[str, Any]]:
        """The rows from an index on, without what is no scalar, as JSON can hold them."""
        new = self.rows[start:]
        columns = self.columns if new else []
        return [{n: _finite(row[n]) for n in columns if n in row} for row in new]

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns by name; None where an epoch lacks a value."""
        return {name: [row.get(name) for row in self.rows] for name in self.columns}

    def to_csv(self, path: str | Path) -> Path:
        """Writes the columns to a file, empty where an epoch lacks a value.

        Args:
            path: The file; its directory is made.

        Returns:
            The path.
        """
        path = local_path(path, name="path")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)
        return path

    def to_pandas(self) -> Any:
        """The columns as a `pandas.DataFrame`, indexed by epoch.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise MissingPackageError(
                "`history.to_pandas` needs pandas, which is not installed.",
                fix="pip install pandas; or use `history.to_dict()` or `history.to_csv(path)`",
            ) from error
        return pandas.DataFrame(self.to_dict()).set_index("epoch")

    def table(self, *, width: int, height: int) -> Table:
        """The rows as text, thinned to fit.

        Args:
            width: The characters of a line; columns that do not fit are left out.
            height: How many rows to show, gaps included; at least 8.
        """
        columns = self.columns
        best = self._best_index()
        shown = _thinned(len(self.rows), best, max(height, _FEWEST_ROWS))
        rows = [self._cells(index, columns, best) for index in shown]
        cut = _columns_that_fit(columns, rows, width)
        notes = list(self._notes(columns[cut:], num_shown=sum(i is not None for i in shown)))
        if best is not None and best in shown:
            notes.insert(0, f"* best by {self.metric} ({self.mode})")
        return Table(
            columns=tuple(columns[:cut]),
            rows=tuple(row[:cut] for row in rows),
            notes=tuple(notes),
        )

    def _cells(
        self, index: int | None, columns: Sequence[str], best: int | None
    ) -> tuple[str, ...]:
        if index is None:
            return ("...", *[""] * (len(columns) - 1))
        epoch, *rest = (_shown(self.rows[index].get(name)) for name in columns)
        return (f"{epoch}{' *' if index == best else ''}", *rest)

    def _notes(self, left_out: Sequence[str], *, num_shown: int) -> Iterator[str]:
        if num_shown < len(self.rows):
            yield f"{num_shown} of {len(self.rows)} epochs; a range shows others: history[a:b]"
        if left_out:
            yield f"not shown: {', '.join(left_out)}; select with history[[{left_out[0]!r}]]"
        for name, shape in self.arrays.items():
            yield f"not tabulated: {name} {shape}; read history[{name!r}]"

    def _no_best(self) -> ConfigError:
        if not self.rows:
            problem = "There is no best epoch: no epoch has finished."
        elif self.metric is None:
            problem = "There is no best epoch: this history has no metric to rank by."
        else:
            problem = (
                f"There is no best epoch: none of {len(self.rows)} has a finite `{self.metric}`."
            )
        return ConfigError(
            problem,
            expected=f"a finished epoch that was scored by `{self.metric or 'a metric'}`",
            fix="ask `history.has_best` first; `history[-1]` is the last finished epoch",
        )

    def _best_index(self) -> int | None:
        scored = [
            (row[self.metric], index)
            for index, row in enumerate(self.rows)
            if self.metric and isinstance(row.get(self.metric), int | float)
        ]
        scored = [(value, index) for value, index in scored if math.isfinite(value)]
        if not scored:
            return None
        sign = 1 if self.mode == "min" else -1
        return min(scored, key=lambda pair: (sign * pair[0], pair[1]))[1]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, key: str) -> list[Any]: ...

    @overload
    def __getitem__(self, key: slice | range | list[str] | tuple[str, ...]) -> History: ...

    def __getitem__(self, key: Any) -> Any:
        """A row by epoch (from 1, or -1 for the last), epochs by range, columns by name.

        Raises:
            ConfigError: No such epoch or column; says what there is.
        """
        if isinstance(key, str):
            return self._column(key)
        if isinstance(key, slice | range):
            return self._of(row for row in self.rows if row["epoch"] in self._epochs(key))
        if isinstance(key, list | tuple):
            names = dict.fromkeys(["epoch", *(self._checked_name(name) for name in key)])
            return self._of({n: row[n] for n in names if n in row} for row in self.rows)
        return self._row(key)

    def __getattr__(self, name: str) -> list[Any]:
        # Dunder look-ups (copying, pickling, display) must fail as Python expects.
        if not name.startswith("_") and "rows" in vars(self) and name in self._names():
            return self._column(name)
        names = () if name.startswith("_") else self._names()
        raise AttributeError(f"the history has no column `{name}`: {did_you_mean(name, names)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in self._names() if name.isidentifier())]

    def __repr__(self) -> str:
        size = shutil.get_terminal_size()
        return self.table(width=size.columns, height=size.lines - 4).to_text()

    def _repr_html_(self) -> str:
        return self.table(width=_HTML_WIDTH, height=_HTML_ROWS).to_html()

    def _of(self, rows: Iterable[Mapping[str, Any]]) -> History:
        return History(rows, metric=self.metric, mode=self.mode)

    def _names(self) -> list[str]:
        return [*self.columns, *self.arrays]

    def _checked_name(self, name: str) -> str:
        if name not in self._names():
            raise ConfigError(
                f"The history has no column `{name}`.", expected=did_you_mean(name, self._names())
            )
        return name

    def _column(self, name: str) -> list[Any]:
        self._checked_name(name)
        return [row.get(name) for row in self.rows]

    def _row(self, epoch: Any) -> dict[str, Any]:
        if isinstance(epoch, int) and -len(self.rows) <= epoch < 0:
            return self.rows[epoch]
        for row in self.rows:
            if row["epoch"] == epoch:
                return row
        held = (
            f"epochs {self.rows[0]['epoch']} to {self.rows[-1]['epoch']}" if self.rows else "none"
        )
        raise ConfigError(f"The history has no epoch {epoch}.", expected=f"what it holds: {held}")

    def _epochs(self, key: slice | range) -> range:
        if isinstance(key, range):
            return key
        after = self.rows[-1]["epoch"] + 1 if self.rows else 1

        def bound(value: int | None, otherwise: int) -> int:
            if value is None:
                return otherwise
            return max(0, after + value) if value < 0 else value

        return range(bound(key.start, 0), bound(key.stop, after), key.step or 1)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _thinned(num_rows: int, best: int | None, height: int) -> list[int | None]:
    """Which rows to show: those around the first, the best and the last; None for a gap."""
    if num_rows <= height:
        return list(range(num_rows))
    anchors = {0, num_rows - 1} | ({best} if best is not None else set())
    kept = sorted(anchors)
    for distance in range(1, num_rows):
        near = {a + d for a in anchors for d in (-distance, distance)}
        wider = sorted({*kept, *(index for index in near if 0 <= index < num_rows)})
        if len(_with_gaps(wider)) > height:
            break
        kept = wider
    return _with_gaps(kept)


def _with_gaps(rows: Sequence[int]) -> list[int | None]:
    shown: list[int | None] = []
    for index in rows:
        if shown and shown[-1] is not None and index > shown[-1] + 1:
            shown.append(None)
        shown.append(index)
    return shown


def _columns_that_fit(columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int) -> int:
    """How many columns fit a line; at least one."""
    widths = Table(columns=tuple(columns), rows=tuple(rows)).widths()
    fitting = (n for n in range(len(columns), 1, -1) if text_width(widths[:n]) <= width)
    return next(fitting, 1)
