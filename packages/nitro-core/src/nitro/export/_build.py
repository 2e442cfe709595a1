"""From a handle to an `ExportProgram`: one pure function, checked before it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro._experiment import Experiment, has_hook
from nitro._run import Session
from nitro._trees import Flat, named_leaves
from nitro.errors import ExportError, NitroError, did_you_mean

from ._golden import golden_inputs
from ._lowering import wide_types_for
from ._program import ExportProgram, Golden
from ._provenance import collect_provenance
from ._spec import ExportSpec


def build_program(
    session: Session,
    *,
    name: str,
    batch_sizes: tuple[int, ...],
    provenance: Mapping[str, Any],
) -> ExportProgram:
    """Builds the program that a backend writes, with its golden outputs.

    Raises:
        ExportError: A hook is missing, or its specs do not fit what `forward` does.
    """
    experiment = session.setup.experiment
    inputs = _checked_inputs(experiment)
    outputs = _checked_outputs(experiment, inputs)
    forward = _WireForward(session, inputs, outputs)
    weights = forward.weights()
    outputs = forward.resolved_outputs(batch_sizes, weights)
    forward.refuse_constants(batch_sizes[0], weights)
    forward.refuse_draws(batch_sizes[0], weights)
    golden = golden_inputs(session, inputs)
    facts, patch = collect_provenance(session)
    return ExportProgram(
        name=name,
        fn=forward.make(tuple(sorted(weights))),
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        batch_sizes=batch_sizes,
        golden=Golden(inputs=golden, outputs=forward.predict(golden)),
        provenance={**facts, **_extra_facts(experiment), **provenance},
        working_tree_patch=patch,
    )


class _WireForward:
    """`forward` between wire inputs and promised outputs."""

    def __init__(
        self, session: Session, inputs: tuple[ExportSpec, ...], outputs: tuple[ExportSpec, ...]
    ) -> None:
        self._session = session
        self._hooks = session.setup.hooks
        self._inputs = inputs
        self._outputs = outputs

    def weights(self) -> Flat:
        """Parameters and model state by dotted name, without RNG state."""
        rngs = self._hooks.layout.rng_names
        state = {n: v for n, v in self._session.state.model_state.items() if n not in rngs}
        return {**self._session.state.params, **state}

    def make(self, weight_names: Sequence[str]) -> Callable[..., tuple[jax.Array, ...]]:
        """The pure function: wire inputs, then weights, to a tuple of outputs."""
        num_inputs = len(self._inputs)

        def program(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            wire = arguments[:num_inputs]
            weights = dict(zip(weight_names, arguments[num_inputs:], strict=True))
            # A name of our own: the function's name becomes part of the artifact.
            return self._run(wire, weights, {})

        return program

    def resolved_outputs(self, batch_sizes: Sequence[int], weights: Flat) -> tuple[ExportSpec, ...]:
        """The output specs with dtype and shape, after a trace at two batch sizes.

        Raises:
            ExportError: A declared dtype or shape differs, or an output does not follow
                the batch size.
        """
        first = batch_sizes[0]
        probes = [self._abstract(batch, weights) for batch in (first, first + 1)]
        return tuple(
            _resolved(spec, first, got, other)
            for spec, got, other in zip(self._outputs, *probes, strict=True)
        )

    def refuse_draws(self, batch: int, weights: Flat) -> None:
        """Refuses an evaluation-mode `forward` whose outputs depend on RNG state.

        Raises:
            ExportError: Names the RNG variables that it reads.
        """
        rngs = {
            name: self._session.state.model_state[name] for name in self._hooks.layout.rng_names
        }
        names = tuple(sorted(weights))

        def program(rngs: Flat, wire: Sequence[jax.Array], *flat: jax.Array) -> Any:
            return self._run(wire, dict(zip(names, flat, strict=True)), rngs)

        with self._wide_types():
            arguments = (rngs, self._wire(batch), *(weights[name] for name in names))
            # Arguments that no output depends on are dropped when a program is exported.
            exported = jax.export.export(jax.jit(program), platforms=["cpu"])(*arguments)
        drawn = [name for i, name in enumerate(sorted(rngs)) if i in exported.module_kept_var_idx]
        if drawn:
            raise ExportError(
                f"`{self._session.setup.owner}.forward` draws random numbers in evaluation mode: "
                f"it reads {', '.join(f'`{name}`' for name in drawn)}.",
                expected="outputs that depend on inputs and weights only",
                fix="draw in training mode only, or take the noise as a batch field",
            )

    def refuse_constants(self, batch: int, weights: Flat) -> None:
        """Refuses large arrays that the hooks capture: they would be baked into the artifact.

        Raises:
            ProgramError: Names each array, its hook, and what it came through.
        """
        names = tuple(sorted(weights))
        flat = (weights[name] for name in names)
        cls = type(self._session.setup.experiment)
        hooks = [name for name in ("forward", "export_preprocess") if hasattr(cls, name)]
        device = self._session.device
        with self._wide_types():
            jaxpr = jax.make_jaxpr(self.make(names))(*self._wire(batch), *flat)
        self._session.setup.programs.check_constants(
            jaxpr,
            role="exported",
            roots={
                **{f"{cls.__name__}.{name}": getattr(cls, name) for name in hooks},
                "model": self._hooks.layout.eval_modules,
            },
            baked={f"Device field {cls.__name__}.{name}": device[name] for name in device},
        )

    def predict(self, wire: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What `Nitro.predict` returns for wire inputs, as the outputs are promised."""
        session = self._session
        view = self._hooks.view(session.device)
        with self._wide_types():
            arrays = [jnp.asarray(wire[spec.name]) for spec in self._inputs]
            batch = jax.tree.map(np.asarray, self._batch(view, arrays))
        result = self._select(session.predict(batch), list(wire.values()), np)
        return dict(zip((spec.name for spec in self._outputs), result, strict=True))

    def _abstract(self, batch: int, weights: Flat) -> tuple[jax.ShapeDtypeStruct, ...]:
        names = tuple(sorted(weights))
        flat = (weights[name] for name in names)
        try:
            with self._wide_types():
                return jax.eval_shape(self.make(names), *self._wire(batch), *flat)
        except NitroError:
            raise
        except (TypeError, ValueError) as error:
            raise ExportError(
                f"`{self._session.setup.owner}.forward` cannot take what `export_inputs` promises: "
                f"{error}",
                expected="shapes and dtypes as in training, or an `export_preprocess` between",
                fix="compare "
                + ", ".join(f"`{s.name}` {s.dtype}{s.shape}" for s in self._inputs)
                + " with the batch fields",
            ) from error

    def _wire(self, batch: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(s.sizes(batch), s.numpy_dtype) for s in self._inputs]

    def _wide_types(self) -> AbstractContextManager[Any]:
        return wide_types_for(spec.numpy_dtype for spec in self._inputs)

    def _run(self, wire: Sequence[jax.Array], weights: Flat, rngs: Flat) -> tuple[jax.Array, ...]:
        """The outputs; RNG state is what `rngs` holds, else an inert constant."""
        view = self._hooks.view(self._session.device)
        params = {name: weights[name] for name in self._session.state.params}
        given = {**weights, **rngs}
        model_state = {
            name: given[name] if name in given else _inert(value)
            for name, value in self._session.state.model_state.items()
        }
        outputs = self._hooks.eval_outputs(view, params, model_state, self._batch(view, wire))
        return tuple(self._select(outputs, wire, jnp))

    def _batch(self, view: Any, wire: Sequence[Any]) -> Any:
        if not has_hook(self._session.setup.experiment, "export_preprocess"):
            return {
                spec.name: jnp.moveaxis(array, spec.batch_axis - 1, 0)
                for spec, array in zip(self._inputs, wire, strict=True)
            }
        batch = view.export_preprocess(*wire)
        if not isinstance(batch, Mapping):
            raise ExportError(
                f"`{self._session.setup.owner}.export_preprocess` returned {type(batch).__name__}.",
                expected="a mapping of the batch fields that `forward` names",
            )
        return batch

    def _select(self, outputs: Any, wire: Sequence[Any], xp: Any) -> list[Any]:
        leaves = {"": outputs} if not isinstance(outputs, Mapping) else named_leaves(outputs)
        wires = {spec.name: (spec, a) for spec, a in zip(self._inputs, wire, strict=True)}
        return [self._selected(spec, leaves, wires, xp) for spec in self._outputs]

    def _selected(
        self, spec: ExportSpec, leaves: Mapping[str, Any], wires: Mapping[str, Any], xp: Any
    ) -> Any:
        source = spec.source or spec.name
        if spec.source is not None and spec.source in wires and spec.source not in leaves:
            echoed, array = wires[spec.source]
            return xp.moveaxis(array, echoed.batch_axis - 1, spec.batch_axis - 1)
        if "" in leaves:
            self._require_one_array(spec)
            return xp.moveaxis(leaves[""], 0, spec.batch_axis - 1)
        if source not in leaves:
            raise ExportError(
                f"The output `{spec.name}` asks for `{source}`, which "
                f"`{self._session.setup.owner}.forward` does not return.",
                expected=did_you_mean(source, leaves),
                fix=f'name its source: `ExportSpec("{spec.name}", source="{next(iter(leaves))}")`',
            )
        return xp.moveaxis(leaves[source], 0, spec.batch_axis - 1)

    def _require_one_array(self, spec: ExportSpec) -> None:
        owner = self._session.setup.owner
        if spec.source not in (None, spec.name):
            raise ExportError(
                f"The output `{spec.name}` asks for `{spec.source}`, but `{owner}.forward` returns "
                "one array, which has no name.",
                expected="no `source`, or that of a wire input to echo: "
                + ", ".join(f"`{s.name}`" for s in self._inputs),
                fix=f'write `ExportSpec("{spec.name}")`',
            )
        names = {s.name for s in self._inputs}
        others = [s for s in self._outputs if s.source not in names and s is not spec]
        if others:
            raise ExportError(
                f"`{owner}.forward` returns one array, and `export_outputs` promises "
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


def _specs_of(experiment: Experiment, hook: str) -> tuple[ExportSpec, ...]:
    owner = type(experiment).__name__
    if not has_hook(experiment, hook):
        raise ExportError(
            f"`{owner}` has no `{hook}` hook.",
            expected="`export_inputs` and `export_outputs`: they promise the program's edge",
            fix=f"add `def {hook}(self): return [ExportSpec(...)]` to the class",
        )
    specs: Any = getattr(experiment, hook)()
    if not isinstance(specs, list | tuple) or not specs:
        raise ExportError(
            f"`{owner}.{hook}` returned {specs!r}.",
            expected="a list of at least one ExportSpec",
        )
    for spec in specs:
        if not isinstance(spec, ExportSpec):
            raise ExportError(
                f"`{owner}.{hook}` returned a list with {spec!r}.", expected="ExportSpec objects"
            )
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ExportError(f"`{owner}.{hook}` names `{twice[0]}` twice.", expected="distinct names")
    return tuple(specs)


def _checked_inputs(experiment: Experiment) -> tuple[ExportSpec, ...]:
    specs = _specs_of(experiment, "export_inputs")
    for spec in specs:
        missing = [name for name in ("dtype", "shape") if getattr(spec, name) is None]
        if missing:
            raise ExportError(
                f"The input `{spec.name}` has no {missing[0]}.",
                expected="dtype and shape of every input",
                fix=f'write `ExportSpec("{spec.name}", "float32", (1, 64))`',
            )
        if spec.source is not None:
            raise ExportError(
                f"The input `{spec.name}` has the source `{spec.source}`.",
                expected="a source on outputs only",
                fix="map wire names to batch fields in `export_preprocess`",
            )
        symbolic = [size for size in spec.shape or () if isinstance(size, str)]
        if symbolic:
            raise ExportError(
                f"The input `{spec.name}` has the symbolic size `{symbolic[0]}`.",
                expected="fixed sizes: this version writes one program per batch size",
            )
    return specs


def _checked_outputs(
    experiment: Experiment, inputs: Sequence[ExportSpec]
) -> tuple[ExportSpec, ...]:
    specs = _specs_of(experiment, "export_outputs")
    wires = {spec.name for spec in inputs}
    for spec in specs:
        if spec.name in wires and spec.source is None:
            raise ExportError(
                f"The output `{spec.name}` has the name of a wire input.",
                expected="it to say whether it echoes the input or ships a leaf of `forward`",
                fix=f'write `ExportSpec("{spec.name}", source="{spec.name}")` to echo it',
            )
    return specs


def _resolved(spec: ExportSpec, batch: int, got: Any, other: Any) -> ExportSpec:
    axis = spec.batch_axis - 1
    follows = len(got.shape) > axis and got.shape[axis] == batch and other.shape[axis] == batch + 1
    if not follows:
        raise ExportError(
            f"The output `{spec.name}` has the shape {got.shape} at batch size {batch} and "
            f"{other.shape} at {batch + 1}.",
            expected=f"axis {spec.batch_axis} to be the batch",
            fix="return it from `forward` with the batch axis first",
        )
    promised = None if spec.shape is None else spec.sizes(batch)
    if promised is not None and promised != got.shape:
        raise ExportError(
            f"The output `{spec.name}` has the shape {got.shape} at batch size {batch}.",
            expected=f"{promised}, as its ExportSpec says",
        )
    if spec.dtype is not None and spec.dtype != got.dtype.name:
        raise ExportError(
            f"The output `{spec.name}` has dtype {got.dtype.name}.",
            expected=f"{spec.dtype}, as its ExportSpec says",
        )
    return replace(spec, dtype=got.dtype.name, shape=tuple(got.shape))


def _extra_facts(experiment: Any) -> Mapping[str, Any]:
    return experiment.export_provenance() if has_hook(experiment, "export_provenance") else {}
