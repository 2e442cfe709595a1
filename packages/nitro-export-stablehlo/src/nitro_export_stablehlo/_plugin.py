"""The entry point through which Nitro finds the backend; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nitro.hooks import BackendInfo, hookimpl

if TYPE_CHECKING:
    from nitro.hooks import ExportBackend


@hookimpl
def nitro_export_backends() -> Iterable[BackendInfo]:
    """Returns the one backend of this package."""
    return [
        BackendInfo(
            name="stablehlo",
            summary="A bundle of StableHLO programs for ReactantServer, IREE and Python.",
            load=_load,
            recognises=_is_bundle,
        )
    ]


def _is_bundle(path: Path) -> bool:
    return (path / "manifest.yaml").is_file() and (path / "nitro.json").is_file()


def _load() -> ExportBackend:
    from ._backend import StableHLOBackend

    return StableHLOBackend()
