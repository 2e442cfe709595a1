"""Traces an export at fixed and symbolic sizes, and says what a failing size would need."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from nitro._programs import raised_at
from nitro._trees import Flat
from nitro.errors import ExportError, NitroError

from ._assignments import MAX_SEARCHED, Assignments
from ._dims import Dim, evaluate_size, size_symbols
from ._program import abstract_arguments, batch_symbol
from ._spec import ExportSpec
from ._wire import WireForward

_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 12, 16)

Sizes = Mapping[str, int]


class ShapeProbe:
    """Traces one export's function at chosen sizes, without lowering it."""

    def __init__(
        self,
        forward: WireForward,
        weights: Flat,
        constraints: Sequence[str],
        *,
        dynamic_batch: bool,
    ) -> None:
        """Traces nothing yet; `dynamic_batch` makes the batch one of the symbols."""
        self._forward = forward
        self._weights = weights
        self._names = tuple(sorted(weights))
        self.constraints = tuple(constraints)
        inputs = forward.inputs
        self._batch = batch_symbol(inputs)
        names = frozenset[str]().union(*(spec.symbols for spec in inputs)) - {self._batch}
        self.symbols = tuple(sorted(names)) + ((self._batch,) if dynamic_batch else ())
        self._assignments = Assignments(inputs, self.constraints, self.symbols)

    def outputs(self, batch: int | None, sizes: Sizes | None = None) -> tuple[Any, ...]:
        """The abstract outputs.

        Raises:
            ExportError: The hooks cannot take these sizes; names the user's line.
        """
        arguments = abstract_arguments(
            self._forward.inputs, self._weights, self.constraints, batch, sizes
        )
        try:
            with self._forward.wide_types():
                return jax.eval_shape(self._forward.make(self._names), *arguments)
        except NitroError:
            raise
        # The user's hooks raise anything, and JAX many types for sizes that do not fit.
        except Exception as error:
            if batch is None or set(self.symbols) - {self._batch} - set(sizes or {}):
                raise self._inconclusive(error) from error
            raise self._unfit(error) from error

    def resolved(self, batch_sizes: Sequence[int], *, keep_dtypes: bool) -> tuple[ExportSpec, ...]:
        """The output specs with dtype and shape, after traces at two batch sizes.

        Args:
            batch_sizes: The ones to compile for.
            keep_dtypes: Whether a declared float dtype need not be the traced one.

        Raises:
            ExportError: A declared dtype or shape differs, or an output does not follow
                the batch size.
        """
        first = self._allowed_batch(batch_sizes[0])
        other = self._allowed_batch(first + 1)
        probes = self.outputs(first), self.outputs(other)
        specs = zip(self._forward.outputs, *probes, strict=True)
        return tuple(
            _resolved(spec, (first, a), (other, b), keep_dtype=keep_dtypes) for spec, a, b in specs
        )

    def check(self, outputs: Sequence[ExportSpec], batch_sizes: Sequence[int]) -> None:
        """Traces with all symbols symbolic, then at several sizes, odd and prime ones too.

        Raises:
            ExportError: A size fails, or gives other shapes than promised; names the size,
                the user's line and the expression or constraint that would help.
        """
        if not self.symbols:
            return
        is_dynamic = self._batch in self.symbols
        self.outputs(None if is_dynamic else batch_sizes[0])
        for values in self.assignments():
            batch = values.get(self._batch, batch_sizes[0])
            try:
                got = self.outputs(batch, values)
            except ExportError as error:
                raise self._failing(values, error) from error
            for spec, array in zip(outputs, got, strict=True):
                wanted = spec.fixed_sizes(batch, {**values, self._batch: batch})
                if array.shape != wanted:
                    raise ExportError(
                        f"The output `{spec.name}` has the shape {array.shape} where "
                        f"{_told(values)}.",
                        expected=f"{wanted}: {spec.shape} by the symbolic trace",
                        fix="test no symbolic size with `==` in a hook: JAX takes that as False",
                    )

    def assignments(self) -> list[dict[str, int]]:
        """Sizes to try for all symbols, which keep the constraints."""
        return self._assignments.choose()

    def is_allowed(self, values: Sizes) -> bool:
        """Whether sizes keep those constraints whose names all have values."""
        return self._assignments.are_allowed(values)

    def _allowed_batch(self, least: int) -> int:
        search = range(least, least + MAX_SEARCHED)
        return next((n for n in search if self.is_allowed({self._batch: n})), least)

    def _unfit(self, error: Exception) -> ExportError:
        return ExportError(
            f"`{self._forward.owner}.forward` cannot take what `export_inputs` promises"
            f"{_where(error)}: {_first_line(error)}",
            expected="shapes and dtypes as in training, or an `export_preprocess` between",
            fix="compare "
            + ", ".join(f"`{s.name}` {s.dtype}{s.shape}" for s in self._forward.inputs)
            + " with the batch fields; the batch axis counts, and its size is a placeholder",
        )

    def _inconclusive(self, error: Exception) -> ExportError:
        symbols = ", ".join(f"`{symbol}`" for symbol in self.symbols)
        return ExportError(
            f"`{self._forward.owner}` does not work for every size of {symbols}{_where(error)}: "
            f"{_first_line(error)}",
            expected="a trace that holds for all sizes of at least 1 that keep the constraints",
            fix=self._promise_that_helps(_first_line(error)),
        )

    def _promise_that_helps(self, message: str) -> str:
        """Tries out which promise about the sizes lets the symbolic trace succeed."""
        constraint = _compared(message)
        if constraint and self._traces(constraints=(constraint,)):
            return f'promise it: pass `constraints=("{constraint}",)`'
        for divisor, symbol in itertools.product(_DIVISORS, self.symbols):
            if symbol != self._batch and self._traces(multiple=(symbol, divisor)):
                return (
                    f'promise a multiple: write "{divisor}*k" instead of "{symbol}" in '
                    "`export_inputs`"
                )
            constraint = f"mod({symbol}, {divisor}) == 0"
            if symbol == self._batch and self._traces(constraints=(constraint,)):
                return f'promise a multiple: pass `constraints=("{constraint}",)`'
        return "let no hook branch on a symbolic size, or write the size as an expression"

    def _traces(
        self, *, constraints: Sequence[str] = (), multiple: tuple[str, int] | None = None
    ) -> bool:
        inputs = self._forward.inputs
        if multiple is not None:
            inputs = tuple(_with_multiple(spec, *multiple) for spec in inputs)
        probe = ShapeProbe(
            self._forward.promising(inputs),
            self._weights,
            (*self.constraints, *constraints),
            dynamic_batch=self._batch in self.symbols,
        )
        arguments = abstract_arguments(
            inputs, self._weights, probe.constraints, None if self._batch in self.symbols else 1
        )
        try:
            with self._forward.wide_types():
                jax.eval_shape(probe._forward.make(self._names), *arguments)
        # As above: the hooks raise anything.
        except Exception:  # noqa: BLE001
            return False
        return True

    def _failing(self, values: Sizes, error: ExportError) -> ExportError:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return ExportError(
            f"`{self._forward.owner}` fails where {_told(values)}{_where(cause)}: "
            f"{_first_line(cause)}",
            expected="it to work for every size that the export promises",
            fix=self._helpful(values),
        )

    def _helpful(self, failing: Sizes) -> str:
        """Finds which multiples of a size work, where others fail."""
        for symbol in self.symbols:
            for divisor in _DIVISORS:
                good = (divisor, 2 * divisor, 3 * divisor)
                works = all(self._works({**failing, symbol: n}) for n in good)
                if failing[symbol] % divisor and works:
                    constraint = f'`constraints=("mod({symbol}, {divisor}) == 0",)`'
                    if symbol == self._batch:
                        return f"only multiples of {divisor} work: pass {constraint}"
                    return (
                        f'only multiples of {divisor} work: write "{divisor}*k" instead of '
                        f'"{symbol}" in `export_inputs`, or pass {constraint}'
                    )
        return "say with `constraints=` which sizes are meant, or make the hook take all"

    def _works(self, values: Sizes) -> bool:
        try:
            self.outputs(values.get(self._batch, 1), values)
        except NitroError:
            return False
        return True


