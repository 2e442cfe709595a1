"""Says for each program what made it new, in the user's words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nitro._trees import describe_array, named_leaves

from ._fingerprint import diff
from ._store import Program, store

_MAX_LEAVES = 4


@dataclass(frozen=True)
class CompileExplanation:
    """Why one program was compiled.

    Attributes:
        role: What kind of program it is.
        seconds: How long tracing and compiling took.
        reasons: What differs from the nearest older program of its kind; empty for the
            first of its kind.
    """

    role: str
    seconds: float
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        why = "; ".join(self.reasons) or "the first of its kind"
        return f"{self.role} ({self.seconds:.2f} s): {why}"


class CompileExplanations(list[CompileExplanation]):
    """A list that prints one program per line."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "no programs"


def explain_compiles() -> CompileExplanations:
    """Says for every program of this process what made it new.

    Each program is compared with the nearest older one of its kind: the one from which
    fewest things differ.

    Returns:
        One `CompileExplanation` per program, oldest first; prints one line each.
    """
    programs = store.programs()
    return CompileExplanations(
        CompileExplanation(p.key.role, p.seconds, _nearest(p, programs[:index]))
        for index, p in enumerate(programs)
    )


def _nearest(program: Program, older: list[Program]) -> tuple[str, ...]:
    same_role = [other for other in older if other.key.role == program.key.role]
    nearest = min(reversed(same_role), key=lambda other: _distance(other, program), default=None)
    return () if nearest is None else tuple(dict.fromkeys(_differences(nearest, program)))


def _distance(old: Program, new: Program) -> int:
    """How many things differ, those that follow from others included."""
    parts = old.key.parts.keys() & new.key.parts.keys()
    options = _option_differences(old.key.options, new.key.options)
    return (
        sum(1 for _ in _field_differences(old, new))
        + sum(old.key.parts[label].digest != new.key.parts[label].digest for label in parts)
        + (old.key.code.digest != new.key.code.digest)
        + sum(1 for _ in options)
        + (old.shapes != new.shapes)
    )


def _differences(old: Program, new: Program) -> list[str]:
    """What differs, leaving out what only follows from it."""
    fields = list(_field_differences(old, new))
    code = [] if fields else list(_part_differences(old, new))
    options = list(_option_differences(old.key.options, new.key.options))
    return fields + code + options or list(_shape_differences(old.arguments, new.arguments))


def _field_differences(old: Program, new: Program) -> Iterator[str]:
    for name, part in new.key.graph.items():
        before = old.key.graph.get(name)
        decides = name in new.key.reads or name in old.key.reads or old.shapes != new.shapes
        if before is not None and before.digest != part.digest and decides:
            yield f"{new.key.owner}.{name}: {before.display} → {part.display}"


def _part_differences(old: Program, new: Program) -> Iterator[str]:
    if old.key.code is not None and new.key.code is not None:
        yield from map(str, diff(old.key.code, new.key.code))
    for label, part in new.key.parts.items():
        before = old.key.parts.get(label)
        if before is not None and before.digest != part.digest:
            yield f"{label}: {before.display} → {part.display}"


def _option_differences(old: Any, new: Any) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"compile option {name}: {old.get(name)} → {new.get(name)}"


def _shape_differences(old: Any, new: Any) -> Iterator[str]:
    before, after = named_leaves(old), named_leaves(new)
    lines = [
        f"argument {name}: {_shown(before.get(name))} → {_shown(after.get(name))}"
        for name in sorted(before.keys() | after.keys())
        if _shown(before.get(name)) != _shown(after.get(name))
    ]
    yield from lines[:_MAX_LEAVES]
    if len(lines) > _MAX_LEAVES:
        yield f"and {len(lines) - _MAX_LEAVES} more arguments"


def _shown(leaf: Any) -> str:
    return "absent" if leaf is None else describe_array(leaf)
