"""Finds the arrays that a trace would bake into a program, and what they came through."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from nitro._code import SourceLine, read_words, user_lines
from nitro._trees import describe_array
from nitro.errors import ProgramError

from ._jaxpr import InnerJaxpr, bodies, jaxprs
from ._sizes import array_bytes, in_units

_MAX_LISTED = 5
_MAX_NAMES = 3
_FIX = (
    "make it a `Device` field of the experiment, an `nnx.Variable` of the model, or a batch "
    "field that `build_data` yields; or allow it with `Nitro(..., max_constant_bytes=...)`"
)


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that a traced program holds.

    Attributes:
        array: The array itself; JAX wraps one of NumPy's.
        find_lines: Finds the user's lines that read it first, innermost first.
    """

    array: Any
    find_lines: Callable[[], Iterator[SourceLine]]

    @property
    def size_bytes(self) -> int:
        """What it adds to the program."""
        return array_bytes(self.array)


@dataclass(frozen=True, kw_only=True)
class TracedCode:
    """What a program was traced from, to look for the origin of its constants.

    Attributes:
        owner: The experiment's class.
        roots: The traced hooks and what else the trace starts from, by the name that
            messages give it.
        baked: Values that the program holds by design, by name: structural fields.
    """

    owner: type
    roots: Mapping[str, Any]
    baked: Mapping[str, Any]

    def hook_of(self, lines: Sequence[SourceLine]) -> str:
        """The hook that a traceback runs through; all of them where it shows none."""
        codes = {name: _code_of(root) for name, root in self.roots.items()}
        hooks = [name for name, code in codes.items() if code is not None]
        traced = {(line.file, line.function) for line in lines}
        through = [n for n in hooks if (codes[n].co_filename, codes[n].co_qualname) in traced]
        return " or ".join(f"`{name}`" for name in through or hooks)

    def values(self) -> list[tuple[str, Any]]:
        """Everything that the trace can reach, by the name that messages give it."""
        return list(read_words({**self.roots, **self.baked}, owner=self.owner).reached)


def _code_of(root: Any) -> Any:
    return getattr(inspect.unwrap(root), "__code__", None) if callable(root) else None


def find_constants(jaxpr: Any) -> list[Constant]:
    """The arrays that a traced program holds, inner jaxprs included, each array once.

    JAX keeps an array that a trace meets beside the jaxpr, or beside an inner one that was
    traced on its own; scalars are written into the equations and are not counted.
    """
    found: dict[int, Constant] = {}
    for inner in jaxprs(jaxpr):
        for variable, array in zip(inner.jaxpr.constvars, inner.arrays, strict=False):
            find_lines = partial(_lines_of_use, inner, variable)
            found.setdefault(id(array), Constant(array, find_lines))
        for equation in inner.jaxpr.eqns:
            for array in _literal_arrays(equation):
                find_lines = partial(user_lines, equation, *inner.calls)
                found.setdefault(id(array), Constant(array, find_lines))
    return sorted(found.values(), key=lambda constant: -constant.size_bytes)


def count_constant_bytes(jaxpr: Any) -> int:
    """The bytes of all arrays that a traced program holds."""
    return sum(constant.size_bytes for constant in find_constants(jaxpr))


def check_constants(jaxpr: Any, code: TracedCode, *, role: str, limit_bytes: float) -> None:
    """Refuses a program that would hold large constants, before it is lowered.

    Raises:
        ProgramError: Names each large constant, its hook, and what it came through.
    """
    constants = find_constants(jaxpr)
    total = sum(constant.size_bytes for constant in constants)
    if total <= limit_bytes:
        return
    values = code.values()
    lines = [_described(constant, code, values) for constant in constants[:_MAX_LISTED]]
    if len(constants) > _MAX_LISTED:
        lines.append(f"and {len(constants) - _MAX_LISTED} smaller ones")
    raise ProgramError(
        f"The {role} program of `{code.owner.__name__}` would hold {in_units(total)} "
        "of constants:\n    " + "\n    ".join(lines),
        expected=f"at most {in_units(limit_bytes)} in all: an array that a trace captures is "
        "copied into the program, slows its compilation, and recompiles when it changes",
        fix=_FIX,
    )


