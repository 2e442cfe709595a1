"""Draws a history: one panel for each curve."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nitro._paths import local_path
from nitro.errors import ConfigError, MissingPackageError

from ._history import History

_PANEL_INCHES = (4.0, 2.8)
_MOST_COLUMNS = 3


def plot_history(history: History, *, title: str, path: str | Path | None = None) -> Any:
    """Draws each scalar column against the epoch, with the best epoch marked.

    Args:
        history: What to draw.
        title: Stands above all.
        path: Where to save it; the suffix says the format. None saves nothing.

    Returns:
        A `matplotlib.figure.Figure`, which a notebook shows as a picture. It belongs to no
        window and needs no closing.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: No epoch has finished.
    """
    if not len(history):
        raise ConfigError(
            f"{title}: no epoch has finished, so there is nothing to draw.",
            fix="train for an epoch first",
        )
    names = [name for name in history.columns if name not in ("epoch", "step")]
    figure, panels = _make_panels(names, title)
    for name, axes in panels.items():
        _draw(axes, history, name)
    return _save(figure, path)


def plot_histories(
    histories: Mapping[str, History], *, title: str, path: str | Path | None = None
) -> Any:
    """Draws the scalar columns of several runs, a panel for each column, a curve for each run.

    Args:
        histories: What to draw, by the words for the legend.
        title: Stands above all.
        path: Where to save it; the suffix says the format. None saves nothing.

    Returns:
        A `matplotlib.figure.Figure`, as `plot_history` does.

    Raises:
        MissingPackageError: matplotlib is not installed.
        ConfigError: None of the runs has finished an epoch.
    """
    drawn = {label: history for label, history in histories.items() if len(history)}
    if not drawn:
        raise ConfigError(
            f"{', '.join(histories)}: no epoch has finished, so there is nothing to draw.",
            fix="train for an epoch first",
        )
    names = dict.fromkeys(name for history in drawn.values() for name in history.columns)
    figure, panels = _make_panels([n for n in names if n not in ("epoch", "step")], title)
    for name, axes in panels.items():
        for label, history in drawn.items():
            if name in history.columns:
                _draw_curve(axes, history, name, label=label)
        axes.legend(fontsize=7)
    return _save(figure, path)


def _make_panels(names: Sequence[str], title: str) -> tuple[Any, dict[str, Any]]:
    """A figure, and an empty panel for each name."""
    make_figure = _figure_class()
    num_columns = min(_MOST_COLUMNS, len(names))
    num_rows = math.ceil(len(names) / num_columns)
    size = (_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + 0.4)
    # Not through pyplot: no global state, no window, nothing to close.
    figure = make_figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    panels: dict[str, Any] = {}
    for index, name in enumerate(names):
        axes = panels[name] = figure.add_subplot(num_rows, num_columns, index + 1)
        axes.set_title("train loss" if name == "loss" else name, fontsize=10)
        axes.set_xlabel("epoch", fontsize=8)
        axes.grid(visible=True, alpha=0.3)
        axes.locator_params(axis="x", integer=True)
    return figure, panels


def _save(figure: Any, path: str | Path | None) -> Any:
    if path is not None:
        path = local_path(path, name="path")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return figure


def _figure_class() -> Any:
    """A figure that a notebook draws though no pyplot has told it how to."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingPackageError(
            "Plots need matplotlib, which is not installed.",
            fix='pip install "nitro-core[plot]"; or read the numbers: `run.history.to_csv(path)`',
        ) from error

    class HistoryFigure(figures.Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    return HistoryFigure


def _draw_curve(axes: Any, history: History, name: str, *, label: str | None = None) -> None:
    epochs = history["epoch"]
    values = [math.nan if value is None else value for value in history[name]]
    marker = "o" if len(epochs) < 30 else None
    axes.plot(epochs, values, marker=marker, markersize=3, label=label)


def _draw(axes: Any, history: History, name: str) -> None:
    """A run's curve, with its best epoch marked."""
    _draw_curve(axes, history, name)
    if not history.has_best:
        return
    best = history.best
    axes.axvline(best["epoch"], linestyle="--", linewidth=0.8, color="grey")
    if name in best and best[name] is not None:
        label = f"best epoch {best['epoch']}: {best[name]:.5g}"
        axes.plot([best["epoch"]], [best[name]], marker="*", markersize=10, label=label)
        axes.legend(fontsize=7)
