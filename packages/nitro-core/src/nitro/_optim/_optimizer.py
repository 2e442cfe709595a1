"""The optimizer of a run: one optax transformation, built inside the trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from nitro._trees import Flat


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Turns gradients into new parameters; what may move between steps is traced.

    Attributes:
        factory: An optax factory that takes `learning_rate`.
        learning_rate: The constant rate.
    """

    factory: Callable[..., optax.GradientTransformation]
    learning_rate: float

    def init(self, params: Flat) -> Any:
        """The optimizer's state for these parameters."""
        return self.factory(learning_rate=self.learning_rate).init(params)

    def anchors(self) -> Flat:
        """What weights decay toward, by parameter; an input of the step program."""
        return {}

    def code(self) -> dict[str, Any]:
        """The user's code and constants that a trace of `update` depends on, by label."""
        return {"optimizer": self.factory}

    def table(self, num_steps: int) -> np.ndarray:
        """The values of everything that is traced and may change with the step.

        Args:
            num_steps: The horizon, in optimizer steps.

        Returns:
            float32 (num_steps, columns): one row per step.
        """
        return np.full((num_steps, 1), self.learning_rate, np.float32)

    def scheduled_fields(self, device: Flat, row: jax.Array) -> Flat:
        """The Device fields of one step: the scheduled ones come out of the row."""
        del row
        return device

    def update(
        self, grads: Flat, opt_state: Any, params: Flat, anchors: Flat, row: jax.Array
    ) -> tuple[Flat, Any]:
        """One update: the new parameters and optimizer state. Pure; works under jit.

        Args:
            grads: Gradients, shaped as the parameters.
            opt_state: What `init` or the last `update` returned.
            params: The parameters before the update.
            anchors: What `anchors` returned.
            row: float32 (columns,): the row of the table for this step.
        """
        del anchors
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
