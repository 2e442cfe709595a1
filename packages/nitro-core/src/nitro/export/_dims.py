"""Symbolic sizes: the small language of `jax.export`, evaluated and solved on the host.

A size is an integer or an expression such as `"time"`, `"2*k"` or `"floordiv(t, 2)"`; the
grammar is that of `jax.export.symbolic_shape`. Importing this module imports no JAX.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Dim = int | str
"""A fixed size, or (as a string) the name or expression of a symbolic one."""

_MAX_LENGTH = 500

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    # `_parsed` lets only small literals stand here.
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}
_RELATION = re.compile(r"(.+?)(>=|<=|==)(.+)")


def size_symbols(*sizes: Dim) -> frozenset[str]:
    """The names in some sizes.

    Raises:
        ValueError: Not an expression of the grammar; says what is wrong.
    """
    found = set[str]()
    for size in sizes:
        if isinstance(size, str):
            tree = _parsed(size)
            called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
            names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
            found |= {node.id for node in names if id(node) not in called}
    return frozenset(found)


def evaluate_size(size: Dim, values: Mapping[str, int]) -> int:
    """The number that a size is, where its names have these values.

    Raises:
        ValueError: Not an expression of the grammar, or a name without a value.
    """
    return size if isinstance(size, int) else _evaluated(_parsed(size), values)


def solve(size: Dim, number: int) -> tuple[str, int] | None:
    """The name in a linear size of one name, and the value that gives `number`.

    None where the size is of another form, or no whole value gives `number`.
    """
    line = _line(size)
    if line is None:
        return None
    name, slope, offset = line
    value, rest = divmod(number - offset, slope)
    return None if rest else (name, value)


def is_solvable(size: Dim) -> bool:
    """Whether a size has one name and is linear in it."""
    return _line(size) is not None


def constraint_symbols(constraint: str) -> frozenset[str]:
    """The names in a constraint such as `"b >= 2"`.

    Raises:
        ValueError: Not two expressions with `>=`, `<=` or `==` between.
    """
    left, _, right = _sides(constraint)
    return size_symbols(left, right)


def is_kept(constraint: str, values: Mapping[str, int]) -> bool:
    """Whether a constraint holds for these values."""
    left, relation, right = _sides(constraint)
    a, b = evaluate_size(left, values), evaluate_size(right, values)
    return {">=": a >= b, "<=": a <= b, "==": a == b}[relation]


def solve_sizes(
    sizes: Sequence[tuple[Dim, int]], constraints: Sequence[str] = ()
) -> tuple[dict[str, int], str]:
    """Finds the values of all names from sizes and the numbers that stand for them.

    Returns:
        The values, and the first contradiction or broken constraint as a clause such as
        `"2*k" cannot be 7`; empty where everything fits.
    """
    values = dict[str, int]()
    for size, number in sizes:
        line = _line(size)
        if line is not None and line[0] not in values:
            solved = solve(size, number)
            if solved is None:
                return values, f'"{size}" cannot be {number}'
            values[solved[0]] = solved[1]
    for name, value in values.items():
        if value < 1:
            return values, f"`{name}` would be {value}"
    for size, number in sizes:
        wanted = evaluate_size(size, values)
        if wanted != number:
            told = ", ".join(f"{n} = {values[n]}" for n in sorted(size_symbols(size)))
            return values, f'"{size}" is {number}, and {wanted} where {told}'
    for constraint in constraints:
        if not is_kept(constraint, values):
            told = ", ".join(f"{n} = {values[n]}" for n in sorted(constraint_symbols(constraint)))
            return values, f"{told} breaks the constraint `{constraint}`"
    return values, ""


def _line(size: Dim) -> tuple[str, int, int] | None:
    """Name, slope and offset of a linear size of one name."""
    names = sorted(size_symbols(size))
    if len(names) != 1:
        return None
    try:
        at = [evaluate_size(size, {names[0]: value}) for value in (0, 1, 2, 97)]
    except ZeroDivisionError:
        return None
    slope = at[1] - at[0]
    is_linear = at[2:] == [at[0] + 2 * slope, at[0] + 97 * slope]
    return (names[0], slope, at[0]) if is_linear and slope else None


def _sides(constraint: str) -> tuple[str, str, str]:
    found = _RELATION.fullmatch(constraint)
    if found is None:
        raise ValueError("it has none of `>=`, `<=` and `==`")
    left, relation, right = found.groups()
    return left.strip(), relation, right.strip()


def _parsed(text: str) -> ast.expr:
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"it has {len(text)} characters")
    try:
        tree = ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("it is no expression") from error
    _check(tree)
    return tree


def _check(node: ast.expr) -> None:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        is_small = isinstance(node.right, ast.Constant) and node.right.value in range(9)
        if isinstance(node.op, ast.Pow) and not is_small:
            raise ValueError("its exponent is no number from 0 to 8")
        operands = [node.left, node.right]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operands = [node.operand]
    elif isinstance(node, ast.Call):
        is_known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if not is_known or len(node.args) != 2 or node.keywords:
            raise ValueError(f"it calls another function than {', '.join(_FUNCTIONS)} of two")
        operands = node.args
    else:
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        if not is_number and not isinstance(node, ast.Name):
            raise ValueError("it holds more than names, whole numbers, +, - and *")
        if isinstance(node, ast.Name) and node.id in _FUNCTIONS:
            raise ValueError(f"`{node.id}` is a function, and no name of a size")
        return
    for operand in operands:
        _check(operand)


def _evaluated(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant():
            value: Any = node.value
            return value
        case ast.Name():
            if node.id not in values:
                raise ValueError(f"`{node.id}` has no value")
            return values[node.id]
        case ast.UnaryOp():
            return -_evaluated(node.operand, values)
        case ast.BinOp():
            left, right = _evaluated(node.left, values), _evaluated(node.right, values)
            return _OPERATORS[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_evaluated(argument, values) for argument in node.args))
        case _:
            raise AssertionError(ast.dump(node))
