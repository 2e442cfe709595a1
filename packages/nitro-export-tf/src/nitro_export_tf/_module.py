"""Turns an export into the module that TensorFlow's `XlaCallModule` op holds.

JAX and TensorFlow are released apart: JAX serializes for StableHLO readers of the last four
weeks, TensorFlow reads what was current when it was built. The module is read with JAX's
MLIR and serialized again for the version that TensorFlow reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import numpy as np
from jax.extend import mlir
from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import stablehlo

from nitro.errors import ExportError
from nitro.export.mlir import (
    custom_call_targets,
    make_context,
    serialize_portable,
    strip_attributes,
)

from ._io_spec import Shape

# Sharding rules mean nothing on one device, and the names that JAX gives results are of no
# use to TensorFlow. `jax.global_constant` and `jax.uses_shape_polymorphism` must stay.
_DROPPED = ("sdy.", "jax.result_info", "jax.arg_info")

_KNOWN_TARGETS = frozenset({"shape_assertion", "Sharding", "annotate_device_placement"})
"""Custom calls that the op itself takes care of."""

_CONVENTIONS = (9, 10)
"""JAX's calling conventions that are the same for one device, sharding rules stripped."""


@dataclass(frozen=True, kw_only=True)
class Module:
    """One program as the attributes of the op.

    Attributes:
        data: The StableHLO portable artifact.
        platforms: What it was lowered for, as TensorFlow calls them.
        kept: Which of the export's arguments the module takes, ascending.
        results: Dtype and shape of each result; what has no values is a boolean.
    """

    data: bytes
    platforms: tuple[str, ...]
    kept: tuple[int, ...]
    results: tuple[tuple[np.dtype[Any], Shape], ...]


def make_module(
    exported: jax.export.Exported, version: str, *, allowed_calls: Collection[str], where: str
) -> Module:
    """Serializes an export for readers of StableHLO `version` or newer.

    The bytes hold no source locations and depend on the program and the versions only.

    Args:
        exported: The program.
        version: The StableHLO version to write for.
        allowed_calls: Custom calls that the reader is said to know.
        where: Names the program in messages, such as `"the program for 8 rows"`.

    Raises:
        ExportError: An operation that `version` does not have, a custom call that
            TensorFlow does not know, or side effects; names it.
    """
    _check_kind(exported, where)
    stablehlo.register_stablehlo_passes()
    with make_context() as context:
        module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized, context)
        strip_attributes(module, _DROPPED)
        passes = ["strip-debuginfo"]
        if _is_dynamic(exported):
            # TensorFlow works out the symbolic sizes when the op runs, and follows calls but
            # not composites (`chlo.erf`, `chlo.top_k`): their bodies would stay dynamic.
            passes.append("func.func(stablehlo-legalize-composite-to-call)")
        pipeline = f"builtin.module({','.join(passes)})"
        passmanager.PassManager.parse(pipeline).run(module.operation)
        _refuse_calls(module, allowed_calls, where)
        data = _serialize(module, version, where)
    return Module(
        data=data,
        platforms=tuple(platform.upper() for platform in exported.platforms),
        kept=tuple(sorted(exported.module_kept_var_idx)),
        results=tuple((_dtype(aval), open_shape(aval)) for aval in exported.out_avals),
    )


def open_shape(aval: Any) -> Shape:
    """The shape of an abstract value, None where it is symbolic."""
    return tuple(size if isinstance(size, int) else None for size in aval.shape)


def _check_kind(exported: jax.export.Exported, where: str) -> None:
    if exported.nr_devices != 1 or exported.ordered_effects or exported.unordered_effects:
        raise ExportError(
            f"{_capital(where)} is for {exported.nr_devices} devices, or has side effects.",
            expected="a pure program for one device",
        )
    if exported.calling_convention_version not in _CONVENTIONS:
        raise ExportError(
            f"JAX {jax.__version__} writes calling convention "
            f"{exported.calling_convention_version}, which this nitro-export-tf does not know.",
            expected=" or ".join(map(str, _CONVENTIONS)),
            fix='pip install --upgrade "nitro-core[tf]"',
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_dynamic(exported: jax.export.Exported) -> bool:
    return any(None in open_shape(aval) for aval in exported.in_avals)


def _dtype(aval: Any) -> np.dtype[Any]:
    # The tangent of an integer; modules have booleans in its place.
    return np.dtype(np.bool_) if aval.dtype == jax.dtypes.float0 else np.dtype(aval.dtype)


def _refuse_calls(module: Any, allowed: Collection[str], where: str) -> None:
    unknown = sorted({*custom_call_targets(module)} - _KNOWN_TARGETS - set(allowed))
    if unknown:
        listed = ", ".join(f"`{target}`" for target in unknown)
        raise ExportError(
            f"{_capital(where)} calls {listed}, which TensorFlow does not have.",
            expected="operations of StableHLO only; JAX's linear algebra on a CPU, such as "
            "`jnp.linalg.cholesky`, calls LAPACK instead",
            fix="compute it outside of `forward`; or pass "
            f"`custom_calls={tuple(unknown)!r}` if the TensorFlow that serves has them",
        )


def _serialize(module: Any, version: str, where: str) -> bytes:
    try:
        return serialize_portable(module, version)
    except ValueError as error:
        raise ExportError(
            f"{_capital(where)} does not fit StableHLO {version}: {error}.",
            expected="operations that the TensorFlow which reads the model has",
            fix="pass a newer `stablehlo_version` if that TensorFlow reads it, or avoid the "
            "operation",
        ) from error
