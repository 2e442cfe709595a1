"""Exports a run: checks everything, has a backend write it, and proves the artifact."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nitro._plugins import get_backend
from nitro._run import Nitro, session_of
from nitro.errors import ConfigError, ExportError
from nitro.hooks import ExportBackend

from ._build import build_program
from ._verify import verify_artifact


def export_model(
    run: Nitro,
    backend: str,
    *,
    dir: str | Path,  # noqa: A002 - the word that users know
    name: str,
    batch_sizes: Sequence[int] = (1,),
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    verify: bool = True,
    **backend_options: Any,
) -> Path:
    """Writes `forward` with the current weights as an artifact that needs no model source.

    The artifact is written into a temporary folder beside its target and renamed when
    it is complete and proved: an interrupted export leaves nothing behind.

    Args:
        run: The handle; its Device fields are baked at their current values.
        backend: The name of an installed backend, such as `"stablehlo"`.
        dir: The folder that the artifact goes into.
        name: The artifact's own folder, and its name when it is served.
        batch_sizes: The sizes to compile for; each at least 1.
        provenance: More facts to keep with the artifact; they win over collected ones.
        overwrite: Whether to replace an artifact of this name.
        verify: Whether to load the artifact in a fresh process and compare it with
            `predict`.
        backend_options: The backend's own options.

    Returns:
        The artifact's path, `dir/name`.

    Raises:
        BackendError: The backend is unknown or cannot be loaded.
        ExportError: A hook is missing or its specs do not fit, the target exists, or the
            artifact does not give what `predict` gives.
        ConfigError: An option that cannot be used.
    """
    target = _checked_target(dir, name, overwrite=overwrite)
    sizes = _checked_sizes(batch_sizes)
    writer = get_backend(backend)
    session = session_of(run)
    session.report_drift()
    program = build_program(session, name=name, batch_sizes=sizes, provenance=provenance or {})
    with _staged(target) as staging:
        _write(writer, program, staging, backend_options)
        if verify:
            verify_artifact(program, backend, staging)
        _swap_in(staging, target)
    return target


def _write(writer: ExportBackend, program: Any, path: Path, options: Mapping[str, Any]) -> None:
    path.mkdir()
    writer.write(program, path, **options)


def _checked_target(folder: str | Path, name: str, *, overwrite: bool) -> Path:
    if not name or name != Path(name).name or name.startswith("."):
        raise ConfigError(
            f"`name` is {name!r}.", expected="one plain folder name, such as `digits_v1`"
        )
    target = Path(folder).absolute() / name
    if target.exists() and not overwrite:
        raise ExportError(
            f"`{target}` exists.", fix="choose another `name`, or pass `overwrite=True`"
        )
    return target


def _checked_sizes(batch_sizes: Sequence[int]) -> tuple[int, ...]:
    sizes = (batch_sizes,) if isinstance(batch_sizes, int) else tuple(batch_sizes)
    bad = [s for s in sizes if isinstance(s, bool) or not hasattr(s, "__index__") or s < 1]
    if bad or not sizes:
        raise ConfigError(
            f"`batch_sizes` is {batch_sizes!r}.", expected="at least one size, each at least 1"
        )
    return tuple(sorted({int(size) for size in sizes}))


@contextmanager
def _staged(target: Path) -> Generator[Path]:
    # One level deeper than the artifact will be, so that a server which watches the
    # folder never takes the unfinished one for an artifact.
    staging = target.parent / f".{target.name}.partial"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging / target.name
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap_in(staging: Path, target: Path) -> None:
    if target.exists():
        target.rename(staging.parent / f"{target.name}.old")
    staging.rename(target)
