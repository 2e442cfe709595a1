"""Evaluation and prediction: one compiled forward at one width, whatever the request."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import jax
import numpy as np

from nitro._data import (
    ArrayLoader,
    Batch,
    RowLoader,
    check_same_fields,
    checked_batch,
    cut_to_width,
    host_fields,
    index_of_shape,
    is_read_from_anywhere,
    num_rows,
    owned_batch,
    routed_fields,
    shape_examples,
)
from nitro._journal import HISTORY_KEYS
from nitro._metrics import Metric, MetricFold, check_finalised, host_number, read_metrics, widened
from nitro._programs import LossTerm
from nitro._state import TrainState
from nitro._trees import Flat
from nitro.errors import DataError, HookError, warn

from ._once import source_to_evaluate
from ._prefetch import prefetched
from ._setup import Setup
from ._splits import check_evaluated, falls_back_to_loss
from ._val_loss import LossFold

_NEW_SHAPES = 3
"""As many in a row are no accident: each request compiles."""


class Evaluator:
    """Runs the forward program on batches of any size.

    A batch is cut into pieces of the compiled width, the last one padded; outputs are
    cut back before any hook sees them.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._width: int | None = _eval_width(setup)
        self._sources: dict[str, Any] = {}
        self._new_in_a_row = 0
        self._has_told_shapes = False
        self.draws = False
        self.figures: dict[str, Any] = {}
        self._told_odd: set[str] = set()

    def warm_up(self, state: TrainState, device: Flat) -> None:
        """Compiles what validation needs, so that nothing compiles once training runs.

        Runs nothing: the memory plan is checked first.
        """
        source = self._setup.splits.get("val")
        if source is None:
            return
        first = self._setup.first["val"]
        names = check_evaluated(self._setup.hooks, first, "val")
        traced = routed_fields(first, names, where="the first batch of `val`")
        for batch in shape_examples(source, traced, split="val"):
            self._warm_up_for(batch, source, state, device)

    def _warm_up_for(self, batch: Batch, source: Any, state: TrainState, device: Flat) -> None:
        """Compiles what validating batches of one shape needs."""
        fields, rows = self._forward_fields(batch, where="the first batch of `val`")
        fields = jax.tree.map(np.asarray, fields)
        programs = self._setup.programs
        outputs = programs.forward(state.params, state.model_state, device, fields).outputs
        self._setup.hooks.check_batched(outputs, self._width)
        if falls_back_to_loss(self._setup.hooks):
            traced = (self._loss_fields(batch), np.ones(rows, bool))
            for count in self._row_counts(source, rows):
                programs.loss(device, (outputs,), *_with_rows(traced, count))
        elif self._setup.hooks.has_device_metrics:
            traced = self._metrics_fields(batch, where="the first batch of `val`")
            for count in self._row_counts(source, rows):
                programs.metrics(
                    device, (outputs,), *_with_rows((traced, np.ones(rows, bool)), count)
                )

    def _row_counts(self, source: Any, width: int) -> set[int]:
        """The sizes of the batches of `val` up to `width`, as far as it tells without being read."""
        if not isinstance(source, list | tuple):
            counts = {width, getattr(source, "num_samples", 0) % width}
        else:
            counts: set[int] = set()
            for index, item in enumerate(source, start=1):
                where = f"batch {index} of `val`"
                counts.add(self._rows_of(checked_batch(item, where=where), where=where))
        return {count for count in counts if 0 < count <= width}

    def _rows_of(self, batch: Batch, *, where: str) -> int:
        """The number of rows, from shapes alone where all fields have one: nothing is converted."""
        fields = self._setup.hooks.routes["forward"].pick(batch)
        if all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(fields)):
            return num_rows(fields, where=where)
        return self._forward_fields(batch, where=where)[1]

    def evaluate(self, state: TrainState, device: Flat, split: str) -> dict[str, Any]:
        """The finalised metrics of a split.

        Raises:
            DataError: Other batches than the split's length and first batch promise.
            HookError: `metrics` or `finalize_metrics` returned something else than it should.
        """
        fold = MetricFold(where=f"`{self._setup.owner}.metrics` on the split `{split}`")
        loss = LossFold(where=f"`{self._setup.owner}.loss` on the split `{split}`")
        first, source = self._setup.first[split], self._source(split)
        promised = len(source)
        names = check_evaluated(self._setup.hooks, first, split)
        traced = routed_fields(first, names, where=f"the first batch of `{split}`")
        examples = shape_examples(self._setup.splits[split], traced, split=split)
        index = 0
        with closing(self._batches(source)) as batches:
            for index, item in enumerate(batches, start=1):
                where = f"batch {index} of `{split}`"
                if index > promised:
                    raise DataError(
                        f"The split `{split}` goes on after the {promised} batches that its length "
                        "promised.",
                        expected="as many batches each time as `len()` says",
                        fix="let `__len__` count the batches of one evaluation, and `__iter__` end "
                        "after them",
                    )
                batch = checked_batch(item, where=where)
                check_same_fields(batch, first, where=where)
                fields = routed_fields(batch, traced, where=where)
                # Other shapes would be other programs, compiled in the middle of the run.
                index_of_shape(fields, examples, where=where)
                self._add((loss, fold), state, device, fields, batch, split, where=where)
        if index < promised:
            raise DataError(
                f"The split `{split}` ended after {index} batches; its length promised {promised}.",
                expected="as many batches each time as `len()` says",
                fix="return a source that starts again at each `iter()`, not one that goes on",
            )
        self._tell_odd(split, loss)
        return self._finalised(loss, fold, split)

    def evaluate_first(self, state: TrainState, device: Flat, split: str) -> dict[str, Any]:
        """The finalised metrics of the first batch of a split, which setup has read already.

        Of a part of a split a count may well be 0; that metric is not a number.
        """
        where = f"the first batch of `{split}`"
        of = f"`{self._setup.owner}.{{}}` on the split `{split}`"
        loss = LossFold(where=of.format("loss"), is_part=True)
        fold = MetricFold(where=of.format("metrics"), is_part=True)
        first = self._setup.first[split]
        names = check_evaluated(self._setup.hooks, first, split)
        fields = routed_fields(first, names, where=where)
        self._add((loss, fold), state, device, fields, first, split, where=where)
        return self._finalised(loss, fold, split)

    def _add(
        self,
        folds: tuple[LossFold, MetricFold],
        state: TrainState,
        device: Flat,
        fields: Flat,
        batch: Batch,
        split: str,
        *,
        where: str,
    ) -> None:
        """Evaluates one batch, of which `fields` are for the device, and adds what comes out."""
        loss, fold = folds
        hooks = self._setup.hooks
        pieces, rows = self._device_outputs(state, device, fields, where=where)
        if falls_back_to_loss(hooks):
            term = self._loss(device, pieces, self._loss_fields(fields), rows)
            loss.add(term, rows, fields=fields, where=where)
        if "metrics" in hooks.routes:
            # On the host, a hook gets the fields as the source made them.
            given = fields if hooks.has_device_metrics else batch
            fold.add(self._metrics(device, pieces, rows, given, split, where=where))

    def _tell_odd(self, split: str, loss: LossFold) -> None:
        """Tells once of each split that its data makes the loss what is no number."""
        batches = loss.odd()
        if not batches or split in self._told_odd:
            return
        self._told_odd.add(split)
        where, odd = next(iter(batches.items()))
        warn(
            f"`val_loss` is not finite, and neither is the data: in {where} {odd}"
            + (f"; and {len(batches) - 1} more batches." if len(batches) > 1 else ".")
            + f"\n  fix: mend or leave out these rows of the split `{split}`"
        )

    def _source(self, split: str) -> Any:
        """What an evaluation goes through; decided, and told, at the first one."""
        if split not in self._sources:
            names = check_evaluated(self._setup.hooks, self._setup.first[split], split)
            self._sources[split] = source_to_evaluate(self._setup, split, names)
        return self._sources[split]

    def _batches(self, source: Any) -> Generator[Batch]:
        """The batches of a source; drawn ahead where drawing one may take time."""
        # Epoch 0 each time: no evaluation depends on how many there were before it.
        is_ours = isinstance(source, RowLoader) and is_read_from_anywhere(source)
        batches = source.batches(0, 0) if is_ours else source
        if _has_arrays_of_its_own(source):
            yield from batches
        else:
            # Copied in the thread: a loader may fill one buffer again and again.
            yield from prefetched(owned_batch(batch) for batch in batches)

    def _metrics(
        self, device: Flat, pieces: Any, rows: int, batch: Batch, split: str, *, where: str
    ) -> tuple[Metric, ...]:
        """The metrics of one batch, where they are computed; real samples only."""
        setup = self._setup
        if setup.hooks.has_device_metrics:
            fields = self._metrics_fields(batch, where=where)
            arguments = (device, pieces, fields, np.ones(rows, bool))
            return setup.programs.metrics(*arguments)(*arguments)
        fields = host_fields(setup.hooks.routes["metrics"].pick(batch), where=where)
        return read_metrics(
            setup.experiment.metrics(widened(_on_host(pieces, rows)), **fields),  # pyright: ignore[reportAttributeAccessIssue] - a hook
            where=f"`{setup.owner}.metrics` on the split `{split}`",
            rows=rows,
            number=host_number,
        )

    def predict(self, state: TrainState, device: Flat, batch: Any) -> Any:
        """The outputs for one batch, as NumPy arrays in `forward`'s structure.

        Raises:
            DataError: No batch, or one whose fields do not fit `forward`.
            HookError: An output without the batch axis.
        """
        route = self._setup.hooks.routes["forward"]
        if not hasattr(batch, "keys"):
            call = ", ".join(f'"{name}": ...' for name in route.required) or '"x": ...'
            raise DataError(
                f"`predict` got {type(batch).__name__}.",
                expected="a batch: a mapping of the fields that `forward` names",
                fix=f"write `run.predict({{{call}}})`",
            )
        before = self._num_forwards()
        outputs = self.outputs(state, device, batch, where="the batch given to `predict`")
        self._tell_new_shapes(
            {name: batch[name] for name in route.names(batch)},
            is_new=self._num_forwards() > before,
        )
        return outputs

    def _num_forwards(self) -> int:
        return sum(program.key.role == "forward" for program in self._setup.programs.held())

    def _tell_new_shapes(self, fields: Flat, *, is_new: bool) -> None:
        """Tells once of requests that each compile a program of their own."""
        shapes = tuple(np.shape(leaf)[1:] for leaf in jax.tree.leaves(fields))
        self._new_in_a_row = self._new_in_a_row + 1 if is_new else 0
        if self._new_in_a_row == _NEW_SHAPES and not self._has_told_shapes:
            self._has_told_shapes = True
            compiled = self._num_forwards()
            warn(
                f"`predict` got {_NEW_SHAPES} new shapes in a row; {compiled} forward programs are "
                f"compiled by now, the last one for {', '.join(map(str, shapes))} per sample.\n"
                "  fix: pad the requests to a few lengths; or, to generate step by step, give "
                "`forward` a window of one length"
            )

    def outputs(self, state: TrainState, device: Flat, batch: Batch, *, where: str) -> Any:
        """`forward`'s outputs for all rows of a batch, as NumPy arrays."""
        return _on_host(*self._device_outputs(state, device, batch, where=where))

    def _device_outputs(
        self, state: TrainState, device: Flat, batch: Batch, *, where: str
    ) -> tuple[tuple[Any, ...], int]:
        """`forward`'s outputs by pieces of the compiled width, and the number of real rows."""
        fields, rows = self._forward_fields(batch, where=where)
        self._width = self._width or rows
        pieces = [
            self._piece(state, device, piece)
            for piece, _ in cut_to_width(fields, rows, self._width)
        ]
        return tuple(pieces), rows

    def _forward_fields(self, batch: Batch, *, where: str) -> tuple[Flat, int]:
        """The fields that `forward` wants, and how many rows they have."""
        names = self._setup.hooks.routes["forward"].names(batch)
        fields = routed_fields(batch, names, where=where)
        rows = num_rows(fields, where=where)
        if rows == 0:
            raise DataError(f"There are no rows in {where}.", expected="at least one")
        return fields, rows

    def _piece(self, state: TrainState, device: Flat, piece: Flat) -> Any:
        arguments = (state.params, state.model_state, device, piece)
        outputs = self._setup.programs.forward(*arguments)(*arguments)
        self._setup.hooks.check_batched(outputs, self._width)
        return outputs

    def sample_losses(self, device: Flat, outputs: Any, batch: Batch) -> list[float]:
        """The loss of each sample of a batch by itself; 0 for one that counts nothing."""
        host = jax.tree.map(np.asarray, (outputs, self._loss_fields(batch)))
        rows = jax.tree.leaves(host)[0].shape[0]
        singles = (jax.tree.map(lambda leaf: leaf[i : i + 1], host) for i in range(rows))  # noqa: B023 - used at once
        terms = [self._loss(device, (outputs,), fields, 1) for outputs, fields in singles]
        return [float(t.total) / (float(t.count or 0) or 1) for t in jax.device_get(terms)]

    def _metrics_fields(self, batch: Batch, *, where: str) -> Flat:
        names = self._setup.hooks.routes["metrics"].names(batch)
        return routed_fields(batch, names, where=where)

    def _loss_fields(self, batch: Batch) -> Flat:
        names = self._setup.hooks.routes["loss"].names(batch)
        return routed_fields(batch, names, where="the batch")

    def _loss(self, device: Flat, pieces: Any, fields: Flat, rows: int) -> LossTerm:
        arguments = (device, pieces, fields, np.ones(rows, bool))
        return self._setup.programs.loss(*arguments)(*arguments)

    def _draw(self, reduced: dict[str, Any], split: str) -> dict[str, Any]:
        """What `figures` draws, where the caller of this evaluation wants it."""
        if not self.draws:
            return {}
        hook = f"{self._setup.owner}.figures"
        try:
            return self._checked_figures(hook, self._setup.experiment.figures(dict(reduced), split))
        # A picture is not worth a run.
        except Exception as error:  # noqa: BLE001
            warn(f"`{hook}` drew nothing for `{split}`: {type(error).__name__}: {error}")
            return {}

    def _checked_figures(self, hook: str, figures: Any) -> dict[str, Any]:
        if not isinstance(figures, Mapping):
            raise HookError(
                f"`{hook}` returned {type(figures).__name__}.",
                expected='a mapping of matplotlib figures by name, such as {"confusion": figure}',
                fix="return {} where there is nothing to draw",
            )
        for name, figure in figures.items():
            if not hasattr(figure, "savefig"):
                raise HookError(
                    f"`{hook}` returned {type(figure).__name__} as `{name}`.",
                    expected="a matplotlib figure",
                    fix="return the figure, as `plt.subplots()` gives it, not its axes",
                )
        return dict(cast("Mapping[str, Any]", figures))

    def _finalised(self, loss: LossFold, fold: MetricFold, split: str) -> dict[str, Any]:
        losses = {"val_loss": loss.result()} if falls_back_to_loss(self._setup.hooks) else {}
        reduced = {**losses, **fold.result()}
        # Before `finalize_metrics`, which may drop what it has used.
        self.figures = self._draw(reduced, split)
        result = self._setup.experiment.finalize_metrics(reduced, split)
        hook = f"{self._setup.owner}.finalize_metrics"
        check_finalised(result, fold, hook=hook, split=split)
        clash = [name for name in HISTORY_KEYS if name in result]
        if clash:
            raise HookError(
                f"`{self._setup.owner}` has a metric named `{clash[0]}`, which the history keeps "
                "for training.",
                expected=f"other names than {', '.join(HISTORY_KEYS)}",
                fix=f"rename it, for example to `val_{clash[0]}`",
            )
        return result


def _has_arrays_of_its_own(source: Any) -> bool:
    """Whether no batch is overwritten while the program that reads it may still be running."""
    return type(source) in (list, tuple) or (isinstance(source, ArrayLoader) and source.takes_rows)


def _on_host(pieces: Any, rows: int) -> Any:
    """The outputs for the real rows, as NumPy arrays."""
    return jax.tree.map(lambda *leaves: _joined(leaves)[:rows], *jax.device_get(pieces))


def _joined(leaves: Sequence[np.ndarray]) -> np.ndarray:
    return leaves[0] if len(leaves) == 1 else np.concatenate(leaves)


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
