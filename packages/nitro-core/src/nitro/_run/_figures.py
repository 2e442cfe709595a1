"""Hands the figures of a validation to whoever shows them, else into files."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nitro.errors import warn


def keep_figures(
    figures: Mapping[str, Any], *, logger: Any, run_dir: Path, split: str, step: int, epoch: int
) -> None:
    """Gives figures to the logger, or saves them below `run_dir/figures`; closes them.

    A figure that cannot be kept is a warning: the epoch has its metrics.
    """
    for name, figure in figures.items():
        try:
            show = getattr(logger, "figure", None)
            if show is None or not show(name, figure, context=split, step=step, epoch=epoch):
                _save(figure, run_dir / "figures" / f"{split}-{_plain(name)}-epoch{epoch:04d}.png")
        # Whatever a picture fails of, the run goes on.
        except Exception as error:  # noqa: BLE001
            warn(f"The figure `{name}` could not be kept: {type(error).__name__}: {error}")
        finally:
            close_figure(figure)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def close_figure(figure: Any) -> None:
    """Takes a figure from pyplot's list, where it would stay for good."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and isinstance(
        figure, importlib.import_module("matplotlib.figure").Figure
    ):
        pyplot.close(figure)
