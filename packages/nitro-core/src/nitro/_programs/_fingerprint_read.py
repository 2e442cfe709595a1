"""Takes one object apart: what it is, and the named parts that its behaviour rests on.

Reading is cheap and looks every name up afresh, so reading an object a second time and
finding the very same parts proves that nothing about it has moved. User code is read by
content; library code (installed packages, the standard library, Nitro) by name and
version.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import itertools
import operator
import os
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, cast

import jax
import numpy as np

from ._fingerprint_code import code_facts
from ._fingerprint_names import PARENT, Owner, Part, Reading, referenced_parts
from ._fingerprint_origin import (
    LibraryName,
    file_label,
    is_library_function,
    is_library_module,
    library_name,
)
from ._fingerprint_values import (
    ABSENT,
    IdentityMemo,
    encode_atom,
    framed,
    has_plain_bytes,
    is_atom,
    jax_digest,
    numpy_digest,
)

# What the class statement, `abc`, `dataclass` and the interpreter write into a class, and
# what is only for readers. A dataclass is read through the methods generated for it.
_CLASS_CLUTTER: Final = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__annotations__",
        "__annotate__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
        "_abc_impl",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__orig_bases__",
        "__parameters__",
    ]
)
_SLOTS: Final = (types.GetSetDescriptorType, types.MemberDescriptorType)
_WRAPPER_CLUTTER: Final = frozenset(
    {"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"}
)
# Where and when a Flax module was made (NNX), or as which object (Linen): nothing about it.
_FLAX_ORIGINS: Final = frozenset({"TraceState", "PytreeState", "ObjectState", "FlaxId"})
# A library's, and yet what they give is the machine's. To compare all of it would make each
# variable of the environment part of every program.
_ENVIRONMENT: Final = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb"})
_JIT_SETTINGS: Final = ("static_argnums", "static_argnames", "inline", "keep_unused")
_ATTRIBUTE_GETTERS: Final = (operator.attrgetter, operator.methodcaller)

_process: Final = uuid.uuid4().hex
_serial: Final = itertools.count()
_tokens: Final = IdentityMemo[bytes]()


def read(value: object, owner: Owner) -> Reading:
    """Takes one object apart, in the eyes of the hooks of `owner`."""
    try:
        return _read(value, owner)
    except Exception as error:  # noqa: BLE001 - an object of the user's may raise on any access
        return _opaque(value, f"reading it raised {type(error).__name__}: {error}")


def _read(value: object, owner: Owner) -> Reading:
    if isinstance(value, LibraryName):
        return _library(value.path)
    if owner.covers(value):
        cls = value if isinstance(value, type) else type(value)
        return Reading("owner", cls.__qualname__.encode(), name=f"class {cls.__qualname__}")
    if isinstance(value, types.FunctionType):
        return _read_function(value, owner)
    if isinstance(value, types.ModuleType):
        return _read_module(value)
    path = "os.environ" if value is os.environ else library_name(value)
    if path:
        return _library(path)
    if isinstance(value, _ATTRIBUTE_GETTERS):
        return _read_getter(value, owner)
    if isinstance(value, type):
        return _read_class(value)
    reader = _READERS.get(type(value)) or _reader_by_base(value)
    return reader(value)


def _library(path: str) -> Reading:
    name = LibraryName(path)
    obstacle = "environment variables are not compared" if path in _ENVIRONMENT else ""
    shown = f"{path} {name.version}"
    return Reading("library", shown.encode(), name=shown, obstacle=obstacle)


def _opaque(value: object, reason: str, parts: Iterable[Part] = ()) -> Reading:
    """Reads an object whose content is out of reach: it counts as itself, in this process."""
    known = _tokens.get(value)
    token = known or _tokens.put(value, f"{_process} {next(_serial)}".encode())
    return Reading("opaque", token, tuple(parts), obstacle=reason)


# Functions --------------------------------------------------------------------------------


def _read_function(function: types.FunctionType, owner: Owner) -> Reading:
    if is_library_function(function):
        return _read_library_function(function)
    code = function.__code__
    facts = code_facts(code)
    parts = [
        *_defaults(function),
        *referenced_parts(function, facts, owner),
        *_attributes(vars(function)),
    ]
    name = code.co_qualname.replace("<locals>.", "")
    file = file_label(code.co_filename, function.__globals__.get("__name__"))
    first = code.co_firstlineno
    return Reading("function", facts.digest, tuple(parts), f"{name}()", file, first, facts)


def _read_library_function(function: types.FunctionType) -> Reading:
    """Reads a library's function by name, and what it closes over if it was made at run time."""
    module = function.__globals__.get("__name__") or "builtins"
    path = library_name(function) or f"{module}.{function.__code__.co_qualname}"
    reading = _library(path)
    if library_name(function) or "<locals>" not in path:
        wrapped = vars(function).get("__wrapped__")
        parts = [] if wrapped is None else [Part("wrapped", wrapped, _of("wrapped by"))]
    elif hasattr(function, "registry") and hasattr(function, "dispatch"):
        # `functools.singledispatch`: its other cells are caches.
        registry = dict(cast("Any", function).registry)
        parts = [Part("registry", registry, _of("overloads of"))]
    else:
        names = function.__code__.co_freevars
        cells = zip(names, function.__closure__ or (), strict=True)
        parts = [*_defaults(function), *(_cell(name, cell) for name, cell in cells)]
        parts += _attributes(vars(function))
    return reading._replace(parts=tuple(parts))


