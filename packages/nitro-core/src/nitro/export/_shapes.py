"""Traces an export at fixed and symbolic sizes, and compares them with what is promised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from nitro._code import raised_at
from nitro._programs import jaxprs
from nitro._trees import Flat
from nitro.errors import ExportError, NitroError

from ._advice import advise
from ._assignments import MAX_SEARCHED, Assignments
from ._dims import Dim, evaluate_size, size_symbols
from ._program import abstract_arguments, batch_symbol
from ._spec import ExportSpec
from ._wire import WireForward

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
        self.batch = batch_symbol(inputs)
        names = frozenset[str]().union(*(spec.symbols for spec in inputs)) - {self.batch}
        self.symbols = tuple(sorted(names)) + ((self.batch,) if dynamic_batch else ())
        self._assignments = Assignments(inputs, self.constraints, self.symbols)

    def outputs(self, batch: int | None, sizes: Sizes | None = None) -> tuple[Any, ...]:
        """The abstract outputs.

        Raises:
            ExportError: The hooks cannot take these sizes; names the user's line.
        """
        try:
            return self.trace(batch, sizes)
        except NitroError:
            raise
        # The user's hooks raise anything, and JAX many types for sizes that do not fit.
        except Exception as error:
            if batch is None or set(self.symbols) - {self.batch} - set(sizes or {}):
                raise self._inconclusive(error) from error
            raise self._unfit(error) from error

    def trace(self, batch: int | None, sizes: Sizes | None = None) -> tuple[Any, ...]:
        """The abstract outputs; raises whatever the hooks raise."""
        with self._forward.wide_types():
            return jax.eval_shape(self._program, *self._arguments(batch, sizes))

    def jaxpr(self, batch: int | None, sizes: Sizes | None = None) -> Any:
        """The trace itself; raises whatever the hooks raise."""
        with self._forward.wide_types():
            return jax.make_jaxpr(self._program)(*self._arguments(batch, sizes))

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
        is_dynamic = self.batch in self.symbols
        self.outputs(None if is_dynamic else batch_sizes[0])
        for values in (*self.assignments(), *self.large()):
            batch = values.get(self.batch, batch_sizes[0])
            try:
                got = self.outputs(batch, values)
            except ExportError as error:
                raise self._failing(values, error) from error
            for spec, array in zip(outputs, got, strict=True):
                wanted = spec.fixed_sizes(batch, {**values, self.batch: batch})
                if array.shape != wanted:
                    raise ExportError(
                        f"The output `{spec.name}` has the shape {array.shape} where "
                        f"{describe_sizes(values)}.",
                        expected=f"{wanted}: {spec.shape} by the symbolic trace",
                        fix="test no symbolic size with `==` in a hook: JAX takes that as False",
                    )

    def assignments(self) -> list[dict[str, int]]:
        """Sizes to try for all symbols, which keep the constraints."""
        return self._assignments.choose()

    def large(self) -> list[dict[str, int]]:
        """For each symbol the largest size to try, others small; all keep the constraints."""
        return [found[0] for found in map(self._assignments.enlarge, self.symbols) if found]

    def enlarge(self, symbol: str) -> list[dict[str, int]]:
        """Large sizes of one symbol, the largest first, others small; all keep the constraints."""
        return self._assignments.enlarge(symbol)

    def is_allowed(self, values: Sizes) -> bool:
        """Whether sizes keep those constraints whose names all have values."""
        return self._assignments.are_allowed(values)

    @property
    def _program(self) -> Any:
        return self._forward.make(self._names)

    def _arguments(self, batch: int | None, sizes: Sizes | None) -> list[jax.ShapeDtypeStruct]:
        inputs = self._forward.inputs
        return abstract_arguments(inputs, self._weights, self.constraints, batch, sizes)

    @property
    def _rows(self) -> int:
        """A number of rows to trace with where the batch is no symbol."""
        return self._allowed_batch(1)

    def _allowed_batch(self, least: int) -> int:
        search = range(least, least + MAX_SEARCHED)
        return next((n for n in search if self.is_allowed({self.batch: n})), least)

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
            fix=advise(self, _first_line(error)),
        )

    def fits(self, values: Sizes) -> bool:
        """Whether sizes keep the constraints, and no axis would have less than 1."""
        return self._assignments.fits(values)

    def works(self, values: Sizes) -> bool:
        """Whether a trace at fixed sizes succeeds; False where they break a constraint."""
        if not self.fits(values):
            return False
        try:
            self.outputs(values.get(self.batch, self._rows), values)
        except NitroError:
            return False
        return True

    def numbers(self, values: Sizes) -> frozenset[int]:
        """All sizes of arrays in a trace at fixed sizes."""
        inner = jaxprs(self.jaxpr(values.get(self.batch, self._rows), values))
        equations = (equation for opened in inner for equation in opened.jaxpr.eqns)
        atoms = (atom for equation in equations for atom in (*equation.invars, *equation.outvars))
        shapes = (getattr(atom.aval, "shape", ()) for atom in atoms)
        return frozenset(size for shape in shapes for size in shape if isinstance(size, int))

    def problem_with(
        self, constraints: Sequence[str], multiple: tuple[str, int] | None = None
    ) -> str | None:
        """Why the symbolic trace, or one at fixed sizes, fails under more promises; else None."""
        inputs = self._forward.inputs
        if multiple is not None:
            changed = tuple(_with_multiple(spec, *multiple) for spec in inputs)
            if changed == inputs:
                return f"no axis has the size {multiple[0]}"
            inputs = changed
        probe = ShapeProbe(
            self._forward.promising(inputs),
            self._weights,
            (*self.constraints, *constraints),
            dynamic_batch=self.batch in self.symbols,
        )
        try:
            probe.trace(None if self.batch in self.symbols else self._rows)
            for values in (*probe.assignments(), *probe.large()):
                probe.trace(values.get(self.batch, self._rows), values)
        # The user's hooks raise anything, and JAX many types for sizes that do not fit.
        except Exception as error:  # noqa: BLE001
            return _first_line(error)
        return None

    def _failing(self, values: Sizes, error: ExportError) -> ExportError:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        return ExportError(
            f"`{self._forward.owner}` fails where {describe_sizes(values)}{_where(cause)}: "
            f"{_first_line(cause)}",
            expected="it to work for every size that the export promises",
            fix=advise(self, _first_line(cause)),
        )


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


def describe_sizes(values: Sizes) -> str:
    return ", ".join(f"{name} = {values[name]}" for name in values)
