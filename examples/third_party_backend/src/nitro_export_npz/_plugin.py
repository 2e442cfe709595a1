"""What Nitro imports to list backends, so nothing heavy."""

from nitro.hooks import BackendInfo, hookimpl


@hookimpl
def nitro_export_backends():
    """Offers the backend; `load` runs when it is first used."""
    return [BackendInfo(name="npz", summary="jax.export programs in .npz files", load=_load)]


def _load():
    from ._backend import NpzBackend

    return NpzBackend()
