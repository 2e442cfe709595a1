"""What the caller of `export_model` asked for, checked before any work is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from nitro.errors import ConfigError, ExportError, did_you_mean

from ._dims import constraint_symbols, is_kept
from ._spec import canonical_dtype, numpy_dtype

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The arguments of `export_model` that shape the program.

    Attributes:
        name: The artifact's name.
        batch_sizes: Ascending and distinct.
        dynamic_batch: Whether a program for any batch size is wanted too.
        platforms: What to lower for.
        dtype: What float weights are stored and computed in; None leaves them.
        vjp_order: How often the artifact must be differentiable.
        constraints: What holds for the symbolic sizes.
        custom_calls: Targets let through by name.
        golden: The caller's own reference inputs, or None.
        provenance: The caller's own facts.
    """

    name: str
    batch_sizes: tuple[int, ...]
    dynamic_batch: bool = False
    platforms: tuple[str, ...] = ("cpu",)
    dtype: np.dtype[Any] | None = None
    vjp_order: int = 0
    constraints: tuple[str, ...] = ()
    custom_calls: tuple[str, ...] = ()
    golden: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict[str, Any])


def checked_batch_sizes(batch_sizes: Any) -> tuple[int, ...]:
    """The sizes, ascending and distinct.

    Raises:
        ConfigError: No size, or one below 1.
    """
    sizes = tuple(batch_sizes) if isinstance(batch_sizes, Iterable) else (batch_sizes,)
    bad = [s for s in sizes if isinstance(s, bool) or not hasattr(s, "__index__") or s < 1]
    if bad or not sizes:
        raise ConfigError(
            f"`batch_sizes` is {batch_sizes!r}.", expected="at least one size, each at least 1"
        )
    return tuple(sorted({int(size) for size in sizes}))


def checked_platforms(platforms: Sequence[str] | None) -> tuple[str, ...]:
    """The platforms to lower for; by default the one that JAX runs on here.

    Raises:
        ConfigError: None, or one that JAX does not lower for.
    """
    if platforms is None:
        return (local_platform(),)
    chosen = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    for platform in chosen:
        if platform not in PLATFORMS:
            raise ConfigError(
                f"`platforms` has {platform!r}.",
                expected=did_you_mean(str(platform), PLATFORMS),
                fix='write `"cuda"` or `"rocm"` for a GPU' if platform == "gpu" else "",
            )
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(f"`platforms` is {chosen}.", expected="distinct names, at least one")
    return chosen


def local_platform() -> str:
    """The platform of JAX's default device, by the name that lowering knows it by."""
    backend = jax.default_backend()
    if backend != "gpu":
        return backend
    is_rocm = "rocm" in getattr(jax.devices()[0].client, "platform_version", "")
    return "rocm" if is_rocm else "cuda"


def checked_float_dtype(dtype: object) -> np.dtype[Any] | None:
    """The float dtype to convert to, or None.

    Raises:
        ConfigError: Not a float dtype.
    """
    if dtype is None:
        return None
    try:
        name = canonical_dtype(dtype, of="dtype")
    except ExportError:
        name = ""
    if name not in {"bfloat16", "float16", "float32", "float64"}:
        raise ConfigError(
            f"`dtype` is {dtype!r}.",
            expected="bfloat16, float16, float32 or float64: what the float weights become",
        )
    return numpy_dtype(name)


def checked_constraints(constraints: Any) -> tuple[str, ...]:
    """The constraints, each of which parses.

    Raises:
        ConfigError: One that does not.
    """
    is_list = isinstance(constraints, Iterable) and not isinstance(constraints, str)
    texts: tuple[Any, ...] = tuple(constraints) if is_list else (constraints,)
    for text in texts:
        try:
            constraint_symbols(text)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"The constraint {text!r} is not one: {error}.",
                expected='two sizes with >=, <= or == between, such as "b >= 2" or '
                '"mod(time, 4) == 0"',
            ) from error
    return texts


def check_kept(batch_sizes: Sequence[int], symbol: str, constraints: Sequence[str]) -> None:
    """Refuses a batch size that no request could have.

    Raises:
        ConfigError: It breaks a constraint on the batch alone.
    """
    on_batch = [c for c in constraints if constraint_symbols(c) == frozenset({symbol})]
    for size in batch_sizes:
        broken = [c for c in on_batch if not is_kept(c, {symbol: size})]
        if broken:
            usable = (n for n in range(1, 1025) if all(is_kept(c, {symbol: n}) for c in on_batch))
            first = next(usable, None)
            raise ConfigError(
                f"`batch_sizes` has {size}, which breaks the constraint `{broken[0]}`.",
                expected="sizes that the constraints let callers send",
                fix="" if first is None else f"pass `batch_sizes=({first},)`",
            )


def checked_vjp_order(order: int) -> int:
    """How often to differentiate.

    Raises:
        ConfigError: Not a small whole number.
    """
    if type(order) is not int or order not in range(4):
        raise ConfigError(
            f"`vjp_order` is {order!r}.",
            expected="0 for an artifact that only predicts, 1 for one that can be trained, at most 3",
        )
    return order
