"""The loss of a split, from the losses of its batches."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nitro._programs import LossTerm
from nitro.errors import HookError

from ._odd_values import odd_fields


class LossFold:
    """Adds up batches, so that the loss of a split does not depend on how it is cut.

    A mean counts as often as its batch has rows; a sum is divided by all the counts.

    Args:
        where: The hook and the split, for messages.
        is_part: Whether counts may add up to 0, as only a part of the split is folded.
    """

    def __init__(self, *, where: str, is_part: bool = False) -> None:
        self._where = where
        self._is_part = is_part
        self._total = 0.0
        self._count = 0.0
        self._pending: tuple[LossTerm, int, Any, str] | None = None
        self._odd: dict[str, str] = {}

    def add(self, term: LossTerm, rows: int, *, fields: Any, where: str) -> None:
        """Adds the loss of a batch of so many rows.

        Args:
            term: The loss.
            rows: How many rows it is over.
            fields: What the model and the loss read, to be looked at where it is not finite.
            where: The batch, for messages.
        """
        # Read one batch late, so that the device need not wait for the host.
        self._fold()
        self._pending = term, rows, fields, where

    def odd(self) -> dict[str, str]:
        """What is not finite in the batches whose loss is not, by batch."""
        self._fold()
        return self._odd

    def result(self) -> float:
        """The loss over all rows, added up in float64.

        Raises:
            HookError: The counts add up to 0.
        """
        self._fold()
        if self._count == 0 and self._is_part:
            return float("nan")
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
        term, rows, fields, where = self._pending
        self._pending = None
        total, count = jax.device_get(term)
        total = float(np.asarray(total, np.float64))
        self._total += total * rows if count is None else total
        self._count += rows if count is None else float(count)
        odd = "" if np.isfinite(total) else odd_fields(fields)
        if odd:
            self._odd[where] = odd