def _resolved(
    spec: ExportSpec, first: tuple[int, Any], second: tuple[int, Any], *, keep_dtype: bool
) -> ExportSpec:
    (batch, got), (other_batch, other) = first, second
    axis = spec.batch_axis - 1
    rank = len(got.shape)
    follows = rank > axis and (got.shape[axis], other.shape[axis]) == (batch, other_batch)
    rest = [i for i in range(rank) if i != axis and str(got.shape[i]) != str(other.shape[i])]
    if not follows or rest:
        raise ExportError(
            f"The output `{spec.name}` has the shape {got.shape} at batch size {batch} and "
            f"{other.shape} at {other_batch}.",
            expected=f"axis {spec.batch_axis} to be the batch, and no other to follow it",
            fix="return it from `forward` with the batch axis first",
        )
    shape = tuple(_plain_size(size, spec.name) for size in got.shape)
    if spec.shape is not None and not _are_equal(spec.sizes(batch), shape):
        raise ExportError(
            f"The output `{spec.name}` has the shape {got.shape} at batch size {batch}.",
            expected=f"{spec.sizes(batch)}, as its ExportSpec says",
        )
    dtype = got.dtype.name
    if jax.numpy.issubdtype(got.dtype, jax.numpy.complexfloating):
        raise ExportError(
            f"The output `{spec.name}` has dtype {dtype}.",
            expected="bool, an integer or a float dtype",
            fix="return its real and imaginary parts, or its absolute value and angle",
        )
    if spec.dtype is not None and spec.dtype != dtype:
        floats = all(
            jax.numpy.issubdtype(d, jax.numpy.floating) for d in (spec.numpy_dtype, got.dtype)
        )
        if not (keep_dtype and floats):
            raise ExportError(
                f"The output `{spec.name}` has dtype {dtype}.",
                expected=f"{spec.dtype}, as its ExportSpec says",
            )
        dtype = spec.dtype
    return replace(spec, dtype=dtype, shape=shape)


