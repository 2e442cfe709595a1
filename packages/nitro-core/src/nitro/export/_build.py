"""From a handle to an `ExportProgram`: one pure function, checked before it is written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from nitro._run import Session
from nitro.errors import ExportError

from ._difference import describe_difference
from ._golden import golden_inputs, make_inputs
from ._program import ExportProgram, Golden, abstract_arguments, batch_symbol
from ._promises import (
    checked_client_specs,
    checked_facts,
    checked_inputs,
    checked_outputs,
    checked_postprocess,
)
from ._provenance import collect_provenance
from ._refusals import (
    refuse_callbacks,
    refuse_constants,
    refuse_draws,
    refuse_undifferentiable,
    refuse_unstable_calls,
    refuse_unstable_targets,
)
from ._request import ExportRequest, check_kept, local_platform
from ._shapes import ShapeProbe
from ._tolerance import tolerance_for
from ._wire import WireForward

_NUM_PROVED = 3


def build_program(session: Session, request: ExportRequest) -> ExportProgram:
    """Builds the program that a backend writes, with its golden outputs.

    Everything is checked on the way: the hooks' promises, what the trace holds, and that
    a symbolic program gives what `predict` gives at several sizes.

    Raises:
        ExportError: A hook is missing, or its specs do not fit what `forward` does.
        ProgramError: The hooks capture large arrays.
    """
    experiment = session.setup.experiment
    inputs = checked_inputs(experiment, request.constraints)
    check_kept(request.batch_sizes, batch_symbol(inputs), request.constraints)
    outputs = checked_outputs(experiment, inputs)
    postprocess = checked_postprocess(experiment)
    client_inputs = checked_client_specs(experiment, "export_client_inputs")
    client_outputs = checked_client_specs(experiment, "export_client_outputs")
    own_facts = checked_facts(experiment)

    # Traced in the training dtypes first: they decide what the outputs are.
    plain = WireForward(session, inputs, outputs)
    probe = _probe(plain, request)
    is_converted = request.dtype is not None
    outputs = probe.resolved(request.batch_sizes, keep_dtypes=is_converted)
    forward = WireForward(session, inputs, outputs, dtype=request.dtype)
    weights = forward.weights
    probe = _probe(forward, request)
    probe.check(outputs, request.batch_sizes)
    _refuse(forward, request, probe)

    golden = golden_inputs(session, inputs, probe, request.golden)
    facts, patch = collect_provenance(session)
    program = ExportProgram(
        name=request.name,
        fn=forward.make(tuple(sorted(weights))),
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        batch_sizes=request.batch_sizes,
        golden=Golden(inputs=golden, outputs=forward.predict(golden)),
        provenance={**facts, **own_facts, **request.provenance},
        working_tree_patch=patch,
        dynamic_batch=request.dynamic_batch,
        platforms=request.platforms,
        vjp_order=request.vjp_order,
        constraints=request.constraints,
        custom_calls=request.custom_calls,
        postprocess=postprocess,
        client_inputs=client_inputs,
        client_outputs=client_outputs,
        rtol=tolerance_for([*inputs, *outputs], weights),
        state_names=frozenset(weights) - frozenset(session.state.params),
    )
    arguments = program.arguments(request.batch_sizes[0], program.golden_sizes)
    refuse_unstable_targets(program, request.batch_sizes[0], forward.owner)
    refuse_draws(forward, program.weight_names, arguments, request.custom_calls)
    _prove_symbolic(forward, program, probe)
    return program


def _probe(forward: WireForward, request: ExportRequest) -> ShapeProbe:
    return ShapeProbe(
        forward, forward.weights, request.constraints, dynamic_batch=request.dynamic_batch
    )


def _refuse(forward: WireForward, request: ExportRequest, probe: ShapeProbe) -> None:
    """Looks through the trace for what no artifact can keep, cheapest first."""
    weights = forward.weights
    names = tuple(sorted(weights))
    values = probe.assignments()[0]
    batch = values.get(batch_symbol(forward.inputs), request.batch_sizes[0])
    arguments = abstract_arguments(forward.inputs, weights, request.constraints, batch, values)
    with forward.wide_types():
        jaxpr = jax.make_jaxpr(forward.make(names))(*arguments)
    refuse_callbacks(jaxpr, forward.owner)
    refuse_unstable_calls(jaxpr, forward.owner, request.custom_calls)
    refuse_constants(forward, jaxpr)
    if request.vjp_order:
        refuse_undifferentiable(forward, names, arguments, weights)


def _prove_symbolic(forward: WireForward, program: ExportProgram, probe: ShapeProbe) -> None:
    """Runs the symbolic program at several sizes, against the hooks traced at those.

    Raises:
        ExportError: It fails where the same hooks work at that size, or gives other values.
    """
    platform = local_platform()
    if not probe.symbols or platform not in program.platforms:
        return
    batch = None if program.dynamic_batch else program.batch_sizes[0]
    exported = program.exported(batch, platforms=[platform])
    weights = [jnp.asarray(program.weights[name]) for name in program.weight_names]
    for values in probe.assignments()[:_NUM_PROVED]:
        rows = values.get(program.batch_symbol, program.batch_sizes[0])
        wire = make_inputs(program.inputs, rows, values)
        told = ", ".join(f"{name} = {value}" for name, value in values.items())
        try:
            with forward.wide_types():
                arguments = [*(wire[spec.name] for spec in program.inputs), *weights]
                got = exported.call(*arguments)
                wanted = jax.jit(program.fn)(*arguments)
        # XLA raises several types for a module that it cannot refine to these sizes.
        except Exception as error:
            raise ExportError(
                f"The symbolic program of `{forward.owner}` fails where {told}: "
                f"{str(error).splitlines()[0]}",
                expected="it to run at every size that the export promises",
                fix='promise the sizes that work with `constraints=`, or write them as "2*k"',
            ) from error
        for spec, a, b in zip(program.outputs, got, wanted, strict=True):
            problem = describe_difference(np.asarray(a), np.asarray(b), program.rtol)
            if problem:
                raise ExportError(
                    f"The output `{spec.name}` of the symbolic program {problem} where {told}.",
                    expected="what the same hooks give when they are traced at that size",
                    fix="test no size with `==` in a hook: JAX takes it as False where the size "
                    "is symbolic",
                )
