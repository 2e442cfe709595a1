"""`nitro-serve local`: KServe's model server around the bundles of a folder."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import sys
import warnings
from collections.abc import Generator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from nitro.errors import ConfigError

from ._access_log import AccessLog
from ._control import Control
from ._models import ModelStore, ServeOptions

logger = logging.getLogger("nitro.serve")

_DRAIN_S = 0.3
"""How long connections are served after a request to end, each told to close behind its next
answer: a client that sends again right then is answered, not cut off."""

_GRPC_OVERHEAD_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the server listens.

    Attributes:
        host: The address.
        http_port: The port of the REST interface.
        grpc_port: The port of the gRPC interface.
        tls_cert: A file with the certificate chain, PEM; None for no TLS.
        tls_key: A file with its key, PEM.
    """

    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    tls_cert: Path | None = None
    tls_key: Path | None = None


@contextlib.contextmanager
def _no_arguments() -> Generator[None]:
    """Hides the command line: kserve parses it while it is imported (kserve 0.21)."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def serve(
    folder: Path,
    *,
    place: Place,
    options: ServeOptions,
    control: Control,
    access_log: str | None = None,
    poll_s: float | None = None,
    grace_s: float = 30.0,
) -> None:
    """Serves the bundles of a folder until SIGINT or SIGTERM; then answers what it has accepted.

    Args:
        folder: Bundles, or a Triton model repository.
        place: Where to listen.
        options: What requests may do.
        control: Who may load and unload models.
        access_log: The file of the access log, `-` for the standard output, or None.
        poll_s: Every how many seconds the folder is looked at; None for never.
        grace_s: How long requests that run at the end may take, in seconds.

    Raises:
        ConfigError: The folder holds no bundle, or a port is taken.
    """
    store = ModelStore(folder, options)
    if not folder.is_dir() or not store.find():
        raise ConfigError(
            f"There is no bundle in `{folder}`.",
            expected="a directory with bundles in it, or a Triton model repository",
            fix="name the directory that the bundles are in, such as `export_out`",
        )
    with _no_arguments():
        importlib.import_module("kserve.model_server")
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
    asyncio.run(
        _Server(
            store,
            place=place,
            control=control,
            log=AccessLog(access_log),
            poll_s=poll_s,
            grace_s=grace_s,
        ).run()
    )


class _Server:
    """One run of the server."""

    def __init__(
        self,
        store: ModelStore,
        *,
        place: Place,
        control: Control,
        log: AccessLog,
        poll_s: float | None,
        grace_s: float,
    ) -> None:
        from kserve.protocol.model_repository_extension import ModelRepositoryExtension

        from ._grpc import GrpcInterface
        from ._kserve import BundleDataPlane, make_registry, make_rest_server
        from ._rest import RestInterface

        self._store = store
        self._place = place
        self._log = log
        self._poll_s = poll_s
        self._grace_s = grace_s
        registry = make_registry()
        plane = BundleDataPlane(store, registry)
        extension = ModelRepositoryExtension(model_registry=registry)
        self._interface = RestInterface(store, log, control)
        self._rest = make_rest_server(
            plane, extension, self._interface, place=place, grace_s=grace_s
        )
        self._servicer = GrpcInterface(
            store, log, control, data_plane=plane, model_repository_extension=extension
        )

    async def run(self) -> None:
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        grpc_server = await self._start_grpc()
        rest = asyncio.create_task(self._rest.serve())
        work = [asyncio.create_task(self._load_and_poll())]
        ending = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait({rest, ending}, return_when=asyncio.FIRST_COMPLETED)
            logger.info("ending: requests that were accepted are answered")
            await self._end(rest, grpc_server)
        finally:
            for task in (*work, ending):
                task.cancel()
            await self._store.drain()
            self._log.close()

    async def _end(self, rest: asyncio.Task[None], grpc_server: grpc.aio.Server) -> None:
        self._store.is_loaded = False
        self._interface.is_closing = True
        stopping = asyncio.create_task(grpc_server.stop(self._grace_s))
        for listener in self._rest.servers:
            listener.close()
        if not rest.done():
            await asyncio.sleep(_DRAIN_S)
            self._rest.should_exit = True
        await asyncio.gather(rest, stopping)

    async def _load_and_poll(self) -> None:
        await self._store.load_all()
        if not self._store.is_ready():
            logger.error("no model of %s can be served", self._store.folder)
        while self._poll_s is not None:
            await asyncio.sleep(self._poll_s)
            await self._store.refresh()

    async def _start_grpc(self) -> grpc.aio.Server:
        # A message that is a little too large is refused by us, with words; a larger one by gRPC.
        limit = 2 * self._store.options.max_body_bytes + _GRPC_OVERHEAD_BYTES
        server = grpc.aio.server(
            futures.ThreadPoolExecutor(max_workers=1),
            handlers=[self._servicer.handlers()],
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        address = f"{self._place.host}:{self._place.grpc_port}"
        try:
            if self._place.tls_cert is None or self._place.tls_key is None:
                server.add_insecure_port(address)
            else:
                pair = (self._place.tls_key.read_bytes(), self._place.tls_cert.read_bytes())
                server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise ConfigError(
                f"{address} cannot be listened on: {error}.",
                expected="an address and a free port",
                fix="choose another one with --grpc-port",
            ) from error
        await server.start()
        return server
