"""Words about user code: which functions and values a hook reaches, and what moved of them.

Nothing here decides what a program is; that is its trace. So the walk may see too much, such
as a global of the name of an attribute, and it may miss what is read by a name that is put
together at run time. What it says has moved is told only where the traces differ, too.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Final

import jax
import numpy as np

from ._content import Content, OutOfReachError, object_state
from ._functions import CodeWords, code_words, moved_constant
from ._origin import (
    definition_name,
    file_label,
    find_definition,
    is_library_function,
    is_library_module,
    library_name,
)
from ._values import describe, digest_of, encode_atom, is_atom

# An object that holds more than this is not looked into: the look has to stay cheap.
_LIMIT: Final = 2000
_DEPTH: Final = 4
_CONTAINERS: Final = (list, tuple, dict, set, frozenset, types.MappingProxyType)
_CLUTTER: Final = frozenset(
    {"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"}
)


@dataclass(frozen=True, kw_only=True)
class Word:
    """One function or value that code rests on.

    Attributes:
        label: What a person calls it: `helper() in features.py`, `global features.SCALE`.
        kind: `function`, `class`, `library`, or the type of a value.
        digest: Hash of its content; the same in every process.
        display: The value, shortened.
        file: The file that a function was written in, for a person.
        line: The line where it starts.
        code: The code of a function.
    """

    label: str
    kind: str
    digest: bytes
    display: str
    file: str = ""
    line: int = 0
    code: types.CodeType | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Words:
    """Everything that some functions rest on, as it was when it was read.

    Attributes:
        entries: What was read, by label.
        digest: Hash of all of it.
        reached: Every value that was met, by the name that messages give it.
        sources: The source lines of functions, by label.
    """

    entries: Mapping[str, Word]
    digest: bytes
    reached: tuple[tuple[str, Any], ...] = field(repr=False)
    sources: Mapping[str, tuple[str, ...]] = field(repr=False)

    def without_values(self) -> Words:
        """The same for those who keep it: it holds no value alive."""
        return Words(entries=self.entries, digest=self.digest, reached=(), sources=self.sources)


def read_words(roots: Mapping[str, Any], *, owner: type | None = None) -> Words:
    """Reads what some functions rest on, as it is now.

    Args:
        roots: Functions, classes and values, by the name that messages give them.
        owner: The experiment's class, for hooks that read `self.helper`; its fields are
            left out.
    """
    walk = _Walk(owner)
    for name, value in roots.items():
        walk.add(name, value, is_root=True)
    walk.add_operators()
    walk.run()
    pieces = [label.encode() + word.digest for label, word in sorted(walk.entries.items())]
    return Words(
        entries=walk.entries,
        digest=digest_of(*pieces),
        reached=tuple(walk.reached),
        sources=walk.sources,
    )


def as_defined_now(value: Any) -> Any:
    """What stands now under the name of a function or class; the same where it is nowhere."""
    named = definition_name(value)
    found = None if named is None else find_definition(*named)
    return found if type(found) is type(value) else value


def moved_words(old: Words, new: Words) -> list[str]:
    """What moved between two states, a line each; arrivals only where nothing else did."""
    both = [label for label in old.entries if label in new.entries]
    lines = [
        _moved(label, old, new)
        for label in both
        if old.entries[label].digest != new.entries[label].digest
    ]
    if lines:
        return lines
    return [f"{n}: added, {w.display}" for n, w in new.entries.items() if n not in old.entries] + [
        f"{n}: removed, {w.display}" for n, w in old.entries.items() if n not in new.entries
    ]


def _moved(label: str, old: Words, new: Words) -> str:
    before, after = old.entries[label], new.entries[label]
    if before.code is None or after.code is None:
        if before.display == after.display:
            return f"{label}: {after.display}, with other content"
        return f"{label}: {before.display} → {after.display}"
    lines = _moved_lines(old.sources.get(label, ()), new.sources.get(label, ()))
    if lines is not None:
        number, was, now = lines
        return f"{label} line {after.line + number}: {was} → {now}"
    constant = moved_constant(before.code, after.code)
    what = f"constant {constant[0]} → {constant[1]}" if constant else "code changed"
    return f"{label} line {after.line}: {what}"


def _moved_lines(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[int, str, str] | None:
    """The first line in which two sources differ, blank ones and comments left out."""
    if not old or not new:
        return None
    was, now = ([(i, s) for i, s in enumerate(x) if s and s[0] != "#"] for x in (old, new))
    for index in range(max(len(was), len(now))):
        before = was[index][1] if index < len(was) else ""
        number, after = now[index] if index < len(now) else (len(new) - 1, "")
        if before != after:
            return number, _quoted(before), _quoted(after)
    return None


def _quoted(line: str) -> str:
    return f"`{line}`" if line else "nothing"


class _Walk:
    """Meets what the roots reach, nearest first."""

    def __init__(self, owner: type | None) -> None:
        self.entries: dict[str, Word] = {}
        self.reached: list[tuple[str, Any]] = []
        self.sources: dict[str, tuple[str, ...]] = {}
        self._owner = owner
        self._owners = () if owner is None else owner.__mro__[:-1]
        listed = fields(owner) if owner is not None and is_dataclass(owner) else ()
        self._fields = frozenset(f.name for f in listed)
        self._names: dict[int, str] = {}
        self._queue: deque[tuple[str, Any, bool]] = deque()

    def add(self, label: str, value: Any, *, is_root: bool = False) -> None:
        """Puts a value in line."""
        self._queue.append((label, value, is_root))

    def add_operators(self) -> None:
        """Puts the owner's special methods in line, which operators call without a name."""
        for cls in self._owners:
            for name, value in vars(cls).items():
                is_special = name.startswith("__") and isinstance(value, types.FunctionType)
                # A dataclass generates some, which follow from its fields.
                is_made = not is_special or value.__code__.co_filename == "<string>"
                if not is_made and not is_library_function(value):
                    self.add(f"{cls.__qualname__}.{name}".replace("<locals>.", ""), value)

    def run(self) -> None:
        """Reads all that is in line, and what it leads to."""
        while self._queue:
            label, value, is_root = self._queue.popleft()
            self.reached.append((label, value))
            try:
                self._read(label, value, is_root=is_root)
            except Exception:  # noqa: BLE001 - an object of the user's may raise on any access
                self._note(label, type(value).__name__, b"", type(value).__name__)

    def _read(self, label: str, value: Any, *, is_root: bool) -> None:
        if is_atom(value):
            self._note(label, type(value).__name__, encode_atom(value), describe(value))
        elif id(value) in self._names:
            # Under this name stands something that has a name of its own.
            name = self._names[id(value)]
            if name != label:
                self._note(label, "name", name.encode(), name)
        elif isinstance(value, np.ndarray | np.generic | jax.Array):
            self._note_content(label, value)
        elif isinstance(value, _CONTAINERS) and type(value) in _CONTAINERS:
            self._read_container(label, value)
        elif not any(value is cls for cls in self._owners) or is_root:
            self._read_code(label, value, is_root=is_root)

    def _note(self, label: str, kind: str, content: bytes, display: str, **where: Any) -> None:
        digest = digest_of(kind.encode(), content)
        word = Word(label=label, kind=kind, digest=digest, display=display, **where)
        self.entries.setdefault(label, word)

    def _note_content(self, label: str, value: Any) -> None:
        try:
            content = Content(_LIMIT)
            digest = content.digest(value, label)
        except OutOfReachError:
            return
        # What counts as itself has another digest in each process.
        self._note(
            label, type(value).__name__, b"" if content.obstacle else digest, describe(value)
        )

    def _read_container(self, label: str, value: Any) -> None:
        if not isinstance(value, dict | types.MappingProxyType):
            if all(map(is_atom, value)):
                self._note_content(label, value)
                return
            items = [(f"{label}[{i}]", item) for i, item in enumerate(value)]
        else:
            items = [(f"{label}[{key!r}]", item) for key, item in value.items()]
        if len(items) > _LIMIT:
            self._note_content(label, value)
            return
        self._names[id(value)] = label
        keys = "\n".join(name for name, _ in items)
        self._note(label, type(value).__name__, keys.encode("utf-8", "replace"), describe(value))
        for name, item in items:
            self.add(name, item)

    def _read_code(self, label: str, value: Any, *, is_root: bool) -> None:
        library = library_name(value)
        if isinstance(value, types.FunctionType):
            self._read_function(label, value, library, is_root=is_root)
        elif library or isinstance(value, types.ModuleType):
            self._note(label, "library", (library or value.__name__).encode(), describe(value))
        elif isinstance(value, type):
            self._read_class(label, value)
        elif isinstance(value, types.MethodType):
            self.add(f"function of {label}", value.__func__)
            self.add(f"instance of {label}", value.__self__)
        elif isinstance(value, functools.partial):
            self.add(f"function of {label}", value.func)
            for i, item in enumerate(value.args):
                self.add(f"argument {i} bound by {label}", item)
            for name, item in value.keywords.items():
                self.add(f"argument `{name}` bound by {label}", item)
        else:
            self._read_object(label, value)

    def _read_function(
        self, label: str, function: types.FunctionType, library: str, *, is_root: bool
    ) -> None:
        code = function.__code__
        short = label
        if is_library_function(function):
            name = library or f"{function.__globals__.get('__name__')}.{code.co_qualname}"
            self._note(label, "library", name.encode(), name)
            self._names[id(function)] = name
            if library or "<locals>" not in code.co_qualname:
                return
        else:
            words = code_words(code)
            name = code.co_qualname.replace("<locals>.", "")
            file = file_label(code.co_filename, function.__globals__.get("__name__"))
            own = label if is_root else self._unique(f"{name}() in {file}")
            short = label if is_root else f"{name}()"
            where = {"file": file, "line": code.co_firstlineno, "code": code}
            self._note(own, "function", words.digest, f"{name}()", **where)
            self.sources[own] = words.source
            self._names[id(function)] = own
            if own != label:
                self._note(label, "name", own.encode(), own)
            self._read_names(function, words)
        self._read_held(short, function)

    def _unique(self, label: str) -> str:
        unique, count = label, 1
        while unique in self.entries:
            count += 1
            unique = f"{label} #{count}"
        return unique

    def _read_held(self, short: str, function: types.FunctionType) -> None:
        """Reads defaults, closure and attributes of a function."""
        code, defaults = function.__code__, function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        held = dict(zip(names, defaults, strict=True)) | (function.__kwdefaults__ or {})
        for name, value in held.items():
            self.add(f"default `{name}` of {short}", value)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                self.add(f"closure variable `{name}` of {short}", cell.cell_contents)
            except ValueError:
                continue
        for name, value in vars(function).items():
            if name not in _CLUTTER:
                self.add(f"{short}.{name}", value)

    def _read_names(self, function: types.FunctionType, words: CodeWords) -> None:
        space = function.__globals__
        modules: list[types.ModuleType] = []
        for name in words.names:
            value = space.get(name, sys.modules.get(name))
            if isinstance(value, types.ModuleType):
                modules.append(value)
            elif name in space:
                self.add(_global_label(space.get("__name__"), name), value)
            for member in self._members(name):
                self.add(*member)
        for module in modules:
            for name, value in _attributes(module, words.names):
                self.add(_global_label(module.__name__, name), value)

    def _members(self, name: str) -> Iterator[tuple[str, Any]]:
        """What the experiment's classes call `name`, but for fields."""
        for cls in self._owners:
            value = vars(cls).get(name)
            is_default = name in self._fields and not isinstance(value, property)
            if value is not None and not is_default and not is_library_module(cls.__module__):
                for part in _functions_of(value):
                    yield f"{cls.__qualname__}.{name}".replace("<locals>.", ""), part

    def _read_class(self, label: str, cls: type) -> None:
        name = f"class {cls.__qualname__.replace('<locals>.', '')}"
        if is_library_module(cls.__module__):
            self._note(label, "library", f"{cls.__module__}.{name}".encode(), name)
            return
        self._names[id(cls)] = name
        self._note(label, "class", cls.__qualname__.encode(), name)
        for base in cls.__bases__:
            if not is_library_module(base.__module__):
                self.add(f"base of {name}", base)
        for member, value in vars(cls).items():
            is_text = member in _CLUTTER or (member.startswith("__") and not callable(value))
            if not is_text:
                for part in _functions_of(value):
                    self.add(f"{name}.{member}", part)

    def _read_object(self, label: str, value: Any) -> None:
        cls = type(value)
        self._names[id(value)] = label
        if not is_library_module(cls.__module__):
            self.add(f"class of {label}", cls)
            self._note_content(label, value)
            for name, item in object_state(value).items():
                self.add(f"{label}.{name}", item)
            return
        # A library's: a wrapped function, a tuple of functions, or a plain value.
        items = getattr(value, "_asdict", dict)()
        held = {**items, **getattr(value, "__dict__", {})}
        wrapped = getattr(value, "__wrapped__", None)
        held |= {} if wrapped is None else {"__wrapped__": wrapped}
        functions = {name: item for name, item in held.items() if callable(item)}
        for name, item in functions.items():
            self.add(f"{label}.{name}", item)
        if not functions:
            self._note_content(label, value)


def _functions_of(value: Any) -> list[Any]:
    """The functions behind a descriptor; another value is itself."""
    if isinstance(value, property):
        return [f for f in (value.fget, value.fset) if f is not None]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    return [value.func] if isinstance(value, functools.cached_property) else [value]


def _attributes(
    module: types.ModuleType, names: tuple[str, ...], depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """What code may read of a module; of a library's, what a user has put there."""
    is_library = is_library_module(module.__name__)
    for name in names:
        value = vars(module).get(name)
        is_own = isinstance(value, types.FunctionType) and not is_library_function(value)
        if value is not None and not isinstance(value, types.ModuleType):
            if is_own or not is_library:
                yield name, value
        elif value is not None and depth < _DEPTH and not is_library_module(value.__name__):
            for inner, item in _attributes(value, names, depth + 1):
                yield f"{name}.{inner}", item


def _global_label(module: Any, name: str) -> str:
    return f"global {name}" if module in (None, "__main__") else f"global {module}.{name}"
