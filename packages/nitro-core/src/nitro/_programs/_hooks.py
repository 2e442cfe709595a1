"""Calls the traced hooks on the compile view, and checks what they return."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nitro._code import raised_at
from nitro._experiment import Experiment, Route, compile_view
from nitro._metrics import Metric, read_metrics, traced_number, widened
from nitro._state import ModelLayout
from nitro._trees import Flat, describe_array, named_leaves
from nitro.errors import HookError

from ._loss import LossTerm, read_loss


@dataclass(frozen=True, kw_only=True)
class TracedHooks:
    """An experiment's traced hooks, ready to be called inside a trace.

    Attributes:
        experiment: Gives the structural fields and the hooks.
        layout: How flat arrays become the model again.
        routes: Which batch fields each hook wants.
        has_device_metrics: Whether `metrics` is compiled, or runs on the host.
    """

    experiment: Experiment
    layout: ModelLayout
    routes: Mapping[str, Route]
    has_device_metrics: bool = False

    def view(self, device: Mapping[str, Any], reads: set[str] | None = None) -> Any:
        """The `self` of the traced hooks."""
        return compile_view(self.experiment, device, reads)

    def forward(self, view: Any, model: Any, batch: Mapping[str, Any]) -> Any:
        """`forward` on a batch, its outputs checked.

        Raises:
            HookError: The outputs are not an array or a (nested) dict of arrays.
        """
        hook = self.routes["forward"].hook
        with _explained(hook, _BRANCHES):
            outputs = view.forward(model, **self.routes["forward"].pick(batch))
        _check_outputs(hook, outputs)
        return outputs

    def check_batched(self, outputs: Any, rows: int | None) -> None:
        """Refuses outputs of a batch that lack its axis.

        Raises:
            HookError: Names the output, its shape, and what makes it fit.
        """
        hook = self.routes["forward"].hook
        leaves = named_leaves(outputs)
        if not leaves:
            raise HookError(f"`{hook}` returned no arrays.", expected="at least one output")
        for name, leaf in leaves.items():
            if leaf.ndim == 0 or leaf.shape[0] != rows:
                raise HookError(
                    f"`{hook}` returned {f'`{name}` ' if name else ''}of shape {leaf.shape} for a "
                    f"batch of {rows}.",
                    expected=f"the batch axis first: ({rows}, ...)",
                    fix=_spread(name, self.routes["forward"].required)
                    if leaf.ndim == 0
                    else "leave it out of the outputs, or broadcast it along the batch",
                )

    def loss(self, view: Any, outputs: Any, batch: Mapping[str, Any]) -> LossTerm:
        """`loss` on outputs and a batch, checked to be a scalar float or (sum, count).

        Raises:
            HookError: Another shape or dtype; names both.
        """
        route = self.routes["loss"]
        with _explained(route.hook, _BRANCHES):
            returned = view.loss(outputs, **route.pick(batch))
        return read_loss(returned, hook=route.hook)

    def metrics(
        self, view: Any, outputs: Any, batch: Mapping[str, Any], rows: int
    ) -> tuple[Metric, ...]:
        """`metrics` on the outputs and fields of the real samples of a batch, traced.

        Raises:
            HookError: It is written for the host, or returned no metrics with modes.
        """
        route = self.routes["metrics"]
        with _explained(route.hook, 'return "host" from `metrics_residency`'):
            metrics = view.metrics(widened(outputs), **route.pick(batch))
        return read_metrics(metrics, where=f"`{route.hook}`", rows=rows, number=traced_number)

    def train_metrics(
        self, view: Any, outputs: Any, batch: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """`train_metrics` as float32 scalars by `group/name`; empty without the hook.

        Raises:
            HookError: It is written for the host, or returned something else than scalars.
        """
        route = self.routes.get("train_metrics")
        if route is None:
            return {}
        with _explained(route.hook, "compute it in `metrics`, which runs on the host"):
            metrics = view.train_metrics(outputs, **route.pick(batch))
        return dict(_scalars(route.hook, metrics, ""))

    def train_step(
        self, view: Any, model: Any, optimizers: Any, batch: Mapping[str, Any]
    ) -> dict[str, jax.Array]:
        """The user's own `train_step`; its scalars by name, the loss among them.

        Raises:
            HookError: It returned anything but a loss, or a loss and a dict of scalars.
        """
        route = self.routes["train_step"]
        with _explained(route.hook, _BRANCHES):
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


def _spread(name: str, fields: Sequence[str]) -> str:
    value, field = name.rpartition(".")[2] or "value", next(iter(fields), "x")
    return (
        f"give each sample its value, and take the mean in `loss`: "
        f"`jnp.broadcast_to({value}, {field}.shape[:1])`"
    )


_STEP_KEYS = ("loss", "step", "epoch", "type", "context")
"""What the log of a step has of its own."""


def _scalars(hook: str, metrics: Any, prefix: str) -> Iterator[tuple[str, jax.Array]]:
    if not isinstance(metrics, Mapping):
        raise HookError(
            f"`{hook}` returned {type(metrics).__name__}.",
            expected='a mapping of scalars, such as {"acc": (logits.argmax(-1) == label).mean()}',
        )
    for key, value in metrics.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _scalars(hook, value, f"{name}/")
            continue
        number = traced_number(value)
        if number is None or number.shape != ():
            got = type(value).__name__ if number is None else describe_array(number)
            raise HookError(
                f"`{hook}` returned {got} for the metric `{name}`.",
                expected="a plain scalar, shape (): each step is logged as it is, without a count",
                fix="reduce it, for example with `.mean()`",
            )
        if name in _STEP_KEYS:
            raise HookError(
                f"`{hook}` has a metric named `{name}`, which every step's log has already.",
                expected=f"other names than {', '.join(_STEP_KEYS)}",
                fix=f"rename it, for example to `train_{name}`",
            )
        yield name, number.astype(jnp.float32)


@contextmanager
def _explained(hook: str, way_out: str) -> Generator[None]:
    """Says of a hook that is traced, and was written for NumPy, what to do."""
    try:
        yield
    except (
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.ConcretizationTypeError,
    ) as error:
        line = raised_at(error)
        where = "" if line is None else f", in {line}"
        raise HookError(
            f"`{hook}` is traced, and needs the value of a traced array{where}: "
            f"{str(error).splitlines()[0]}",
            expected="`jax.numpy` in a hook that runs on the device: there the array has a shape "
            "and a dtype, and no value yet",
            fix=f"use `jax.numpy`, or {way_out}",
        ) from error


_BRANCHES = (
    "leave `float()`, `.item()` and `np.` out; `jnp.where` chooses, `jax.debug.print` shows a value, "
    "and `train_metrics` logs one"
)


def _check_outputs(hook: str, outputs: Any, path: str = "") -> None:
    if isinstance(outputs, Mapping):
        for name, value in outputs.items():
            if not isinstance(name, str):
                raise HookError(
                    f"`{hook}` returned a dict with the key {name!r}.",
                    expected="string keys: they name the outputs",
                )
            _check_outputs(hook, value, f"{path}.{name}" if path else name)
    elif not hasattr(outputs, "dtype") or not hasattr(outputs, "shape"):
        raise HookError(
            f"`{hook}` returned {type(outputs).__name__}" + (f" as `{path}`." if path else "."),
            expected="an array, or a (nested) dict of arrays",
            fix='name the outputs, for example `return {"logits": logits}`',
        )
