"""What `loss` returns for a batch: a mean, or a sum with the count that divides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from nitro._metrics import traced_number
from nitro._trees import describe_array
from nitro.errors import HookError


class LossTerm(NamedTuple):
    """The loss of one batch, or of several that make one step; a pytree.

    Attributes:
        total: What `loss` returned, or its sum; an array of shape ().
        count: What divides the sum, float32 (); None for a loss that is a mean already.
    """

    total: jax.Array
    count: Any

    @property
    def value(self) -> jax.Array:
        """The loss. Over a count of 0 it is the sum, so that nothing becomes NaN."""
        if self.count is None:
            return self.total
        return self.total / _or_one(self.count)

    @property
    def value32(self) -> jax.Array:
        """The loss in float32."""
        return LossTerm(self.total.astype(jnp.float32), self.count).value


def joined(terms: Sequence[LossTerm]) -> LossTerm:
    """The loss of all micro-batches of a step: their mean, or their sums over their counts."""
    if len(terms) == 1:
        return terms[0]
    totals = jnp.stack([term.total.astype(jnp.float32) for term in terms])
    counts = [term.count for term in terms if term.count is not None]
    if not counts:
        return LossTerm(totals.mean(), None)
    return LossTerm(totals.sum(), jnp.stack(counts).sum())


def divided(grads: Any, terms: Sequence[LossTerm]) -> Any:
    """The gradient of a step, of the summed gradients of its micro-batches' totals."""
    count = joined(terms).count
    if count is None:
        return jax.tree.map(lambda total: total / len(terms), grads)
    # In float32: a count of thousands is no bfloat16 number.
    return jax.tree.map(lambda total: (total / _or_one(count)).astype(total.dtype), grads)


def _or_one(count: jax.Array) -> jax.Array:
    return jnp.where(count == 0, 1, count)


def read_loss(returned: Any, *, hook: str) -> LossTerm:
    """Reads what `loss` returned inside a trace.

    No gradient goes through the count.

    Raises:
        HookError: Neither a scalar float nor (sum, count); names what it is.
    """
    if not isinstance(returned, tuple):
        return LossTerm(_checked_scalar(returned, hook, ""), None)
    pair = cast("tuple[Any, ...]", returned)
    if len(pair) != 2:
        raise HookError(f"`{hook}` returned a tuple of {len(pair)}.", expected=_FORMS)
    count = None if pair[1] is None else traced_number(pair[1])
    if count is None or count.shape != ():
        got = type(pair[1]).__name__ if count is None else describe_array(count)
        raise HookError(
            f"`{hook}` returned {got} as the count.",
            expected="a scalar, shape (): how many samples or tokens the sum is over",
            fix="reduce it, for example with `mask.sum()`, or return the loss alone",
        )
    total = _checked_scalar(pair[0], hook, " as the sum")
    return LossTerm(total, jax.lax.stop_gradient(count.astype(jnp.float32)))


def _checked_scalar(loss: Any, hook: str, role: str) -> jax.Array:
    if not hasattr(loss, "dtype") or not hasattr(loss, "shape"):
        raise HookError(f"`{hook}` returned {type(loss).__name__}{role}.", expected=_FORMS)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise HookError(
            f"`{hook}` returned {describe_array(loss)}{role}.",
            expected="a scalar float, shape ()",
            fix="reduce it, for example with `.sum()`"
            if role
            else "reduce it, for example with `.mean()`",
        )
    return loss


_FORMS = "a scalar float array, or (sum, count)"