def _cell(name: str, cell: types.CellType) -> Part:
    try:
        content = cell.cell_contents
    except ValueError:
        content = ABSENT
    return Part(f"closure {name}", content, f"closure variable `{name}` of {PARENT}")


def _defaults(function: types.FunctionType) -> list[Part]:
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    pairs = dict(zip(names[len(names) - len(values) :], values, strict=True))
    pairs.update(sorted((function.__kwdefaults__ or {}).items()))
    return [
        Part(f"default {name}", value, f"default `{name}` of {PARENT}")
        for name, value in pairs.items()
    ]


def _of(what: str) -> str:
    return f"{what} {PARENT}"


def _named(role: str, *values: object) -> list[Part]:
    return [
        Part(f"{role} {i}", value, _of(role) + (f" ({i})" if i else ""))
        for i, value in enumerate(values)
    ]


def _attributes(state: Mapping[str, object]) -> list[Part]:
    return [
        Part(f".{name}", state[name])
        for name in sorted(state, key=str)
        if name not in _WRAPPER_CLUTTER
    ]


def _read_method(value: types.MethodType) -> Reading:
    parts = (*_named("function of", value.__func__), *_named("instance of", value.__self__))
    return Reading("method", parts=parts)


def _read_builtin(value: Any) -> Reading:
    target = getattr(value, "__self__", None)
    if target is None or isinstance(target, types.ModuleType):
        module = getattr(value, "__module__", None)
        if is_library_module(module):
            return _library(f"{module}.{value.__qualname__}")
        return _opaque(value, "it is compiled code of yours")
    return Reading("builtin", value.__name__.encode(), tuple(_named("instance of", target)))


def _read_slot(value: Any) -> Reading:
    return Reading(
        "builtin", value.__name__.encode(), tuple(_named("class of", value.__objclass__))
    )


def _read_partial(value: functools.partial[Any] | functools.partialmethod[Any]) -> Reading:
    bound = [
        Part(f"argument {i}", item, f"argument {i} bound by {PARENT}")
        for i, item in enumerate(value.args)
    ]
    bound += [
        Part(f"argument {name}", item, f"argument `{name}` bound by {PARENT}")
        for name, item in value.keywords.items()
    ]
    return Reading(type(value).__name__, parts=(*_named("function of", value.func), *bound))


def _read_getter(value: object, owner: Owner) -> Reading:
    """Reads `attrgetter("name")`, which may be meant for the owner."""
    _, arguments = cast("Any", value).__reduce__()[:2]
    texts = [text for text in arguments if isinstance(text, str)]
    names = [name for text in texts for name in text.split(".")]
    found = [part for name in names for part in owner.definitions(name, uses_super=False)]
    return Reading(type(value).__name__, parts=(*_named("names of", *arguments), *found))


def _read_cached(value: Any) -> Reading:
    """Reads an `lru_cache`, without what it holds at the moment."""
    settings = repr(value.cache_parameters()).encode()
    return Reading("lru_cache", settings, tuple(_named("function of", value.__wrapped__)))


