"""From a frozen model to an `ExportProgram`: one pure function, checked before it is written."""

from __future__ import annotations

from typing import Any

import jax

from ._complex import part_names
from ._frozen import FrozenModel
from ._golden import golden_inputs
from ._program import ExportProgram, Golden, abstract_arguments, batch_symbol
from ._promises import (
    checked_client_specs,
    checked_facts,
    checked_inputs,
    checked_outputs,
    checked_postprocess,
)
from ._proof import prove_symbolic
from ._refusals import (
    refuse_callbacks,
    refuse_constants,
    refuse_draws,
    refuse_undifferentiable,
    refuse_unstable_calls,
    refuse_unstable_targets,
)
from ._request import ExportRequest, check_kept
from ._shapes import ShapeProbe
from ._tolerance import tolerance_for
from ._wire import WireForward


def build_program(model: FrozenModel, request: ExportRequest) -> ExportProgram:
    """Builds the program that a backend writes, with its golden outputs.

    Everything is checked on the way: the hooks' promises, what the trace holds, and that
    a symbolic program gives what `predict` gives at several sizes.

    Raises:
        ExportError: A hook is missing, or its specs do not fit what `forward` does.
        ProgramError: The hooks capture large arrays.
    """
    experiment = model.experiment
    inputs = checked_inputs(experiment, request.constraints)
    check_kept(request.batch_sizes, batch_symbol(inputs), request.constraints)
    outputs = checked_outputs(experiment, inputs)
    postprocess = checked_postprocess(experiment)
    client_inputs = checked_client_specs(experiment, "export_client_inputs")
    client_outputs = checked_client_specs(experiment, "export_client_outputs")
    own_facts = checked_facts(experiment)

    # Traced in the training dtypes first: they decide what the outputs are.
    forward = WireForward(model, inputs, outputs)
    probe = _probe(forward, request)
    is_converted = request.dtype is not None
    outputs = probe.resolved(request.batch_sizes, keep_dtypes=is_converted)
    if is_converted:
        forward = WireForward(model, inputs, outputs, dtype=request.dtype)
        probe = _probe(forward, request)
    weights = forward.weights
    probe.check(outputs, request.batch_sizes)
    arguments = _refuse(forward, request, probe)

    golden = golden_inputs(model, inputs, probe, request.golden)
    program = ExportProgram(
        name=request.name,
        fn=forward.make(tuple(sorted(weights))),
        inputs=inputs,
        outputs=outputs,
        weights=weights,
        batch_sizes=request.batch_sizes,
        golden=Golden(inputs=golden, outputs=forward.predict(golden)),
        provenance={**model.facts, **_split_facts(forward), **own_facts, **request.provenance},
        working_tree_patch=model.patch,
        dynamic_batch=request.dynamic_batch,
        platforms=request.platforms,
        vjp_order=request.vjp_order,
        constraints=request.constraints,
        custom_calls=request.custom_calls,
        postprocess=postprocess,
        client_inputs=client_inputs,
        client_outputs=client_outputs,
        rtol=tolerance_for([*inputs, *outputs], weights),
        state_names=forward.state_names,
        narrowed=forward.narrowed(arguments[: len(inputs)]),
    )
    arguments = program.arguments(request.batch_sizes[0], program.golden_sizes)
    refuse_unstable_targets(program, request.batch_sizes[0], forward.owner)
    refuse_draws(forward, program.weight_names, arguments, request.custom_calls)
    prove_symbolic(forward, program, probe)
    return program


def _split_facts(forward: WireForward) -> dict[str, Any]:
    """Which weights an artifact holds as two, for who wants to put others in."""
    names = {name: list(part_names(name)) for name in forward.complex_names}
    return {"complex_weights": names} if names else {}


def _probe(forward: WireForward, request: ExportRequest) -> ShapeProbe:
    return ShapeProbe(
        forward, forward.weights, request.constraints, dynamic_batch=request.dynamic_batch
    )


def _refuse(forward: WireForward, request: ExportRequest, probe: ShapeProbe) -> list[Any]:
    """Looks through the trace for what no artifact can keep, cheapest first.

    Returns the abstract arguments that it traced with.
    """
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
    return arguments
