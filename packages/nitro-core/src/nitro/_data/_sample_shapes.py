"""The shapes that a source declares: each is a program, compiled before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nitro._trees import named_leaves
from nitro.errors import DataError, did_you_mean

from ._batches import Batch, check_same_shapes, num_rows

_EXAMPLE = 'such as `sample_shapes = [{"tokens": (64,)}, {"tokens": (128,)}]`'


def shape_examples(source: Any, first: Batch, *, split: str) -> list[dict[str, Any]]:
    """A batch of each shape that a source declares; of the first batch's where it declares none.

    Args:
        source: The split; its `sample_shapes`, if it has one, is a list of mappings of fields to
            the shape of one sample.
        first: The fields of its first batch that programs take, as they take them.
        split: The split's name.

    Raises:
        DataError: A declaration that cannot be read, or that the first batch does not fit.
    """
    declared = getattr(source, "sample_shapes", None)
    if declared is None:
        return [dict(first)]
    _check_declared(declared, first, split)
    rows = num_rows(first, where=f"the first batch of `{split}`")
    examples = [
        {name: _example(field, shapes.get(name), rows) for name, field in first.items()}
        for shapes in declared
    ]
    index_of_shape(first, examples, where=f"the first batch of `{split}`")
    return examples


def index_of_shape(fields: Batch, examples: Sequence[Batch], *, where: str) -> int:
    """Which of the declared shapes a batch has; the number of samples may differ.

    Raises:
        DataError: None of them; names the fields.
    """
    found = _by_sample(fields)
    for index, example in enumerate(examples):
        if found == _by_sample(example):
            return index
    if len(examples) == 1:
        check_same_shapes(fields, examples[0], where=where)
    named = ", ".join(f"`{name}` {shape}" for name, (_, shape) in found.items())
    listed = "; ".join(
        ", ".join(f"`{name}` {shape}" for name, (_, shape) in _by_sample(example).items())
        for example in examples
    )
    raise DataError(
        f"The samples of {where} have the shapes {named}.",
        expected=f"one of the declared: {listed}",
        fix="pad them to the next declared shape, or add theirs to `sample_shapes`",
    )


def _by_sample(fields: Batch) -> dict[str, tuple[Any, tuple[int, ...]]]:
    return {
        ".".join(part for part in (name, leaf_name) if part): (leaf.dtype, leaf.shape[1:])
        for name, field in sorted(fields.items())
        for leaf_name, leaf in named_leaves(field).items()
    }


def _example(field: Any, shape: Any, rows: int) -> Any:
    if shape is None:
        return field
    return np.broadcast_to(np.zeros((), field.dtype), (rows, *shape))


def _check_declared(declared: Any, first: Batch, split: str) -> None:
    is_list = isinstance(declared, list | tuple) and len(declared) > 0
    if not is_list or not all(isinstance(shapes, Mapping) for shapes in declared):
        raise DataError(
            f"`sample_shapes` of the split `{split}` is {declared!r}.",
            expected="a list of mappings of fields to the shape of one sample",
            fix=f"write them down, {_EXAMPLE}",
        )
    for name, shape in (item for shapes in declared for item in shapes.items()):
        if name not in first:
            raise DataError(
                f"`sample_shapes` of the split `{split}` names `{name}`, which no program takes.",
                expected=did_you_mean(str(name), first),
                fix="leave it out: only fields that a traced hook names have compiled shapes",
            )
        is_shape = isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)
        if not is_shape or not isinstance(first[name], np.ndarray):
            raise DataError(
                f"`sample_shapes` of the split `{split}` has {shape!r} for `{name}`.",
                expected="the shape of one sample as a tuple of integers, for a field that is an "
                "array",
                fix=f"leave the batch axis out, {_EXAMPLE}",
            )
