"""Makes the memory plan of a run from its programs and what it keeps, and checks it."""

from __future__ import annotations

from typing import Any

import jax

from nitro._checkpoint import flat_items
from nitro._devices import device_memory_bytes
from nitro._programs import (
    CONVOLUTION_SCRATCH,
    Chunk,
    Held,
    MemoryPart,
    MemoryPlan,
    Program,
    StepInputs,
    has_convolutions,
    in_units,
    program_memory,
    tree_bytes,
)
from nitro.errors import MemoryPlanError, warn

from ._session import Session

_CHUNKS_IN_FLIGHT = 2
"""While the device takes the steps of one chunk, the next call is given another one."""

_WARN_FROM = 0.85
_WORTH_NAMING = 0.05

_RESIDENT_ARGUMENTS = {"forward": 3, "loss": 1}
"""How many leading arguments of an evaluation program lie on the device anyway."""

_ADVICE = {
    "step: activations": "halve `batch_size` and double `accum`, or wrap blocks of the model in "
    "`nnx.remat`",
    "batches": "lower `steps_per_call` or `batch_size`",
    "training data": "keep the training data on the host: `ArrayLoader(..., device=False)`",
    "evaluation": "lower the `batch_size` of the evaluation splits",
    "optimizer state": "take an optimizer with less state, such as `optax.sgd`",
    "checkpoint staging": "write no records during training: `checkpointer=None`",
    "parameters": "make the model smaller, or give its parameters a narrower dtype",
}


def make_memory_plan(
    session: Session,
    inputs: StepInputs | None = None,
    chunk: Chunk | None = None,
    *,
    chunks_ahead: int = 0,
) -> MemoryPlan:
    """The plan for the programs that the handle has compiled so far.

    Args:
        session: The handle's session.
        inputs: What training reads besides the state, concrete or abstract.
        chunk: What one call of the step program takes, concrete or abstract.
        chunks_ahead: How many chunks are held on the host before they are fed.
    """
    programs = session.setup.programs.held()
    limit = session.setup.options.memory_limit_bytes
    is_cpu = jax.default_backend() == "cpu"
    on_host = Held.ALWAYS if is_cpu else Held.HOST
    scratch = is_cpu and any(has_convolutions(p.facts.primitives) for p in programs)
    parts = {
        **_kept(session, inputs, chunk),
        "batches ahead": MemoryPart(chunks_ahead * tree_bytes(chunk), on_host),
        "checkpoint staging": MemoryPart(_staging_bytes(session), on_host),
        **_step(session, [p for p in programs if p.key.role == "train step"]),
        **_evaluation([p for p in programs if p.key.role != "train step"]),
    }
    return MemoryPlan(
        parts=parts,
        limit_bytes=device_memory_bytes() if limit is None else limit,
        device=_device_name(is_cpu=is_cpu, is_given=limit is not None),
        scratch_factor=CONVOLUTION_SCRATCH if scratch else 1.0,
    )


def check_memory_plan(plan: MemoryPlan, owner: str) -> None:
    """Warns where the plan comes close to the device's limit, and refuses what does not fit.

    Raises:
        MemoryPlanError: The plan takes all of the memory or more; shows it by part.
    """
    if plan.share < _WARN_FROM:
        return
    needs = f"`{owner}` needs {in_units(plan.upper_bytes)} of the {in_units(plan.limit_bytes)} "
    problem = f"{needs}of {plan.device}.\n{plan}"
    if plan.share >= 1.0:
        raise MemoryPlanError(
            problem,
            expected=f"less than {in_units(plan.limit_bytes)}",
            fix="; or ".join([*_advice(plan), "raise `memory_limit_bytes` if it is wrong"]),
        )
    warn(f"{problem}\n  to lower it: {'; or '.join(_advice(plan))}")


def _kept(
    session: Session, inputs: StepInputs | None, chunk: Chunk | None
) -> dict[str, MemoryPart]:
    """What lies on the device from the first step to the last."""
    state = session.state
    device, anchors, data = (session.device, {}, {}) if inputs is None else inputs
    trees: dict[str, Any] = {
        "parameters": state.params,
        "model state": state.model_state,
        "optimizer state": state.opt_state,
        "Device fields and anchors": (device, anchors),
        "training data": data,
        "batches in flight": [chunk] * _CHUNKS_IN_FLIGHT,
    }
    return {name: MemoryPart(tree_bytes(tree), Held.ALWAYS) for name, tree in trees.items()}


def _staging_bytes(session: Session) -> int:
    """The copy of the state that is written while training goes on."""
    return 0 if session.records is None else tree_bytes(flat_items(session.state))


def _step(session: Session, programs: list[Program]) -> dict[str, MemoryPart]:
    if not programs:
        return {}
    # One program for each declared shape: the largest decides.
    memory = max(
        (program_memory(program.compiled) for program in programs),
        key=lambda memory: memory.temporary + memory.results,
    )
    of_several = f" (largest of {len(programs)} shapes)" if len(programs) > 1 else ""
    # XLA does not tell them apart: of its temporary memory this much are gradients.
    gradients = min(tree_bytes(session.state.params), memory.temporary)
    sizes = {
        "step: gradients": gradients,
        f"step: activations{of_several}": memory.temporary - gradients,
        "step: results and code": memory.results + memory.code,
    }
    return {name: MemoryPart(size, Held.STEP) for name, size in sizes.items()}


def _evaluation(programs: list[Program]) -> dict[str, MemoryPart]:
    """The largest program that runs between the steps."""
    if not programs:
        return {}
    size, role = max((_working_bytes(p), p.key.role) for p in programs)
    return {f"evaluation: {role}": MemoryPart(size, Held.EVALUATION)}


def _working_bytes(program: Program) -> int:
    memory = program_memory(program.compiled)
    resident = program.arguments[: _RESIDENT_ARGUMENTS.get(program.key.role, 0)]
    fed = memory.arguments - tree_bytes(resident)
    return fed + memory.results + memory.temporary + memory.code


def _advice(plan: MemoryPlan) -> list[str]:
    """What to change, the largest part first."""
    worth = _WORTH_NAMING * plan.total_bytes
    by_size = sorted(plan.parts.items(), key=lambda item: -item[1].size_bytes)
    large = [name for name, part in by_size if part.size_bytes >= worth]
    advice = [text for name in large for key, text in _ADVICE.items() if name.startswith(key)]
    return list(dict.fromkeys(advice))


def _device_name(*, is_cpu: bool, is_given: bool) -> str:
    if is_given:
        return "`memory_limit_bytes`"
    return "the host's RAM" if is_cpu else f"the device {jax.local_devices()[0].device_kind}"
