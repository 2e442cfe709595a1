"""Options for XLA, checked before any program is compiled with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from nitro.errors import ConfigError


def checked_compile_options(options: Any) -> dict[str, Any]:
    """The options as a dict that XLA accepts.

    Args:
        options: Flag name → bool, int, float or str, as `jax.stages.Lowered.compile`
            takes them; None for none.

    Raises:
        ConfigError: Not a mapping, or a flag or value that XLA does not know.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"`compile_options` is {options!r}.",
            expected='a mapping, such as {"xla_cpu_enable_fast_math": False}',
        )
    checked: dict[str, Any] = dict(options)
    for name, value in checked.items():
        _try_option(name, value)
    return checked


def _try_option(name: Any, value: Any) -> None:
    # XLA has no list of its flags to compare with, but it refuses them by name.
    smallest = jax.jit(lambda x: x).lower(jnp.float32(0))
    try:
        smallest.compile({name: value})
    except (jax.errors.JaxRuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"XLA does not take the compile option `{name}` = {value!r}: {error}.",
            expected="an XLA flag of this jaxlib with a value of its type",
            fix="correct the name, or leave the option out",
        ) from error
