"""`forward` between the wire's inputs and the promised outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._experiment import has_hook, listed
from nitro._programs import TraceScope, bodies
from nitro._trees import Flat, named_leaves
from nitro.errors import ExportError, did_you_mean

from ._complex import is_complex, part_names, split_complex
from ._frozen import FrozenModel
from ._lowering import wide_types_for
from ._spec import ExportSpec


class WireForward:
    """The function that is exported, and `Nitro.predict` seen through the same wire."""

    def __init__(
        self,
        model: FrozenModel,
        inputs: Sequence[ExportSpec],
        outputs: Sequence[ExportSpec],
        *,
        dtype: np.dtype[Any] | None = None,
    ) -> None:
        """Makes the function; traces nothing yet.

        Args:
            model: The hooks and the weights.
            inputs: In wire order.
            outputs: In result order.
            dtype: What float weights are stored in and float batch fields are cast to;
                outputs are cast back to what their specs say. None leaves all as it is.
        """
        self.model = model
        self.hooks = model.hooks
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._dtype = dtype
        self._scope = TraceScope()
        # Before any wire widens them: what the run was trained with.
        self._is_wide = bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue] - made at run time

    def promising(self, inputs: Sequence[ExportSpec]) -> WireForward:
        """The same function with other input specs."""
        return WireForward(self.model, inputs, self.outputs, dtype=self._dtype)

    @property
    def owner(self) -> str:
        """The experiment's class name, for messages."""
        return self.model.owner

    @property
    def weights(self) -> Flat:
        """Parameters and model state by dotted name, without RNG state, complex ones in parts."""
        # There are no complex numbers of half floats.
        is_half = self._dtype is not None and self._dtype.itemsize < 4
        kept = {part for n in self.complex_names for part in part_names(n)} if is_half else set()
        flat = split_complex(self._whole_weights)
        with self.wide_types():
            return {n: v if n in kept else self._cast(v) for n, v in flat.items()}

    @property
    def complex_names(self) -> tuple[str, ...]:
        """The weights that are complex numbers, sorted."""
        whole = self._whole_weights
        names = tuple(sorted(name for name, value in whole.items() if is_complex(value)))
        taken = sorted(part for name in names for part in part_names(name) if part in whole)
        if taken:
            raise ExportError(
                f"`{self.owner}` has a variable `{taken[0]}`, which is what an artifact calls a part "
                "of a complex one.",
                expected="another name: complex weights are stored as two arrays",
                fix="rename the attribute of the model",
            )
        return names

    @property
    def state_names(self) -> frozenset[str]:
        """Those of `weights` that are model state and no parameters."""
        params = split_complex(self.model.params)
        return frozenset(split_complex(self._whole_weights)) - frozenset(params)

    @property
    def _whole_weights(self) -> Flat:
        rngs = self.hooks.layout.rng_names
        state = {n: v for n, v in self.model.model_state.items() if n not in rngs}
        return {**self.model.params, **state}

    @property
    def roots(self) -> dict[str, Any]:
        """What a trace starts from, by the names that messages give it."""
        cls = type(self.model.experiment)
        hooks = [name for name in ("forward", "export_preprocess") if hasattr(cls, name)]
        code = {f"{cls.__name__}.{name}": getattr(cls, name) for name in hooks}
        return {**code, "model": self.hooks.layout.eval_modules}

    @property
    def rngs(self) -> Flat:
        """The RNG state by dotted name."""
        return {n: self.model.model_state[n] for n in self.hooks.layout.rng_names}

    def make(self, weight_names: Sequence[str]) -> Callable[..., tuple[jax.Array, ...]]:
        """The pure function: wire inputs, then weights, to a tuple of outputs."""

        # Its name becomes part of the artifact.
        def program(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            return self.run(arguments, weight_names, {})

        return program

    def make_drawing(self, weight_names: Sequence[str]) -> Callable[..., tuple[jax.Array, ...]]:
        """As `make`, with the RNG state as a first argument instead of inert constants."""

        def program(rngs: Flat, *arguments: jax.Array) -> tuple[jax.Array, ...]:
            return self.run(arguments, weight_names, rngs)

        return program

    def run(
        self, arguments: Sequence[Any], weight_names: Sequence[str], rngs: Flat
    ) -> tuple[jax.Array, ...]:
        """The outputs for wire inputs and weights, and for this RNG state."""
        count = len(self.inputs)
        wire, flat = arguments[:count], arguments[count:]
        weights = dict(zip(weight_names, flat, strict=True))
        for name in self.complex_names:
            weights[name] = jax.lax.complex(*(weights.pop(part) for part in part_names(name)))
        view = self.hooks.view(self.model.device)
        params = {name: weights[name] for name in self.model.params}
        given = {**weights, **rngs}
        model_state = {
            name: given[name] if name in given else _inert(value)
            for name, value in self.model.model_state.items()
        }
        with self._scope.entered():
            batch = self._batch(view, wire)
            with self._types_of_training():
                batch = jax.tree.map(self._cast, batch)
                outputs = self.hooks.eval_outputs(view, params, model_state, batch)
        return tuple(
            self._cast_back(spec, array)
            for spec, array in zip(self.outputs, self._select(outputs, wire, jnp), strict=True)
        )

    def predict(self, wire: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What `Nitro.predict` returns for wire inputs, as the outputs are promised."""
        view = self.hooks.view(self.model.device)
        with self.wide_types(), self._scope.entered():
            arrays = [jnp.asarray(wire[spec.name]) for spec in self.inputs]
            batch = jax.tree.map(np.asarray, self._batch(view, arrays))
        ordered = [wire[spec.name] for spec in self.inputs]
        result = self._select(self.model.predict(batch), ordered, np)
        if self._dtype is not None:
            pairs = zip(result, self.outputs, strict=True)
            result = [np.asarray(a).astype(s.numpy_dtype, copy=False) for a, s in pairs]
        return dict(zip((spec.name for spec in self.outputs), result, strict=True))

    def narrowed(self, arguments: Sequence[Any]) -> tuple[str, ...]:
        """The 64-bit integer inputs that reach `forward` as they are, but in 32 bits.

        Args:
            arguments: The abstract inputs, in wire order.
        """
        if self._is_wide or self._dtype == np.float64:
            return ()

        def batch(*wire: Any) -> list[Any]:
            fields = self._batch(self.hooks.view(self.model.device), wire)
            return jax.tree.leaves(fields)

        with self.wide_types(), self._scope.entered():
            jaxpr = jax.make_jaxpr(batch)(*arguments).jaxpr
        reached = _moved(jaxpr, [v for v in jaxpr.outvars if not hasattr(v, "val")])
        return tuple(
            spec.name
            for spec, variable in zip(self.inputs, jaxpr.invars, strict=True)
            if variable in reached and spec.dtype in ("int64", "uint64")
        )

    def wide_types(self) -> AbstractContextManager[Any]:
        """A context in which JAX keeps the 64-bit types that are promised."""
        dtypes = [spec.numpy_dtype for spec in self.inputs]
        return wide_types_for([*dtypes, *([] if self._dtype is None else [self._dtype])])

    def _types_of_training(self) -> AbstractContextManager[Any]:
        """A context in which `forward` sees the types that `Nitro.predict` gives it."""
        return jax.enable_x64(self._is_wide or self._dtype == np.float64)

    def _cast(self, array: Any) -> Any:
        is_float = self._dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        if is_float:
            return jnp.asarray(array, self._dtype)
        kept = jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)
        return array if array.dtype == kept else array.astype(kept)

    def _cast_back(self, spec: ExportSpec, array: Any) -> Any:
        return array if self._dtype is None else array.astype(spec.numpy_dtype)

    def _batch(self, view: Any, wire: Sequence[Any]) -> Any:
        if not has_hook(self.model.experiment, "export_preprocess"):
            batch = {
                spec.name: jnp.moveaxis(array, spec.batch_axis - 1, 0)
                for spec, array in zip(self.inputs, wire, strict=True)
            }
            self._require_fields(
                batch, "export_inputs", "promise it there, or return it from `export_preprocess`"
            )
            return batch
        batch = view.export_preprocess(*wire)
        if not isinstance(batch, Mapping):
            raise ExportError(
                f"`{self.owner}.export_preprocess` returned {type(batch).__name__}.",
                expected="a mapping of the batch fields that `forward` names",
            )
        self._require_fields(batch, "export_preprocess", "return it from there, too")
        return batch

    def _require_fields(self, batch: Mapping[str, Any], hook: str, fix: str) -> None:
        missing = [name for name in self.hooks.routes["forward"].required if name not in batch]
        if missing:
            raise ExportError(
                f"`{self.owner}.forward` wants the batch field `{missing[0]}`, but "
                f"`{self.owner}.{hook}` has {listed(batch)}.",
                fix=f"{fix}, or give the keyword a default",
            )

    def _select(self, outputs: Any, wire: Sequence[Any], xp: Any) -> list[Any]:
        leaves = {"": outputs} if not isinstance(outputs, Mapping) else named_leaves(outputs)
        wires = {spec.name: (spec, a) for spec, a in zip(self.inputs, wire, strict=True)}
        return [self._selected(spec, leaves, wires, xp) for spec in self.outputs]

    def _selected(
        self, spec: ExportSpec, leaves: Mapping[str, Any], wires: Mapping[str, Any], xp: Any
    ) -> Any:
        source = spec.source or spec.name
        if spec.source is not None and spec.source in wires and spec.source not in leaves:
            echoed, array = wires[spec.source]
            return xp.moveaxis(array, echoed.batch_axis - 1, spec.batch_axis - 1)
        if "" in leaves:
            self._require_one_array(spec)
            source = ""
        if source not in leaves:
            raise ExportError(
                f"The output `{spec.name}` asks for `{source}`, which "
                f"`{self.owner}.forward` does not return.",
                expected=did_you_mean(source, leaves),
                fix=f'name its source: `ExportSpec("{spec.name}", source="{next(iter(leaves))}")`',
            )
        array = leaves[source]
        if spec.batch_axis > array.ndim:
            raise ExportError(
                f"The output `{spec.name}` has batch_axis={spec.batch_axis}, and `{source}` of "
                f"`{self.owner}.forward` has {array.ndim} axes.",
                expected=f"a batch axis from 1 to {array.ndim}" if array.ndim else "a batch axis",
                fix="" if array.ndim else "return a value for each row",
            )
        return xp.moveaxis(array, 0, spec.batch_axis - 1)

    def _require_one_array(self, spec: ExportSpec) -> None:
        if spec.source not in (None, spec.name):
            raise ExportError(
                f"The output `{spec.name}` asks for `{spec.source}`, but `{self.owner}.forward` "
                "returns one array, which has no name.",
                expected="no `source`, or that of a wire input to echo: "
                + ", ".join(f"`{s.name}`" for s in self.inputs),
                fix=f'write `ExportSpec("{spec.name}")`',
            )
        names = {s.name for s in self.inputs}
        others = [s for s in self.outputs if s.source not in names and s is not spec]
        if others:
            raise ExportError(
                f"`{self.owner}.forward` returns one array, and `export_outputs` promises "
                f"`{spec.name}` and `{others[0].name}`.",
                expected="one output",
                fix=f'return {{"{spec.name}": ..., "{others[0].name}": ...}} from `forward`',
            )


def _inert(value: Any) -> Any:
    """What stands for RNG state in evaluation mode: a constant that no run has seen."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = jnp.zeros(jax.random.key_data(value).shape, jnp.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    return jnp.zeros(value.shape, value.dtype)


_MOVING = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "reshape", "rev", "slice", "squeeze", "transpose"}
)
"""The primitives that give the values which they get, elsewhere."""


def _moved(jaxpr: Any, variables: Sequence[Any]) -> set[Any]:
    """The variables whose values these are, through equations that only move values."""
    found = set(variables)
    for equation in reversed(jaxpr.eqns):
        if not found.intersection(equation.outvars):
            continue
        inner = [getattr(body, "jaxpr", body) for body in bodies(equation)]
        given = equation.invars
        if len(inner) == 1 and len(inner[0].invars) == len(given):
            pairs = zip(inner[0].outvars, equation.outvars, strict=False)
            wanted = [v for v, outer in pairs if outer in found and not hasattr(v, "val")]
            reached = _moved(inner[0], wanted)
            given = [v for v, own in zip(given, inner[0].invars, strict=True) if own in reached]
        elif equation.primitive.name not in _MOVING:
            given = []
        found.update(v for v in given if not hasattr(v, "val"))
    return found
