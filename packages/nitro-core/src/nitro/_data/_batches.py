"""Checks on batches, and cutting or padding them to a compiled width."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from nitro._trees import describe_array, jax_dtype, named_leaves, too_wide
from nitro.errors import DataError, warn

from ._array_loader import is_read_from_anywhere

Batch = Mapping[str, Any]
"""Batch fields by name: arrays, or trees of arrays, batch axis first."""


_LONGEST = 2**40
"""More batches than any epoch has; sources without an end claim such a length."""

_NAMES_FOR_VAL = ("valid", "validation", "dev", "eval")
_NAME_THE_PARTS = (
    'name its parts, for example in the dataset that a DataLoader reads: `return {"x": x, "y": y}`'
)


def checked_splits(data: Any, *, hook: str) -> dict[str, Any]:
    """The splits that `build_data` returned, as a dict.

    Raises:
        DataError: Not a mapping of named, sized, non-empty iterables.
    """
    if not isinstance(data, Mapping):
        raise DataError(
            f"`{hook}` returned {type(data).__name__}.",
            expected='a mapping of splits, such as {"train": ..., "val": ...}',
        )
    for split, source in data.items():
        _check_source(split, source)
    if "train" in data and "val" not in data:
        _warn_unvalidated(data)
    return dict(data)


def _warn_unvalidated(splits: Mapping[str, Any]) -> None:
    meant = [name for name in splits if name.lower() in _NAMES_FOR_VAL]
    if meant:
        warn(
            f"Training validates on the split `val`, and there is none beside `{meant[0]}`: no "
            f"epoch is validated.\n  fix: rename `{meant[0]}` to `val`"
        )


def _check_source(split: Any, source: Any) -> None:
    if not isinstance(split, str):
        raise DataError(f"A split is named {split!r}.", expected='a string, such as "train"')
    if isinstance(source, Mapping):
        fields = ", ".join(f"`{name}`" for name in source) or "nothing in it"
        raise DataError(
            f"The split `{split}` is a mapping: {fields}.",
            expected="a sized iterable of batches: an ArrayLoader, a list of dicts, a DataLoader",
            fix=f'let an ArrayLoader cut the arrays: {{"{split}": '
            "nitro.ArrayLoader(arrays, batch_size=32)}",
        )
    if not isinstance(source, Iterable) or not hasattr(source, "__len__"):
        raise DataError(
            f"The split `{split}` is {type(source).__name__}, which has no length or cannot be "
            "iterated.",
            expected="a sized iterable of batches: an ArrayLoader, a list of dicts, a DataLoader",
            fix="give it a `__len__` that counts the batches of an epoch, and an `__iter__` that "
            "starts anew; for a loader without a length, write a class around it, whose `__iter__` "
            "returns `iter(loader)`",
        )
    if isinstance(source, Iterator):
        raise DataError(
            f"The split `{split}` is {type(source).__name__}, an iterator: it can be gone through "
            "once, and setup already looks at its first batch.",
            expected="a source that starts again at each `iter()`: a list, an ArrayLoader, a "
            "DataLoader",
            fix="let `__iter__` return a new iterator, for example by writing it with `yield`",
        )
    length = _length_of(split, source)
    if length > _LONGEST:
        raise DataError(
            f"The split `{split}` has {length} batches: it never ends.",
            expected="the batches of one epoch",
            fix="leave `.repeat()` out: every epoch goes through the source anew",
        )
    if length == 0:
        raise DataError(f"The split `{split}` has no batches.", expected="at least one batch")


def _length_of(split: str, source: Any) -> int:
    try:
        return len(source)
    # An infinite `tf.data.Dataset`, or one that filters, has a `__len__` that raises.
    except TypeError as error:
        raise DataError(
            f"The split `{split}` is {type(source).__name__}, whose `len()` fails: {error}",
            expected="the batches of one epoch, and a length that counts them",
            fix="leave `.repeat()` out: every epoch goes through the source anew; where TensorFlow "
            "cannot count, say how many with `tf.data.experimental.assert_cardinality(n)`",
        ) from error


def first_batch(split: str, source: Iterable[Any]) -> Batch:
    """The first batch of a split, without moving a source that can be peeked into.

    Raises:
        DataError: There is none, or it is no mapping of fields.
    """
    peeked: Any = source if is_read_from_anywhere(source) else None
    keeps: Any = source if hasattr(source, "get_state") and hasattr(source, "set_state") else None
    before = None if keeps is None else keeps.get_state()
    batch = next(iter(source if peeked is None else peeked.batches(0, 0)), None)
    if keeps is not None:
        keeps.set_state(before)
    if batch is None:
        raise DataError(
            f"The split `{split}` has the length {len(source)} and yields no batch.",  # pyright: ignore[reportArgumentType] - it has a length
            expected="as many batches as `len()` says",
        )
    return owned_batch(checked_batch(batch, where=f"the first batch of `{split}`"))


def checked_batch(batch: Any, *, where: str) -> Batch:
    """A batch that is a mapping of named fields.

    Raises:
        DataError: Anything else; names the type.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"In {where} Nitro found {type(batch).__name__}.",
            expected='a mapping of batch fields, such as {"img": ..., "label": ...}',
            fix=_NAME_THE_PARTS if isinstance(batch, tuple | list) else "",
        )
    return batch


