"""Says for each program what made it new, in the user's words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import jax

from nitro._code import moved_words, user_lines
from nitro._trees import describe_array, named_leaves

from ._identity import CanonicalForm
from ._jaxpr import bodies, jaxprs
from ._store import Program, store

_MAX_LEAVES = 4
_ARGUMENTS = {
    "train step": ("state", "inputs", "batch"),
    "forward": ("params", "model_state", "device", "batch"),
    "loss": ("device", "outputs", "batch", "rows"),
    "metrics": ("device", "outputs", "batch", "rows"),
}
_FOLLOWING = frozenset({"state", "params", "model_state", "outputs"})
"""The arguments whose shapes follow from the model and its hooks."""


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
    return (
        len(_settings(old, new))
        + len(list(_argument_differences(old, new, direct=True)))
        + (old.key.code.digest != new.key.code.digest)
        + (old.shapes != new.shapes)
    )


def _differences(old: Program, new: Program) -> list[str]:
    """What differs: settings and arguments, then code, else the first equation."""
    settings = _settings(old, new)
    settings += _argument_differences(old, new, direct=True)
    fields = {f"{new.key.owner}.{name}" for name in new.key.graph}
    code = [
        line
        for line in moved_words(old.key.code, new.key.code)
        if not any(line.startswith((f"{name}:", f"{name}[", f"{name}.")) for name in fields)
    ]
    if settings:
        # What came along with a setting did so because of it.
        code = [line for line in code if ": added, " not in line and ": removed, " not in line]
        code = [line for line in code if not line.startswith("model")]
    found = settings + code
    if not found:
        found = list(_argument_differences(old, new, direct=False))
    return found or first_difference(old.jaxpr, new.jaxpr)


def _settings(old: Program, new: Program) -> list[str]:
    parts = [
        f"{label}: {old.key.parts[label].display} → {part.display}"
        for label, part in new.key.parts.items()
        if label in old.key.parts and old.key.parts[label].digest != part.digest
    ]
    options = list(_option_differences(old.key.options, new.key.options))
    return [*_field_differences(old, new), *options, *parts]


def _field_differences(old: Program, new: Program) -> Iterator[str]:
    for name, part in new.key.graph.items():
        before = old.key.graph.get(name)
        decides = name in new.key.reads or name in old.key.reads or old.shapes != new.shapes
        if before is not None and before.digest != part.digest and decides:
            yield f"{new.key.owner}.{name}: {before.display} → {part.display}"


def _option_differences(old: Any, new: Any) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"compile option {name}: {old.get(name)} → {new.get(name)}"


def _argument_differences(old: Program, new: Program, *, direct: bool) -> Iterator[str]:
    """The arguments that differ: the batch and Device fields, or what follows from the model."""
    before, after = _named_arguments(old), _named_arguments(new)
    lines = [
        f"argument {name}: {before.get(name, 'absent')} → {after.get(name, 'absent')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and (name.partition(".")[0] not in _FOLLOWING) == direct
    ]
    yield from lines[:_MAX_LEAVES]
    if len(lines) > _MAX_LEAVES:
        yield f"and {len(lines) - _MAX_LEAVES} more arguments"


def _named_arguments(program: Program) -> dict[str, str]:
    """The arguments by name and type; of a chunk what one step takes of it."""
    names = _ARGUMENTS.get(program.key.role, ())
    arguments = list(program.arguments)
    if program.key.role == "train step":
        chunk = arguments[2]
        # What lies in a row of the table follows from the optimizer.
        arguments[2] = jax.tree.map(_of_one_batch, chunk.batches)
    named = dict(zip(names, arguments, strict=False)) or dict(enumerate(arguments))
    return {name: describe_array(leaf) for name, leaf in named_leaves(named).items()}


def _of_one_batch(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype)


def first_difference(old: Any, new: Any) -> list[str]:
    """The first equation in which two traces differ, with the line that made it."""
    pairs = zip_longest(_equations(old), _equations(new))
    for (before, was), (after, now) in ((a or ("", None), b or ("", None)) for a, b in pairs):
        if before != after:
            equation = now if now is not None else was
            where = next(user_lines(*equation), None) if equation else None
            what = f"{_equation_text(was)} → {_equation_text(now)}"
            return [f"{where}: {what}" if where else f"the trace: {what}"]
    return []


def _equations(jaxpr: Any) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each equation of a jaxpr and of those inside it, in canonical form, with its calls."""
    form = CanonicalForm()
    for inner in jaxprs(jaxpr):
        _, _, *lines = form.lines(inner.jaxpr)
        for text, equation in zip(lines, inner.jaxpr.eqns, strict=False):
            if not bodies(equation):
                yield text, (equation, *inner.calls)


def _equation_text(equations: tuple[Any, ...] | None) -> str:
    if equations is None:
        return "nothing"
    equation = equations[0]
    operands = [str(v.val) if hasattr(v, "val") else v.aval.str_short() for v in equation.invars]
    return f"`{equation.primitive.name} {' '.join(operands)}`"
