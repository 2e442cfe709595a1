"""Loads TensorFlow when it is needed, without a GPU, and asks what it can read."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from nitro.errors import ConfigError, ExportError, MissingPackageError

OLDEST_CONVENTION = 7
"""The first calling convention in which the op checks symbolic sizes."""

_USUAL_CONVENTION = 9
"""What modules for one device have meant since 2024; 10 only adds sharding rules."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The reader that modules are written for.

    Attributes:
        stablehlo_version: The StableHLO version that they are serialized for.
        call_module_version: Their calling convention: the `version` of `XlaCallModule`.
    """

    stablehlo_version: str
    call_module_version: int


def import_tensorflow(purpose: str) -> Any:
    """Imports TensorFlow and hides all GPUs from it: JAX may be using them.

    A process whose TensorFlow has opened its GPUs already keeps them.

    Raises:
        MissingPackageError: It is not installed; `purpose` says what wanted it.
    """
    try:
        with _hidden_jax():
            import tensorflow as tf
    except ImportError as error:
        raise MissingPackageError(
            f"TensorFlow cannot be imported, and {purpose} needs it: {error}.",
            expected="tensorflow 2.18 or newer",
            fix='pip install "nitro-core[tf]"',
        ) from error
    # An error says that the devices are open; what we run is pinned to the CPU anyway.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    return tf


@contextlib.contextmanager
def _hidden_jax() -> Generator[None]:
    """Keeps TensorFlow from importing JAX beside itself, for its deprecated LiteRT bridge.

    A process that only serves a SavedModel needs no JAX; where JAX is loaded already, or
    is to be Keras' backend, it stays.
    """
    wanted = "tensorflow" in sys.modules or os.environ.get("KERAS_BACKEND") == "jax"
    if wanted or "jax" in sys.modules:
        yield
        return
    # None makes `import jax` an ImportError, which TensorFlow is prepared for.
    modules: dict[str, Any] = sys.modules
    modules["jax"] = None
    try:
        yield
    finally:
        del modules["jax"]


def choose_target(stablehlo_version: str | None, call_module_version: int | None) -> Target:
    """What to write for: by default, what the installed TensorFlow and JAX both know.

    Raises:
        ConfigError: A version that cannot be written or read.
    """
    return Target(
        stablehlo_version=_stablehlo_version(stablehlo_version),
        call_module_version=_call_module_version(call_module_version),
    )


def installed_target() -> Target:
    """The newest versions that the installed TensorFlow reads."""
    from tensorflow.compiler.mlir.stablehlo import stablehlo
    from tensorflow.compiler.tf2xla.python import xla

    # A native module, which type checkers cannot look into.
    native: Any = stablehlo
    return Target(
        stablehlo_version=native.get_current_version(),
        call_module_version=xla.call_module_maximum_supported_version(),
    )


def version_numbers(version: str) -> tuple[int, ...]:
    """A version as numbers that compare."""
    return tuple(int(part) for part in version.split("."))


def _stablehlo_version(wanted: str | None) -> str:
    from jax.extend.mlir.dialects import stablehlo

    oldest, newest = stablehlo.get_minimum_version(), stablehlo.get_current_version()
    if wanted is None:
        return min(installed_target().stablehlo_version, newest, key=version_numbers)
    fits = re.fullmatch(r"\d{1,6}\.\d{1,6}\.\d{1,6}", str(wanted)) and (
        version_numbers(oldest) <= version_numbers(wanted) <= version_numbers(newest)
    )
    if not fits:
        raise ConfigError(
            f"`stablehlo_version` is {wanted!r}.",
            expected=f"a version from {oldest} to {newest}, which this JAX can write for",
            fix="leave it out for the installed TensorFlow, or ask the one that will read: "
            "`tensorflow.compiler.mlir.stablehlo.stablehlo.get_current_version()`",
        )
    return wanted


def _call_module_version(wanted: int | None) -> int:
    newest = installed_target().call_module_version
    if wanted is None:
        if newest < OLDEST_CONVENTION:
            raise ExportError(
                f"The installed TensorFlow reads calling conventions up to {newest}.",
                expected=f"at least {OLDEST_CONVENTION}",
                fix='pip install --upgrade "nitro-core[tf]"',
            )
        return min(newest, _USUAL_CONVENTION)
    if isinstance(wanted, bool) or wanted not in range(OLDEST_CONVENTION, newest + 1):
        raise ConfigError(
            f"`call_module_version` is {wanted!r}.",
            expected=f"a number from {OLDEST_CONVENTION} to {newest}, which the installed "
            "TensorFlow reads",
            fix=f"leave it out for {min(newest, _USUAL_CONVENTION)}",
        )
    return wanted
