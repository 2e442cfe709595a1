"""Tells Nitro that this package has the backend `tf`; imports nothing heavy."""

from __future__ import annotations

from nitro.hooks import BackendInfo, ExportBackend, hookimpl


@hookimpl
def nitro_export_backends() -> list[BackendInfo]:
    """Offers the SavedModel backend."""
    summary = "A TensorFlow SavedModel, for TensorFlow, Keras and TensorFlow Serving."
    return [BackendInfo(name="tf", summary=summary, load=_load)]


def _load() -> ExportBackend:
    from ._backend import SavedModelBackend

    return SavedModelBackend()
