"""The optimizer of a run: one optax transformation, built inside the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from nitro._trees import Flat


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Turns gradients into new parameters; hyperparameters arrive as a traced row.

    Attributes:
        factory: An optax factory that takes `learning_rate`.
        learning_rate: The constant rate.
    """

    factory: Callable[..., optax.GradientTransformation]
    learning_rate: float

    def init(self, params: Flat) -> Any:
        """The optimizer's state for these parameters."""
        return self.factory(learning_rate=self.learning_rate).init(params)

    def row(self) -> list[float]:
        """The values of the traced hyperparameters, in the order of `update`'s row."""
        return [self.learning_rate]

    def update(self, grads: Flat, opt_state: Any, params: Flat, row: jax.Array) -> tuple[Flat, Any]:
        """One update: the new parameters and optimizer state. Pure; works under jit.

        Args:
            grads: Gradients, shaped as the parameters.
            opt_state: What `init` or the last `update` returned.
            params: The parameters before the update.
            row: float32 (1,): the learning rate.
        """
        # The rate is traced and everything else constant: bit-equal to optax by hand.
        transformation = self.factory(learning_rate=row[0])
        updates, opt_state = transformation.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state  # pyright: ignore[reportReturnType] - optax types trees loosely


def default_no_decay(path: str, leaf: Any) -> bool:
    """Whether a parameter is left out of weight decay: biases and scales, that is 1-D leaves.

    Args:
        path: The parameter's dotted name.
        leaf: The parameter, or its shape and dtype.
    """
    del path
    return len(leaf.shape) <= 1
