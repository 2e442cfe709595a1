"""The REST interface: KServe's own application, with what it lacks in front of it.

What is mended here, as of kserve 0.21: JSON without a Content-Type is refused; `outputs` and
versions are ignored or refused; configuration, statistics and repository index are missing;
bodies have no limit; v1 of the protocol is served as well.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ._access_log import AccessLog
from ._codec import HEADER, chosen_outputs, invalid, read_call, write_answer
from ._control import Control
from ._metrics import count_failure
from ._model_config import model_config
from ._models import ModelStore, ServedModel
from ._refusals import Kind, RefusedError, as_refusal

_WATCH_AFTER_S = 0.02
"""A request that is answered sooner is not watched for a client that goes away."""

_T = TypeVar("_T")

Endpoint = Callable[[Request], Awaitable[Response]]


class RestInterface:
    """The routes that come before KServe's own.

    Args:
        store: The models.
        log: The access log.
        control: Who may load and unload.
    """

    def __init__(self, store: ModelStore, log: AccessLog, control: Control) -> None:
        self._store = store
        self._log = log
        self._control = control
        self.is_closing = False

    def install(self, app: FastAPI) -> None:
        """Puts the routes in front of those that the application has."""
        model = "/v2/models/{model}"
        version = model + "/versions/{version}"
        routes: list[tuple[str, str, Endpoint]] = [
            (f"{path}{end}", method, endpoint)
            for end, method, endpoint in (
                ("/infer", "POST", self._infer),
                ("", "GET", self._metadata),
                ("/ready", "GET", self._ready),
                ("/config", "GET", self._config),
                ("/stats", "GET", self._statistics),
            )
            for path in (model, version)
        ]
        routes += [
            ("/v2/health/ready", "GET", self._server_ready),
            ("/v2/models/stats", "GET", self._all_statistics),
            ("/v2/repository/index", "POST", self._index),
            ("/v2/repository/models/{model}/load", "POST", self._load),
            ("/v2/repository/models/{model}/unload", "POST", self._unload),
        ]
        app.router.routes[:0] = [
            Route(path, self._guarded(endpoint), methods=[method])
            for path, method, endpoint in sorted(routes, key=lambda route: "{" in route[0])
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Answers a refusal with its status and its three parts."""

        @functools.wraps(endpoint)
        async def guarded(request: Request) -> Response:
            try:
                response = await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - every error becomes a response
                response = _json({"error": str(refusal := as_refusal(error))}, refusal.kind)
            if self.is_closing:
                # So that clients come back to another server, or to none.
                response.headers["connection"] = "close"
            return response

        return guarded

    async def _infer(self, request: Request) -> Response:
        name, version = request.path_params["model"], request.path_params.get("version", "")
        model: ServedModel | None = None
        request_id = ""
        try:
            model = self._store.get(name, version)
            call = read_call(await self._body(request), request.headers.get(HEADER))
            request_id = call.id
            # Another version may have taken its place while the body came in.
            model = self._store.get(name, version)
            chosen_outputs(call.outputs, {spec.name: None for spec in model.outputs})
            answering = model.predict(call.inputs, timeout_s=call.timeout_s)
            outputs, timing = await _unless_gone(request, answering)
            body, length = write_answer(call, outputs, model=name, version=model.version)
        except ClientDisconnect:
            raise
        except Exception as error:
            refusal = as_refusal(error)
            count_failure(model and model.statistics, refusal.kind)
            self._log.write(
                protocol="rest",
                model=name,
                version=version,
                status=refusal.kind.name,
                request_id=request_id,
            )
            raise
        self._log.write(
            protocol="rest",
            model=name,
            version=model.version,
            status="OK",
            request_id=request_id,
            timing=timing,
        )
        if length is None:
            return Response(body, media_type="application/json")
        headers = {HEADER: str(length)}
        return Response(body, headers=headers, media_type="application/octet-stream")

    async def _body(self, request: Request) -> bytes:
        """The whole body; one that is too large is not read to its end."""
        limit = self._store.options.max_body_bytes
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise RefusedError(
                Kind.UNSUPPORTED,
                f"The body is encoded as {encoding!r}.",
                expected="a body as it is",
                fix="send it without compression",
            )
        declared = request.headers.get("content-length", "0")
        size = int(declared) if declared.isascii() and declared.isdecimal() else 0
        chunks: list[bytes] = []
        if size <= limit:
            size = 0
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    break
        if size > limit:
            raise RefusedError(
                Kind.TOO_LARGE,
                f"The body has {size} bytes or more.",
                expected=f"at most {limit}",
                fix="send it in parts; the limit is --max-body-bytes",
            )
        return b"".join(chunks)

    async def _server_ready(self, _: Request) -> Response:
        if not self._store.is_ready():
            raise RefusedError(Kind.UNAVAILABLE, "The server is not ready: no model is, yet.")
        return _json({"ready": True})

    async def _metadata(self, request: Request) -> Response:
        return _json(self._model(request).metadata())

    async def _ready(self, request: Request) -> Response:
        model = self._model(request)
        return _json({"name": model.name, "ready": True})

    async def _config(self, request: Request) -> Response:
        return _json(model_config(self._model(request)))

    async def _statistics(self, request: Request) -> Response:
        return _json({"model_stats": [self._model(request).statistics.to_json()]})

    async def _all_statistics(self, _: Request) -> Response:
        models = self._store.served()
        return _json({"model_stats": [model.statistics.to_json() for model in models]})

    async def _index(self, request: Request) -> Response:
        body = await self._body(request)
        only_ready = bool(_document(body).get("ready"))
        index = self._store.index()
        return _json([e for e in index if not only_ready or e["state"] == "READY"])

    async def _load(self, request: Request) -> Response:
        self._control.check(request.headers.get("authorization"))
        if _document(await self._body(request)).get("parameters"):
            raise invalid(
                "The request to load has `parameters`.",
                expected="none: a model is loaded as it lies in the server's folder",
            )
        await self._store.load(request.path_params["model"])
        return _json({})

    async def _unload(self, request: Request) -> Response:
        self._control.check(request.headers.get("authorization"))
        await self._body(request)
        self._store.unload(request.path_params["model"])
        return _json({})

    def _model(self, request: Request) -> ServedModel:
        return self._store.get(request.path_params["model"], request.path_params.get("version", ""))


async def _unless_gone(request: Request, answering: Awaitable[_T]) -> _T:
    """Waits for an answer, as long as the client does."""
    task = asyncio.ensure_future(answering)
    done, _ = await asyncio.wait({task}, timeout=_WATCH_AFTER_S)
    if not done:
        gone = asyncio.ensure_future(request.receive())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not task.done():
            task.cancel()
            raise ClientDisconnect
    return task.result()


def _document(body: bytes) -> Mapping[str, Any]:
    if not body:
        return {}
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The request's JSON cannot be read: {error}.") from None
    return document if isinstance(document, dict) else {}


def _json(content: Any, kind: Kind | None = None) -> Response:
    status = 200 if kind is None else kind.value.http
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