def origin_of(array: Any, values: Sequence[tuple[str, Any]]) -> str:
    """What a constant came through: the very array, else an equal one, else one it views."""
    tests: Mapping[str, Callable[[Any, Any], bool]] = {
        "": _is_same,
        "equal to ": _is_equal,
        "a view of ": _is_view,
    }
    for relation, test in tests.items():
        names = dict.fromkeys(name for name, value in values if test(value, array))
        if names:
            return relation + ", ".join(list(names)[:_MAX_NAMES])
    return "computed while tracing"


def _described(constant: Constant, code: TracedCode, values: Sequence[tuple[str, Any]]) -> str:
    lines = list(constant.find_lines())
    where = f" ({lines[0]})" if lines else ""
    return (
        f"{describe_array(constant.array)}, {constant.size_bytes:,} bytes, in "
        f"{code.hook_of(lines)}{where}: {origin_of(constant.array, values)}"
    )


def _lines_of_use(inner: InnerJaxpr, variable: Any) -> Iterator[SourceLine]:
    yield from _lines_of_first_use(inner.jaxpr, variable)
    yield from user_lines(*inner.calls)


def _lines_of_first_use(jaxpr: Any, variable: Any) -> Iterator[SourceLine]:
    for equation in jaxpr.eqns:
        for position, operand in enumerate(equation.invars):
            if operand is variable:
                yield from _lines_inside(equation, position)
                yield from user_lines(equation)
                return


def _lines_inside(equation: Any, position: int) -> Iterator[SourceLine]:
    # Loops, branches and calls pass their last operands on as the inputs of their bodies.
    from_end = position - len(equation.invars)
    for body in bodies(equation):
        inner = getattr(body, "jaxpr", body)
        if -from_end <= len(inner.invars):
            variable = inner.invars[from_end]
            if variable.aval.shape == equation.invars[position].aval.shape:
                yield from _lines_of_first_use(inner, variable)


def _literal_arrays(equation: Any) -> Iterator[Any]:
    operands = [operand.val for operand in equation.invars if hasattr(operand, "val")]
    parameters = jax.tree.leaves(list(equation.params.values()))
    for value in (*operands, *parameters):
        if isinstance(value, np.ndarray | jax.Array) and value.ndim:
            yield value


def _is_same(value: Any, array: Any) -> bool:
    # JAX wraps a view of an array of NumPy's.
    wrapped = getattr(array, "val", array)
    is_whole = (
        isinstance(value, np.ndarray)
        and isinstance(wrapped, np.ndarray)
        and (value.__array_interface__ == wrapped.__array_interface__)
    )
    return value is wrapped or is_whole


def _is_equal(value: Any, array: Any) -> bool:
    if not _may_hold(value, array.shape):
        return False
    try:
        # A trace narrows what it meets: float64 to float32, int64 to int32.
        with np.errstate(over="ignore"):
            narrowed = np.asarray(value).astype(array.dtype, casting="same_kind")
        return np.array_equal(narrowed, np.asarray(array), equal_nan=True)
    except (TypeError, ValueError):  # random keys, other kinds of number, ragged lists
        return False


def _may_hold(value: Any, shape: tuple[int, ...]) -> bool:
    if isinstance(value, np.ndarray | jax.Array):
        return value.shape == shape
    return isinstance(value, list | tuple) and len(value) == (shape or (0,))[0]


def _is_view(value: Any, array: Any) -> bool:
    wrapped = getattr(array, "val", array)
    both = isinstance(value, np.ndarray) and isinstance(wrapped, np.ndarray)
    return both and np.may_share_memory(value, wrapped)
