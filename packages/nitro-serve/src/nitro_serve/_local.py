"""Checks the options of `nitro-serve local`, and starts the server."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

from nitro.errors import ConfigError, MissingPackageError

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def run_local(
    directory: Path,
    *,
    host: str,
    http_port: int,
    grpc_port: int,
    control: bool,
    token_file: Path | None,
    poll_s: float | None,
    access_log: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    **limits: Any,
) -> None:
    """Serves until it is told to end; see `nitro-serve local --help`.

    Raises:
        MissingPackageError: KServe is not installed.
        ConfigError: Options that cannot be used together.
    """
    if importlib.util.find_spec("kserve") is None:
        raise MissingPackageError(
            "`nitro-serve local` needs the package `kserve`.",
            fix='pip install "nitro-serve[local]"',
        )
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError(
            f"Only {'--tls-key' if tls_cert is None else '--tls-cert'} was given.",
            expected="--tls-cert and --tls-key together",
        )
    token = None if token_file is None else _read_token(token_file, is_used=control)
    if control and token is None and host not in _LOOPBACK:
        raise ConfigError(
            f"--control without a token, and the server listens on {host}.",
            expected="a token where others reach the server",
            fix="write one into a file and add --token-file FILE",
        )
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    from ._control import Control
    from ._models import ServeOptions
    from ._server import Place, serve

    serve(
        directory,
        place=Place(
            host=host, http_port=http_port, grpc_port=grpc_port, tls_cert=tls_cert, tls_key=tls_key
        ),
        options=ServeOptions(**limits),
        control=Control(is_on=control, token=token),
        access_log=access_log,
        poll_s=poll_s,
    )


def _read_token(file: Path, *, is_used: bool) -> str:
    if not is_used:
        raise ConfigError(
            "--token-file was given without --control.",
            expected="both: the token guards loading and unloading",
            fix="add --control",
        )
    token = file.read_text(encoding="utf-8").strip()
    if not token:
        raise ConfigError(f"`{file}` is empty.", expected="a token")
    return token
