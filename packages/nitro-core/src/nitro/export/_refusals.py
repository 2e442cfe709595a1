"""Looks into a traced export for what no artifact can keep, before anything is lowered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from nitro._code import user_lines
from nitro._programs import bodies, jaxprs, where_drawn
from nitro._trees import Flat
from nitro.errors import ExportError

from ._program import ExportProgram
from ._wire import WireForward

_CALLBACKS = re.compile(r"callback|debug_print|infeed|outfeed")
_STABLE = re.compile(r"lapack_|cu(solver|blas|dnn)|hip(solver|blas)|shape_assertion")

_UNSTABLE = re.compile(r"custom calls? .*?targets? .*?guarantees?\.", re.S)
_TARGET = re.compile(r'custom_call @(?:"([^"]+)"|([\w.$]+))')


@dataclass(frozen=True)
class _Culprit:
    """An equation, with the ones that it is inside of."""

    name: str
    equations: tuple[Any, ...]

    def __str__(self) -> str:
        line = next(user_lines(*self.equations), None)
        return f"`{self.name}`" + ("" if line is None else f" ({line})")


def refuse_callbacks(jaxpr: Any, owner: str) -> None:
    """Refuses calls into Python, which no artifact can hold, and other side effects.

    Raises:
        ExportError: Names each, with the user's line.
    """
    found = [c for c in _culprits(jaxpr) if _CALLBACKS.search(c.name)]
    if found:
        raise ExportError(
            f"The exported program of `{owner}` would call Python: {_listed(found)}.",
            expected="pure JAX: an artifact runs where there is no Python",
            fix="compute it with JAX, do it in `export_postprocess`, or drop the debugging call",
        )
    effects = {str(effect) for effect in jaxpr.effects}
    if effects:
        culprits = [c for c in _culprits(jaxpr) if c.equations[0].effects]
        around = {id(equation) for c in culprits for equation in c.equations[1:]}
        culprits = [c for c in culprits if id(c.equations[0]) not in around]
        raise ExportError(
            f"The exported program of `{owner}` has side effects: {_listed(culprits)} "
            f"({', '.join(sorted(effects))}).",
            expected="a function whose only result is its outputs",
            fix="take what has the effect out of `forward` and `export_preprocess`",
        )


def refuse_unstable_calls(jaxpr: Any, owner: str, allowed: Sequence[str]) -> None:
    """Refuses foreign calls whose targets nobody promises to keep (JX-22).

    Raises:
        ExportError: Names each target, with the user's line.
    """
    calls = [
        _Culprit(target, culprit.equations)
        for culprit in _culprits(jaxpr)
        if culprit.name == "ffi_call"
        and (target := str(culprit.equations[0].params["target_name"])) not in allowed
        and not _STABLE.match(target)
    ]
    if calls:
        raise _unstable(owner, calls)


def refuse_unstable_targets(program: ExportProgram, batch: int | None, owner: str) -> None:
    """Lowers a program once, and tells which targets JAX refuses to write.

    Any primitive may be lowered to one: `jax.lax.linalg.ormqr` is, and a user's own.

    Raises:
        ExportError: Names each target, with the user's line.
    """
    try:
        program.exported(batch)
    except ValueError as error:
        targets = _unstable_targets(error)
        if not targets:
            raise
        arguments = program.arguments(batch, program.golden_sizes)
        with program.wide_types():
            jaxpr = jax.make_jaxpr(program.fn)(*arguments)
            found = _calling(jaxpr, program)
        named = {culprit.name for culprit in found}
        found += [_Culprit(target, ()) for target in targets if target not in named]
        raise _unstable(owner, found) from error


def _unstable_targets(error: Exception) -> list[str]:
    """The targets that JAX refuses to serialize; empty for another error."""
    if not _UNSTABLE.search(" ".join(str(error).split())):
        return []
    found = [quoted or plain for quoted, plain in _TARGET.findall(str(error))]
    return list(dict.fromkeys(found)) or ["a custom call"]


def _calling(jaxpr: Any, program: ExportProgram, calls: tuple[Any, ...] = ()) -> list[_Culprit]:
    """The innermost equations that are lowered to unstable calls, one for each target.

    Each equation is lowered alone: JAX tells no lines, which Nitro keeps out of modules.
    """
    found = list[_Culprit]()
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in opened.eqns:
        around = (equation, *calls)
        targets = _targets_of(equation, opened, program)
        inner = (
            [c for b in bodies(equation) for c in _calling(b, program, around)] if targets else []
        )
        found += inner or [_Culprit(target, around) for target in targets]
    return found


def _targets_of(equation: Any, opened: Any, program: ExportProgram) -> list[str]:
    """The unstable targets of one equation of a jaxpr."""
    inputs = list(dict.fromkeys(filter(_is_variable, equation.invars)))
    alone = opened.replace(
        constvars=[],
        invars=inputs,
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
        debug_info=opened.debug_info._replace(arg_names=None, result_paths=None),
    )
    export = jax.export.export(
        jax.jit(jaxpr_as_fun(ClosedJaxpr(alone, []))),
        platforms=program.platforms,
        disabled_checks=tuple(
            map(jax.export.DisabledSafetyCheck.custom_call, program.custom_calls)
        ),
    )
    try:
        export(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inputs))
    # What needs the equations around it raises various types; it is refused without a line.
    except Exception as error:  # noqa: BLE001
        return _unstable_targets(error)
    return []


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")


def _unstable(owner: str, calls: Sequence[_Culprit]) -> ExportError:
    targets = tuple(dict.fromkeys(call.name for call in calls))
    return ExportError(
        f"The exported program of `{owner}` calls {_listed(calls)}, which JAX does not promise "
        "to keep.",
        expected="targets with a compatibility promise, such as LAPACK's",
        fix=f"compute it without; or, where every reader has it, pass `custom_calls={targets!r}`",
    )


def refuse_constants(forward: WireForward, jaxpr: Any) -> None:
    """Refuses large arrays that the hooks capture: they would be baked into the artifact.

    Raises:
        ProgramError: Names each array, its hook, and what it came through.
    """
    model = forward.model
    model.check_constants(
        jaxpr,
        role="exported",
        roots=forward.roots,
        baked={f"Device field {forward.owner}.{name}": model.device[name] for name in model.device},
    )


def refuse_draws(
    forward: WireForward,
    names: Sequence[str],
    arguments: Sequence[Any],
    custom_calls: Sequence[str] = (),
) -> None:
    """Refuses an evaluation-mode `forward` whose outputs depend on RNG state.

    Raises:
        ExportError: Names the RNG variables that it reads, and the user's line.
    """
    rngs = forward.rngs
    if not rngs:
        return
    fn = forward.make_drawing(names)
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in custom_calls]
    with forward.wide_types():
        jaxpr = jax.make_jaxpr(fn)(rngs, *arguments)
        # Arguments that no output depends on are dropped when a program is exported.
        export = jax.export.export(jax.jit(fn), platforms=["cpu"], disabled_checks=allowed)
        kept = set(export(rngs, *arguments).module_kept_var_idx)
    drawn = [name for i, name in enumerate(sorted(rngs)) if i in kept]
    if drawn:
        where = where_drawn(jaxpr.jaxpr, sorted(rngs), drawn)
        raise ExportError(
            f"`{forward.owner}.forward` draws random numbers in evaluation mode: "
            f"it reads {', '.join(f'`{name}`' for name in drawn)}{where}.",
            expected="outputs that depend on inputs and weights only",
            fix="draw in training mode only, or take the noise as a batch field",
        )


def refuse_undifferentiable(
    forward: WireForward, names: Sequence[str], arguments: Sequence[Any], weights: Flat
) -> None:
    """Refuses a program that has no derivative by its float weights.

    Raises:
        ExportError: Says why.
    """
    fn = forward.make(names)
    count = len(forward.inputs)
    given = dict(enumerate(arguments))
    floats = {
        count + i: given.pop(count + i)
        for i, name in enumerate(names)
        if jnp.issubdtype(weights[name].dtype, jnp.floating)
    }

    def total(varied: Mapping[int, Any], fixed: Mapping[int, Any]) -> jax.Array:
        every = {**varied, **fixed}
        outputs = fn(*(every[i] for i in range(len(arguments))))
        return sum((o.astype(jnp.float32).sum() for o in outputs), start=jnp.zeros(()))

    try:
        with forward.wide_types():
            jax.eval_shape(jax.grad(total), floats, given)
    # JAX raises several types for what has no reverse-mode derivative.
    except Exception as error:
        raise ExportError(
            f"`{forward.owner}.forward` cannot be differentiated by its weights: "
            f"{str(error).splitlines()[0]}",
            expected="a derivative, as `vjp_order` promises one",
            fix="replace what has none, such as `lax.while_loop` by `lax.scan`; or leave "
            "`vjp_order` out",
        ) from error


def _culprits(jaxpr: Any) -> Iterator[_Culprit]:
    for inner in jaxprs(jaxpr):
        for equation in inner.jaxpr.eqns:
            yield _Culprit(equation.primitive.name, (equation, *inner.calls))


def _listed(culprits: Sequence[_Culprit]) -> str:
    return ", ".join(dict.fromkeys(map(str, culprits)))
