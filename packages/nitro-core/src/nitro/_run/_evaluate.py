"""Evaluation and prediction: one compiled forward at one width, whatever the request."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nitro._metrics import MetricSums
from nitro._state import TrainState
from nitro._trees import Flat, named_leaves
from nitro.data import Batch, checked_batch, cut_to_width, num_rows, routed_fields
from nitro.errors import DataError, HookError

from ._history import HISTORY_KEYS
from ._setup import Setup


class Evaluator:
    """Runs the forward program on batches of any size.

    A batch is cut into pieces of the compiled width, the last one padded; outputs are
    cut back before any hook sees them.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._width: int | None = _eval_width(setup)

    def warm_up(self, state: TrainState, device: Flat) -> None:
        """Compiles what validation needs, so that nothing compiles once training runs.

        Runs nothing: the memory plan is checked first.
        """
        source = self._setup.splits.get("val")
        if source is None:
            return
        batch = self._setup.first["val"]
        fields, rows = self._forward_fields(batch, where="the first batch of `val`")
        fields = jax.tree.map(np.asarray, fields)
        programs = self._setup.programs
        outputs = programs.forward(state.params, state.model_state, device, fields).outputs
        self._check_batched(outputs)
        if self._falls_back:
            traced = (outputs, self._loss_fields(batch))
            ragged = getattr(source, "num_samples", 0) % rows
            for count in {rows, ragged} - {0}:
                programs.loss(device, *_with_rows(traced, count))

    @property
    def _falls_back(self) -> bool:
        return "metrics" not in self._setup.hooks.routes

    def evaluate(self, state: TrainState, device: Flat, split: str) -> dict[str, Any]:
        """The finalised metrics of a split."""
        setup = self._setup
        sums = MetricSums(hook=f"{setup.owner}.metrics", split=split)
        for index, item in enumerate(setup.splits[split], start=1):
            where = f"batch {index} of `{split}`"
            batch = checked_batch(item, where=where)
            outputs = self.outputs(state, device, batch, where=where)
            if self._falls_back:
                loss = self._loss(device, outputs, self._loss_fields(batch))
                sums.add({"val_loss": (loss, 1)})
            else:
                fields = setup.hooks.routes["metrics"].pick(batch)
                sums.add(setup.experiment.metrics(outputs, **fields))  # pyright: ignore[reportAttributeAccessIssue] - a hook
        return self._finalised(sums.result(), split)

    def predict(self, state: TrainState, device: Flat, batch: Any) -> Any:
        """The outputs for one batch, as NumPy arrays in `forward`'s structure."""
        route = self._setup.hooks.routes["forward"]
        if not hasattr(batch, "keys"):
            call = ", ".join(f'"{name}": ...' for name in route.required) or '"x": ...'
            raise DataError(
                f"`predict` got {type(batch).__name__}.",
                expected="a batch: a mapping of the fields that `forward` names",
                fix=f"write `run.predict({{{call}}})`",
            )
        return self.outputs(state, device, batch, where="the batch given to `predict`")

    def outputs(self, state: TrainState, device: Flat, batch: Batch, *, where: str) -> Any:
        """`forward`'s outputs for all rows of a batch, as NumPy arrays."""
        fields, rows = self._forward_fields(batch, where=where)
        self._width = self._width or rows
        pieces = [
            self._piece(state, device, piece, real)
            for piece, real in cut_to_width(fields, rows, self._width)
        ]
        if len(pieces) == 1:
            return pieces[0]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)

    def _forward_fields(self, batch: Batch, *, where: str) -> tuple[Flat, int]:
        """The fields that `forward` wants, and how many rows they have."""
        names = self._setup.hooks.routes["forward"].names(batch)
        fields = routed_fields(batch, names, where=where)
        rows = num_rows(fields, where=where)
        if rows == 0:
            raise DataError(f"There are no rows in {where}.", expected="at least one")
        return fields, rows

    def _piece(self, state: TrainState, device: Flat, piece: Flat, real: int) -> Any:
        arguments = (state.params, state.model_state, device, piece)
        outputs = jax.device_get(self._setup.programs.forward(*arguments)(*arguments))
        self._check_batched(outputs)
        return jax.tree.map(lambda leaf: leaf[:real], outputs)

    def _check_batched(self, outputs: Any) -> None:
        hook = self._setup.hooks.routes["forward"].hook
        leaves = named_leaves(outputs)
        if not leaves:
            raise HookError(f"`{hook}` returned no arrays.", expected="at least one output")
        for name, leaf in leaves.items():
            if leaf.ndim == 0 or leaf.shape[0] != self._width:
                raise HookError(
                    f"`{hook}` returned {f'`{name}` ' if name else ''}of shape {leaf.shape} for a "
                    f"batch of {self._width}.",
                    expected=f"the batch axis first: ({self._width}, ...)",
                    fix="leave it out of the outputs, or broadcast it along the batch",
                )

    def _loss_fields(self, batch: Batch) -> Flat:
        names = self._setup.hooks.routes["loss"].names(batch)
        return routed_fields(batch, names, where="the batch")

    def _loss(self, device: Flat, outputs: Any, fields: Flat) -> float:
        arguments = (device, outputs, fields)
        return float(self._setup.programs.loss(*arguments)(*arguments))

    def _finalised(self, reduced: dict[str, Any], split: str) -> dict[str, Any]:
        result = self._setup.experiment.finalize_metrics(reduced, split)
        if not isinstance(result, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - a user's hook
            raise HookError(
                f"`{self._setup.owner}.finalize_metrics` returned {type(result).__name__}.",
                expected="a dict of metrics",
            )
        clash = [name for name in HISTORY_KEYS if name in result]
        if clash:
            raise HookError(
                f"`{self._setup.owner}` has a metric named `{clash[0]}`, which the history keeps "
                "for training.",
                expected=f"other names than {', '.join(HISTORY_KEYS)}",
                fix=f"rename it, for example to `val_{clash[0]}`",
            )
        return result


def _with_rows(tree: Any, rows: int) -> Any:
    """The shapes of the first rows."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), tree
    )


def _eval_width(setup: Setup) -> int | None:
    for split in ("val", "test", *setup.splits):
        if split in setup.first:
            batch = setup.first[split]
            names = setup.hooks.routes["forward"].names(batch)
            fields = routed_fields(batch, names, where=f"the first batch of `{split}`")
            return num_rows(fields, where=f"the first batch of `{split}`")
    return None
