"""Digests of values by content, the same in every process."""

from __future__ import annotations

import copyreg
import enum
import functools
import itertools
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import jax
import numpy as np

from ._functions import code_digest
from ._origin import is_library_function, is_library_module, library_name
from ._values import (
    IdentityMemo,
    digest_of,
    encode_atom,
    framed,
    has_plain_bytes,
    is_atom,
    jax_digest,
    numpy_digest,
)

# Where and when a Flax module was made (NNX), or as which object (Linen): nothing about it.
_FLAX_ORIGINS: Final = frozenset({"TraceState", "PytreeState", "ObjectState", "FlaxId"})
_PAYLOADS: Final[Mapping[type, Callable[[Any], object]]] = {
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    list: lambda value: list.__getitem__(value, slice(None)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: set(frozenset.__iter__(value)),
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    BaseException: lambda value: value.args,
}
_CLASS_CLUTTER: Final = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__"),
        *("__annotations__", "__annotate__", "__annotations_cache__", "__static_attributes__"),
        *("__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__"),
        *("__orig_bases__", "__parameters__"),
    }
)
_SLOTS: Final = (types.GetSetDescriptorType, types.MemberDescriptorType)

_DESCRIPTORS: Final = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *_SLOTS,
)

_process: Final = uuid.uuid4().hex
_serial: Final = itertools.count()
_tokens: Final = IdentityMemo[bytes]()


class OutOfReachError(Exception):
    """A value whose content cannot be read, or not within the limit."""


def value_digest(value: object) -> str:
    """Hashes a value by content, as hexadecimal text that is the same in every process.

    What `why_not_by_content` objects to counts as itself, in this process only.
    """
    return Content().digest(value).hex()


def why_not_by_content(value: object) -> str | None:
    """Returns what stands in the way of hashing a value by content, None if nothing does."""
    content = Content()
    content.digest(value)
    return content.obstacle


