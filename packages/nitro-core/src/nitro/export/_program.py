"""What a backend is handed: one pure function, its flat weights, and the promised specs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.export
import numpy as np

from ._dims import Dim, constraint_symbols, evaluate_size, size_symbols, solve
from ._lowering import export_traced, make_argument, make_scope, wide_types_for
from ._spec import ExportSpec

_BATCH = "b"


@dataclass(frozen=True, kw_only=True)
class Golden:
    """Inputs and the outputs that they gave before the export, by wire name.

    Attributes:
        inputs: One array per wire input; all have the same number of rows.
        outputs: What `Nitro.predict` returned for them, renamed as promised.
    """

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class ExportProgram:
    """A forward pass ready to be written: `fn(*inputs, *weights)` gives the outputs.

    Attributes:
        name: The artifact's name.
        fn: Pure and traceable. All arguments are positional arrays: the inputs in wire
            order, then the weights in the order of `weight_names`. Returns a tuple of
            arrays in the order of `outputs`.
        inputs: The wire inputs, in wire order; dtype and shape are resolved. A string in
            a shape is a symbolic size, which a caller of the artifact may choose.
        outputs: The promised outputs; dtype and shape are resolved. A string in a shape
            is an expression of the inputs' symbolic sizes, such as `"floordiv(time, 2)"`.
        weights: Parameters and model state, by dotted name; no RNG state.
        batch_sizes: The fixed sizes to compile for, ascending and distinct.
        golden: Reference inputs and outputs.
        provenance: Where the artifact comes from, as JSON values.
        working_tree_patch: `git diff --binary HEAD` of a dirty source tree; None for a clean
            one, and for more than 20 MiB.
        dynamic_batch: Whether the artifact must also take any batch size, through
            `exported(None)`. A backend that cannot must raise `ExportError`.
        platforms: What to lower for: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`, at least one.
            With several, the program takes the platform's index as its first argument.
        vjp_order: How often the artifact must be differentiable; 0 is not at all.
        constraints: What holds for the symbolic sizes, such as `"b >= 2"`.
        custom_calls: Targets that JAX does not promise to keep, let through by name.
        postprocess: Source of a Python module that ships beside the program and runs
            only when a caller asks for it, else None.
        client_inputs: What a client sees in front of the program; empty if the same.
        client_outputs: What a client sees behind `postprocess`; empty if the same.
        rtol: How far outputs may move from the golden ones, relative to the largest.
        state_names: The weights that no gradient updates in training: model state, such
            as BatchNorm's statistics.
        narrowed: The 64-bit integer inputs that `forward` gets as they are and in 32 bits,
            as in training: a loader must refuse values that would wrap around.
    """

    name: str
    fn: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[ExportSpec, ...]
    outputs: tuple[ExportSpec, ...]
    weights: Mapping[str, jax.Array | np.ndarray]
    batch_sizes: tuple[int, ...]
    golden: Golden
    provenance: Mapping[str, Any]
    working_tree_patch: bytes | None = None
    dynamic_batch: bool = False
    platforms: tuple[str, ...] = ("cpu",)
    vjp_order: int = 0
    constraints: tuple[str, ...] = ()
    custom_calls: tuple[str, ...] = ()
    postprocess: str | None = None
    client_inputs: tuple[ExportSpec, ...] = ()
    client_outputs: tuple[ExportSpec, ...] = ()
    rtol: float = 1e-5
    state_names: frozenset[str] = frozenset()
    narrowed: tuple[str, ...] = ()
    _exported: dict[Any, jax.export.Exported] = field(default_factory=dict, repr=False)

    @property
    def weight_names(self) -> tuple[str, ...]:
        """The dotted names in argument order, which is sorted order."""
        return tuple(sorted(self.weights))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the symbolic sizes besides the batch, sorted."""
        names = frozenset[str]().union(*(spec.symbols for spec in self.inputs))
        return tuple(sorted(names - {self.batch_symbol}))

    @property
    def batch_symbol(self) -> str:
        """What `constraints` and outputs call the batch size: `"b"` unless specs rename it."""
        return batch_symbol(self.inputs)

    @property
    def golden_sizes(self) -> dict[str, int]:
        """The symbolic sizes, besides the batch, that the golden inputs have."""
        found = dict[str, int]()
        for spec in self.inputs:
            for size, number in zip(
                spec.sizes(1), self.golden.inputs[spec.name].shape, strict=True
            ):
                solved = solve(size, number)
                if solved is not None:
                    found.setdefault(*solved)
        return {name: found[name] for name in self.symbols}

    def exported(
        self,
        batch: int | None,
        *,
        sizes: Mapping[str, int] | None = None,
        platforms: Sequence[str] | None = None,
        calling_convention_version: int | None = None,
    ) -> jax.export.Exported:
        """The program at one batch size, traced once and shared between callers.

        Unused arguments are kept, so the arity is always inputs plus weights.

        Args:
            batch: A fixed size; or None for a symbolic one, called `batch_symbol`.
            sizes: A value for each of `symbols`, to fix those too; else they stay
                symbolic. All symbolic sizes of the result share one scope, which holds
                `constraints`.
            platforms: To lower for less than the program's `platforms`: readers outside
                JAX want one platform, which adds no argument.
            calling_convention_version: Of `jax.export`, for an older reader; None means
                the installed JAX's default.
        """
        chosen = tuple(platforms or self.platforms)
        values = dict(sizes or {})
        key = batch, tuple(sorted(values.items())), chosen, calling_convention_version
        if key not in self._exported:
            allowed = jax.export.DisabledSafetyCheck.custom_call
            with self.wide_types():
                self._exported[key] = export_traced(
                    self.fn,
                    self.arguments(batch, values),
                    platforms=chosen,
                    disabled_checks=[allowed(target) for target in self.custom_calls],
                    calling_convention_version=calling_convention_version,
                )
        return self._exported[key]

    def wide_types(self) -> AbstractContextManager[Any]:
        """A context in which JAX narrows no input, output or weight to 32 bits."""
        specs = (*self.inputs, *self.outputs)
        weights = [np.dtype(weight.dtype) for weight in self.weights.values()]
        return wide_types_for([*(spec.numpy_dtype for spec in specs), *weights])

    def arguments(
        self, batch: int | None, sizes: Mapping[str, int] | None = None
    ) -> list[jax.ShapeDtypeStruct]:
        """The abstract arguments of `fn`, as `exported` traces it."""
        return abstract_arguments(self.inputs, self.weights, self.constraints, batch, sizes)


def abstract_arguments(
    inputs: Sequence[ExportSpec],
    weights: Mapping[str, Any],
    constraints: Sequence[str],
    batch: int | None,
    sizes: Mapping[str, int] | None = None,
) -> list[jax.ShapeDtypeStruct]:
    """Inputs in wire order, then weights by name; what has no value stays symbolic."""
    symbol = batch_symbol(inputs)
    values = {**(sizes or {}), **({} if batch is None else {symbol: batch})}
    left = [_with_values(constraint, values) for constraint in constraints]
    scope = make_scope([c for c in left if constraint_symbols(c)])
    wire = [
        make_argument([_fixed(s, values) for s in spec.sizes(symbol)], spec.numpy_dtype, scope)
        for spec in inputs
    ]
    flat = [weights[name] for name in sorted(weights)]
    return wire + [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in flat]


def batch_symbol(inputs: Sequence[ExportSpec]) -> str:
    """The name at the inputs' batch axes, or the usual one where they hold numbers."""
    for spec in inputs:
        size = spec.shape[spec.batch_axis - 1] if spec.shape else 1
        if isinstance(size, str):
            return size
    return _BATCH


def _fixed(size: Dim, values: Mapping[str, int]) -> Dim:
    """A size with values for its names: a number where none is left."""
    if isinstance(size, int):
        return size
    left = _with_values(size, values)
    return left if size_symbols(left) else evaluate_size(left, {})


def _with_values(text: str, values: Mapping[str, int]) -> str:
    return re.sub(r"[^\W\d]\w*", lambda name: str(values.get(name[0], name[0])), text)
