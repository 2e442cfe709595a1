"""The loss of a split, from the losses of its batches."""

from __future__ import annotations

import jax
import numpy as np

from nitro._programs import LossTerm
from nitro.errors import HookError


class LossFold:
    """Adds up batches, so that the loss of a split does not depend on how it is cut.

    A mean counts as often as its batch has rows; a sum is divided by all the counts.
    """

    def __init__(self, *, where: str) -> None:
        self._where = where
        self._total = 0.0
        self._count = 0.0
        self._pending: tuple[LossTerm, int] | None = None

    def add(self, term: LossTerm, rows: int) -> None:
        """Adds the loss of a batch of so many rows."""
        # Read one batch late, so that the device need not wait for the host.
        self._fold()
        self._pending = term, rows

    def result(self) -> float:
        """The loss over all rows, added up in float64.

        Raises:
            HookError: The counts add up to 0.
        """
        self._fold()
        if self._count == 0:
            raise HookError(
                f"{self._where}: the counts that `loss` returned add up to 0.",
                expected="a count above 0 over the split",
                fix="leave the split out, or look at the mask or the weights that are counted",
            )
        return self._total / self._count

    def _fold(self) -> None:
        if self._pending is None:
            return
        term, rows = self._pending
        self._pending = None
        total, count = jax.device_get(term)
        total = float(np.asarray(total, np.float64))
        self._total += total * rows if count is None else total
        self._count += rows if count is None else float(count)