class Content:
    """Hashes values by content.

    Attributes:
        obstacle: The first thing that could not be read, and why; it counts as itself.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.obstacle: str | None = None
        self._limit = limit
        self._known: dict[int, bytes] = {}
        self._alive: list[object] = []

    def digest(self, value: object, label: str = "the value") -> bytes:
        """The digest of a value.

        Raises:
            OutOfReachError: It holds more objects than the limit.
        """
        if is_atom(value):
            return digest_of(encode_atom(value))
        known = self._known.get(id(value))
        if known is not None:
            return known
        self._alive.append(value)
        if self._limit is not None and len(self._alive) > self._limit:
            raise OutOfReachError(label)
        # For what refers back to it; told apart by what else it holds.
        self._known[id(value)] = f"cycle {type(value).__name__}".encode()
        digest = self._known[id(value)] = self._read(value, label)
        return digest

    def _read(self, value: Any, label: str) -> bytes:
        try:
            return digest_of(*self._pieces(value, label))
        except OutOfReachError:
            raise
        except Exception as error:  # noqa: BLE001 - an object of the user's may raise on any access
            return self._opaque(value, label, f"its content is out of reach: {error}")

    def _opaque(self, value: object, label: str, reason: str) -> bytes:
        self.obstacle = self.obstacle or f"{label} ({type(value).__qualname__}): {reason}"
        known = _tokens.get(value)
        return known or _tokens.put(value, f"{_process} {next(_serial)}".encode())

    def _pieces(self, value: Any, label: str) -> Iterable[bytes]:
        kind = type(value).__name__.encode()
        match value:
            case np.ndarray() if type(value) is np.ndarray:
                return kind, self._array(value, label)
            case np.generic():
                return b"scalar", self._array(np.asarray(value), label)
            case jax.Array():
                return kind, jax_digest(value)
            case enum.Enum():
                return b"enum", value.name.encode(), self.digest(type(value), label)
            case list() | tuple() if type(value) in (list, tuple):
                return kind, *self._items(value, label)
            case set() | frozenset() if type(value) in (set, frozenset):
                return kind, *sorted(self._items(value, label))
            case dict() | types.MappingProxyType() if type(value) in (dict, types.MappingProxyType):
                return kind, *self._pairs(value, label)
            case jax.Device():
                return kind, f"{value.platform} {value.id}".encode()
            case _:
                return kind, *self._code_or_object(value, label)

    def _array(self, value: np.ndarray[Any, Any], label: str) -> bytes:
        if has_plain_bytes(value):
            return numpy_digest(value)
        content = [f"{value.dtype} {value.shape}", value.ravel().tolist()]
        return self.digest(content, label)

    def _items(self, values: Iterable[object], label: str) -> list[bytes]:
        return [self.digest(item, f"{label}[{i}]") for i, item in enumerate(values)]

    def _pairs(self, value: Mapping[object, object], label: str) -> list[bytes]:
        return [
            piece
            for key, item in value.items()
            for piece in (self.digest(key, label), self.digest(item, f"{label}[{key!r}]"))
        ]

    def _code_or_object(self, value: Any, label: str) -> Iterable[bytes]:
        name = library_name(value)
        if name or isinstance(value, types.ModuleType):
            return b"named", (name or value.__name__).encode()
        match value:
            case types.FunctionType():
                return self._function(value, label)
            case functools.partial() | functools.partialmethod():
                return self._many(label, value.func, value.args, value.keywords)
            case types.MethodType():
                return self._many(label, value.__func__, value.__self__)
            case types.BuiltinFunctionType() | types.MethodWrapperType():
                return self._many(label, value.__name__, value.__self__)
            case staticmethod() | classmethod() | functools.cached_property() | property():
                parts = ("fget", "fset", "fdel", "func", "__func__")
                return self._many(label, *(getattr(value, part, None) for part in parts))
            case type():
                return self._class(value, label)
            case _ if isinstance(value, _DESCRIPTORS):
                return self._many(label, value.__name__, value.__objclass__)
            case _:
                return self._object(value, label)

    def _many(self, label: str, *values: object) -> list[bytes]:
        return [self.digest(value, label) for value in values]

    def _function(self, function: types.FunctionType, label: str) -> Iterable[bytes]:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        own = function.__code__.co_qualname.encode()
        code = own if is_library_function(function) else code_digest(function.__code__)
        return code, *self._many(label, function.__defaults__, function.__kwdefaults__, cells)

    def _class(self, cls: type, label: str) -> Iterable[bytes]:
        if is_library_module(cls.__module__):
            return (f"{cls.__module__}.{cls.__qualname__}".encode(),)
        members = {
            name: value
            for name, value in sorted(vars(cls).items())
            if name not in _CLASS_CLUTTER and not isinstance(value, _SLOTS)
        }
        if issubclass(cls, enum.Enum):
            members = {name: item.value for name, item in cls.__members__.items()}
        return cls.__name__.encode(), *self._many(label, cls.__bases__, members)

    def _object(self, value: Any, label: str) -> Iterable[bytes]:
        """Reads an object through its class, its state and what it inherits from a builtin."""
        cls = type(value)
        if cls.__name__ in _FLAX_ORIGINS and is_library_module(cls.__module__):
            return (b"origin",)
        author = _author_of_reduce(cls)
        # A state that the user writes for pickling may leave out what counts.
        is_custom = cls.__getstate__ is not object.__getstate__
        is_ours = author is object and not is_custom
        if is_ours or (author is not object and is_library_module(author.__module__)):
            reduced = _reduced(value)
            if author is not object:
                return self._many(label, cls, *reduced)
        payload = [view(value) for base, view in _PAYLOADS.items() if isinstance(value, base)][:1]
        state = object_state(value)
        named = [self.digest(item, f"{label}.{name}") for name, item in sorted(state.items())]
        return framed(*map(str.encode, sorted(state))), *named, *self._many(label, cls, payload)


def object_state(value: object) -> dict[str, Any]:
    """What an object holds, in slots or otherwise, by name."""
    state: dict[str, Any] = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    state[name] = slot.__get__(value, type(value))
                except AttributeError:
                    continue
    state.update(getattr(value, "__dict__", {}))
    return {str(name): item for name, item in state.items()}


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _author_of_reduce(cls: type) -> type:
    """Finds the class that says how objects of `cls` are taken apart for pickling."""
    if cls in copyreg.dispatch_table:
        return cls
    names = {"__reduce_ex__", "__reduce__"}
    return next((base for base in cls.__mro__ if names & vars(base).keys()), object)


def _reduced(value: Any) -> list[object]:
    """Takes an object apart as pickle would, without writing anything."""
    special = copyreg.dispatch_table.get(type(value))
    reduced: Any = special(value) if special else value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return [reduced]
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    listed = [None if items is None else list(items), None if pairs is None else list(pairs)]
    return [arguments, make, state, *listed]
