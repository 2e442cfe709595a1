"""How far an artifact's outputs may be from the model's, and how far they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._spec import ExportSpec

RTOL = 1e-5
_EPSILONS = 8


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one output was from what `predict` gave.

    Attributes:
        max_abs: The largest difference of two elements.
        max_rel: The same, as a part of the largest element.
    """

    max_abs: float
    max_rel: float


def tolerance_for(specs: Iterable[ExportSpec], weights: Mapping[str, Any]) -> float:
    """How far outputs may move, relative to the largest: by the coarsest dtype involved.

    XLA sums in another order for another batch size or machine, and rounds each time.
    """
    dtypes = {spec.numpy_dtype for spec in specs}
    dtypes |= {np.dtype(weight.dtype) for weight in weights.values()}
    epsilons = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    # What is stored in 8 bits is computed with in more.
    coarsest = min(max(epsilons, default=0.0), float(jnp.finfo(jnp.bfloat16).eps))
    return max(RTOL, _EPSILONS * coarsest)


def measure(got: np.ndarray, wanted: np.ndarray) -> Difference:
    """The difference of two arrays of one shape; elements that are not finite count as equal."""
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    furthest = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    largest = float(np.abs(b[finite]).max(initial=0.0))
    return Difference(max_abs=furthest, max_rel=furthest / largest if largest else furthest)


def describe_difference(got: np.ndarray | None, wanted: np.ndarray, rtol: float) -> str:
    """What is wrong with an output, as a clause; empty where nothing is.

    Integers and booleans must be equal. Floats may differ by `rtol` times one more than the
    largest element.
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
