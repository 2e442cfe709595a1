"""Fingerprints of user code: what a compiled program was traced from, by value.

A program is traced from functions that read globals, closure variables, defaults, class
attributes and other functions, which read more of them. `trace_closure` follows all of
this from the hooks on and keeps two things: one digest, which is a component of the
program's key and the same in every process, and one entry for each thing that was read,
which lets `check` and `diff` say in the user's words what has moved.

The walk takes names as the interpreter would look them up at this moment. `check` looks
them all up again: if it finds the same objects with the same content, nothing has moved;
otherwise it walks once more and compares.

Followed: bytecode in a normal form (`_fingerprint_bytecode`), the names it reads
(`_fingerprint_code`, `_fingerprint_names`), and objects by content (`_fingerprint_read`).
Library code counts by name and version (`_fingerprint_origin`).

Decisions worth knowing:
    - State that traced code itself changes counts like any other, except what cannot come
      back to it: a counter that is only added to (`calls += 1`, `calls["loss"] += 1`), and a
      list that is only appended to.
    - The values held by an `lru_cache` do not count; what a `cached_property` has stored in
      an object does, because it looks the same as an attribute that was assigned.
    - A user's module that a function imports in its body is imported by the walk, as the
      trace would do; a library is not.
    - A name that is put together at run time (`getattr(self, prefix + name)`) cannot be
      followed. A literal one is, except in `sys.modules["name"]`.
    - Annotations and docstrings do not count; a program that reads them is not guarded.
    - An object or module that is handed around counts with everything in it, a class with
      all its methods. Only the experiment's own class is followed name by name.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ._fingerprint_code import CodeFacts
from ._fingerprint_names import Owner, Part
from ._fingerprint_origin import definition_name, find_definition
from ._fingerprint_values import ABSENT, describe, digest_of, encode_atom
from ._fingerprint_walk import Node, is_current, label_of, own_digest, walk

__all__ = [
    "Change",
    "Closure",
    "Entry",
    "describe",
    "diff",
    "trace_closure",
    "value_digest",
    "why_not_by_content",
]

ChangeKind = Literal["constant", "code", "value", "added", "removed"]
_ROOT_LABEL: Final = "the value"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that the fingerprinted code rests on.

    Attributes:
        label: What a person calls it: `helper() in features.py`, `global features.SCALE`.
        kind: `function`, `class`, `list`, ..., or the type of a plain value.
        digest: Hash of the thing itself, without what it refers to.
        display: The value, shortened.
        location: `features.py:12`, where it is known.
        facts: The code of a function.
    """

    label: str
    kind: str
    digest: bytes
    display: str
    location: str = ""
    facts: CodeFacts | None = dataclasses.field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One difference between two states of the code; its text is one readable line.

    Attributes:
        label: The label of the entry that moved.
        kind: Whether a literal moved, other code, or a value; or the entry came or went.
        before: What it was, for a person; empty for code and for what came or went.
        after: What it is now; what came or went.
        location: `features.py:12`, where it is known.
    """

    label: str
    kind: ChangeKind
    before: str = ""
    after: str = ""
    location: str = ""

    def __str__(self) -> str:
        line = self.location.rpartition(":")[2]
        where = f"{self.label} line {line}" if line else self.label
        match self.kind:
            case "constant":
                return f"{where}: constant {self.before} → {self.after}"
            case "code":
                return f"{where}: code changed"
            case "added" | "removed":
                return f"{self.label}: {self.kind}, {self.after}"
            case "value" if self.before == self.after:
                return f"{self.label}: {self.after}, with other content"
            case "value":
                return f"{self.label}: {self.before} → {self.after}"


@dataclass(frozen=True)
class _Root:
    """A root and how to find it again: through the owner, by its name, or not at all."""

    name: str
    value: object
    is_member: bool
    is_named: bool

    @classmethod
    def make(cls, name: str, value: object, owner: type | None) -> _Root:
        is_member = owner is not None and _class_member(owner, name) is value
        return cls(name, value, is_member, _by_name(value) is value)

    def now(self, owner: type | None) -> object:
        """Returns what stands in this place now."""
        if self.is_member and owner is not None:
            return _class_member(owner, self.name)
        return _by_name(self.value) if self.is_named else self.value


class Closure:
    """Everything that some functions rest on, as it was when `trace_closure` read it.

    Attributes:
        digest: Hexadecimal hash; the same in every process, whatever the folder.
        entries: What was read, by label.
        unfingerprinted: What could not be read by content. Each counts as itself, which
            means that its digest holds in this process only.
    """

    def __init__(self, roots: tuple[_Root, ...], owner: type | None) -> None:
        self._roots = roots
        self._owner = owner
        self._owner_is_named = owner is not None and _by_name(owner) is owner
        self._graph = walk(_root_parts(roots, owner), Owner(owner))
        self._latest = self
        self.digest: str = self._graph[0].digest.hex()
        entries: dict[str, Entry] = {}
        for entry in _make_entries(self._graph):
            entries.setdefault(entry.label, entry)
        self.entries: Mapping[str, Entry] = types.MappingProxyType(entries)
        self.unfingerprinted: tuple[str, ...] = tuple(
            f"{node.label} ({_kind(node)})" for node in self._graph if node.reading.obstacle
        )

    def __repr__(self) -> str:
        return f"Closure({self.digest[:12]}, {len(self.entries)} entries)"

    def check(self) -> list[Change]:
        """Compares with the current state of the code; empty if nothing moved.

        Every name is looked up again, the roots and their class included, so that a
        redefined notebook cell, a reloaded module and a value changed in place are seen.
        Unchanged code costs about 20 microseconds for each function, and a NumPy array one
        comparison of its bytes.
        """
        if not self._latest._is_current():
            self._latest = self._traced_again()
        return diff(self, self._latest)

    def _is_current(self) -> bool:
        owner = self._owner_now()
        if owner is not self._owner:
            return False
        if any(root.now(owner) is not root.value for root in self._roots):
            return False
        return is_current(self._graph, Owner(owner))

    def _traced_again(self) -> Closure:
        owner = self._owner_now()
        now = (dataclasses.replace(root, value=root.now(owner)) for root in self._roots)
        return Closure(tuple(now), owner)

    def _owner_now(self) -> type | None:
        found = _by_name(self._owner) if self._owner_is_named else self._owner
        return found if isinstance(found, type) else self._owner


def trace_closure(roots: Mapping[str, object], *, owner: type | None = None) -> Closure:
    """Reads everything that some functions rest on.

    Args:
        roots: Functions, or classes and objects that the program also runs, such as the
            model's class; by the name that messages give them, `Digits.forward`.
        owner: The experiment class, for hooks that read `self.helper`. Its
            dataclass fields are left out: the store keys their values.

    Returns:
        The closure, a snapshot of this moment.

    Example:
        >>> scale = 2.0
        >>> closure = trace_closure({"forward": lambda x: x * scale})
        >>> closure.check()
        []
    """
    made = (_Root.make(name, value, owner) for name, value in sorted(roots.items()))
    return Closure(tuple(made), owner)


def diff(old: Closure, new: Closure) -> list[Change]:
    """Lists what differs between two closures; empty exactly if their digests agree."""
    if old.digest == new.digest:
        return []
    both = [label for label in old.entries if label in new.entries]
    changes = [
        change
        for label in both
        if old.entries[label].digest != new.entries[label].digest
        for change in _compare(old.entries[label], new.entries[label])
    ]
    # What came or went did so because something else moved, unless nothing else did.
    return changes or [*_arrivals(old, new)] or [Change(label="the code reached", kind="code")]


def value_digest(value: object) -> str:
    """Hashes a value by content, as hexadecimal text that is the same in every process.

    What `why_not_by_content` objects to counts as itself, in this process only.
    """
    return walk([Part("root", value, _ROOT_LABEL)], Owner(None))[0].digest.hex()


def _kind(node: Node) -> str:
    is_library = node.reading.kind == "library"
    return "library" if is_library else type(node.value).__qualname__


def why_not_by_content(value: object) -> str | None:
    """Returns what stands in the way of hashing a value by content, None if nothing does."""
    for node in walk([Part("root", value, _ROOT_LABEL)], Owner(None)):
        if node.reading.obstacle:
            return f"{node.label} ({type(node.value).__qualname__}): {node.reading.obstacle}"
    return None


# Finding things again ---------------------------------------------------------------------


def _root_parts(roots: tuple[_Root, ...], owner: type | None) -> Iterator[Part]:
    for root in roots:
        yield Part(f"root {root.name}", root.value, root.name)
    yield from Owner(owner).operators()


def _class_member(owner: type, name: str) -> object:
    name = name.rpartition(".")[2]
    found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), ABSENT)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _by_name(value: object) -> object:
    """Looks a function or class up under the name that it was defined by."""
    named = definition_name(value)
    found = None if named is None else find_definition(*named)
    return ABSENT if found is None else found


# Entries and their differences ------------------------------------------------------------


def _make_entries(graph: list[Node]) -> Iterator[Entry]:
    for node in graph[1:]:
        reading = node.reading
        location = f"{reading.file}:{reading.line}" if reading.line else ""
        yield Entry(
            label=node.label,
            kind=reading.kind,
            digest=own_digest(node),
            display=reading.name or describe(node.value),
            location=location,
            facts=reading.facts,
        )
        for part, child in zip(reading.parts, node.children, strict=True):
            label = label_of(part, node)
            if child is None:
                yield _make_atom_entry(label, part.value, location)
            elif child.label != label:
                # Under this name stands something that has a name of its own.
                digest = digest_of(b"name", child.label.encode("utf-8", "surrogatepass"))
                kind = child.reading.kind
                yield Entry(
                    label=label, kind=kind, digest=digest, display=child.label, location=location
                )


def _make_atom_entry(label: str, value: object, location: str) -> Entry:
    return Entry(
        label=label,
        kind=type(value).__name__,
        digest=digest_of(b"atom", encode_atom(value)),
        display=describe(value),
        location=location,
    )


def _arrivals(old: Closure, new: Closure) -> Iterator[Change]:
    kinds: tuple[tuple[ChangeKind, Closure, Closure], ...] = (
        ("added", new, old),
        ("removed", old, new),
    )
    for kind, having, lacking in kinds:
        for label, entry in having.entries.items():
            if label not in lacking.entries:
                yield Change(label=label, kind=kind, after=entry.display, location=entry.location)


def _compare(old: Entry, new: Entry) -> Iterator[Change]:
    if old.facts is not None and new.facts is not None:
        yield from _compare_code(new, old.facts, new.facts)
    else:
        yield Change(
            label=new.label,
            kind="value",
            before=old.display,
            after=new.display,
            location=new.location,
        )


def _compare_code(entry: Entry, old: CodeFacts, new: CodeFacts) -> Iterator[Change]:
    file = entry.location.rpartition(":")[0]
    if old.operations != new.operations:
        line = _first_difference(old, new)
        yield Change(label=entry.label, kind="code", location=f"{file}:{line}")
        return
    for before, after in zip(old.constants, new.constants, strict=True):
        if before.encoded != after.encoded:
            yield Change(
                label=entry.label,
                kind="constant",
                before=before.text,
                after=after.text,
                location=f"{file}:{after.line}",
            )


def _first_difference(old: CodeFacts, new: CodeFacts) -> int:
    pairs = zip(old.operations, new.operations, strict=False)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(new.operations) - 1)
    return new.lines[min(equal, len(new.lines) - 1)]
