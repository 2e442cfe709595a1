"""How far an artifact's outputs may be from the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ._spec import ExportSpec

RTOL = 1e-5
_EPSILONS = 8


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
