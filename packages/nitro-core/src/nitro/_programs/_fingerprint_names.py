"""Looks the names that code reads up, as the interpreter would do it now."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ._fingerprint_code import CodeFacts, Reference
from ._fingerprint_origin import LibraryName, is_library_function, is_library_module
from ._fingerprint_values import ABSENT, is_atom

PARENT: Final = "\0"

_METHODS: Final = (
    *(types.FunctionType, property, classmethod, staticmethod),
    functools.cached_property,
)
# Special methods that the class statement calls or a decorator writes, and that no
# operator on `self` inside a hook reaches.
_MADE_BY_CLASS: Final = frozenset(
    f"__{name}__"
    for name in [
        "init",
        "new",
        "post_init",
        "init_subclass",
        "set_name",
        "class_getitem",
        "del",
        "repr",
        "eq",
        "hash",
        "lt",
        "le",
        "gt",
        "ge",
        "setattr",
        "delattr",
        "replace",
        "copy",
        "deepcopy",
        "reduce",
        "reduce_ex",
        "getstate",
        "setstate",
        "sizeof",
        "dir",
    ]
)
# They return None, so what the container holds does not come back through them.
_ONE_WAY: Final[dict[type, frozenset[str]]] = {
    list: frozenset({"append", "extend", "insert", "clear"}),
    dict: frozenset({"update", "clear"}),
    set: frozenset({"add", "discard", "update", "clear"}),
    collections.deque: frozenset({"append", "appendleft", "extend", "extendleft", "clear"}),
}
_COUNTERS: Final = frozenset[type]({int, float, dict, list, collections.Counter})


class Part(NamedTuple):
    """Something that an object refers to.

    Attributes:
        key: Its role, the same in every process: `global SCALE`, `[3]`.
        value: The object that plays the role now.
        label: Its name for a person, where `PARENT` stands for the name of the whole;
            empty for the parent's name with the key behind it.
    """

    key: str
    value: object
    label: str = ""


class Reading(NamedTuple):
    """One object, taken apart.

    Attributes:
        kind: What it is: `function`, `class`, `library`, `array`, `list`, ...
        header: Its content as far as it is not parts.
        parts: What it refers to.
        name: What a person calls it, where it has a name of its own.
        file: The file it was written in, as a person calls it.
        line: The line where it starts.
        facts: The code of a function.
        has_order: Whether the order of the parts counts.
        obstacle: Why it could not be read by content; empty if it was.
    """

    kind: str
    header: bytes = b""
    parts: tuple[Part, ...] = ()
    name: str = ""
    file: str = ""
    line: int = 0
    facts: CodeFacts | None = None
    has_order: bool = True
    obstacle: str = ""


class Owner:
    """The experiment class whose hooks are read, as it is now.

    A hook reads its helpers as `self.helper`, `type(self).CONSTANT` or `super().loss`. The
    code does not show what `self` is, so an attribute name counts as read from the owner
    wherever the owner has that name. Fields are left out, because the store keys them by
    value; so is all that a program does not name, so that an edit of one hook moves only
    the programs that reach it.
    """

    def __init__(self, cls: type | None) -> None:
        self.cls = cls
        self.classes: tuple[type, ...] = () if cls is None else cls.__mro__[:-1]
        # Not `__dataclass_fields__`, which lists class variables, too.
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        self._fields = frozenset(field.name for field in fields)

    def covers(self, value: object) -> bool:
        """Tells whether a value is the owner, one of its bases, or an instance of it."""
        if any(value is cls for cls in self.classes):
            return True
        return self.cls is not None and isinstance(value, self.cls)

    def definitions(self, name: str, *, uses_super: bool) -> Iterator[Part]:
        """Finds what the owner calls `name`: the first definition, or all for `super()`."""
        for cls in self.classes:
            if name not in vars(cls):
                continue
            # What stands under a field's name is its default, unless a class derives it.
            if name not in self._fields or isinstance(vars(cls)[name], _METHODS):
                yield _member(cls, name)
            if not uses_super:
                return

    def operators(self) -> Iterator[Part]:
        """Finds the special methods, which operators call without naming them."""
        names = {name for cls in self.classes for name in vars(cls)} - _MADE_BY_CLASS
        for name in sorted(names):
            for part in self.definitions(name, uses_super=True):
                if name.startswith("__") and isinstance(part.value, types.FunctionType):
                    yield part


def _member(cls: type, name: str) -> Part:
    value = vars(cls)[name]
    if is_library_module(cls.__module__):
        value = LibraryName(f"{cls.__module__}.{cls.__qualname__}.{name}")
    label = f"{cls.__qualname__}.{name}".replace("<locals>.", "")
    return Part(f"member {cls.__name__}.{name}", value, label)


def referenced_parts(function: types.FunctionType, facts: CodeFacts, owner: Owner) -> list[Part]:
    """Looks up everything that a function reads from outside of it."""
    parts: dict[str, Part] = {}
    for reference in facts.references:
        for part in _resolve(reference, function, owner):
            parts.setdefault(part.key, part)
    for name in facts.attributes:
        for part in owner.definitions(name, uses_super=facts.uses_super):
            parts.setdefault(part.key, part)
    return list(parts.values())


def _resolve(reference: Reference, function: types.FunctionType, owner: Owner) -> Iterator[Part]:
    value = _look_up(reference, function)
    if reference.is_updated and type(value) in _COUNTERS:
        return
    taken: list[str] = []
    container: types.ModuleType | None = None
    for attribute in reference.attributes:
        if isinstance(value, types.ModuleType):
            container, value = value, _module_attribute(value, attribute)
        elif isinstance(value, type) and owner.covers(value):
            yield from Owner(value).definitions(attribute, uses_super=False)
            return
        else:
            if attribute in _ONE_WAY.get(type(value), ()):
                return
            break
        taken.append(attribute)
    if container is not None and is_library_module(container.__name__):
        value = _in_library(f"{container.__name__}.{taken[-1]}", value)
    if reference.scope == "global" and not taken and _is_plain_builtin(value):
        return
    key = ".".join((reference.name, *taken))
    yield Part(f"{reference.scope} {key}", value, _label(reference, taken, container, function))


def _look_up(reference: Reference, function: types.FunctionType) -> object:
    name = reference.name
    match reference.scope:
        case "global":
            found = function.__globals__.get(name, ABSENT)
            return vars(builtins).get(name, ABSENT) if found is ABSENT else found
        case "closure":
            return _cell_content(function, name)
        case "import":
            package = function.__globals__.get("__package__")
            try:
                return _import(importlib.util.resolve_name(name, package))
            except ImportError:
                return ABSENT


def _cell_content(function: types.FunctionType, name: str) -> object:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        return cells[name].cell_contents
    except (KeyError, ValueError):
        return ABSENT


def _import(name: str) -> object:
    """Returns a module that a function imports, importing it first if it is the user's.

    Tracing the function would import it in a moment, and only then could it be read. A
    library counts by its name, so it is not imported here.
    """
    module = sys.modules.get(name)
    if module is not None:
        return module
    if is_library_module(name):
        return LibraryName(name)
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a user's module may raise anything while it runs
        return ABSENT


def _module_attribute(module: types.ModuleType, name: str) -> object:
    found = vars(module).get(name, ABSENT)
    if found is not ABSENT or is_library_module(module.__name__):
        return found
    if "__getattr__" in vars(module):
        try:
            return getattr(module, name)
        except Exception:  # noqa: BLE001 - a user's `__getattr__` may raise anything
            return ABSENT
    if hasattr(module, "__path__"):
        return _import(f"{module.__name__}.{name}")
    return ABSENT


def _in_library(path: str, value: object) -> object:
    """Reduces a library's attribute to its name, unless the user has put it there."""
    if value is not ABSENT and (is_atom(value) or belongs_to_user(value)):
        return value
    return LibraryName(path)


def belongs_to_user(value: object) -> bool:
    """Tells whether a callable or an object was made by the user's code."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    if isinstance(value, types.FunctionType):
        return not is_library_function(value)
    module: Any = getattr(value, "__module__", None)
    return isinstance(module, str) and not is_library_module(module)


def _is_plain_builtin(value: object) -> bool:
    module = getattr(value, "__module__", None)
    return module == "builtins" and isinstance(value, type | types.BuiltinFunctionType)


def _label(
    reference: Reference,
    taken: list[str],
    container: types.ModuleType | None,
    function: types.FunctionType,
) -> str:
    if reference.scope == "closure":
        dotted = ".".join((reference.name, *taken))
        return f"closure variable `{dotted}` of {PARENT}"
    name = taken[-1] if taken else reference.name
    module = function.__globals__.get("__name__") if container is None else container.__name__
    return f"global {name}" if module in (None, "__main__") else f"global {module}.{name}"