def owned_batch(batch: Any) -> Any:
    """A batch whose arrays no loader can overwrite; the rest is as it was."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: jax.tree.map(_owned, value) for name, value in batch.items()}


def _owned(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not _is_array(leaf) or isinstance(leaf, jax.Array | np.generic):
        return leaf
    try:
        # Not `np.array`, which trusts the tensor to copy itself.
        return np.asarray(leaf).copy()
    # A tensor that NumPy cannot read matters only to a hook that wants it, which is told.
    except (TypeError, RuntimeError, ValueError):
        return leaf


def check_same_fields(batch: Batch, first: Collection[str], *, where: str) -> None:
    """Refuses a batch with other fields than the first one of its split.

    Raises:
        DataError: Says which fields are gone and which are new.
    """
    gone = [f"`{name}` is gone" for name in first if name not in batch]
    new = [f"`{name}` is new" for name in batch if name not in first]
    if gone or new:
        raise DataError(
            f"{where} has the fields {sorted(batch)}: {', '.join(gone + new)}.",
            expected=f"the fields of the first batch, {sorted(first)}, in every batch",
        )


def check_same_shapes(fields: Batch, first: Batch, *, where: str) -> None:
    """Refuses fields of another dtype or shape than in the first batch of their split.

    The number of samples may differ.

    Raises:
        DataError: Names the field, and what it is and was.
    """
    for name, value in fields.items():
        got, expected = _by_sample(value), _by_sample(first[name])
        if got != expected:
            raise DataError(
                f"The field `{name}` of {where} is {_described(value)}.",
                expected=f"{_described(first[name])}, as in the first batch",
                fix="let the loader give all batches one dtype and one shape but for the number "
                "of samples: pad what is shorter",
            )


def _by_sample(value: Any) -> dict[str, Any]:
    return {name: (leaf.dtype, leaf.shape[1:]) for name, leaf in named_leaves(value).items()}


def _described(value: Any) -> str:
    named = ((f"{name} " if name else "", leaf) for name, leaf in named_leaves(value).items())
    return ", ".join(f"{name}{describe_array(leaf)}" for name, leaf in named)


def host_fields(fields: Batch, *, where: str) -> dict[str, Any]:
    """The fields of a batch as a hook on the host gets them: arrays as NumPy's.

    Raises:
        DataError: An array that cannot be read on the host.
    """
    return {
        name: jax.tree.map(
            lambda leaf: _in_numpy(name, leaf, where) if _is_array(leaf) else leaf,  # noqa: B023 - used at once
            value,
        )
        for name, value in fields.items()
    }


def routed_fields(batch: Batch, names: Iterable[str], *, where: str) -> dict[str, Any]:
    """The named fields of a batch as NumPy arrays of dtypes that JAX computes with.

    Raises:
        DataError: A field that is no numeric array; names field and type.
    """
    return {name: _checked_field(name, batch[name], where) for name in names}


def _checked_field(name: str, value: Any, where: str) -> Any:
    if not jax.tree.leaves(value):
        _checked_leaf(name, value, where)
    if isinstance(value, list | tuple) and all(map(_is_number, jax.tree.leaves(value))):
        raise DataError(
            f"The batch field `{name}` in {where} is a {type(value).__name__}, not an array.",
            expected="NumPy arrays, batch axis first",
            fix=f"make one of it: `np.asarray({name}, ...)` with a dtype",
        )
    return jax.tree.map(lambda leaf: _checked_leaf(name, leaf, where), value)


def _checked_leaf(name: str, leaf: Any, where: str) -> np.ndarray:
    if not _is_array(leaf):
        raise DataError(
            f"The batch field `{name}` in {where} holds {type(leaf).__name__}, not an array.",
            expected="NumPy arrays, batch axis first: a scalar would be baked into the program",
            fix="make it a Device field of the experiment, or do not name it in a traced hook",
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"The batch field `{name}` in {where} is a masked array, whose mask JAX does not see.",
            expected="a plain array",
            fix="fill it with `.filled(value)`, and pass the mask as a field of its own",
        )
    array = _in_numpy(name, leaf, where)
    # As JAX would: float64 becomes float32 unless x64 is on, so that one program serves both.
    dtype = jax_dtype(array.dtype)
    if dtype is None:
        raise DataError(
            f"The batch field `{name}` in {where} has dtype {array.dtype}.",
            expected="a boolean or numeric dtype that JAX has",
            fix="convert it in the loader; or leave it undeclared: fields that no traced hook names "
            "stay on the host",
        )
    lost = too_wide(array)
    if lost is not None:
        raise DataError(
            f"The batch field `{name}` in {where} is {array.dtype} and holds {lost}.",
            expected=f"integers that fit {dtype}, which JAX makes of it: they would wrap around",
            fix="map them to a smaller range in the loader, or set `JAX_ENABLE_X64=1`",
        )
    return array.astype(dtype, copy=False)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | complex)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _in_numpy(name: str, leaf: Any, where: str) -> np.ndarray:
    try:
        return np.asarray(leaf)
    # What a tensor library raises for a tensor that lies elsewhere or has a gradient.
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(
            f"The batch field `{name}` in {where} is {type(leaf).__name__} ({leaf.dtype}), which "
            f"NumPy cannot read: {str(error).splitlines()[0]}",
            expected="arrays in the host's memory",
            fix="convert it in the loader, for example with `.detach().cpu().float()`",
        ) from error


def num_rows(fields: Batch, *, where: str) -> int:
    """The batch extent that all fields share.

    Raises:
        DataError: Fields without a batch axis, or of different extents; lists each shape.
    """
    shapes = {
        name: tuple(leaf.shape) for name, value in fields.items() for leaf in jax.tree.leaves(value)
    }
    extents = {shape[0] if shape else None for shape in shapes.values()}
    if len(extents) != 1 or None in extents:
        listing = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items()) or "none"
        raise DataError(
            f"The fields of {where} disagree on the batch extent: {listing}.",
            expected="one number of samples in every field, whose batch axis is the first",
        )
    return extents.pop() or 0


def cut_to_width(fields: Batch, rows: int, width: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Cuts a batch into pieces of `width` rows; yields each with its count of real rows.

    A short piece is padded by repeating its last row, so that no padded value lies
    outside what the model has seen.
    """
    for start in range(0, rows, width):
        real = min(width, rows - start)
        yield (
            jax.tree.map(lambda leaf: _padded(leaf[start : start + real], width), dict(fields)),  # noqa: B023 - used at once
            real,
        )


def _padded(leaf: Any, width: int) -> np.ndarray:
    array = np.asarray(leaf)
    missing = width - array.shape[0]
    if not missing:
        return array
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
