"""The one check that `flatbuffers` is there, which JAX needs to serialize an export."""

from __future__ import annotations

import importlib.util

from nitro.errors import MissingPackageError


def require_flatbuffers() -> None:
    """Checks for the package before any work is done.

    Raises:
        MissingPackageError: It is not installed; gives the command.
    """
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingPackageError(
            "The package `flatbuffers` is not installed, and JAX needs it to read and write "
            "exported programs.",
            expected="flatbuffers 24.3 or newer beside nitro-export-stablehlo",
            fix="pip install flatbuffers",
        )