def _read_jitted(value: Any) -> Reading:
    # Its other settings hold the file and line, or say where the code runs, not what it does.
    info = getattr(value, "_jit_info", None)
    settings = repr([getattr(info, name, None) for name in _JIT_SETTINGS]).encode()
    return Reading("jit", settings, tuple(_named("function of", value.__wrapped__)))


def _read_descriptor(value: Any) -> Reading:
    """Reads a property, a static or class method, or a cached property."""
    names = ("fget", "fset", "fdel") if isinstance(value, property) else ("__func__", "func")
    functions = [getattr(value, name, None) for name in names]
    return Reading(type(value).__name__, parts=tuple(_named("function of", *functions)))


# Modules and classes ----------------------------------------------------------------------


def _read_module(module: types.ModuleType) -> Reading:
    """Reads a module that is handed around: then everything in it counts."""
    if is_library_module(module.__name__):
        return _library(module.__name__)
    parts = [
        Part(f".{name}", value, f"global {module.__name__}.{name}")
        for name, value in sorted(vars(module).items())
        if not (name.startswith("__") and name.endswith("__"))
    ]
    return Reading("module", parts=tuple(parts), name=f"module {module.__name__}")


def _read_class(cls: type) -> Reading:
    name = cls.__qualname__.replace("<locals>.", "")
    if is_library_module(cls.__module__):
        # Made by a library at run time: a named tuple type, a parametrised type.
        return _library(f"{cls.__module__}.{cls.__qualname__}")
    members = _enum_members(cls) if issubclass(cls, enum.Enum) else _class_members(cls)
    bases = [*cls.__bases__, *([] if type(cls) is type else [type(cls)])]
    parts = (*_named("base of", *bases), *members)
    return Reading("class", cls.__name__.encode(), parts, f"class {name}", cls.__module__)


def _class_members(cls: type) -> list[Part]:
    return [
        Part(f".{name}", value)
        for name, value in sorted(vars(cls).items())
        if name not in _CLASS_CLUTTER and not isinstance(value, _SLOTS)
    ]


def _enum_members(cls: type[enum.Enum]) -> list[Part]:
    values = [Part(f".{name}", item.value) for name, item in cls.__members__.items()]
    others = [
        part
        for part in _class_members(cls)
        # What the enum machinery keeps for itself starts with an underscore.
        if not part.key.startswith("._") and part.key[1:] not in cls.__members__
    ]
    return values + others


def _read_enum(value: enum.Enum) -> Reading:
    parts = (Part("name", value.name), *_named("class of", type(value)))
    return Reading("enum", parts=parts)


# Values -----------------------------------------------------------------------------------


def _items(values: Iterable[object]) -> tuple[Part, ...]:
    return tuple(Part(f"[{i}]", value) for i, value in enumerate(values))


def _read_sequence(value: list[object] | tuple[object, ...]) -> Reading:
    kind = type(value).__name__
    if all(map(is_atom, value)):
        return Reading(kind, framed(*map(encode_atom, value)))
    return Reading(kind, parts=_items(value))


def _read_set(value: set[object] | frozenset[object]) -> Reading:
    kind = type(value).__name__
    if all(map(is_atom, value)):
        return Reading(kind, framed(*sorted(map(encode_atom, value))))
    parts = tuple(Part("item", item) for item in value)
    return Reading(kind, parts=parts, has_order=False)


def _read_dict(value: dict[object, object]) -> Reading:
    return Reading(type(value).__name__, parts=tuple(_dict_parts(value)))


def _dict_parts(value: Mapping[object, object]) -> Iterator[Part]:
    for i, (key, item) in enumerate(value.items()):
        if is_atom(key):
            yield Part(f"[{type(key).__name__} {key!r}]", item, f"{PARENT}[{key!r}]")
        else:
            yield Part(f"key {i}", key, f"key {i} of {PARENT}")
            yield Part(f"[{i}]", item)


def _read_numpy(value: np.ndarray[Any, Any]) -> Reading:
    kind = type(value)
    extra: list[Part] = []
    if kind is not np.ndarray:
        extra = [*_named("class of", kind), *_attributes(getattr(value, "__dict__", {}))]
    if has_plain_bytes(value):
        return Reading("array", numpy_digest(value), tuple(extra))
    header = f"{value.dtype} {value.shape}".encode()
    return Reading("array", header, (*_items(cast("Any", value).ravel().tolist()), *extra))


def _read_scalar(value: np.generic) -> Reading:
    return _read_numpy(np.asarray(value))._replace(kind="scalar")


