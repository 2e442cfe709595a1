"""Whether the installed JAX promises to read a bundle: versions first, its age as a hint.

JAX promises to read an export of a jaxlib that was released up to six months before the
reader's, or up to three weeks after it
(https://docs.jax.dev/en/latest/export/export.html#compatibility-guarantees). When a version
was released is written nowhere in it, and a table of dates ends where it matters: at the
versions to come. What is known for certain is which calling conventions and StableHLO
versions the installed JAX reads, and which of two versions is the newer one.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from datetime import UTC, datetime

import jax
import jax.export
from jax.extend.mlir.dialects import stablehlo

from ._index import Index

_PROMISED_DAYS = 180
# A month is left for a new export.
_NEAR_DAYS = 150


@dataclass(frozen=True, kw_only=True)
class Window:
    """Where a bundle stands in the installed JAX's promise.

    Attributes:
        violations: What the installed JAX does not read, a line each.
        notes: What it reads without having promised to, or what another JAX may not.
    """

    violations: tuple[str, ...]
    notes: tuple[str, ...]


def find_window(index: Index, exported_at: str) -> Window:
    """Compares what wrote a bundle with the installed JAX.

    Args:
        index: The bundle's `nitro.json`.
        exported_at: When it was exported, ISO 8601; another text tells nothing.
    """
    violations = (*_unread_convention(index), *_unread_stablehlo(index))
    notes = (*_old_convention(index), *_other_version(index, _age_days(exported_at)))
    return Window(violations=violations, notes=notes)


def _unread_convention(index: Index) -> tuple[str, ...]:
    version = index.calling_convention_version
    oldest = jax.export.minimum_supported_calling_convention_version
    newest = jax.export.maximum_supported_calling_convention_version
    if oldest <= version <= newest:
        return ()
    return (
        f"The exports are in the calling convention {version}; expected: from {oldest} to "
        f"{newest}, which the installed jax {jax.__version__} reads",
    )


def _unread_stablehlo(index: Index) -> tuple[str, ...]:
    version = index.versions.get("stablehlo_target", "")
    oldest, newest = stablehlo.get_minimum_version(), stablehlo.get_current_version()
    if not version or _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        return ()
    return (
        f"The .mlir files are in StableHLO {version}; expected: from {oldest} to {newest}, "
        f"which the installed jax {jax.__version__} reads",
    )


def _old_convention(index: Index) -> tuple[str, ...]:
    version = index.calling_convention_version
    usual: int = jax.config.jax_export_calling_convention_version  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    if version != jax.export.minimum_supported_calling_convention_version or version == usual:
        return ()
    return (
        f"The exports are in the calling convention {version}, the oldest that jax "
        f"{jax.__version__} reads: a newer jax may not. Export again before you upgrade.",
    )


def _other_version(index: Index, days: int | None) -> tuple[str, ...]:
    writer, reader = index.versions.get("jaxlib", ""), importlib.metadata.version("jaxlib")
    if _numbers(writer) > _numbers(reader):
        return (
            f"jaxlib {writer} wrote the bundle, and {reader} is installed. JAX promises to read "
            "exports of a newer jaxlib for three weeks between the releases only: install "
            f"jaxlib {writer} or newer.",
        )
    if days is None or days < _NEAR_DAYS:
        return ()
    promise = f"JAX promises to read exports for {_PROMISED_DAYS} days between two releases"
    again = "Export again with the new one; the .mlir files stay readable for five years."
    if _numbers(writer) == _numbers(reader):
        return (
            f"The bundle is {days} days old; the installed jaxlib {reader} wrote it, so it reads "
            f"it. {promise}, so a newer jaxlib may not. {again}",
        )
    return (
        f"The bundle is {days} days old, and an older jaxlib, {writer or 'not named'}, wrote it. "
        f"{promise}: the installed {reader} may be beyond that, or the next one. {again}",
    )


def _age_days(exported_at: str) -> int | None:
    try:
        exported = datetime.fromisoformat(exported_at)
    except ValueError:
        return None
    if exported.tzinfo is None:
        exported = exported.replace(tzinfo=UTC)
    return (datetime.now(UTC) - exported).days


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a release; what follows them, such as `.dev1`, does not count."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
