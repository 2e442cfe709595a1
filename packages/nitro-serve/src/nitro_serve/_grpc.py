"""The gRPC interface: KServe's own service, with what it lacks in front of it.

What is mended here, as of kserve 0.21: `outputs` and the version of a request are ignored; load
and unload have other field numbers than Triton's clients send, and fail behind them; index,
configuration and statistics are missing; BF16 is unknown; each request writes a log line.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import numpy as np
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.servicer import InferenceServicer

from ._access_log import AccessLog
from ._codec import chosen_outputs, from_bytes, invalid, numpy_dtype, read_timeout
from ._control import Control
from ._kserve_types import KSERVE_BY_NUMPY
from ._metrics import count_failure
from ._model_config import model_config
from ._models import ModelStore, ServedModel
from ._refusals import Kind, RefusedError, as_refusal
from ._triton_messages import DATA_TYPES, message_class

SERVICE = "inference.GRPCInferenceService"

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""Where the protocol keeps values that are not sent as bytes; FP16 and BF16 always are."""

Method = Callable[[Any, Any], Awaitable[Any]]


class GrpcInterface(InferenceServicer):
    """The service: what Triton's clients ask for, over the models of a store.

    Args:
        store: The models.
        log: The access log.
        control: Who may load and unload.
    """

    def __init__(self, store: ModelStore, log: AccessLog, control: Control, **kserve: Any) -> None:
        super().__init__(**kserve)
        self._store = store
        self._log = log
        self._control = control

    def handlers(self) -> grpc.GenericRpcHandler:
        """The handlers of all methods, those that kserve's servicer has among them."""
        methods: dict[str, tuple[Method, Any, Any]] = {
            "ServerLive": (self.ServerLive, pb.ServerLiveRequest, pb.ServerLiveResponse),
            "ServerReady": (self.ServerReady, pb.ServerReadyRequest, pb.ServerReadyResponse),
            "ServerMetadata": (
                self.ServerMetadata,
                pb.ServerMetadataRequest,
                pb.ServerMetadataResponse,
            ),
            "ModelInfer": (self._infer, pb.ModelInferRequest, pb.ModelInferResponse),
            "ModelReady": (self._ready, pb.ModelReadyRequest, pb.ModelReadyResponse),
            "ModelMetadata": (self._metadata, pb.ModelMetadataRequest, pb.ModelMetadataResponse),
            **{
                name: (method, message_class(f"{name}Request"), message_class(f"{name}Response"))
                for name, method in (
                    ("ModelConfig", self._config),
                    ("ModelStatistics", self._statistics),
                    ("RepositoryIndex", self._index),
                    ("RepositoryModelLoad", self._load),
                    ("RepositoryModelUnload", self._unload),
                )
            },
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: grpc.unary_unary_rpc_method_handler(
                    _guarded(method),
                    request_deserializer=request.FromString,
                    response_serializer=response.SerializeToString,
                )
                for name, (method, request, response) in methods.items()
            },
        )

    async def _infer(self, request: Any, context: Any) -> Any:
        name, version = request.model_name, request.model_version
        model: ServedModel | None = None
        try:
            model = self._store.get(name, version)
            inputs = self._read_inputs(request)
            wanted = {output.name: True for output in request.outputs} or None
            names = chosen_outputs(wanted, {spec.name: None for spec in model.outputs})
            outputs, timing = await model.predict(inputs, timeout_s=_timeout(request, context))
        except Exception as error:
            refusal = as_refusal(error)
            count_failure(model and model.statistics, refusal.kind)
            self._log.write(
                protocol="grpc",
                model=name,
                version=version,
                status=refusal.kind.name,
                request_id=request.id,
            )
            raise
        self._log.write(
            protocol="grpc",
            model=name,
            version=model.version,
            status="OK",
            request_id=request.id,
            timing=timing,
        )
        return _answer(request, model, {name: outputs[name] for name in names})

    def _read_inputs(self, request: Any) -> dict[str, np.ndarray]:
        limit, size = self._store.options.max_body_bytes, request.ByteSize()
        if size > limit:
            raise RefusedError(
                Kind.TOO_LARGE,
                f"The request has {size} bytes.",
                expected=f"at most {limit}",
                fix="send it in parts; the limit is --max-body-bytes",
            )
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            raise invalid(
                f"The request has {len(raw)} `raw_input_contents` for {len(request.inputs)} inputs.",
                expected="one for each input, or none",
            )
        inputs: dict[str, np.ndarray] = {}
        for number, tensor in enumerate(request.inputs):
            if tensor.name in inputs:
                raise invalid(f"The input `{tensor.name}` is given twice.")
            inputs[tensor.name] = _read_tensor(tensor, raw[number] if raw else None)
        return inputs

    async def _ready(self, request: Any, _: Any) -> Any:
        try:
            self._store.get(request.name, request.version)
        except RefusedError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def _metadata(self, request: Any, _: Any) -> Any:
        return pb.ModelMetadataResponse(**self._model(request).metadata())

    async def _config(self, request: Any, _: Any) -> Any:
        config = model_config(self._model(request))
        for tensor in (*config["input"], *config["output"]):
            tensor["data_type"] = DATA_TYPES[tensor["data_type"]]
        return message_class("ModelConfigResponse")(config=config)

    async def _statistics(self, request: Any, _: Any) -> Any:
        models = [self._model(request)] if request.name else self._store.served()
        statistics = [model.statistics.to_json() for model in models]
        return message_class("ModelStatisticsResponse")(model_stats=statistics)

    async def _index(self, request: Any, _: Any) -> Any:
        index = [e for e in self._store.index() if not request.ready or e["state"] == "READY"]
        return message_class("RepositoryIndexResponse")(models=index)

    async def _load(self, request: Any, context: Any) -> Any:
        self._control.check(_authorization(context))
        if request.parameters:
            raise invalid(
                "The request to load has `parameters`.",
                expected="none: a model is loaded as it lies in the server's folder",
            )
        await self._store.load(request.model_name)
        return message_class("RepositoryModelLoadResponse")()

    async def _unload(self, request: Any, context: Any) -> Any:
        self._control.check(_authorization(context))
        self._store.unload(request.model_name)
        return message_class("RepositoryModelUnloadResponse")()

    def _model(self, request: Any) -> ServedModel:
        return self._store.get(request.name, request.version)


