"""Which devices the process uses, and JAX's persistent compilation cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from nitro._paths import local_path
from nitro.errors import ConfigError

CACHE_VARIABLE = "NITRO_CACHE_DIR"


_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says how much memory a container may use: version 2, then version 1."""


class _Default:
    def __repr__(self) -> str:
        return "<the user's cache folder>"


DEFAULT_CACHE: Any = _Default()
_is_cache_decided = False


def setup_devices(
    platform: str | None = None, *, cache_dir: str | Path | None = DEFAULT_CACHE
) -> dict[str, Any]:
    """Chooses the platform and the compilation cache of this process.

    Optional; call it before the first handle. The cache holds machine code for this
    jaxlib and this hardware: it makes restarts quick, and is never what is delivered.

    Args:
        platform: "cpu", "gpu" or "tpu"; None leaves the choice to JAX.
        cache_dir: Where compiled programs are kept between processes; None turns it off.
            The default is `$NITRO_CACHE_DIR`, else a folder in the user's cache.

    Returns:
        `platform`, `n_devices` (those visible) and `cache_dir`.

    Raises:
        ConfigError: The platform is unknown, or JAX already runs on another one.
    """
    if platform is not None:
        _choose_platform(platform)
    _choose_cache(cache_dir)
    return {
        "platform": jax.default_backend(),
        "n_devices": jax.device_count(),
        "cache_dir": _cache_dir(),
    }


def ensure_cache() -> None:
    """Turns the persistent cache on, unless somebody has decided about it."""
    if not _is_cache_decided and _cache_dir() is None:
        _choose_cache(DEFAULT_CACHE)


def checked_n_devices(n_devices: Any) -> int:
    """The number of devices to train on, which is 1 for now.

    Raises:
        ConfigError: More than one.
    """
    if n_devices != 1:
        raise ConfigError(
            f"`n_devices` is {n_devices!r}.",
            expected="1: this version trains on one device",
            fix="leave `n_devices` out",
        )
    return 1


def brought_home(tree: Any) -> Any:
    """The same arrays on the one device that Nitro works on, wherever they are now.

    That is JAX's default device. Arrays that are there already are not copied, and leaves
    that are no JAX arrays stay as they are.
    """
    with jax.ensure_compile_time_eval():
        home = jax.device_put(np.zeros(())).sharding
    return jax.tree.map(lambda leaf: _moved(leaf, home), tree)


def _moved(leaf: Any, home: Any) -> Any:
    # What is traced has no place yet.
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    is_away = is_array and leaf.sharding != home
    return jax.device_put(leaf, home) if is_away else leaf


def _choose_platform(platform: str) -> None:
    known = ("cpu", "gpu", "cuda", "rocm", "tpu")
    if platform not in known:
        raise ConfigError(f"`platform` is {platform!r}.", expected="one of " + ", ".join(known))
    jax.config.update("jax_platforms", platform)
    try:
        running = jax.default_backend()
    except RuntimeError as error:
        raise ConfigError(
            f"JAX cannot use the platform {platform!r} here: {error}.",
            fix="install the jaxlib for it, or leave `platform` out",
        ) from error
    if running != platform and (running, platform) not in (("gpu", "cuda"), ("gpu", "rocm")):
        raise ConfigError(
            f"JAX already runs on {running!r}; it cannot change to {platform!r}.",
            fix="call `nitro.setup_devices` before anything uses JAX",
        )


def _choose_cache(cache_dir: Any) -> None:
    global _is_cache_decided  # noqa: PLW0603 - JAX's configuration is the process's, too
    _is_cache_decided = True
    chosen = _default_cache_dir() if cache_dir is DEFAULT_CACHE else cache_dir
    if chosen is not None:
        local_path(chosen, name="cache_dir")
    jax.config.update("jax_compilation_cache_dir", None if chosen is None else str(chosen))
    # Small programs count as well: a sweep starts many processes.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _default_cache_dir() -> Path | None:
    set_by_user = os.environ.get(CACHE_VARIABLE)
    if set_by_user is not None:
        return local_path(set_by_user, name=CACHE_VARIABLE) if set_by_user else None
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "nitro" / "xla"


def device_memory_bytes() -> int:
    """The device's memory in bytes: what it reports, or the host's RAM on the CPU.

    A container has what its control group grants it.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([ram, *_granted_bytes()])


def _granted_bytes() -> Iterator[int]:
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" where there is no limit
            yield int(text)


def _cache_dir() -> str | None:
    return jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue] - made at run time
