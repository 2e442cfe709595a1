"""How far an artifact's outputs are from the model's; imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one output was from what `predict` gave.

    Attributes:
        max_abs: The largest difference of two elements.
        max_rel: The same, as a part of the largest element.
    """

    max_abs: float
    max_rel: float


def measure(got: np.ndarray, wanted: np.ndarray) -> Difference:
    """The difference of two arrays of one shape; elements that are not finite count as equal."""
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    furthest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(np.abs(b[finite]).max(initial=0.0))
    return Difference(max_abs=furthest, max_rel=furthest / largest if largest else furthest)


def describe_difference(got: np.ndarray | None, wanted: np.ndarray, rtol: float) -> str:
    """What is wrong with an output, as a clause; empty where nothing is.

    Args:
        got: What an artifact gave, of any shape and dtype; None where it is missing.
        wanted: What `predict` gave. Integers and booleans must be equal; infinities and NaNs
            must be in the same places.
        rtol: How far floats may be, relative to one more than the largest finite element;
            `ExportProgram.rtol`.
    """
    if got is None:
        return "is missing"
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"is {got.dtype}{got.shape} instead of {wanted.dtype}{wanted.shape}"
    if wanted.dtype.kind in "biu":
        changed = int((got != wanted).sum())
        return f"differs in {changed} of {wanted.size} values" if changed else ""
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(np.isfinite(a), 0, a), np.where(finite, 0, b), equal_nan=True):
        return "has infinities or NaNs in other places"
    allowed = rtol * (1.0 + float(np.abs(b[finite]).max(initial=0.0)))
    furthest = measure(got, wanted).max_abs
    return f"differs by {furthest:.3g}, more than {allowed:.3g}" if furthest > allowed else ""
