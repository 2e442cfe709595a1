"""Turns an export into a portable StableHLO artifact, and reads one's signature back."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax.export
from jax.extend import mlir
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import stablehlo

from nitro.errors import BundleError, ConfigError, ExportError
from nitro.export.mlir import (
    custom_call_targets,
    make_context,
    serialize_portable,
    strip_attributes,
)

from ._bytecode import check_frame

DEFAULT_VERSION = "1.13.0"
"""August 2025: older than every reader that the bundle format names."""

# Sharding rules mean nothing on one device, and stop LAPACK calls from serializing; the
# names that JAX gives results are of no use to other readers.
_DROPPED = ("sdy.", "jax.")


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a portable artifact's entry takes and returns.

    Attributes:
        arguments: The argument types as MLIR prints them, such as `tensor<8x10xf32>`.
        results: The result types.
        custom_calls: The targets of all custom calls, sorted.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    custom_calls: tuple[str, ...]


def check_version(version: str) -> None:
    """Checks that this JAX can write for a StableHLO version.

    Raises:
        ConfigError: Not a version, or out of the range that it can write.
    """
    oldest, newest = stablehlo.get_minimum_version(), stablehlo.get_current_version()
    fits = re.fullmatch(r"\d{1,6}\.\d{1,6}\.\d{1,6}", str(version)) and (
        _numbers(oldest) <= _numbers(version) <= _numbers(newest)
    )
    if not fits:
        raise ConfigError(
            f"`stablehlo_version` is {version!r}.",
            expected=f"a version from {oldest} to {newest}, which this JAX can write for",
            fix=f"leave it out for {DEFAULT_VERSION}, or take the version of your oldest reader",
        )


def make_artifact(exported: jax.export.Exported, version: str) -> tuple[bytes, Signature]:
    """Serializes an export for readers of StableHLO `version` or newer.

    The bytes hold no source locations and depend on the program and the versions only.

    Raises:
        ExportError: An operation that `version` does not have; the message names it.
    """
    with make_context() as context:
        module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized, context)
        strip_attributes(module, _DROPPED)
        _move_main_first(module)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        # Read before serializing, which turns the module into another dialect.
        signature = _signature(module)
        try:
            return serialize_portable(module, version), signature
        except ValueError as error:
            raise ExportError(
                f"The program does not fit StableHLO {version}: {error}.",
                expected="operations that this version has",
                fix="pass a newer `stablehlo_version` if every reader of the bundle knows it, "
                "or avoid the operation",
            ) from error


def read_signature(data: bytes, *, file: str) -> Signature:
    """Parses a portable artifact and returns its entry's types.

    Raises:
        BundleError: Not a portable artifact that this JAX can read; names the file.
    """
    with _parsed(data, file) as module:
        return _signature(module)


def read_text(data: bytes, *, file: str) -> str:
    """A portable artifact as MLIR text, to be compared with another and not to be kept.

    Raises:
        BundleError: As for `read_signature`.
    """
    with _parsed(data, file) as module:
        return str(module)


@contextmanager
def _parsed(data: bytes, file: str) -> Generator[Any, None, None]:
    check_frame(data, file=file)
    with make_context() as context:
        try:
            yield mlir.deserialize_portable_artifact(data, context)
        # jaxlib raises several types here, which differ from version to version.
        except Exception as error:
            raise BundleError(
                f"`{file}` does not parse: {' '.join(str(error).split())[:300]}.",
                expected="a StableHLO portable artifact that the installed JAX can read",
            ) from error


def _functions(module: Any) -> dict[str, Any]:
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if op.operation.name == "func.func"
    }


def _move_main_first(module: Any) -> None:
    """Puts the entry first: public tools read the arity of the first function."""
    functions = _functions(module)
    first = next(iter(functions))
    if first != "main":
        functions["main"].move_before(functions[first])


def _signature(module: Any) -> Signature:
    functions = _functions(module)
    if next(iter(functions), None) != "main":
        raise ValueError("its first function is not `main`")
    kind = ir.FunctionType(ir.TypeAttr(functions["main"].attributes["function_type"]).value)
    return Signature(
        arguments=tuple(str(argument) for argument in kind.inputs),
        results=tuple(str(result) for result in kind.results),
        custom_calls=custom_call_targets(module),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
