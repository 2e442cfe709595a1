"""Reads and writes safetensors files, one tensor in memory at a time.

The format is that of https://github.com/huggingface/safetensors (an 8-byte little-endian
header length, a JSON header, then the tensors without gaps). A bundle's weights are stored
with their axes reversed, because the server reads shapes as column-major (bundle format §6).
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np

from nitro.errors import BundleError, ExportError
from nitro.export import is_size, read_json

from ._dtypes import BY_SAFETENSORS, BY_TOKEN, DType, find_dtype, has_nan

FILE = "weights.safetensors"
GOLDEN_FILE = "golden.safetensors"

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_CHUNK_BYTES = 16 * 1024 * 1024
_ALIGNMENT = 8
_STRIPE = 256


class _Sink(Protocol):
    def write(self, data: Any, /) -> object: ...


def write_tensors(
    sink: _Sink,
    tensors: Mapping[str, Any],
    *,
    reverse_axes: bool,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file; the bytes depend on the arguments only.

    Each tensor is fetched, turned and written in blocks of 16 MiB, so what is added to
    memory does not grow with the file.

    Args:
        sink: Where the bytes go.
        tensors: NumPy or JAX arrays by name.
        reverse_axes: Stores each tensor as its transpose, of the reversed shape.
        metadata: The header's `__metadata__`.

    Raises:
        ExportError: A dtype that the format lacks, or a name it reserves.
    """
    # Widest first, as the safetensors library does it: so each tensor is aligned.
    dtypes = {name: _stored_dtype(name, array) for name, array in tensors.items()}
    order = sorted(tensors, key=lambda name: (-dtypes[name].numpy.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        shape = [int(size) for size in tensors[name].shape]
        end = offset + math.prod(shape) * dtypes[name].numpy.itemsize
        header[name] = {
            "dtype": dtypes[name].safetensors,
            "shape": shape[::-1] if reverse_axes else shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    sink.write(len(text).to_bytes(8, "little"))
    sink.write(text)
    for name in order:
        array = np.asarray(tensors[name])
        for block in _blocks(array.T if reverse_axes else array):
            sink.write(block.reshape(-1).view(np.uint8).data)


def _stored_dtype(name: str, array: Any) -> DType:
    found = find_dtype(array.dtype)
    if found is None:
        raise ExportError(
            f"The weight `{name}` has the dtype {array.dtype}.",
            expected="one of " + ", ".join(str(dtype.numpy) for dtype in BY_TOKEN.values()),
            fix="store it in a dtype that bundles have, and convert it inside `forward`",
        )
    if name == "__metadata__":
        raise ExportError(
            "A weight has the name `__metadata__`.", expected="a name that safetensors leaves free"
        )
    return found


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """The array's elements in C order, as C-contiguous pieces of limited size."""
    if array.size == 0:
        return
    if array.flags.c_contiguous or array.nbytes <= _CHUNK_BYTES:
        yield make_contiguous(array)
        return
    rows = max(1, _CHUNK_BYTES // (array.nbytes // len(array)))
    for at in range(0, len(array), rows):
        piece = array[at : at + rows]
        if piece.nbytes > _CHUNK_BYTES and piece.ndim > 1:
            yield from _blocks(piece[0])
        else:
            yield make_contiguous(piece)


def make_contiguous(array: np.ndarray) -> np.ndarray:
    """The array in C order; itself where it is so already.

    Turns large arrays stripe by stripe, which the caches of a CPU like three times better
    than NumPy's own order of copying a transpose.
    """
    if array.flags.c_contiguous or array.ndim < 2:
        return np.array(array, order="C", copy=None)
    turned = np.empty(array.shape, array.dtype)
    for at in range(0, array.shape[-1], _STRIPE):
        turned[..., at : at + _STRIPE] = array[..., at : at + _STRIPE]
    return turned


def check_values(flat: np.ndarray, name: str, *, file: str) -> None:
    """Refuses what no bundle's weights may hold; looks at every element.

    Raises:
        BundleError: A NaN, or a boolean that is neither 0 nor 1; names the weight.
    """
    dtype = find_dtype(flat.dtype)
    assert dtype is not None
    if has_nan(flat, dtype):
        raise BundleError(
            f"`{file}` holds a NaN in `{name}`.",
            expected="finite weights, or infinite ones: the export refuses NaNs",
        )
    if dtype.token == "bool" and (flat.view(np.uint8) > 1).any():
        raise BundleError(
            f"`{file}` holds a boolean other than 0 and 1 in `{name}`.",
            expected="bytes of 0 and 1",
        )


class TensorFile(Mapping[str, np.ndarray]):
    """A safetensors file, memory-mapped: tensors by name, nothing read before its use.

    Attributes:
        metadata: The header's `__metadata__`.
        dtypes: The dtype of each tensor.
    """

    def __init__(self, path: Path, *, file: str, reverse_axes: bool) -> None:
        """Maps a file and checks its header against its size.

        Args:
            path: The file.
            file: Its name in messages.
            reverse_axes: Turns each tensor back: it was stored as its transpose.

        Raises:
            BundleError: The header lies or does not parse.
        """
        self._file = file
        self._reverse_axes = reverse_axes
        size = path.stat().st_size
        if size < 8:
            self._refuse(f"has {size} bytes", "a safetensors file, whose header length has 8")
        with path.open("rb") as opened:
            self._bytes = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._bytes[:8], "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            self._refuse(f"claims a header of {length} bytes", f"at most {size - 8}")
        self._start = 8 + length
        header = read_json(self._bytes[8 : self._start], file=file)
        if not isinstance(header, dict):
            self._refuse(f"has a header of {type(header).__name__}", "a JSON object")
        self.metadata = self._checked_metadata(header.pop("__metadata__", {}))
        self._entries = {name: self._checked_entry(name, e) for name, e in header.items()}
        self.dtypes = {name: dtype for name, (dtype, _, _, _) in self._entries.items()}
        self._check_offsets(size - self._start)

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file, in the program's axis order."""
        dtype, shape, begin, _ = self._entries[name]
        count = math.prod(shape)
        flat = np.frombuffer(self._bytes, dtype.numpy, count, self._start + begin if count else 0)
        stored = flat.reshape(shape)
        return stored.T if self._reverse_axes else stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def flat(self, name: str) -> np.ndarray:
        """The tensor's elements in the order of the file, as a read-only view of it."""
        array = self[name]
        return (array.T if self._reverse_axes else array).reshape(-1)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in the program's axis order; reads no data."""
        shape = self._entries[name][1]
        return shape[::-1] if self._reverse_axes else shape

    def forget_pages(self) -> None:
        """Lets the system take back the memory of what was read; reading again is allowed."""
        if hasattr(self._bytes, "madvise"):
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def argument_order(self) -> tuple[str, ...]:
        """The names of all tensors in the order of the program's weight arguments.

        Raises:
            BundleError: `argument_order` is missing while there are tensors, or does not
                name each of them exactly once.
        """
        key = "__metadata__.argument_order"
        if "argument_order" not in self.metadata:
            if not self._entries:
                return ()
            self._refuse(f"lacks `{key}`", "a JSON list of the tensors' names, as a string")
        names = read_json(self.metadata["argument_order"].encode(), file=f"{self._file}: {key}")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self._refuse(f"has an `{key}` that is no list of names", "a JSON list of strings")
        for name in names:
            if name not in self._entries:
                self._refuse(f"names `{name}` in `{key}`", "the name of a tensor in the file")
        if len(names) != len(set(names)) or len(names) != len(self._entries):
            missing = sorted(set(self._entries) - set(names))
            self._refuse(
                f"has {len(self._entries)} tensors, and {len(names)} names in `{key}`"
                + (f"; it leaves out `{missing[0]}`" if missing else ""),
                "each tensor's name once",
            )
        return tuple(names)

    def _checked_metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(
            isinstance(value, str) for value in metadata.values()
        ):
            self._refuse("has a `__metadata__` of other things", "a JSON object of strings")
        return metadata

    def _checked_entry(self, name: str, entry: Any) -> tuple[DType, tuple[int, ...], int, int]:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._refuse(f"has a malformed entry `{name}`", "dtype, shape and data_offsets")
        token, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(token, str) or token not in BY_SAFETENSORS:
            self._refuse(f"has the dtype {token!r} at `{name}`", "a dtype of the bundle format")
        if not _are_sizes(shape) or len(shape) > 64:
            self._refuse(f"has the shape {shape!r} at `{name}`", "a list of at most 64 sizes")
        if not _are_sizes(offsets) or len(offsets) != 2:
            self._refuse(f"has the data_offsets {offsets!r} at `{name}`", "two sizes")
        dtype, (begin, end) = BY_SAFETENSORS[token], offsets
        wanted = math.prod(shape) * dtype.numpy.itemsize
        if end - begin != wanted:
            self._refuse(
                f"gives `{name}` {end - begin} bytes", f"{wanted}, for {token} of shape {shape}"
            )
        return dtype, tuple(shape), begin, end

    def _check_offsets(self, size: int) -> None:
        at = 0
        for name, (_, _, begin, end) in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if begin != at:
                self._refuse(f"starts `{name}` at byte {begin}", f"{at}: no gap and no overlap")
            at = end
        if at != size:
            self._refuse(f"holds {size} bytes of tensors", f"{at}, by its header")

    def _refuse(self, problem: str, expected: str) -> NoReturn:
        raise BundleError(f"`{self._file}` {problem}.", expected=expected)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(is_size(size) for size in value)
