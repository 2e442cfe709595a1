"""What the full form of the `optimizer` hook builds its chain from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from ._decay import decay_pulls


class Hyper:
    """The hyperparameters of one group at one step, for the hook that builds its chain.

    What is read is noted: the binding report lists what a chain leaves unused.
    """

    def __init__(
        self,
        *,
        learning_rate: Any,
        weight_decay: Any,
        applies: Mapping[str, Any],
        anchor: Mapping[str, Any],
        no_decay: Mapping[str, bool],
    ) -> None:
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self._applies = applies
        self._anchor = anchor
        self._no_decay = no_decay
        self.reads: set[str] = set()

    @property
    def learning_rate(self) -> jax.Array:
        """The group's rate at this step; traced, float32 ()."""
        self.reads.add("learning_rate")
        return self._learning_rate

    @property
    def weight_decay(self) -> jax.Array:
        """The group's decay at this step, already times the rate; traced, float32 ().

        It is 0 or more: `optax.add_decayed_weights(-hyper.weight_decay)` ends a chain.
        """
        self.reads.add("weight_decay")
        return self._weight_decay

    @property
    def anchor(self) -> Mapping[str, jax.Array] | None:
        """What the weights decay toward, by parameter name; None for zero."""
        self.reads.add("anchor")
        return self._anchor or None

    @property
    def no_decay(self) -> Mapping[str, bool]:
        """Whether each parameter is left out of decay, by name.

        Static, so that it can be an optax mask. A chain that reads it is compiled for this
        choice, while `decay()` takes it as a traced input.
        """
        self.reads.add("no_decay")
        return self._no_decay

    def decay(self) -> optax.GradientTransformation:
        """A transformation that adds `-weight_decay * (weight - anchor)` to the updates.

        It leaves out what `no_decay` does. Put it last: what follows would scale the decay.
        """
        self.reads.add("weight_decay")

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            pulls = self.pulls(params)
            return jax.tree.map(lambda update, pull: update - pull, updates, pulls), state

        return optax.GradientTransformation(optax.init_empty_state, update)

    def pulls(self, params: Mapping[str, Any]) -> dict[str, jax.Array]:
        """What decay takes off each weight; for Nitro itself."""
        coefficients = {name: self._weight_decay * self._applies[name] for name in params}
        return decay_pulls(params, coefficients=coefficients, anchor=self._anchor)