def _guarded(method: Method) -> Method:
    """Answers a refusal with its status and its three parts."""

    @functools.wraps(method)
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except Exception as error:  # noqa: BLE001 - every error becomes a status
            refusal = as_refusal(error)
        status = getattr(grpc.StatusCode, refusal.kind.value.grpc)
        await context.abort(status, str(refusal))
        return None

    return guarded


def _read_tensor(tensor: Any, raw: bytes | None) -> np.ndarray:
    name, datatype, shape = tensor.name, tensor.datatype, tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise invalid(f"The input `{name}` has the shape {list(shape)}.", expected="sizes")
    if raw is not None:
        return from_bytes(raw, name, datatype, shape)
    dtype = numpy_dtype(name, datatype)
    if datatype not in _CONTENTS:
        raise invalid(
            f"The input `{name}` is {datatype} and has no bytes.",
            expected="`raw_input_contents`: the protocol has no other place for this dtype",
        )
    values = list(getattr(tensor.contents, _CONTENTS[datatype]))
    try:
        return np.asarray(values, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise invalid(
            f"The `contents` of the input `{name}` are not {datatype} of shape {list(shape)}: "
            f"{error}."
        ) from None


def _answer(request: Any, model: ServedModel, outputs: Mapping[str, np.ndarray]) -> Any:
    return pb.ModelInferResponse(
        model_name=model.name,
        model_version=model.version,
        id=request.id,
        outputs=[
            pb.ModelInferResponse.InferOutputTensor(
                name=name, datatype=KSERVE_BY_NUMPY[array.dtype], shape=array.shape
            )
            for name, array in outputs.items()
        ],
        raw_output_contents=[array.tobytes() for array in outputs.values()],
    )


def _timeout(request: Any, context: Any) -> float | None:
    """The shorter of what the request and the call allow, in seconds."""
    asked = request.parameters.get("timeout") if "timeout" in request.parameters else None
    limits = [
        None if asked is None else read_timeout(asked.int64_param),
        context.time_remaining(),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def _authorization(context: Any) -> str | None:
    return dict(context.invocation_metadata() or ()).get("authorization")
