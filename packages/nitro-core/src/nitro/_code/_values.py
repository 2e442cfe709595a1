"""Atoms, arrays and short descriptions: the leaves of a fingerprint.

Everything here is exact. Two atoms share an encoding only if they have one type and one
value, so `1`, `True` and `1.0`, or `0.0` and `-0.0`, never stand for each other. Arrays
count by dtype, shape and bytes, and none is ever sampled.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import struct
import types
import weakref
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from nitro._trees import is_rng_key

from ._origin import definition_name

# A NumPy array up to this size keeps a private copy, so that a re-check compares bytes
# (13 GB/s); a larger one is hashed again (1.6 GB/s) rather than held twice in memory.
COPY_LIMIT_BYTES: Final = 64 << 20

_TEXT_LIMIT: Final = 60
_ITEM_LIMIT: Final = 6

_V = TypeVar("_V")


class Absent:
    """A name that is not bound, or a closure variable that is still empty."""

    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = Absent()

_ATOM_TYPES: Final = frozenset[type](
    {
        *(types.NoneType, types.EllipsisType, types.NotImplementedType, Absent),
        *(bool, int, float, complex, str, bytes),
    }
)


def is_atom(value: object) -> bool:
    """Tells whether a value is a leaf that is encoded where it stands."""
    return type(value) in _ATOM_TYPES


def framed(*pieces: bytes) -> bytes:
    """Joins pieces so that no other list of pieces gives the same bytes."""
    return b"".join(len(piece).to_bytes(8, "big") + piece for piece in pieces)


def digest_of(*pieces: bytes) -> bytes:
    """Hashes pieces, keeping their borders."""
    return hashlib.sha256(framed(*pieces)).digest()


def encode_atom(value: object) -> bytes:
    """Encodes an atom together with its type."""
    kind = type(value).__name__.encode() + b":"
    match value:
        case float():
            return kind + struct.pack(">d", value)
        case complex():
            return kind + struct.pack(">dd", value.real, value.imag)
        case str():
            return kind + value.encode("utf-8", "surrogatepass")
        case bytes():
            return kind + value
        case int():
            # Not in decimal, which CPython refuses for huge numbers.
            return kind + hex(value).encode()
        case _:
            return kind


class IdentityMemo(Generic[_V]):
    """Remembers something about an object for as long as the object lives.

    An object that allows no weak reference is kept alive instead, so that its `id` cannot
    pass to another one.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], object], _V]] = {}

    def get(self, value: object) -> _V | None:
        """Returns what was remembered about this very object."""
        known = self._known.get(id(value))
        return known[1] if known is not None and known[0]() is value else None

    def put(self, value: object, what: _V) -> _V:
        """Remembers `what` about this very object."""
        key = id(value)
        try:
            alive: Callable[[], object] = weakref.ref(value, lambda _: self._forget(key, alive))
        except TypeError:
            alive = lambda: value  # noqa: E731 - the other branch is an object, too
        self._known[key] = alive, what
        return what

    def _forget(self, key: int, alive: Callable[[], object]) -> None:
        # Another object may have taken the address before this callback ran.
        known = self._known.get(key)
        if known is not None and known[0] is alive:
            del self._known[key]


# Arrays -----------------------------------------------------------------------------------


class _HashedArray(NamedTuple):
    layout: tuple[object, ...]
    digest: bytes
    content: bytearray | None  # None for a JAX array, which cannot change


_hashed_arrays: Final = IdentityMemo[_HashedArray]()


def has_plain_bytes(array: npt.NDArray[Any]) -> bool:
    """Tells whether the bytes of an array are all that it holds."""
    return not array.dtype.hasobject and array.dtype.kind != "T"


def numpy_digest(array: npt.NDArray[Any]) -> bytes:
    """Hashes the dtype, shape and bytes of an array without Python objects in it."""
    layout = (_dtype_text(array.dtype), array.shape)
    content = _flat_bytes(array)
    known = _hashed_arrays.get(array)
    # `bytearray == array` is one memcmp.
    if known is not None and known.layout == layout and known.content == content:
        return known.digest
    digest = digest_of(repr(layout).encode(), hashlib.sha256(content.data).digest())
    if content.nbytes <= COPY_LIMIT_BYTES:
        _hashed_arrays.put(array, _HashedArray(layout, digest, bytearray(content)))
    return digest


