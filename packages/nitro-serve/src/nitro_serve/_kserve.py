"""The parts of KServe's server that are used, with a store of bundles behind them.

As of kserve 0.21: its server is always ready, listens on all addresses, installs its own signal
handlers and unloads the models before it has answered what it accepted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from typing import Any

import uvicorn
from fastapi import FastAPI
from kserve import ModelRepository
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.rest.server import RESTServer, metrics_handler
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints

from ._models import ModelStore
from ._rest import RestInterface
from ._version import __version__


class BundleDataPlane(DataPlane):
    """What kserve's endpoints ask about the server."""

    def __init__(self, store: ModelStore, registry: Any) -> None:
        super().__init__(model_registry=registry)
        self._store = store

    async def ready(self) -> bool:
        """Whether every model of the folder was looked at, and at least one is served."""
        return self._store.is_ready()

    def metadata(self) -> dict[str, Any]:
        """The server's name, version and extensions."""
        return {
            "name": "nitro-serve",
            "version": __version__,
            "extensions": [
                "binary_tensor_data",
                "model_configuration",
                "model_repository",
                "statistics",
            ],
        }


def make_registry() -> Any:
    """An empty registry: kserve's own endpoints for models are all covered by ours."""
    return ModelRepository(models_dir="")


class _Server(uvicorn.Server):
    """A server of which others say when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none: one signal has to end REST and gRPC together."""
        yield


class _RESTServer(RESTServer):
    """KServe's REST server, with the routes that it lacks and without those of v1."""

    interface: RestInterface

    def _register_endpoints(self, app: FastAPI) -> None:
        app.router.routes.clear()
        app.add_api_route("/metrics", metrics_handler, methods=["GET"])
        register_v2_endpoints(app, self.dataplane, self.model_repository_extension)
        self.interface.install(app)

    def _add_middlewares(self, app: FastAPI) -> None:
        """Adds none: kserve's times each request for a log line."""


def make_rest_server(
    plane: BundleDataPlane,
    extension: Any,
    interface: RestInterface,
    *,
    place: Any,
    grace_s: float,
) -> uvicorn.Server:
    """The REST server, ready to be started."""
    with_tls = place.tls_cert is not None and place.tls_key is not None
    rest = _RESTServer(
        "kserve.model_server:app",
        plane,
        extension,
        place.http_port,
        grace_period=int(grace_s),
        ssl_certfile=str(place.tls_cert) if with_tls else None,
        ssl_keyfile=str(place.tls_key) if with_tls else None,
    )
    rest.interface = interface
    rest.create_application()
    rest.config.host = place.host
    # Kserve has given it a handler; a line for each request is for the access log alone.
    silenced = logging.getLogger("uvicorn.access")
    silenced.handlers, silenced.propagate = [], False
    rest.config.server_header = False
    return _Server(rest.config)
