"""The entry point through which Nitro finds the backend; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nitro.hooks import BackendInfo, hookimpl

if TYPE_CHECKING:
    from nitro.hooks import ExportBackend


@hookimpl
def nitro_export_backends() -> Iterable[BackendInfo]:
    """Returns the one backend of this package."""
    return [
        BackendInfo(
            name="triton",
            summary="A model of a Triton repository: config.pbtxt, model.py and the bundle.",
            load=_load,
        )
    ]


def _load() -> ExportBackend:
    from ._backend import TritonBackend

    return TritonBackend()