def jax_digest(array: jax.Array) -> bytes:
    """Hashes a JAX array by content; `weak_type` and the place where it lives are left out.

    Raises:
        ValueError: The content cannot be read: a tracer, a deleted or a remote array.
    """
    known = _hashed_arrays.get(array)
    if known is not None:
        return known.digest
    if isinstance(array, Tracer):
        raise ValueError("a tracer has no value")
    if array.is_deleted() or not array.is_fully_addressable:
        raise ValueError("a deleted or remote array cannot be read")
    kind = str(array.dtype).encode()
    host = np.asarray(jax.random.key_data(array) if is_rng_key(array) else array)
    digest = digest_of(b"jax", kind, numpy_digest(host))
    return _hashed_arrays.put(array, _HashedArray((), digest, None)).digest


def _dtype_text(dtype: np.dtype[Any]) -> str:
    # `str` alone takes bfloat16 for two raw bytes, `name` alone drops the byte order.
    return f"{dtype.name} {dtype.str} {dtype.descr if dtype.names else ''}"


def _flat_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    flat = np.ascontiguousarray(np.asarray(array)).reshape(-1)
    return flat.view(np.uint8) if flat.size else np.empty(0, np.uint8)


# Descriptions -----------------------------------------------------------------------------


def describe(value: object) -> str:
    """Writes a value for a person, in at most about 60 characters and without addresses.

    Arrays read `float32[3,4]`. No code of the user runs: an object is described by its
    class and attributes, never by its own `__repr__`.
    """
    try:
        return shorten(_describe(value, depth=2))
    except Exception:  # noqa: BLE001 - a property of the user's may raise anything
        return type(value).__qualname__


def shorten(text: str) -> str:
    """Cuts a text that is too long for a message."""
    return text if len(text) <= _TEXT_LIMIT else f"{text[: _TEXT_LIMIT - 1]}…"


def _describe(value: object, *, depth: int) -> str:
    if is_atom(value):
        return _describe_atom(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _describe_array(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.dtype | PurePath | range | slice):
        return str(value)
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"class {value.__qualname__}"
    if isinstance(value, list | tuple | set | frozenset | dict):
        items = cast("list[object]", value)
        return _describe_container(items, depth=depth)
    named = definition_name(value)
    if named is not None and callable(value):
        return f"{named[1].replace('<locals>.', '')}()"
    return _describe_object(value, depth=depth)


def _describe_atom(value: object) -> str:
    match value:
        case int() if value.bit_length() > 256:
            return f"int of {value.bit_length()} bits"
        case str() | bytes() if len(value) > _TEXT_LIMIT:
            return f"{value[:_TEXT_LIMIT]!r}…"
        case types.EllipsisType():
            return "..."
        case _:
            return repr(value)


def _describe_array(value: npt.NDArray[Any] | np.generic | jax.Array) -> str:
    text = f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, np.generic):
        return f"{value.dtype}({value})"
    if value.ndim == 0 and isinstance(value, np.ndarray) and has_plain_bytes(value):
        return f"{text} {value}"
    return text


def _describe_container(value: object, *, depth: int) -> str:
    size = len(cast("list[object]", value))
    if depth == 0:
        return f"{type(value).__name__} of {size}"
    if isinstance(value, dict):
        pairs = itertools.islice(cast("dict[object, object]", value).items(), _ITEM_LIMIT)
        shown = [f"{_describe(k, depth=0)}: {_describe(v, depth=depth - 1)}" for k, v in pairs]
    else:
        items = cast("list[object]", value)
        shown = [_describe(item, depth=depth - 1) for item in itertools.islice(items, _ITEM_LIMIT)]
    # The order of a set differs from process to process.
    shown = sorted(shown) if isinstance(value, set | frozenset) else shown
    if size > _ITEM_LIMIT:
        shown.append(f"… {size - _ITEM_LIMIT} more")
    opening, closing = _brackets(value)
    comma = "," if size == 1 and isinstance(value, tuple) else ""
    return f"{opening}{', '.join(shown)}{comma}{closing}"


def _brackets(value: object) -> tuple[str, str]:
    plain: dict[type, tuple[str, str]]
    plain = {list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), dict: ("{", "}")}
    return plain.get(type(value)) or (f"{type(value).__name__}(", ")")


def _describe_object(value: object, *, depth: int) -> str:
    name = type(value).__qualname__.replace("<locals>.", "")
    held: Mapping[str, object] = getattr(value, "__dict__", {})
    state = {key: item for key, item in held.items() if not key.startswith("_")}
    if dataclasses.is_dataclass(value):
        state = {
            field.name: getattr(value, field.name, ABSENT)
            for field in dataclasses.fields(value)
            if field.repr
        }
    if depth == 0 or not state:
        return f"{name}({'…' if state else ''})"
    shown = [f"{key}={_describe(v, depth=depth - 1)}" for key, v in state.items()]
    return f"{name}({', '.join(shown[:_ITEM_LIMIT])})"
