"""Calls the traced hooks on the compile view, and checks what they return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nitro._experiment import Experiment, Route, compile_view
from nitro._state import ModelLayout
from nitro._trees import Flat, describe_array
from nitro.errors import HookError


@dataclass(frozen=True, kw_only=True)
class TracedHooks:
    """An experiment's traced hooks, ready to be called inside a trace.

    Attributes:
        experiment: Gives the structural fields and the hooks.
        layout: How flat arrays become the model again.
        routes: Which batch fields each hook wants.
    """

    experiment: Experiment
    layout: ModelLayout
    routes: Mapping[str, Route]

    def view(self, device: Mapping[str, Any], reads: set[str] | None = None) -> Any:
        """The `self` of the traced hooks."""
        return compile_view(self.experiment, device, reads)

    def forward(self, view: Any, model: Any, batch: Mapping[str, Any]) -> Any:
        """`forward` on a batch, its outputs checked.

        Raises:
            HookError: The outputs are not an array or a (nested) dict of arrays.
        """
        outputs = view.forward(model, **self.routes["forward"].pick(batch))
        _check_outputs(self.routes["forward"].hook, outputs)
        return outputs

    def loss(self, view: Any, outputs: Any, batch: Mapping[str, Any]) -> jax.Array:
        """`loss` on outputs and a batch, checked to be a scalar float.

        Raises:
            HookError: Another shape or dtype; names both.
        """
        hook = self.routes["loss"].hook
        loss = view.loss(outputs, **self.routes["loss"].pick(batch))
        if not hasattr(loss, "dtype") or not hasattr(loss, "shape"):
            raise HookError(
                f"`{hook}` returned {type(loss).__name__}.", expected="a scalar float array"
            )
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise HookError(
                f"`{hook}` returned {loss.dtype}{tuple(loss.shape)}.",
                expected="a scalar float, shape ()",
                fix="reduce it, for example with `.mean()`",
            )
        return loss

    def train_step(
        self, view: Any, model: Any, optimizers: Any, batch: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """The user's own `train_step`; its scalars by name, the loss among them.

        Raises:
            HookError: It returned anything but a loss, or a loss and a dict of scalars.
        """
        route = self.routes["train_step"]
        returned = view.train_step(model, optimizers, **route.pick(batch))
        loss, more = returned if isinstance(returned, tuple) else (returned, {})
        if not isinstance(more, Mapping):
            raise HookError(
                f"`{route.hook}` returned {type(more).__name__} beside the loss.",
                expected="the loss, or the loss and a dict of scalars",
                fix='write `return loss, {"d_loss": d_loss}`',
            )
        scalars = {"loss": loss, **more}
        for name, value in scalars.items():
            if getattr(value, "shape", None) != ():
                got = describe_array(value) if hasattr(value, "shape") else type(value).__name__
                raise HookError(
                    f"`{route.hook}` returned {got} as `{name}`.",
                    expected="a scalar array, shape ()",
                    fix="reduce it, for example with `.mean()`",
                )
        return {name: value.astype(jnp.float32) for name, value in scalars.items()}

    def eval_outputs(
        self, view: Any, params: Flat, model_state: Flat, batch: Mapping[str, Any]
    ) -> Any:
        """`forward` in evaluation mode; what it does to the model state is discarded."""
        model = self.layout.merge(self.layout.eval, params, model_state)
        return self.forward(view, model, batch)


def _check_outputs(hook: str, outputs: Any) -> None:
    if isinstance(outputs, Mapping):
        for name, value in outputs.items():
            if not isinstance(name, str):
                raise HookError(
                    f"`{hook}` returned a dict with the key {name!r}.",
                    expected="string keys: they name the outputs",
                )
            _check_outputs(hook, value)
    elif not hasattr(outputs, "dtype") or not hasattr(outputs, "shape"):
        raise HookError(
            f"`{hook}` returned {type(outputs).__name__}.",
            expected="an array, or a (nested) dict of arrays",
            fix='name the outputs, for example `return {"logits": logits}`',
        )