def _plain_size(size: Any, name: str) -> Dim:
    if isinstance(size, int):
        return size
    try:
        size_symbols(str(size))
    except ValueError as error:
        raise ExportError(
            f"The output `{name}` has the size {size}: {error}.",
            expected="a size made of names, numbers, +, -, *, floordiv, mod, max and min",
        ) from error
    return str(size)


def _are_equal(promised: Sequence[Dim], got: Sequence[Dim]) -> bool:
    """Compares expressions by their values at sizes that no two formulas share by chance."""
    if len(promised) != len(got):
        return False
    names = sorted(size_symbols(*got))
    for scale in (61, 128, 1009):
        values = {name: scale * (i + 1) + i for i, name in enumerate(names)}
        for a, b in zip(promised, got, strict=True):
            if size_symbols(a) - set(names) or evaluate_size(a, values) != evaluate_size(b, values):
                return False
    return True


def _compared(message: str) -> str:
    """The constraint that would decide a comparison which JAX could not; "" if none."""
    found = re.search(r"comparison '(.+?)' (>=|<=|>|<|==) '(.+?)' is inconclusive", message)
    if not found:
        return ""
    left, relation, right = found.groups()
    strict = {">": 1, "<": -1}.get(relation, 0)
    try:
        right = str(int(right) + strict)
    except ValueError:
        right += f" {strict:+d}" if strict else ""
    kept = relation if relation in {">=", "<=", "=="} else relation + "="
    return f"{left} {kept} {right}"


def _with_multiple(spec: ExportSpec, symbol: str, divisor: int) -> ExportSpec:
    assert spec.shape is not None
    sizes = (f"{divisor}*{symbol}" if size == symbol else size for size in spec.shape)
    return replace(spec, shape=tuple(sizes))


def _first_line(error: BaseException) -> str:
    if isinstance(error, NitroError):
        return error.problem
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _where(error: BaseException) -> str:
    line = raised_at(error)
    return "" if line is None else f" ({line})"


def _told(values: Sizes) -> str:
    return ", ".join(f"{name} = {values[name]}" for name in values)
