"""Which random state the outputs of a trace depend on, and where in the user's code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.interpreters import partial_eval

from nitro._code import user_lines
from nitro._trees import Flat


def find_draws(fn: Callable[..., Any], rngs: Flat, *arguments: Any) -> tuple[list[str], str]:
    """The random variables that the outputs of `fn(rngs, *arguments)` depend on, and a line.

    Args:
        fn: A pure function.
        rngs: Random keys and counters by name.
        arguments: Trees of arrays, or of shapes and dtypes.

    Returns:
        The names, none where nothing is drawn; and ` (file.py:12)`, the line that draws last,
        or "".
    """
    jaxpr = jax.make_jaxpr(fn)(rngs, *arguments).jaxpr
    _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    drawn = [name for name, used in zip(sorted(rngs), is_used, strict=False) if used]
    return drawn, where_drawn(jaxpr, sorted(rngs), drawn)


def where_drawn(jaxpr: Any, names: Sequence[str], drawn: Collection[str]) -> str:
    """The user's line of the last equation that random state reaches directly or by a key.

    Args:
        jaxpr: A trace whose first inputs are random state.
        names: The names of these inputs.
        drawn: Those that count.
    """
    inputs = dict(zip(names, jaxpr.invars, strict=False))
    reached, found = {inputs[name] for name in drawn}, ""
    for equation in jaxpr.eqns:
        if not {atom for atom in equation.invars if isinstance(atom, Var)} & reached:
            continue
        if not all(_is_random(v) for v in equation.outvars):
            line = next(user_lines(equation), None)
            return f" ({line})" if line is not None else found
        reached |= set(equation.outvars)
    return found


def _is_random(variable: Any) -> bool:
    """Whether a variable is a key, or the integers that keys and counters are made of."""
    dtype = variable.aval.dtype
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return is_key or (jnp.issubdtype(dtype, jnp.integer) and variable.aval.size <= 4)