def _read_jax(value: jax.Array) -> Reading:
    try:
        return Reading("jax array", jax_digest(value))
    except (ValueError, RuntimeError) as error:
        return _opaque(value, str(error))


def _read_device(value: Any) -> Reading:
    return Reading("device", f"{value.platform} {value.id}".encode())


def _read_weak(value: Callable[[], object]) -> Reading:
    return Reading("weak reference", parts=tuple(_named("referent of", value())))


def _read_object(value: object) -> Reading:
    """Reads an object through its class, its attributes and what it inherits from a builtin."""
    cls = type(value)
    if cls.__name__ in _FLAX_ORIGINS and is_library_module(cls.__module__):
        return Reading("origin")
    parts = [*_named("class of", cls), *_attributes(_state(value)), *_inherited(value)]
    author = _author_of_reduce(cls)
    # A state that the user writes for pickling may leave out what a trace reads.
    is_custom = getattr(cls, "__getstate__", None) is not getattr(object, "__getstate__", None)
    if not is_custom if author is object else is_library_module(author.__module__):
        try:
            reduced = _reduce(value)
        except Exception as error:  # noqa: BLE001 - whatever `__reduce__` of a library raises
            return _opaque(value, f"its content is out of reach: {error}", parts)
        if author is not object:
            parts = [*_named("class of", cls), *reduced]
    return Reading("object", parts=tuple(parts))


def _state(value: object) -> dict[str, object]:
    state: dict[str, object] = {}
    for cls in type(value).__mro__:
        for name, slot in vars(cls).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    state[name] = slot.__get__(value, type(value))
                except AttributeError:
                    continue
    state.update(getattr(value, "__dict__", {}))
    return state


def _inherited(value: object) -> Iterator[Part]:
    """Reads the content that an object of a derived class keeps as a builtin."""
    for base, view in _PAYLOADS.items():
        if isinstance(value, base):
            yield from _named("content of", view(value))
            return


_PAYLOADS: Final[dict[type, Callable[[Any], object]]] = {
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


def _author_of_reduce(cls: type) -> type:
    """Finds the class that says how objects of `cls` are taken apart for pickling."""
    if cls in copyreg.dispatch_table:
        return cls
    names = {"__reduce_ex__", "__reduce__"}
    return next((base for base in cls.__mro__ if names & vars(base).keys()), object)


def _reduce(value: object) -> list[Part]:
    """Takes an object apart as pickle would, without writing anything."""
    special = copyreg.dispatch_table.get(type(value))
    reduced: Any = special(value) if special else value.__reduce_ex__(2)
    if isinstance(reduced, str):
        return [Part("name", reduced)]
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    listed = [None if items is None else list(items), None if pairs is None else list(pairs)]
    return _named("content of", arguments, make, state, *listed)


def _reader_by_base(value: object) -> Callable[[Any], Reading]:
    for base, reader in _READERS_BY_BASE:
        if isinstance(value, base):
            return reader
    is_jitted = type(value).__name__ == "PjitFunction" and hasattr(value, "__wrapped__")
    return _read_jitted if is_jitted else _read_object


_READERS: Final[dict[type, Callable[[Any], Reading]]] = {
    **dict.fromkeys((list, tuple), _read_sequence),
    **dict.fromkeys((set, frozenset), _read_set),
    dict: _read_dict,
    types.MappingProxyType: _read_dict,
    types.MethodType: _read_method,
    types.BuiltinFunctionType: _read_builtin,
    types.MethodWrapperType: _read_builtin,
    types.MethodDescriptorType: _read_slot,
    types.WrapperDescriptorType: _read_slot,
    types.ClassMethodDescriptorType: _read_slot,
    types.GetSetDescriptorType: _read_slot,
    functools.partial: _read_partial,
    functools.partialmethod: _read_partial,
    functools._lru_cache_wrapper: _read_cached,  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys((property, staticmethod, classmethod), _read_descriptor),
    functools.cached_property: _read_descriptor,
    weakref.ref: _read_weak,
}
_READERS_BY_BASE: Final[tuple[tuple[type, Callable[[Any], Reading]], ...]] = (
    (enum.Enum, _read_enum),
    (np.ndarray, _read_numpy),
    (np.generic, _read_scalar),
    (jax.Array, _read_jax),
    (jax.Device, _read_device),
)
