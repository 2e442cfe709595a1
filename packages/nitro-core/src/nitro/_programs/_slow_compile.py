"""Says of a program that was slow to compile what is large in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nitro._code import SourceLine, user_lines
from nitro.errors import warn

from ._jaxpr import bodies, equations, jaxprs

_MAX_LISTED = 5
_MANY = 16
"""How often one line makes the same equation before it counts as an unrolled loop."""

_LOOPS = frozenset({"while", "scan"})


def warn_if_slow(program: str, jaxpr: Any, *, seconds: float, limit_s: float) -> None:
    """Warns of a compile that took longer than the limit.

    Args:
        program: The program's name, for the message.
        jaxpr: What was compiled.
        seconds: How long tracing and compiling took.
        limit_s: How long it may take.
    """
    if seconds <= limit_s:
        return
    warn(
        f"Compiling the {program} took {seconds:.1f} s, over `slow_compile_s` = {limit_s:g}.\n"
        + size_report(jaxpr)
    )


def size_report(jaxpr: Any) -> str:
    """What a program consists of: by primitive and by user line, its loops, unrolled ones."""
    everything = list(_placed_equations(jaxpr))
    by_primitive = Counter(equation.primitive.name for equation, _ in everything)
    by_line = Counter(str(line) for _, line in everything if line is not None)
    lines = [
        f"  {len(everything):,} equations: {_listed(by_primitive)}",
        f"  by line: {_listed(by_line)}" if by_line else "",
        *_loop_bodies(everything),
        *_unrolled_loops(everything),
    ]
    return "\n".join(line for line in lines if line)


_Placed = tuple[Any, SourceLine | None]


def _placed_equations(jaxpr: Any) -> Iterator[_Placed]:
    for inner in jaxprs(jaxpr):
        for equation in inner.jaxpr.eqns:
            yield equation, next(user_lines(equation, *inner.calls), None)


def _loop_bodies(everything: Iterable[_Placed]) -> list[str]:
    sizes: Counter[str] = Counter()
    for equation, line in everything:
        if equation.primitive.name in _LOOPS:
            name = f"{equation.primitive.name}{f' at {line}' if line else ''}"
            body = sum(1 for inner in bodies(equation) for _ in equations(inner))
            sizes[name] = max(sizes[name], body)
    return [f"  loop bodies, in equations: {_listed(sizes)}"] if sizes else []


def _unrolled_loops(everything: Iterable[_Placed]) -> list[str]:
    """The lines that make one equation many times over, the worst first."""
    repeats = Counter((line, _signature(e)) for e, line in everything if line is not None)
    worst: dict[SourceLine, tuple[int, str]] = {}
    for (line, (primitive, _)), count in repeats.most_common():
        if count >= _MANY:
            worst.setdefault(line, (count, primitive))
    return [
        f"  {line} makes the same `{primitive}` {count} times: if a Python loop goes through it, "
        "`jax.lax.scan` or `nnx.scan` compiles its body once"
        for line, (count, primitive) in list(worst.items())[:_MAX_LISTED]
    ]


def _signature(equation: Any) -> tuple[str, tuple[str, ...]]:
    return equation.primitive.name, tuple(str(v.aval) for v in equation.outvars)


def _listed(counts: Mapping[str, int]) -> str:
    top = Counter(counts).most_common(_MAX_LISTED)
    return ", ".join(f"{name} {count:,}" for name, count in top)
